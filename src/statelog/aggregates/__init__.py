"""Ready-made aggregates of a keyed stream, on columns from end to end.

An aggregate is a monoid: an accumulator is made of each row, accumulators are merged, and a value is made of the merged
one. So the same three functions make partial aggregates before the shuffle, merge them with the state, and merge the
panes of a window. No function costs time per row in the interpreter, except for one hash per counted text.

The rows of a batch on their way:

1. `build` makes an operator of what a user has asked for. With ``combine``, it also reduces the rows of a task by key
   before they are shuffled.
2. `operator` reduces the rows of a subtask to one per key, merges them with the keys' state, and returns the values.
3. `accumulators` does both for several aggregates side by side, with a kernel for each (`kernels`, `list_kernels`; for
   `sketches`, `hyperloglog` and `quantiles`). `stored_aggregates` finds the kernels again for a reader of state.

Words:

- kernel: the three functions of one aggregate, for a column of one type.
- accumulator: the stored form of an aggregate of some rows, one or more columns.
- partial aggregate: the accumulator of a key's rows in one task, before the shuffle.
- sketch: an accumulator of bounded size, from which an approximate value follows.
- group: the rows that are reduced to one.
- stored form: an input value as state holds it, with timestamps as microseconds.

May import `convert` and the packages below it, but not `spark`. It names Spark's types and touches no Spark session.
"""
