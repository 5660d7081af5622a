"""The Spark side of operators: plan, driver endpoint, tasks in Python workers, batches without data, placement.

Connects the packages below to Spark: operators are planned and coordinated on the driver, and run in Python workers.

The life of an operator:

1. Plan: `checks` refuses unsupported arguments and sessions, and `declare` calls the processor's ``init`` to learn its
   `states`. `keyed_plan` and `unkeyed_plan` make the output DataFrame and an `operator_plan` for the driver. They share
   `plan`, which gives each row its subtask and adds the `clock_source` for batches without data. `placement` ties
   subtasks to executors.
2. Start: Spark calls the `endpoint` before the first batch. It adapts the query's settings (`adaptive`), warns of a
   sink that would leave batches out (`file_sinks`), places the subtasks, and stores `initial` state.
3. Batch: Spark calls a spec for each subtask (`keyed_spec` or `unkeyed_spec`), which runs a task of package checkpoint.
   `worker` has what both share, and keeps connections, stores and tables for later tasks. The task calls the driver
   through `rpc`; the endpoint passes the call to the operator's coordinator, which the first call opens.
4. Between batches: the `clock_source` asks `query_clocks` whether the query needs a batch; `no_data` has the rule.
5. End: the endpoint closes the coordinator. `query_errors` finds the error that made the query fail.
6. Migration: `transform_with_state` reads the state of Spark's own operator, `sorted_runs` stores it.

Words of this package:

- plan, spec: the description of an operator for the driver, and the pickled one for its tasks.
- endpoint: the server for the tasks' calls, one per driver process.
- instance: the id of an operator in the driver's program. It tells operators with the same uid apart.
- placement table: a cached DataFrame with a row per subtask. Its cached partitions fix the subtasks' executors.
- clock: the source without rows by which a query has batches without data.
- stranger: a connection that has not yet proved that it knows the endpoint's secret.

May import savepoint and all packages below, but not windows, streams or testing. Only this package and streams touch a
Spark session; `internals` and `executor_internals` collect the uses of Spark's private parts.
"""
