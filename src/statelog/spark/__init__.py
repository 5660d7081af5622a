"""The Spark side of operators: the plan, the driver's endpoint, tasks in Python workers, the data sources.

Connects the packages below to Spark: operators are planned and coordinated on the driver, and run in Python workers.

The life of an operator:

1. Plan (`plan`): the arguments are checked, the processor declares its states, and the output DataFrame is built.
2. Start (`driver`): Spark calls the endpoint before the first batch. It sets what the query's session needs, places the
   subtasks, and stores initial state.
3. Batch (`worker`): Spark calls a spec for each subtask, which runs a task of package `tasks`. The task calls the
   driver, and the endpoint passes the call to the query's coordinator, which the first call opens.
4. Between batches: the clock of package `source` asks the driver whether the query needs a batch without data.
5. End: the endpoint closes the coordinator. ``error_of`` finds the error that made the query fail.

`source` also has the data source by which Spark reads state, and `checkpoint` reads and writes the files of a
checkpointLocation.

Words of this package:

- plan, spec: the description of an operator for the driver, and the pickled one for its tasks.
- instance: the id of an operator in the driver's program. It tells operators with the same uid apart.
- placement table: a cached DataFrame with a row per subtask. Its cached partitions fix the subtasks' executors.
- clock: the source without rows by which a query has batches without data.

May import reading and all packages below. Only this package, queries, streams and tools touch a Spark session;
`driver.internals` and `driver.executor_internals` collect the uses of Spark's private parts.
"""
