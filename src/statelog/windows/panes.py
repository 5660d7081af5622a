"""Tumbling and sliding windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from statelog.aggregates.groups import Groups
from statelog.aggregates.kernels import Columns
from statelog.convert.codecs import ColumnCodecs
from statelog.history.settings import PANES_STATE
from statelog.operators.keyed.columns import Mask, TimerColumns
from statelog.operators.keyed.indexing import Int64s
from statelog.operators.keyed.time_columns import TimeColumns, TimeRows
from statelog.runs.byte_slices import BUDGET
from statelog.windows.contents import Contents, TimedRows
from statelog.windows.engine import (
    ChunkKeys,
    Clock,
    Windows,
    WindowShape,
    WindowTimes,
    first_of_each,
    last_of_each,
    open_and_closed,
)
from statelog.windows.pane_columns import PaneMerge, Panes, TimeGroups, group_rows, next_ends, pair_codes
from statelog.windows.processor import WindowContext

_Panes = tuple[Int64s, Int64s]
"""The owners and the starts of panes."""
_NONE: Final[_Panes] = (np.zeros(0, np.int64), np.zeros(0, np.int64))


def pane_field(grid: Panes) -> str:
    """The name of the panes' start in the state's schema: it differs by grid, so that none is mistaken for another."""
    return f"start_ms_step_{grid.step_ms}_at_{grid.offset_ms % grid.step_ms}"


class TimeWindows(Windows):
    """Keeps an accumulator per pane, and merges the panes of a window when the window is complete.

    A new pane has a timer for the next thing due for it: the end of a window that contains it, or its removal. Of the
    new panes of a key in overlapping windows only the first that is due has one. The first timer of a key that fires in
    a batch does everything due for the key, and registers the key's next timer. Only panes that are due are read.
    """

    def __init__(
        self, panes: Panes, contents: Contents, clock: Clock, shape: WindowShape, codecs: ColumnCodecs
    ) -> None:
        super().__init__(contents, clock, shape, codecs)
        self._grid = panes
        self._merge = PaneMerge(panes, BUDGET.slice_bytes)

    def _declare(self, handle: Any) -> None:
        self._panes: TimeColumns = handle.getTimeColumns(
            PANES_STATE, f"{pane_field(self._grid)} long", self._contents.schema
        )
        self._timers: TimerColumns = handle.timers

    # ---- Rows ----

    def _process(self, timed: TimedRows, keys: ChunkKeys, times: WindowTimes) -> Iterator[pa.RecordBatch]:
        grid = self._grid
        inside = (timed.times_ms - grid.offset_ms) % grid.step_ms
        is_late = ~timed.has_time | (timed.times_ms - inside < grid.first_open(times.closed_before_ms))
        is_between = inside >= grid.width_ms
        yield from self._late(timed.take(is_late & ~(is_between & timed.has_time)))
        rows = self._in_order(timed.take(~is_late & ~is_between))
        starts = rows.times_ms - (rows.times_ms - grid.offset_ms) % grid.step_ms
        groups = group_rows(rows.owners, starts, len(keys), grid.step_ms)
        if len(groups):
            self._add(groups, rows, keys, times)
            if self._lateness_ms:
                yield from self._updates(groups, keys, times)

    def _add(self, groups: TimeGroups, rows: TimedRows, keys: ChunkKeys, times: WindowTimes) -> None:
        """Add rows to their panes."""
        owners = groups.owners[first_of_each(groups.owners)]
        has_few = self._panes.few()[owners]
        is_new = np.ones(len(groups), bool)
        if has_few.all():
            stored = self._panes.read(owners)
            is_new = self._add_to(groups.owners, groups.times_ms, groups.index, rows, stored, keys)
        else:
            # The rows of some groups, which are together in this order.
            order = np.argsort(groups.index, kind="stable")
            bounds = np.searchsorted(groups.index[order], np.arange(len(groups) + 1))

            def add_to(picked: Int64s, own: Int64s, index: Int64s, stored: TimeRows) -> None:
                some = groups.owners[picked], groups.times_ms[picked]
                is_new[picked] = self._add_to(*some, index, rows.take(own), stored, keys)

            if has_few.any():
                is_picked = np.isin(groups.owners, owners[has_few])
                own = np.flatnonzero(is_picked[groups.index])
                index = (np.cumsum(is_picked) - 1)[groups.index[own]]
                add_to(np.flatnonzero(is_picked), own, index, self._panes.read(owners[has_few]))
            for owner in owners[~has_few].tolist():
                first, last = np.searchsorted(groups.owners, [owner, owner + 1]).tolist()
                times_ms = groups.times_ms[first:last]
                for stored in self._panes.pages(owner, int(times_ms[0]), int(times_ms[-1]) + 1):
                    end = last - len(times_ms) + int(np.searchsorted(times_ms, stored.until_ms))
                    if first < end:
                        own = order[bounds[first] : bounds[end]]
                        add_to(np.arange(first, end), own, groups.index[own] - first, stored)
                    first = end
        self._register(groups.owners[is_new], groups.times_ms[is_new], times.before_ms)

    def _add_to(
        self, owners: Int64s, starts: Int64s, index: Int64s, rows: TimedRows, stored: TimeRows, keys: ChunkKeys
    ) -> Mask:
        """Add rows to what is stored for their panes; returns which panes are new. `index` has the pane of each row."""
        wanted, known = pair_codes(len(keys), (owners, starts), (stored.key_index, stored.times_ms))
        places = np.searchsorted(known, wanted)
        is_new = np.ones(len(owners), bool)
        if len(known):
            is_new = known[np.minimum(places, len(known) - 1)] != wanted
        old = np.flatnonzero(~is_new)
        before = stored.take(places[old]).values
        held = self._contents.add(before, old, rows, Groups(index, len(owners)), keys.of(owners))
        self._panes.put(TimeRows(owners, starts, held))
        return is_new

    def _register(self, owners: Int64s, panes: Int64s, after_ms: int) -> None:
        """Register timers for the next thing that is due for panes after a time."""
        due_ms, has_any = self._next_due(panes, after_ms)
        owners, due_ms = owners[has_any], due_ms[has_any]
        if not self._grid.are_windows and len(owners):
            firsts = first_of_each(owners)
            owners, due_ms = owners[firsts], np.minimum.reduceat(due_ms, firsts)
        self._timers.register(owners, due_ms)

    def _next_due(self, panes: Int64s, after_ms: int) -> tuple[Int64s, Mask]:
        """The next time after `after_ms` when something is due for each pane, and whether there is any."""
        last_ends = self._grid.last_end_of(panes)
        is_over = last_ends <= after_ms
        due_ms: Int64s = np.where(is_over, last_ends + self._lateness_ms, next_ends(self._grid, panes, after_ms))
        has_any: Mask = ~is_over | (last_ends > self._closed_ms(after_ms))
        return due_ms, has_any

    def _updates(self, groups: TimeGroups, keys: ChunkKeys, times: WindowTimes) -> Iterator[pa.RecordBatch]:
        """The windows with new rows that were complete in the batch before, and are not closed."""
        size_ms = self._grid.size_ms
        first_ms, last_ms = times.closed_before_ms + 1, times.before_ms
        is_due = (next_ends(self._grid, groups.times_ms, first_ms - 1) <= last_ms) & (
            self._grid.last_end_of(groups.times_ms) >= first_ms
        )
        touched = TimeRows(groups.owners[is_due], groups.times_ms[is_due], [])
        owners = np.unique(touched.key_index)
        if not len(owners):
            return
        has_few, from_ms = self._panes.few()[owners], np.full(len(keys), first_ms)
        if has_few.any():
            few = owners[has_few]
            panes = self._panes.read(few, with_changes=True)
            own = touched.take(np.isin(touched.key_index, few))
            yield from self._windows([panes], own, from_ms, last_ms, keys, times.update)
        for owner in owners[~has_few].tolist():
            own = touched.take(np.arange(*np.searchsorted(touched.key_index, [owner, owner + 1])))
            first = int(own.times_ms[0]) - size_ms
            pages = self._panes.pages(owner, first, int(own.times_ms[-1]) + size_ms, with_changes=True)
            yield from self._windows(pages, own, from_ms, last_ms, keys, times.update)

    # ---- Timers ----

    def _fire(self, due_ms: Int64s, keys: ChunkKeys, times: WindowTimes) -> Iterator[pa.RecordBatch]:
        now_ms, size_ms, has_few = times.now_ms, self._grid.size_ms, self._panes.few()
        if has_few.any():
            stored = self._panes.read(np.flatnonzero(has_few))
            is_due = (stored.times_ms >= due_ms[stored.key_index] - size_ms) & (stored.times_ms < now_ms)
            yield from self._windows([stored.take(is_due)], None, due_ms, now_ms, keys, times.context)
            self._close(stored, times)
        for owner in np.flatnonzero(~has_few).tolist():
            pages = self._panes.pages(owner, int(due_ms[owner]) - size_ms, now_ms)
            yield from self._windows(pages, None, due_ms, now_ms, keys, times.context)
            self._close_large(owner, times)

    def _windows(
        self,
        pages: Iterable[TimeRows],
        picked: TimeRows | None,
        first_ms: Int64s,
        last_ms: int,
        keys: ChunkKeys,
        context: WindowContext,
    ) -> Iterator[pa.RecordBatch]:
        """The windows that have one of the picked panes, or any, and end between two times; the first by key."""
        contents = self._contents

        def merge(held: Columns, groups: Groups, owners: Int64s) -> Columns:
            return contents.merge(held, groups, keys.of(owners))

        size_ms, carried = self._grid.size_ms, None
        for page in pages:
            panes = page if carried is None else carried.followed_by(page)
            some = panes if picked is None else picked
            known_ms = min(last_ms, page.until_ms)
            opened = replace(panes, values=contents.opened(panes.values)) if contents.merges else panes
            for windows in self._merge.windows(panes, some, first_ms[some.key_index], known_ms):
                held = self._merge.merged(opened, windows, merge) if contents.merges else []
                bounds = [windows.ends_ms - size_ms, windows.ends_ms]
                yield from self._results(keys, windows.owners, held, bounds, context)
            carried = panes.take(panes.times_ms > known_ms - size_ms)
            first_ms = np.maximum(first_ms, known_ms + 1)  # more than one page is of a single key

    def _close(self, stored: TimeRows, times: WindowTimes) -> None:
        """Remove the panes that no open window needs, and register the next timer of each key; all panes are given."""
        owners, panes, grid = stored.key_index, stored.times_ms, self._grid
        if not len(owners):
            return
        is_open = panes >= grid.first_open(times.closed_now_ms)
        emptied, is_removed = open_and_closed(stored.key_index, is_open)
        self._panes.clear(emptied)
        self._contents.clear(emptied)
        self._remove(owners[is_removed], panes[is_removed])
        oldest = _first_of_each(owners, panes, is_open)
        coming = _first_of_each(owners, panes, panes >= grid.first_open(times.now_ms))
        self._schedule(oldest, coming, times.now_ms)

    def _remove(self, owners: Int64s, panes: Int64s) -> None:
        """Remove panes and their rows, by key and time; no earlier ones are open."""
        self._panes.remove(owners, panes)
        lasts = last_of_each(owners)
        self._contents.remove(owners[lasts], panes[lasts] + self._grid.width_ms)

    def _close_large(self, owner: int, times: WindowTimes) -> None:
        """Do the same for a key with many panes, of which only the closed ones are read."""
        grid, panes = self._grid, self._panes
        first_open = grid.first_open(times.closed_now_ms)
        coming = self._first_from(owner, grid.first_open(times.now_ms))  # first, as its page has just been read
        closed = [page.times_ms for page in panes.pages(owner, end_ms=first_open)]
        oldest = self._first_from(owner, first_open)
        if not len(oldest[0]):
            panes.clear(np.array([owner]))
            self._contents.clear(np.array([owner]))
            return
        for times_ms in closed:
            self._remove(np.full(len(times_ms), owner), times_ms)
        self._schedule(oldest, coming, times.now_ms)

    def _first_from(self, owner: int, start_ms: int) -> _Panes:
        """The first pane of a key from a time on, if there is any."""
        pages = (page for page in self._panes.pages(owner, start_ms) if len(page))
        found = next(pages, None)
        return _NONE if found is None else (np.array([owner]), found.times_ms[:1])

    def _schedule(self, oldest: _Panes, coming: _Panes, now_ms: int) -> None:
        """Register the timers that keys need besides those that their panes have had from the beginning.

        Panes are closed one after the other, so a timer for the oldest one is enough for their removal. The next end is
        that of the first pane with one, the coming one. If windows do not overlap, it usually has a timer already, but
        not if an earlier start stored it, with longer windows that did.
        """
        is_over = self._grid.last_end_of(oldest[1]) <= now_ms
        owners = np.concatenate([oldest[0][is_over], coming[0]])
        due_ms, has_any = self._next_due(np.concatenate([oldest[1][is_over], coming[1]]), now_ms)
        owners, due_ms = owners[has_any], due_ms[has_any]
        order = np.lexsort((due_ms, owners))
        owners, due_ms = owners[order], due_ms[order]
        firsts = first_of_each(owners)
        self._timers.register(owners[firsts], due_ms[firsts])


def _first_of_each(owners: Int64s, panes: Int64s, mask: Mask) -> _Panes:
    """The first pane of each owner where the mask is set."""
    owners, panes = owners[mask], panes[mask]
    firsts = first_of_each(owners)
    return owners[firsts], panes[firsts]
