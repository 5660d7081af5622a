"""Windows on a keyed stream, as an ordinary stateful processor.

A user chooses windows (`assigners`) and a result: ready-made aggregates (`aggregates`), functions, or a processor
(`processor`). `build` checks both against the input's columns and makes a window operator of them. To the packages
below, that operator is a processor like any other: accumulators are its state and the ends of windows its timers, so
checkpoints, restarts and rescaling need no code here.

Ready-made aggregates are processors of columns: `aggregated_panes`, `aggregated_sessions` and `aggregated_counts` on
the base in `aggregated`; the package `aggregates` merges panes. With the user's functions a batch passes so:

1. `codec` and `panes` sort the rows of each key by time and cut them into groups, one per pane or session.
2. `time`, `session` or `count`, on the base in `operator`, finds the state that a group belongs to. Rows whose windows
   are all closed are late: they are dropped, or returned in a column of their own.
3. `accumulators` adds the group, row by row. For a window processor the rows are stored as columns (`collected`).
4. A timer fires when a window is complete. `merging` puts overlapping windows together from their panes,
   `accumulators` makes the results, `codec` turns them into columns, and state that no window needs is deleted.

Words:

- assigner: says which windows a row belongs to.
- pane: a part of time that overlapping windows share. State is stored per pane; a window is merged from its panes.
- accumulator: one row of state that stands for the rows of a pane, a session or a count window.
- complete: time has reached the window's end, so its result is returned. Late rows may still update it.
- closed: the allowed lateness is over too, and the window's state is deleted.
- stored form: an input value as state holds it, with timestamps as microseconds.

May import `spark` and all packages below it, but not `streams` and `testing`. It names Spark's types and touches no
Spark session.
"""
