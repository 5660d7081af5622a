"""What runs in the driver while a query runs.

1. The `endpoint` learns of a start from Spark before the first batch, and serves the tasks' calls. There is one per
   driver process, for all queries.
2. `query_session` sets what the query's session needs, and refuses a file sink that would skip batches.
3. `planned_query` has the operators of a query in one start, and opens its coordinator at the first call.
4. `query_clocks` answers the clock: does the query need a batch without data?
5. `avoided_executors` remembers where tasks could not keep their local files; placement gives them no subtasks.
6. `encryption` and `interpreter` find out how Spark encrypts its connections, and which Python runs on executors.

`internals` and `executor_internals` collect the uses of Spark's private parts, each with the reason and what happens
where a version lacks it. No other module uses private parts.

Calls from tasks run in threads of the endpoint; Spark's notifications run in its listener's thread.
"""
