"""Tumbling and sliding windows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Final

from statelog.spark.forms import ProcessorForm
from statelog.windows.assigners import Panes
from statelog.windows.contents import Contents
from statelog.windows.operator import Clock, WindowOperator
from statelog.windows.processor import TimeWindow, WindowContext
from statelog.windows.rows import RowGroup

__all__ = ["TimeWindowOperator"]

PANES_STATE: Final = "window.panes"

Row = tuple[Any, ...]


class TimeWindowOperator(WindowOperator):
    """Keeps an accumulator per pane; a window is put together from its panes when it is complete.

    Each pane has a timer for the next thing that is due for it: the end of a window with it, or its removal. Where
    windows overlap, the first timer of a key that fires does all that is due for the key, and registers one
    for what comes next.

    Parameters
    ----------
    panes : Panes
        The panes.
    contents : Contents
        What is kept and returned of rows.
    clock : Clock
        What makes windows complete.
    form : ProcessorForm
        How the operator is given rows, and returns them.
    """

    def __init__(self, panes: Panes, contents: Contents, clock: Clock, form: ProcessorForm) -> None:
        super().__init__(contents, clock, form)
        self._grid = panes
        self._lateness_ms = clock.allowed_lateness_ms

    def init(self, handle: Any) -> None:
        # The grid is part of the state's schema, so that another one does not take the panes for its own.
        grid = self._grid
        start = f"start_ms_step_{grid.step_ms}_at_{grid.offset_ms % grid.step_ms}"
        self._panes = handle.getMapState(PANES_STATE, f"{start} long", self._contents.schema)
        super().init(handle)

    def handleInputRows(self, key: Row, rows: Iterator[RowGroup], timerValues: Any) -> Iterator[Any]:
        before_ms = self._clock.before_ms(timerValues)
        updated: set[int] = set()
        for group in self._timed(rows, timerValues):
            if group.first_ms is None:
                yield from self._late(group)
                continue
            pane = self._grid.pane_of(group.first_ms)
            if pane is None:
                continue  # between two windows
            if self._grid.last_end_of(pane) + self._lateness_ms <= before_ms:
                yield from self._late(group)
                continue
            held = self._panes.getValue((pane,))
            self._panes.updateValue((pane,), self._contents.added(group, held))
            if held is None:
                due_ms = self._next_due(pane, before_ms)
                if due_ms is not None:
                    self._handle.registerTimer(due_ms)
            if self._lateness_ms:
                open_ms = before_ms - self._lateness_ms
                updated.update(end for end in self._grid.ends_of(pane) if open_ms < end <= before_ms)
        if updated:
            yield from self._results(key, self._held(), sorted(updated), self._context(timerValues, is_update=True))

    def handleExpiredTimer(self, key: Row, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        due_ms: int = expiredTimerInfo.getExpiryTimeInMs()
        now_ms = self._clock.now_ms(timerValues)
        if self._grid.are_windows:
            yield from self._expire_window(key, due_ms, now_ms, timerValues)
        else:
            yield from self._expire_key(key, due_ms, now_ms, timerValues)

    # ---- Panes that are windows ----

    def _expire_window(self, key: Row, due_ms: int, now_ms: int, times: Any) -> Iterator[Any]:
        """Do what is due at a time: return the window that ends there, remove the one whose lateness is over."""
        size_ms, lateness_ms = self._grid.size_ms, self._lateness_ms
        pane = due_ms - size_ms
        held = self._panes.getValue((pane,))
        if held is not None:
            yield from self._contents.results(key, TimeWindow(pane, due_ms), [held], self._context(times))
            if due_ms + lateness_ms <= now_ms:
                self._remove(pane)
            else:
                self._handle.registerTimer(due_ms + lateness_ms)
        if lateness_ms and self._panes.containsKey((pane - lateness_ms,)):
            self._remove(pane - lateness_ms)

    def _remove(self, pane: int) -> None:
        self._panes.removeKey((pane,))
        self._contents.remove(pane, pane + self._grid.width_ms)

    # ---- Panes of overlapping windows ----

    def _expire_key(self, key: Row, due_ms: int, now_ms: int, times: Any) -> Iterator[Any]:
        """Do all that is due for the key by now."""
        for timer_ms in self._handle.listTimers():
            if timer_ms <= now_ms:
                self._handle.deleteTimer(timer_ms)
        held = self._held()
        ends = {end for pane in held for end in self._grid.ends_of(pane) if due_ms <= end <= now_ms}
        yield from self._results(key, held, sorted(ends), self._context(times))
        due = {pane: self._next_due(pane, now_ms) for pane in held}
        next_ms = min((pane_due_ms for pane_due_ms in due.values() if pane_due_ms is not None), default=None)
        if next_ms is None:
            self._panes.clear()
            self._contents.clear()
            return
        self._handle.registerTimer(next_ms)
        over = [pane for pane in held if due[pane] is None]
        if over:
            for pane in over:
                self._panes.removeKey((pane,))
            self._contents.remove(over[0], over[-1] + self._grid.width_ms)

    def _held(self) -> dict[int, Row]:
        """The key's panes in order of time, with their accumulators."""
        return dict(sorted((start, held) for (start,), held in self._panes.iterator()))

    def _results(self, key: Row, held: dict[int, Row], ends: list[int], context: WindowContext) -> Iterator[Any]:
        starts = list(held)
        accumulators = list(held.values())
        for end in ends:
            start = end - self._grid.size_ms
            parts = accumulators[bisect_left(starts, start) : bisect_left(starts, end)]
            yield from self._contents.results(key, TimeWindow(start, end), parts, context)

    def _next_due(self, pane: int, after_ms: int) -> int | None:
        """The next time after another that something is due for a pane; None if it is over."""
        ends = self._grid.ends_of(pane)
        if ends[0] > after_ms:
            return ends[0]
        if ends[-1] > after_ms:
            return ends[bisect_left(ends, after_ms + 1)]
        removal_ms = ends[-1] + self._lateness_ms
        return removal_ms if removal_ms > after_ms else None
