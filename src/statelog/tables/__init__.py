"""State tables: how a subtask reads its state, in bulk.

A table answers for many keys at once: their values, their entries, the timers that are due. For one key, it also finds
single entries, and gives all in pages. It shows the state of one checkpoint. A table is never the only copy: it can
always be made again from local runs.

The life of a table:

1. `open` brings a table to the view that a batch starts from. A memory or RocksDB table continues from the state that
   it holds, if local runs lead from there; otherwise it is made anew. A ``RunsTable`` only remembers the runs.
2. The operator reads from it during the batch. Reading never changes a table.
3. A later phase of the batch must see the changes of the earlier ones. So these become a run, and ``branch`` gives a
   table of the state with this run's changes; the first table stays as it is.
4. The task closes the table. The batch's changes reach it only when a later batch opens it, so a repeated batch finds
   the state unchanged.

`table` has the contract ``StateTable`` and the columns that go in and out. Of the tables, `runs` (the default)
searches mapped runs, newest first, and also puts runs over another table; `run_entries` does so for a single key,
and makes answers from the rows. `memory` has dictionaries; `rocksdb` has an index on disk, in the format of
`rocksdb_format`.

Words: *key batch* (distinct keys in the order of their hashes), *entry* (here a row of a list or map state, or a
timer), *header* (the record in a RocksDB table of the state that it holds), *description* (a state's kind and fields).

The package may import only `local`, `log`, `storage`, `runs` and the core modules.
"""
