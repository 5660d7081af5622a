"""Tumbling and sliding windows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from statelog.aggregates.pane_grid import Panes
from statelog.convert.codecs import ProcessorCodecs
from statelog.history.window_settings import PANES_STATE
from statelog.windows.accumulators import Contents
from statelog.windows.merging import Pane, WindowMerge, filled_windows
from statelog.windows.operator import Clock, WindowOperator, WindowTimes
from statelog.windows.panes import RowGroup
from statelog.windows.processor import WindowContext

Row = tuple[Any, ...]


def pane_field(grid: Panes) -> str:
    """The name of the panes' start in the state's schema: it differs by grid, so that none is mistaken for another."""
    return f"start_ms_step_{grid.step_ms}_at_{grid.offset_ms % grid.step_ms}"


class TimeWindowOperator(WindowOperator):
    """Stores an accumulator per pane, and merges the panes of a window when the window is complete.

    A new pane has a timer for the next thing due for it: the end of a window that contains it, or its removal. The
    first timer of a key that fires in a batch does everything due for the key, and registers the key's next timer.
    Only panes that are due are read.
    """

    def __init__(self, panes: Panes, contents: Contents, clock: Clock, codecs: ProcessorCodecs) -> None:
        super().__init__(contents, clock, codecs)
        self._grid = panes
        self._merge = WindowMerge(panes, contents.merged)
        self._first_open: tuple[WindowTimes, int, int] | None = None

    def init(self, handle: Any) -> None:
        self._panes = handle.getTimeline(PANES_STATE, f"{pane_field(self._grid)} long", self._contents.schema)
        self._timers = handle.timers
        super().init(handle)

    def handleInputRows(self, key: Row, rows: Iterator[RowGroup], timerValues: Any) -> Iterator[Any]:
        times, grid, panes = self.times(timerValues), self._grid, self._panes
        first_open, _ = self._open_panes(times)
        updated: set[int] = set()
        for group in self._timed(rows, timerValues):
            if group.first_ms is None:
                yield from self._late(group)
                continue
            pane = grid.pane_of(group.first_ms)
            if pane is None:
                continue  # between two windows
            if pane < first_open:
                yield from self._late(group)
                continue
            held = panes.get(pane)
            panes.put(pane, self._contents.added(group, held))
            if held is None:
                due_ms = self._next_due(pane, times.before_ms)
                if due_ms is not None:
                    self._timers.register(due_ms)
            if self._lateness_ms:
                ends = grid.ends_of(pane)
                closed, complete = bisect_right(ends, times.closed_before_ms), bisect_right(ends, times.before_ms)
                updated.update(ends[closed:complete])
        if updated:
            for near in _close_together(sorted(updated), grid.size_ms):
                yield from self._results(key, frozenset(near), near[0], near[-1], times.update)

    def handleExpiredTimer(self, key: Row, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Do everything due for the key by now.

        The panes and the times alone decide what is due: the timer may come from a start with another lateness, or
        with windows of another size.
        """
        times = self.times(timerValues)
        due_ms: int = expiredTimerInfo.getExpiryTimeInMs()
        self._timers.skip_due(times.now_ms)  # they would return the same windows again
        size_ms = self._grid.size_ms
        if self._grid.are_windows:
            for start_ms, held in self._panes.between(due_ms - size_ms, times.now_ms - size_ms + 1):
                yield from self._contents.results(key, (start_ms, start_ms + size_ms), held, times.context)
        else:
            ends = range(due_ms, times.now_ms + 1)
            yield from self._results(key, ends, due_ms, times.now_ms, times.context)
        closed, oldest = self._panes.split(self._open_panes(times)[1])
        if oldest is None:
            if closed:
                self._panes.clear()
                self._contents.clear()
            return
        self._remove(closed)
        next_ms = self._next_timer(oldest, times.now_ms)
        if next_ms is not None:
            self._timers.register(next_ms)

    def _open_panes(self, times: WindowTimes) -> tuple[int, int]:
        """Start of the first pane that is not closed before the batch, and after it."""
        if self._first_open is None or self._first_open[0] is not times:
            before, now = (self._grid.first_open(at_ms) for at_ms in (times.closed_before_ms, times.closed_now_ms))
            self._first_open = times, before, now
        return self._first_open[1:]

    def _results(
        self, key: Row, ends: Container[int], first_end_ms: int, last_end_ms: int, context: WindowContext
    ) -> Iterator[Any]:
        """The results of the windows that have a pane and whose ends are in `ends`, between the first and the last."""
        grid, contents = self._grid, self._contents
        size_ms = grid.size_ms
        panes: Iterable[Pane] = self._panes.between(first_end_ms - size_ms, last_end_ms)
        if grid.are_windows:
            for start_ms, held in panes:
                if start_ms + size_ms in ends:
                    yield from contents.results(key, (start_ms, start_ms + size_ms), held, context)
            return
        windows: Iterable[Pane]
        if contents.merges:
            windows = self._merge.windows(panes, ends)
        else:
            windows = ((end_ms, ()) for end_ms in filled_windows(panes, ends, grid))
        for end_ms, held in windows:
            yield from contents.results(key, (end_ms - size_ms, end_ms), held, context)

    def _remove(self, closed: Sequence[int]) -> None:
        """Remove panes that no open window needs; their starts ascend."""
        for start_ms in closed:
            self._panes.remove(start_ms)
        if closed:
            self._contents.remove(closed[0], closed[-1] + self._grid.width_ms)

    def _next_timer(self, oldest: int, now_ms: int) -> int | None:
        """The timer that the key needs besides those that its panes have had from the beginning.

        Panes are closed one after the other, so a timer for the oldest one is enough for their removal. If windows do
        not overlap, each has had a timer for its end; otherwise the next end is that of the first pane with one.
        """
        due: list[int | None] = []
        if self._grid.last_end_of(oldest) <= now_ms:
            due.append(self._next_due(oldest, now_ms))
        if not self._grid.are_windows:
            coming = next((start_ms for start_ms, _ in self._panes.between(self._grid.first_open(now_ms))), None)
            due.append(None if coming is None else self._next_due(coming, now_ms))
        return min((due_ms for due_ms in due if due_ms is not None), default=None) if due else None

    def _next_due(self, pane: int, after_ms: int) -> int | None:
        """The next time after `after_ms` when something is due for a pane; None if the pane is over."""
        grid = self._grid
        last_end_ms = pane + grid.size_ms if grid.are_windows else grid.last_end_of(pane)
        if last_end_ms <= after_ms:
            return last_end_ms + self._lateness_ms if last_end_ms > self.closed_ms(after_ms) else None
        if grid.are_windows:
            return last_end_ms
        ends = grid.ends_of(pane)
        return ends[bisect_right(ends, after_ms)]


def _close_together(ends: Sequence[int], size_ms: int) -> Iterator[list[int]]:
    """Ascending ends in groups, such that windows of two groups have no pane in common."""
    group: list[int] = []
    for end_ms in ends:
        if group and end_ms - group[-1] >= size_ms:
            yield group
            group = []
        group.append(end_ms)
    if group:
        yield group
