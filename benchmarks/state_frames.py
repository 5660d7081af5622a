"""The processors of ``state`` that take pandas frames; those of ``state_rows`` otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmarks.state_rows import Appending, Counting, CountingEntries, Timing

__all__ = ["AppendFrames", "CountFrames", "EntryFrames", "TimerFrames"]


class CountFrames(Counting):
    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        yield _frame(key, self.counted(sum(map(len, rows))))


class AppendFrames(Appending):
    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        frames = list(rows)
        items = [item for frame in frames for item in frame["item"].tolist()]
        yield _frame(key, self.appended(items, bool(frames[0]["checks"].iloc[0])))


class EntryFrames(CountingEntries):
    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        yield _frame(key, self.counted(item for frame in rows for item in frame["item"].tolist()))


class TimerFrames(Timing):
    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        yield _frame(key, 1)


def _frame(key: Any, n: int) -> pd.DataFrame:
    return pd.DataFrame({"key": [key[0]], "n": [n]})
