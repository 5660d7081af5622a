"""Operations on whole queries: savepoints, branches, names, rewinds, repair.

Each module has one or two public functions. They all follow the same steps: open the checkpointLocation, read the log
(`stopped`), require that the query is in the right state, and write in an order that leaves, after a crash, a query
that can start.

- `save_restore`: ``savepoint`` copies the state of a running or stopped query, ``restore`` begins a new query with it.
  `save` writes the tables; `load` reserves an empty location for one writer, and turns the tables into runs.
- `branch`: ``branch`` begins a new query with the state of another one, without copying it.
- `rewind`: ``rewind`` and ``fall_back`` make Spark repeat batches that it has committed.
- `rename`: ``rename`` and ``forget`` give an operator another name, or its state up, by a claim in the query's log.
- `orphans`: ``list_orphans`` lists the objects that nothing needs, ``delete_orphans`` deletes them while a query runs.
- `migrate`: begins a new query with the state of Spark's own ``transformWithState``, which `transform_with_state`
  reads and `sorted_runs` stores.

Words of this package:

- savepoint: a self-contained copy of a query's state and of its sources' positions, as Parquet tables and a manifest.
  No running query owns it. The format is in ``docs/savepoints.md``.
- rewind: to go back to a checkpoint and take back Spark's commits, so that both agree on the next batch.

May import `spark` and all packages below it.
"""
