"""Interval joins of two keyed streams, as an ordinary stateful processor of columns.

A user joins two keyed streams by a distance of their event times. `build` checks the definition against the columns
of both sides, and makes an operator of it (`interval`). To the packages below, the operator is a processor like any
other: it has one input, the rows of both sides with a column that tells the sides apart. Waiting rows are its state, by
key and time, and a key has a timer for the first time when one of its rows need not wait any longer.

The life of a row:

1. It meets the waiting rows of the other side in its interval, and those that came in the same batch (`pairs`).
2. It waits for rows of the other side that are still to come, unless the watermark has passed its interval.
3. Once the watermark passes the end of its interval, all rows that could match it would be late. It is removed, and
   returned if nothing matched it and the join returns unmatched rows of its side.

Words:

- side: one of the two streams, left or right.
- interval: for a row, the times between which a row of the other side matches it; its bounds belong to it.
- pair: two rows that match.
- waiting row: a row in the state.

May import `windows` and all packages below it. It names Spark's types and touches no Spark session.
"""
