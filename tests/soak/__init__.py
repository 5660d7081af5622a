"""A soak: queries under random harm for as long as one likes, compared with a plain-Python model after every batch.

``python -m tests.soak`` runs *lives*, one after the other. A life is one query from its first batch to its end, in a
fresh directory, and everything in it is drawn from its seed: settings, rows, how many actions ask for a batch, on which
hosts its attempts run, which process is killed when, which call of the store fails, when it stops and starts with other
settings, when a savepoint is taken or a branch made, and another query continues from it. A life that fails can be
repeated alone.

There are three lanes. In the *engine* lane everything below Spark is real: driver and workers are processes that talk
through the RPC server, and only Spark's part (numbering batches and attempts, trying again, starting anew) is played,
by :mod:`tests.soak.engine`; it runs thousands of batches in minutes. In the *queries* lane the same is done with
queries of several operators. In the *spark* lane a real query runs, and its
Python driver, its JVM and its Python workers are killed.

| module | job |
|---|---|
| moves | what may happen: everything that is drawn at random |
| processes | an object in a process of its own, which may be killed at any moment |
| servers | what those processes do: the driver, a worker, and a tool that looks at what is stored |
| cluster | the processes of one query, and the attempts of a batch |
| engine | a life in the engine lane: Spark's part, and the comparison |
| query_servers, query_lane | the processes, and a life, in the queries lane |
| query_tools | what others do beside a query of that lane, and the model of what is stored |
| spark_lane | a life in the spark lane |
| report | counters |
| plants | defects that the soak must find: guards taken away, one at a time |
"""
