"""A demo on real data: a year of flights, kept as keyed state while the job is killed and started again.

Read ``job.py``: it is the whole streaming program. The other modules are the demo around it: ``data`` lays the
flights out as files, ``telemetry`` tells what happens inside the job, ``supervisor`` starts and kills it,
``compare`` computes the same result as a plain batch query, ``report`` shows the figures, and ``pictures`` draws them
over time.
"""
