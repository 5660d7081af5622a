"""The processors of ``state``, for rows and for pandas frames, and the kinds of state that they make up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import LongType, StructType

OUTPUT: Final = StructType().add("key", LongType()).add("n", LongType())
TTL_MS: Final = 3_600_000
WINDOW_MS: Final = 1000
_COUNT: Final = StructType().add("n", LongType())
_ITEM: Final = StructType().add("item", LongType())


class _Processor(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.handle = handle

    def close(self) -> None:
        pass


class _Counting(_Processor):
    """A value state: how many rows a key has had."""

    def __init__(self, ttl_ms: int | None = None) -> None:
        self._ttl_ms = ttl_ms

    def init(self, handle: Any) -> None:
        self._n = handle.getValueState("n", _COUNT, ttlDurationMs=self._ttl_ms)

    def counted(self, rows: int) -> int:
        """Add to the key's count, and return it."""
        before = self._n.get()
        n = rows + (before[0] if before else 0)
        self._n.update((n,))
        return n


class CountRows(_Counting):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        yield Row(key=key[0], n=self.counted(sum(1 for _ in rows)))


class CountFrames(_Counting):
    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        yield _frame(key, self.counted(sum(map(len, rows))))


class _Appending(_Processor):
    """A list state: appends an element per row, and reads the list only in the batch that checks it."""

    def init(self, handle: Any) -> None:
        self._items = handle.getListState("items", _ITEM)

    def appended(self, items: Iterable[int], checks: bool) -> int:
        """Append elements; how many they were, or how long the list is if that is to be checked."""
        count = 0
        for item in items:
            self._items.appendValue((item,))
            count += 1
        return sum(1 for _ in self._items.get()) if checks else count


class AppendRows(_Appending):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        held = list(rows)
        yield Row(key=key[0], n=self.appended([row.item for row in held], held[0].checks))


class AppendFrames(_Appending):
    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        frames = list(rows)
        items = [item for frame in frames for item in frame["item"].tolist()]
        yield _frame(key, self.appended(items, bool(frames[0]["checks"].iloc[0])))


class _CountingEntries(_Processor):
    """A map state: how many rows each item of a key has had."""

    def init(self, handle: Any) -> None:
        self._counts = handle.getMapState("counts", _ITEM, _COUNT)

    def counted(self, items: Iterable[int]) -> int:
        """Count rows by item; the sum of the counts, each as of its row."""
        total = 0
        for item in items:
            before = self._counts.getValue((item,))
            n = 1 + (before[0] if before else 0)
            self._counts.updateValue((item,), (n,))
            total += n
        return total


class EntryRows(_CountingEntries):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        yield Row(key=key[0], n=self.counted(row.item for row in rows))


class EntryFrames(_CountingEntries):
    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        yield _frame(key, self.counted(item for frame in rows for item in frame["item"].tolist()))


class _Timing(_Processor):
    """Timers: each key with rows registers one that is due in the same batch."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs())
        return iter(())


class TimerRows(_Timing):
    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(key=key[0], n=1)


class TimerFrames(_Timing):
    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        yield _frame(key, 1)


class WindowRows(_Processor):
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

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        start = expiredTimerInfo.getExpiryTimeInMs() - WINDOW_MS
        n: int = self._counts.getValue((start,))[0]
        self._counts.removeKey((start,))
        yield Row(key=key[0], n=n)


def _frame(key: Any, n: int) -> pd.DataFrame:
    return pd.DataFrame({"key": [key[0]], "n": [n]})


@dataclass(frozen=True)
class Kind:
    """A kind of state: columns that it reads beside the key, time mode, and what makes its processors."""

    columns: tuple[str, ...]
    time_mode: str
    takes_rows: Callable[[], Any]
    takes_frames: Callable[[], Any] | None
    has_few_keys: bool = False
    """Whether keys should meet often, so that each has many entries."""


KINDS: Final = {
    "value": Kind((), "None", CountRows, CountFrames),
    "list": Kind(("item", "checks"), "None", AppendRows, AppendFrames, has_few_keys=True),
    "map": Kind(("item",), "None", EntryRows, EntryFrames, has_few_keys=True),
    "timer": Kind((), "ProcessingTime", TimerRows, TimerFrames),
    "ttl": Kind((), "ProcessingTime", lambda: CountRows(TTL_MS), lambda: CountFrames(TTL_MS)),
    "window": Kind(("time", "time_ms"), "EventTime", WindowRows, None, has_few_keys=True),
}
