"""What Spark pickles and runs in Python workers.

A spec is the description of an operator for its tasks: small, picklable, and without the user's session.

- `specs`: those of keyed and unkeyed operators run a task of package `tasks` on the rows that Spark gives to a subtask;
  that of an output stores it for a sink that gets the stored rows.
- `worker`: what all specs share. It keeps connections, stores and tables for later tasks of the same Python process,
  and opens the stores that the user registered on the driver. Spark's observation brings the tasks' measurements to
  the driver.

A worker process runs one task after another, of any query and operator. Nothing that it keeps may change a result.

These modules load only what a task needs, because Spark starts many Python processes.
"""
