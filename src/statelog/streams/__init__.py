"""The functions and classes by which users build, save, restore and repair queries.

Each checks the user's arguments and hands them to the packages below. ``statelog`` exports the public names.

The life of a keyed stream:

1. `keyed`: ``key_by`` makes a keyed stream of a DataFrame.
2. `windowed`: ``KeyedStream.window`` cuts the rows of each key into windows, which gives a windowed stream.
3. A method of either stream applies a processor or aggregates: ``spark.keyed_plan`` turns it into an output DataFrame.
4. The user starts this DataFrame as a query like any other. From then on the packages below do the work.

`unkeyed` is the shorter way for processors without keys: ``process`` goes straight to ``spark.unkeyed_plan``.

The other modules work on the state of whole queries:

- `save_restore`: ``savepoint`` copies the state of a running or stopped query, ``restore`` begins a new query with it.
- `migrate`: ``migrate`` begins a new query with the state of Spark's own ``transformWithState``.
- `branch`: ``branch`` begins a new query with the state of another one, without copying it.
- `repair`, `fall_back`: ``rewind`` and ``fall_back`` make Spark repeat batches that it has committed.
- `forget` and `rename`: an operator's state is given up, or gets another name, by a claim in the query's log.
- `orphans`: ``list_orphans`` lists the objects that nothing needs, ``delete_orphans`` deletes them beside a query.

Words of this package:

- keyed stream: a DataFrame and its grouping columns. Windowed stream: one whose rows are cut into windows.
- savepoint: a self-contained copy of a query's state and of its sources' positions. No running query owns it.
- rewind: to go back to a checkpoint and take back Spark's commits, so that both agree on the next batch.
- late row: a row that comes after its window was closed. A query can return late rows beside its results.

May import all packages but testing. Only this package and spark touch a Spark session.
"""
