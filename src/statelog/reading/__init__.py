"""Reading state without its query: at any retained checkpoint, without Spark, beside the running query.

A read goes these steps; `read` calls them:

1. `source` finds the query's log below a checkpointLocation or at a location of state, reads it, and chooses an
   operator's checkpoint: on the line that counts, or by the name of a pin. Nothing is claimed, so the query does not
   notice.
2. `scan` cuts the key hashes into `parts` of bounded size, and merges each part's stored runs, as a restore does.
3. `tables` turns merged changes into typed columns. Savepoints store the same tables. `windows` makes rows of windows
   instead, and `states` knows which of both a name means.

`lookup` reads blocks of some keys instead of step 2, and `reader` keeps a checkpoint open for many reads. `savepoint`
reads the tables of a savepoint, which its `manifest` lists. Beside states there are `changes` of batches, the `history`
of a key, the `diff` of two checkpoints, `listing` of what is there, `pinning` by hand, and `verify`, which checks all
of it; `kept` finds the checkpoints for them.

Words:

- source: an operator's checkpoint that is being read, with the history that names its files; or a saved operator.
- part: a range of key hashes, the work of one call, here or in a task of a cluster.
- table: a state's rows in typed columns. (Elsewhere in statelog a table is what a subtask reads state from.)

May import `aggregates`, `checkpoint` and the packages below them, but not Spark, also not by way of `aggregates`.
"""
