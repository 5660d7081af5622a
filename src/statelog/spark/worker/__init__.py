"""What Spark pickles and runs in Python workers.

A spec is the description of an operator for its tasks: small, picklable, and without the user's session.

- `keyed_spec`, `unkeyed_spec`: run a task of package `tasks` on the rows that Spark gives to a subtask.
- `output_spec`: stores the query's output for a sink that gets the stored rows.
- `worker`: what all specs share. It keeps connections, stores and tables for later tasks of the same Python process,
  and opens the stores that the user registered on the driver.
- `reports`: the tasks' measurements, as rows that Spark's observation brings to the driver.

A worker process runs one task after another, of any query and operator. Nothing that it keeps may change a result.

These modules load only what a task needs, because Spark starts many Python processes.
"""
