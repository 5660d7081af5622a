"""The processors of ``state`` that take rows; imports little, because every worker imports it.

The states, and what is done with them, are in base classes that the processors for frames share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import LongType, StructType

__all__ = [
    "OUTPUT",
    "TTL_MS",
    "WINDOW_MS",
    "AppendRows",
    "Appending",
    "CountRows",
    "Counting",
    "CountingEntries",
    "CountingWindows",
    "EntryRows",
    "TimerRows",
    "Timing",
    "WindowRows",
]

OUTPUT: Final = StructType().add("key", LongType()).add("n", LongType())
TTL_MS: Final = 3_600_000
WINDOW_MS: Final = 1000
_COUNT: Final = StructType().add("n", LongType())
_ITEM: Final = StructType().add("item", LongType())


class Counting(StatefulProcessor):
    """A value state: how many rows a key has had.

    Parameters
    ----------
    ttl_ms : int, optional
        The state's TTL, milliseconds.
    """

    def __init__(self, ttl_ms: int | None = None) -> None:
        self._ttl_ms = ttl_ms

    def init(self, handle: Any) -> None:
        self._n = handle.getValueState("n", _COUNT, ttlDurationMs=self._ttl_ms)

    def close(self) -> None:
        pass

    def counted(self, rows: int) -> int:
        """Add to the key's count, and return it."""
        before = self._n.get()
        n = rows + (before[0] if before else 0)
        self._n.update((n,))
        return n


class CountRows(Counting):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        yield Row(key=key[0], n=self.counted(sum(1 for _ in rows)))


class Appending(StatefulProcessor):
    """A list state: appends an element per row, and reads the list only in the batch that checks it."""

    def init(self, handle: Any) -> None:
        self._items = handle.getListState("items", _ITEM)

    def close(self) -> None:
        pass

    def appended(self, items: Iterable[int], checks: bool) -> int:
        """Append elements; how many they were, or how long the list is if that is to be checked."""
        count = 0
        for item in items:
            self._items.appendValue((item,))
            count += 1
        return sum(1 for _ in self._items.get()) if checks else count


class AppendRows(Appending):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        held = list(rows)
        yield Row(key=key[0], n=self.appended([row.item for row in held], held[0].checks))


class CountingEntries(StatefulProcessor):
    """A map state: how many rows each item of a key has had."""

    def init(self, handle: Any) -> None:
        self._counts = handle.getMapState("counts", _ITEM, _COUNT)

    def close(self) -> None:
        pass

    def counted(self, items: Iterable[int]) -> int:
        """Count rows by item; the sum of the counts, each as of its row."""
        total = 0
        for item in items:
            before = self._counts.getValue((item,))
            n = 1 + (before[0] if before else 0)
            self._counts.updateValue((item,), (n,))
            total += n
        return total


class EntryRows(CountingEntries):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        yield Row(key=key[0], n=self.counted(row.item for row in rows))


class Timing(StatefulProcessor):
    """Timers: each key with rows registers one that is due in the same batch."""

    def init(self, handle: Any) -> None:
        self._handle = handle

    def close(self) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs())
        return iter(())


class TimerRows(Timing):
    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(key=key[0], n=1)


class CountingWindows(StatefulProcessor):
    """Tumbling windows by hand: a map of counts by the start of the window, and a timer at its end."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._counts = handle.getMapState("counts", _ITEM, _COUNT)

    def close(self) -> None:
        pass

    def count(self, times_ms: Iterable[int]) -> None:
        """Add rows to their windows, with one read and one write for each window."""
        added: dict[int, int] = {}
        for time_ms in times_ms:
            start = time_ms - time_ms % WINDOW_MS
            added[start] = added.get(start, 0) + 1
        for start, rows in added.items():
            before = self._counts.getValue((start,))
            if before is None:
                self._handle.registerTimer(start + WINDOW_MS)
            self._counts.updateValue((start,), (rows + (before[0] if before else 0),))

    def closed(self, end_ms: int) -> int:
        """Remove a window and return its count."""
        start = end_ms - WINDOW_MS
        n: int = self._counts.getValue((start,))[0]
        self._counts.removeKey((start,))
        return n


class WindowRows(CountingWindows):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self.count(row.time_ms for row in rows)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(key=key[0], n=self.closed(expiredTimerInfo.getExpiryTimeInMs()))
