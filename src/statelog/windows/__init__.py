"""Windows on a keyed stream, as an ordinary stateful processor.

A user chooses windows (`assigners`) and a result: ready-made aggregates (`aggregates`), functions, or a processor
(`processor`). `build` checks both against the input's columns and makes a window operator of them. To the packages
below, that operator is a processor like any other: accumulators are its state and the ends of windows its timers, so
checkpoints, restarts and rescaling need no code here.

One engine works on columns of many keys at once:

1. `panes` and `sessions`, on the base in `engine`, and the count windows of `build` find the group that each row
   belongs to: a pane, a session, a count window. Rows whose windows are all closed are late: they are dropped, or
   returned in a column.
2. The `contents` of the windows add the rows to the stored accumulators of their groups: with kernels of `aggregates`,
   or with the user's functions, row by row. For a window processor the rows themselves are stored (`rows`).
3. A timer fires when a window is complete. The engine finds the windows that are due, merges overlapping ones from
   their panes, and the contents make the output. State that no window needs is deleted.

Readers of state find windows in the same way: `pane_columns` cuts time into panes, and merges those of windows.

Words:

- assigner: says which windows a row belongs to.
- pane: a part of time that overlapping windows share. State is stored per pane; a window is merged from its panes.
- accumulator: one row of state that stands for the rows of a pane, a session or a count window.
- complete: time has reached the window's end, so its result is returned. Late rows may still update it.
- closed: the allowed lateness is over too, and the window's state is deleted.
- stored form: an input value as state holds it, with timestamps as microseconds.

May import `aggregates` and all packages below it. It names Spark's types and touches no Spark session.
"""
