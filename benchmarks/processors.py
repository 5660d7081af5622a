"""The code that runs in the Python workers; imports little, because every worker imports it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statelog import TimeWindow, WindowContext, WindowProcessor

OUTPUT: Final = "key long, n long"
TTL_MS: Final = 3_600_000
WINDOW_MS: Final = 1000
_COUNT: Final = "n long"
_ITEM: Final = "item long"


def count_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The stateless ceiling: reads all rows of a partition and returns how many they are."""
    _send_at_once()
    total = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"n": pa.array([total], pa.int64())})


def pass_on(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A stateless operator that returns its rows."""
    _send_at_once()
    yield from batches


def _send_at_once() -> None:
    """As statelog's tasks do, so that a stateless one does not wait 40 ms for its input either."""
    from statelog.spark.worker.worker import send_at_once  # only these two need it

    send_at_once()


class _Processor(StatefulProcessor):
    """Takes and returns rows or pandas frames."""

    def __init__(self, uses_frames: bool = False) -> None:
        self._uses_frames = uses_frames

    def init(self, handle: Any) -> None:
        self.handle = handle

    def values(self, rows: Iterable[Any], column: str) -> list[Any]:
        """The values of an input column."""
        if self._uses_frames:
            return [value for frame in rows for value in frame[column].tolist()]
        return [getattr(row, column) for row in rows]

    def output(self, key: Any, n: int) -> Any:
        """The output of a key."""
        return _frame(key, n) if self._uses_frames else Row(key=key[0], n=n)


class Count(StatefulProcessor):
    """A value state: how many rows a key has had; written as in the README."""

    def __init__(self, ttl_ms: int | None = None) -> None:
        self._ttl_ms = ttl_ms

    def init(self, handle: Any) -> None:
        self.seen = handle.getValueState("n", _COUNT, ttlDurationMs=self._ttl_ms)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        n = (self.seen.get() or (0,))[0] + sum(1 for _ in rows)
        self.seen.update((n,))
        yield Row(key=key[0], n=n)


class CountFrames(Count):
    """The same with pandas frames."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        n = (self.seen.get() or (0,))[0] + sum(map(len, rows))
        self.seen.update((n,))
        yield _frame(key, n)


def make_count(uses_frames: bool, ttl_ms: int | None = None) -> Count:
    """The counting processor of either mode."""
    return CountFrames(ttl_ms) if uses_frames else Count(ttl_ms)


class Keep(StatefulProcessor):
    """Counts the rows of a key, adds up their amounts, and keeps two more columns of the last one."""

    def __init__(self, amount: str, at: str, items: str) -> None:
        self._schema = f"n long, amount {amount}, at {at}, items {items}"

    def init(self, handle: Any) -> None:
        self._kept = handle.getValueState("kept", self._schema)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, amount = (self._kept.get() or (0, 0))[:2]
        for row in rows:
            n += 1
            amount += row.amount
        self._kept.update((n, amount, row.at, row.items))
        yield Row(key=key[0], n=n)


class Append(_Processor):
    """A list state: appends an element per row and returns their number, or the list's in the batch that checks it."""

    def init(self, handle: Any) -> None:
        self._items = handle.getListState("items", _ITEM)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        held = list(rows)
        items = self.values(held, "item")
        for item in items:
            self._items.appendValue((item,))
        checks = self.values(held[:1], "checks")[0]
        yield self.output(key, sum(1 for _ in self._items.get()) if checks else len(items))


class CountItems(_Processor):
    """A map state: how many rows each item of a key has had; returns the sum of the counts, each as of its row."""

    def init(self, handle: Any) -> None:
        self._counts = handle.getMapState("counts", _ITEM, _COUNT)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        total = 0
        for item in self.values(rows, "item"):
            before = self._counts.getValue((item,))
            n = 1 + (before[0] if before else 0)
            self._counts.updateValue((item,), (n,))
            total += n
        yield self.output(key, total)


class Time(_Processor):
    """Timers: each key with rows registers one that is due in the same batch."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs())
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield self.output(key, 1)


class CountWindows(_Processor):
    """Tumbling windows by hand: a map of counts by the start of the window, and a timer at its end."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        self._counts = handle.getMapState("counts", _ITEM, _COUNT)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        added: dict[int, int] = {}
        for row in rows:
            start = row.time_ms - row.time_ms % WINDOW_MS
            added[start] = added.get(start, 0) + 1
        for start, count in added.items():
            before = self._counts.getValue((start,))
            if before is None:
                self.handle.registerTimer(start + WINDOW_MS)
            self._counts.updateValue((start,), (count + (before[0] if before else 0),))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        start = expiredTimerInfo.getExpiryTimeInMs() - WINDOW_MS
        n: int = self._counts.getValue((start,))[0]
        self._counts.removeKey((start,))
        yield self.output(key, n)


class KeepPayload(StatefulProcessor):
    """Counts the rows of each key, keeps its payload, and tells how long the payload was that it has found again."""

    def init(self, handle: Any) -> None:
        self._kept = handle.getValueState("kept", "n long, payload binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        before = self._kept.get()
        n = before[0] if before else 0
        for row in rows:
            n += 1
            payload = bytes(row.payload)
        self._kept.update((n, payload))
        found = len(payload) if before and bytes(before[1]) == payload else 0
        yield Row(key=key[0], n=n, found=found)


class CountInPayload(StatefulProcessor):
    """A value state: the payload of a key's last event, in whose first 8 bytes is how many events the key has had."""

    def init(self, handle: Any) -> None:
        self._kept = handle.getValueState("kept", "payload binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n = 0
        for row in rows:
            before = self._kept.get()
            n = 1 + (int.from_bytes(before[0][:8], "little") if before else 0)
            self._kept.update((n.to_bytes(8, "little") + row.payload[8:],))
        yield Row(key=key[0], n=n)


class CountSlidingRows(StatefulProcessor):
    """Sliding windows of processing time by hand, returned as by CountWindowRows: a list of the rows with their times.

    An event is stored once. A timer is at the end of the next window that has rows, and one window follows another.
    """

    def __init__(self, size_ms: int, slide_ms: int) -> None:
        self._size_ms = size_ms
        self._slide_ms = slide_ms

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._rows = handle.getListState("rows", "time_ms long, payload binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        # If the key has rows, its next window may end before this one; then the timer is there already.
        self._handle.registerTimer(now_ms - now_ms % self._slide_ms + self._slide_ms)
        self._rows.appendList([(now_ms, row.payload) for row in rows])
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        rows = list(self._rows.get())
        end_ms, now_ms = expiredTimerInfo.getExpiryTimeInMs(), timerValues.getCurrentProcessingTimeInMs()
        while rows and end_ms <= now_ms:
            held = [row for row in rows if row[0] < end_ms]
            if held:
                yield Row(key=key[0], n=len(held), bytes=sum(len(row[1]) for row in held))
            end_ms += self._slide_ms
            rows = [row for row in rows if row[0] >= end_ms - self._size_ms]
        if rows:
            self._rows.put(rows)
            self._handle.registerTimer(end_ms)
        else:
            self._rows.clear()


class CountWindowRows(WindowProcessor):
    """Reads all rows of a window, and returns how many they are and how long their payloads."""

    def process(
        self, key: tuple[Any, ...], window: TimeWindow | None, rows: Iterator[Any], context: WindowContext
    ) -> Iterator[Row]:
        lengths = [len(row.payload) for row in rows]
        yield Row(key=key[0], n=len(lengths), bytes=sum(lengths))


def _frame(key: Any, n: int) -> Any:
    # Not at the top: only pandas mode needs it.
    import pandas as pd

    return pd.DataFrame({"key": [key[0]], "n": [n]})
