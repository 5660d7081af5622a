"""What the operators of all kinds of windows share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from statelog.convert.codecs import ProcessorCodecs
from statelog.runs.times import NO_TIME_MS
from statelog.windows.accumulators import Contents
from statelog.windows.panes import RowGroup
from statelog.windows.processor import LateRow, WindowContext

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Clock:
    """What makes windows complete.

    Parameters
    ----------
    is_event_time : bool
        Whether it is the watermark; otherwise the batches' processing time.
    allowed_lateness_ms : int
        How long windows are kept after that.
    returns_late : bool
        Whether rows that are too late are returned instead of left out.
    """

    is_event_time: bool
    allowed_lateness_ms: int = 0
    returns_late: bool = False

    def now_ms(self, times: Any) -> int:
        """Up to when windows are complete in a batch."""
        now_ms: int = times.getCurrentWatermarkInMs() if self.is_event_time else times.getCurrentProcessingTimeInMs()
        return now_ms

    def before_ms(self, times: Any) -> int:
        """Up to when windows were complete in the batch before."""
        before_ms: int = times.getLateWatermarkInMs() if self.is_event_time else NO_TIME_MS
        return before_ms


class WindowOperator(ABC):
    """A stateful processor that keeps windows; it gets a key's rows as groups, see :class:`WindowInput`.

    Parameters
    ----------
    contents : Contents
        What is kept of the rows of a window, and returned.
    clock : Clock
        What makes windows complete.
    form : ProcessorCodecs
        How the operator is given rows, and returns them.
    """

    def __init__(self, contents: Contents, clock: Clock, form: ProcessorCodecs) -> None:
        self.form = form
        self._contents = contents
        self._clock = clock

    def init(self, handle: Any) -> None:
        """Declare the states."""
        self._handle = handle
        self._contents.init(handle)

    def closed_ms(self, at_ms: int) -> int:
        """Windows that end up to then are closed when the watermark has come to a time.

        One that was closed while another lateness was allowed stays closed: what it had is not there any more.
        """
        own_ms = at_ms - self._clock.allowed_lateness_ms
        return max(own_ms, self._handle.closed_ms) if self._clock.is_event_time else own_ms

    @abstractmethod
    def handleInputRows(self, key: Row, rows: Iterator[RowGroup], timerValues: Any) -> Iterator[Any]:
        """Take a key's rows, and return the windows that they complete or update."""

    def handleExpiredTimer(self, key: Row, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Return the windows of a key that are complete now."""
        raise AssertionError("an operator that registers timers handles them")

    def close(self) -> None:
        """The batch is over."""
        self._contents.close()

    def _timed(self, groups: Iterator[RowGroup], times: Any) -> Iterator[RowGroup]:
        """The groups with a time: in processing time it is that of the batch."""
        if self._clock.is_event_time:
            return groups
        return self._at(groups, times.getCurrentProcessingTimeInMs())

    def _at(self, groups: Iterator[RowGroup], now_ms: int) -> Iterator[RowGroup]:
        for group in groups:
            group.first_ms = group.last_ms = now_ms
            yield group

    def _late(self, group: RowGroup) -> Iterator[LateRow]:
        """Rows that belong to no window that is still open."""
        self._handle.countLateRows(len(group))
        return map(LateRow, group.rows()) if self._clock.returns_late else iter(())

    def _context(self, times: Any, *, is_update: bool = False) -> WindowContext:
        return WindowContext(times.getCurrentProcessingTimeInMs(), times.getCurrentWatermarkInMs(), is_update)
