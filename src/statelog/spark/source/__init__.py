"""The data sources that statelog gives to Spark.

- `data_source`: ``spark.read.format("statelog")`` reads the state of an operator as a table.
- `change_source`: the same format with ``readStream`` gives the changes of a query's state as a stream.
- `clock_source`: a source without rows. A query that reads it beside its own source has batches without data when
  the driver says that one is due.
- `newer_streaming`: stands in for classes of Spark that older versions lack.

Spark runs each of them in Python processes of its own, so `clock_source` loads as little as possible.
"""
