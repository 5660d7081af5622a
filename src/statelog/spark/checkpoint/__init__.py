"""Spark's own files in a checkpointLocation: offsets, commits, metadata and the logs of sources.

1. `location` opens a checkpointLocation: a directory directly, any other place through the session's Hadoop.
2. `files` lists, reads, writes and deletes single files there, in a directory or in a store.
3. `logs` knows the formats of Spark's logs: what a batch's offsets are, which lines name a source, and where a
   compacted log of files must be cut.
4. `checkpoint` puts these together: which batches Spark has planned and committed, how they are copied to a savepoint
   or to a new query, and how commits are taken back.

Nothing here changes a checkpoint on its own; package `queries` decides what is written, and in which order, so that a
crash in between leaves a query that can start.

Formats of Spark's logs are read as Spark 4 writes them. A file that is not understood is an error, never a guess.
"""
