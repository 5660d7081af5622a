"""FLIP-8's example: a source that keeps partitions and offsets as operator state, and is rescaled.

Read ``source.py``: it is the operator. ``__main__`` writes four partitions of records, reads them with 2, 1 and 4
subtasks, and checks that nothing is lost or read twice.
"""
