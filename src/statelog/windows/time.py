"""Tumbling and sliding windows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Final

from statelog.convert.codecs import ProcessorCodecs
from statelog.windows.accumulators import Contents
from statelog.windows.assigners import Panes
from statelog.windows.operator import Clock, WindowOperator
from statelog.windows.panes import RowGroup
from statelog.windows.processor import TimeWindow, WindowContext

PANES_STATE: Final = "window.panes"

Row = tuple[Any, ...]


class TimeWindowOperator(WindowOperator):
    """Stores an accumulator per pane, and merges the panes of a window when the window is complete.

    Each pane has a timer for the next thing due for it: the end of a window that contains it, or its removal. A timer
    that fires does everything due for the key, and registers the next timer.
    """

    def __init__(self, panes: Panes, contents: Contents, clock: Clock, codecs: ProcessorCodecs) -> None:
        super().__init__(contents, clock, codecs)
        self._grid = panes

    def init(self, handle: Any) -> None:
        # The grid is part of the state's schema, so that windows of another grid cannot mistake the panes for theirs.
        grid = self._grid
        start = f"start_ms_step_{grid.step_ms}_at_{grid.offset_ms % grid.step_ms}"
        self._panes = handle.getMapState(PANES_STATE, f"{start} long", self._contents.schema)
        super().init(handle)

    def handleInputRows(self, key: Row, rows: Iterator[RowGroup], timerValues: Any) -> Iterator[Any]:
        before_ms = self._clock.before_ms(timerValues)
        closed_ms = self.closed_ms(before_ms)
        updated: set[int] = set()
        for group in self._timed(rows, timerValues):
            if group.first_ms is None:
                yield from self._late(group)
                continue
            pane = self._grid.pane_of(group.first_ms)
            if pane is None:
                continue  # between two windows
            if self._grid.last_end_of(pane) <= closed_ms:
                yield from self._late(group)
                continue
            held = self._panes.getValue((pane,))
            self._panes.updateValue((pane,), self._contents.added(group, held))
            if held is None:
                due_ms = self._next_due(pane, before_ms)
                if due_ms is not None:
                    self._handle.registerTimer(due_ms)
            if self._lateness_ms:
                updated.update(end for end in self._grid.ends_of(pane) if closed_ms < end <= before_ms)
        if updated:
            yield from self._results(key, self._held(), sorted(updated), self._context(timerValues, is_update=True))

    def handleExpiredTimer(self, key: Row, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Do everything due for the key by now.

        The panes and the times alone decide what is due: the timer may come from a start with another lateness, or
        with windows of another size.
        """
        due_ms: int = expiredTimerInfo.getExpiryTimeInMs()
        now_ms = self._clock.now_ms(timerValues)
        held = self._held()
        ends = sorted({end for pane in held for end in self._grid.ends_of(pane) if due_ms <= end <= now_ms})
        if not held:
            return
        if ends and ends[-1] > due_ms:
            self._delete_timers_until(now_ms)  # they would return the same windows again
        yield from self._results(key, held, ends, self._context(timerValues))
        due = {pane: self._next_due(pane, now_ms) for pane in held}
        over = [pane for pane in held if due[pane] is None]
        if len(over) == len(held):
            self._panes.clear()
            self._contents.clear()
            return
        for pane in over:
            self._panes.removeKey((pane,))
        if over:
            self._contents.remove(over[0], over[-1] + self._grid.width_ms)
        for next_ms in self._timers_of(due, now_ms):
            self._handle.registerTimer(next_ms)

    def _delete_timers_until(self, now_ms: int) -> None:
        for timer_ms in self._handle.listTimers():
            if timer_ms <= now_ms:
                self._handle.deleteTimer(timer_ms)

    def _timers_of(self, due: dict[int, int | None], now_ms: int) -> set[int]:
        """The timers that panes still need, given each pane's next due time.

        Each pane has had one timer for its first window. If windows overlap, one timer per key is enough from then on.
        """
        coming = {pane: due_ms for pane, due_ms in due.items() if due_ms is not None}
        if self._grid.are_windows:
            return {due_ms for pane, due_ms in coming.items() if self._grid.last_end_of(pane) <= now_ms}
        return {min(coming.values())}

    def _held(self) -> dict[int, Row]:
        """The key's accumulators by start of their panes, in order of time."""
        return dict(sorted((start, held) for (start,), held in self._panes.iterator()))

    def _results(self, key: Row, held: dict[int, Row], ends: list[int], context: WindowContext) -> Iterator[Any]:
        starts = list(held)
        accumulators = list(held.values())
        for end in ends:
            start = end - self._grid.size_ms
            parts = accumulators[bisect_left(starts, start) : bisect_left(starts, end)]
            yield from self._contents.results(key, TimeWindow(start, end), parts, context)

    def _next_due(self, pane: int, after_ms: int) -> int | None:
        """The next time after `after_ms` when something is due for a pane; None if the pane is over."""
        ends = self._grid.ends_of(pane)
        if ends[0] > after_ms:
            return ends[0]
        if ends[-1] > after_ms:
            return ends[bisect_left(ends, after_ms + 1)]
        return ends[-1] + self._lateness_ms if ends[-1] > self.closed_ms(after_ms) else None
