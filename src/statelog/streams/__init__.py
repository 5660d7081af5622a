"""The functions and classes by which users build queries with state.

Each checks the user's arguments and hands them to the packages below. ``statelog`` exports the public names.

The life of a keyed stream:

1. `keyed`: ``key_by`` makes a keyed stream of a DataFrame.
2. `windowed`: ``KeyedStream.window`` cuts the rows of each key into windows, which gives a windowed stream. `joined`:
   ``KeyedStream.join_interval`` brings the rows of two keyed streams into one.
3. A method of either stream applies a processor or aggregates: `spark.plan.keyed_plan` turns it into an output
   DataFrame.
4. The user starts this DataFrame as a query like any other. From then on the packages below do the work.

`unkeyed` is the shorter way for processors without keys: ``process`` goes straight to `spark.plan.unkeyed_plan`.
`write_ahead` stores a query's output with its checkpoint, so that a sink gets the same rows when a batch is repeated.

Words of this package:

- keyed stream: a DataFrame and its grouping columns. Windowed stream: one whose rows are cut into windows.
- late row: a row that comes after its window was closed. A query can return late rows beside its results.

May import all packages but tools and testing.
"""
