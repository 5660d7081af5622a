"""Checkpoints: the log of an operator, its coordinator, and the tasks' side of the protocol."""
