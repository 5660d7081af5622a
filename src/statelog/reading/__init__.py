"""Reading state without its query: at any retained checkpoint, without Spark, beside the running query.

Two nouns: a *point* is what exists of an operator at a moment, and *rows* are what a point has of a state.

1. `open` finds the query's log, or the savepoint, at a location. `point` is what both have in common: `checkpoints`
   are the points of a log: on the line
   that counts, or by the name of a pin. `savepoint` has a manifest and the points in it. Nothing is claimed, so the
   query does not notice.
2. `states` knows what users can read of a point: stored states, or the `windows` that are computed from one.
3. `read` holds the point while its `rows` are read: all of them, merged part by part from the stored runs as in a
   restore, or those of some `keys`, found block by block. In a savepoint, the rows are in tables.

The modules that work on points are `changes` of batches, with what was `before`; the `history` of a key; the `diff` of
two checkpoints; `compare`; `listing`; `pins` made by users; `stats`, and `verify`, which checks everything. A
`consumer` follows changes.

Words:

- point: an operator's checkpoint, whatever keeps it, or the operator in a savepoint.
- part: a range of key hashes, the work of one call, here or in a task of a cluster.

May import `windows` and the packages below it, but not Spark, not even indirectly.
"""
