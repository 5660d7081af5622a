"""Joins of two keyed streams, as ordinary stateful processors of columns.

A user joins two keyed streams by a distance of their event times (an interval join), or gives each left row the newest
right row that is not later (an as-of join). `build` checks the definition against the columns of both sides, and makes
an operator of it (`interval`, `asof`). To the packages below, the operator is a processor like any other: it has one
input, the rows of both sides with a column that tells the sides apart (`sides`). The rows that it keeps are its state,
by key and time, and a key has a timer for the first time when something is due for one of its rows.

The life of a row of an interval join:

1. It meets the waiting rows of the other side in its interval, and those that came in the same batch (`pairs`).
2. It waits for rows of the other side that are still to come, unless the watermark has passed its interval.
3. Once the watermark passes the end of its interval, all rows that could match it would be late. It is removed, and
   returned if nothing matched it and the join returns unmatched rows of its side. With a timeout, such a row is
   returned earlier, once it has waited for its first match for that long in processing time.

Of an as-of join: a left row waits until the watermark passes its time, or is answered at once. A right row is removed
when the watermark passes a newer one of its key, or its tolerance.

Words:

- side: one of the two streams, left or right.
- interval: for a row, the times between which a row of the other side matches it; its bounds are part of it.
- pair: two rows that match.
- waiting row: a row in the state that waits for rows of the other side.
- arrival: the processing time at which a key got rows that may time out.
- to answer a left row: to return it with its right row, or without one.

May import `windows` and all packages below it. It names Spark's types and touches no Spark session.
"""
