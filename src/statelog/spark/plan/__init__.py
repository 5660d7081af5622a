"""From a call on a stream to a DataFrame: what happens before a query starts.

1. `checks` refuses unsupported arguments and sessions.
2. `declare` calls the processor's ``init`` to learn its `states`.
3. `keyed_plan` and `unkeyed_plan` make the output DataFrame and an `operator_plan` for the driver.
   They share `plan`, which gives each row its subtask and adds the clock for batches without data.
4. `lossless_casts` converts columns only where no value can change.
5. `placement` shuffles the rows to their subtasks and ties subtasks to executors.
6. `initial` stores the state that a query begins with, in jobs of its own, at the query's first start.

An output DataFrame may be built and never started, or started several times; everything that belongs to one start is
made by package `spark.driver`.

Runs on the driver, in the user's thread.
"""
