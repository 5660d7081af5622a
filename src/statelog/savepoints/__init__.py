"""Savepoints: self-contained copies of a query's state, as Parquet tables and a manifest.

No running query owns or changes a savepoint. Other tools can read its tables, and a new query can continue from it at
any parallelism, because it also has Spark's offsets of the batch. The format is in ``docs/savepoints.md``.

The life of a savepoint; `statelog.streams.save_restore` calls the steps:

1. For a stopped query, `stopped` chooses a batch that Spark has committed and that has a checkpoint. A running query
   holds its newest committed checkpoint instead, so that nothing of it is deleted meanwhile.
2. `target` reserves an empty place for one writer.
3. `save` reads each operator's state part by part, as columns, with package `reading`, and `parquet` writes them.
4. `spark_checkpoint` copies Spark's offsets, commit and source logs, with `spark_logs` for their formats, and
   `spark_files` to reach them: in a directory or bucket; package `spark` has another way, through Hadoop.
5. The manifest (`reading.manifest`), the list of all files, is written last. From then on the savepoint exists.

A restore goes back: the manifest checks the files, `load` turns tables into runs and snapshots and begins a log with a
checkpoint of the saved batch, and `spark_checkpoint` writes a checkpoint of Spark's for a query with a new id.

`branch` begins a log with the entries of another query's checkpoint. `stopped` also appends the claims by which tools
change a stopped query: a rewind, another name, an operator that ends.

Words:

- saved: an operator, state or file as the manifest records it.

May import `reading`, `checkpoint` and the packages below them, but not `spark`: callers pass in the function that
spreads the parts over a cluster (`reading.parts.RunAll`).
"""
