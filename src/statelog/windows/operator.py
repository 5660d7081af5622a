"""The base of all window operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.sql.types import LongType, StructField, StructType

from statelog.convert.codecs import ProcessorCodecs
from statelog.convert.times import BatchTimes
from statelog.errors import ConfigurationError
from statelog.runs.times import NO_TIME_MS
from statelog.windows.accumulators import Contents
from statelog.windows.panes import RowGroup
from statelog.windows.processor import LateRow, WindowContext

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Clock:
    """The time that completes windows: the watermark, or the batches' processing time."""

    is_event_time: bool
    """Whether it is the watermark."""
    allowed_lateness_ms: int = 0
    """How long complete windows still take late rows."""
    returns_late: bool = False
    """Whether rows that are too late are returned; otherwise they are dropped."""

    def now_ms(self, times: BatchTimes) -> int:
        """Windows that end up to the returned time are complete in this batch."""
        return times.getCurrentWatermarkInMs() if self.is_event_time else times.getCurrentProcessingTimeInMs()

    def before_ms(self, times: BatchTimes) -> int:
        """Windows that end up to the returned time were complete in the previous batch."""
        return times.getLateWatermarkInMs() if self.is_event_time else NO_TIME_MS


@dataclass(frozen=True)
class WindowTimes:
    """What the times of a batch mean for windows."""

    now_ms: int
    """Windows that end up to it are complete."""
    before_ms: int
    """Windows that end up to it were complete in the batch before."""
    closed_now_ms: int
    """Windows that end up to it are closed after the batch."""
    closed_before_ms: int
    """Windows that end up to it were closed before the batch."""
    context: WindowContext
    """Of windows that are returned because they are complete."""
    update: WindowContext
    """Of windows that are returned again because of late rows."""


class WindowOperator(ABC):
    """A stateful processor of windows; it gets a key's rows as groups, see :class:`WindowInput`."""

    def __init__(self, contents: Contents, clock: Clock, codecs: ProcessorCodecs) -> None:
        self.codecs = codecs
        self._contents = contents
        self._clock = clock
        self._lateness_ms = clock.allowed_lateness_ms
        self._times: tuple[BatchTimes, WindowTimes] | None = None

    def init(self, handle: Any) -> None:
        """Declare the states."""
        self._handle = handle
        self._contents.init(handle)

    def closed_ms(self, at_ms: int) -> int:
        """Windows that end up to the returned time are closed when the clock is at `at_ms`.

        A window that was closed under a shorter lateness stays closed: its state has been deleted.
        """
        own_ms = at_ms - self._lateness_ms
        return max(own_ms, self._handle.closed_ms) if self._clock.is_event_time else own_ms

    def times(self, times: BatchTimes) -> WindowTimes:
        """The times of the batch, made once for all its keys."""
        if self._times is None or self._times[0] is not times:
            now_ms, before_ms = self._clock.now_ms(times), self._clock.before_ms(times)
            at_ms = times.getCurrentProcessingTimeInMs(), times.getCurrentWatermarkInMs()
            closed_ms = self.closed_ms(now_ms), self.closed_ms(before_ms)
            contexts = WindowContext(*at_ms), WindowContext(*at_ms, isUpdate=True)
            self._times = times, WindowTimes(now_ms, before_ms, *closed_ms, *contexts)
        return self._times[1]

    @abstractmethod
    def handleInputRows(self, key: Row, rows: Iterator[RowGroup], timerValues: Any) -> Iterator[Any]:
        """Add a key's rows to its windows, and return the windows that they complete or update."""

    def handleExpiredTimer(self, key: Row, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Return the key's windows that are complete now."""
        raise AssertionError("an operator that registers timers handles them")

    def close(self) -> None:
        """End the batch."""
        self._contents.close()

    def _timed(self, groups: Iterator[RowGroup], times: Any) -> Iterator[RowGroup]:
        """Give each group a time; in processing time it is the batch's."""
        if self._clock.is_event_time:
            return groups
        return self._at(groups, times.getCurrentProcessingTimeInMs())

    def _at(self, groups: Iterator[RowGroup], now_ms: int) -> Iterator[RowGroup]:
        for group in groups:
            group.first_ms = group.last_ms = now_ms
            yield group

    def _late(self, group: RowGroup) -> Iterator[LateRow]:
        """Count rows whose windows are all closed, and return them if the user wants them."""
        self._handle.countLateRows(len(group))
        return map(LateRow, group.rows()) if self._clock.returns_late else iter(())


def schema_behind(name: str, accumulator: StructType) -> StructType:
    """The accumulator's fields, behind a field of the windows' own; raises ConfigurationError if they have it too."""
    if name in accumulator.names:
        raise ConfigurationError(
            f"The windows' accumulator has a field {name!r}, a name that the windows use themselves.",
            hint="Give it another name.",
        )
    return StructType([StructField(name, LongType()), *accumulator.fields])
