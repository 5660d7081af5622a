"""Session windows."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from statelog.aggregates.groups import Groups
from statelog.aggregates.kernels import Columns
from statelog.convert.codecs import ColumnCodecs
from statelog.history.settings import SESSION_END_FIELD, SESSIONS_STATE
from statelog.operators.keyed.columns import Mask, TimerColumns
from statelog.operators.keyed.indexing import Int64s
from statelog.operators.keyed.time_columns import END_MS, TimeColumns, TimeRows
from statelog.operators.keyed.time_reader import FIRST_MS
from statelog.windows.contents import Contents, TimedRows, key_of_some
from statelog.windows.engine import (
    ChunkKeys,
    Clock,
    Windows,
    WindowShape,
    WindowTimes,
    first_of_each,
    last_of_each,
    open_and_closed,
    schema_behind,
)
from statelog.windows.processor import WindowContext


@dataclass(frozen=True)
class _Spans:
    """Rows or sessions: whose they are, when they begin and end."""

    owners: Int64s
    starts_ms: Int64s
    ends_ms: Int64s
    numbers: Int64s
    """The place of new rows among all that are new; -1 for stored sessions."""
    held: Columns
    """The accumulators of the stored sessions among them, in their order."""

    def __len__(self) -> int:
        return len(self.owners)

    def take(self, rows: Int64s) -> _Spans:
        """Some of them, in any order."""
        is_stored = self.numbers < 0
        picked = pa.array((np.cumsum(is_stored) - 1)[rows][is_stored[rows]])
        held = [column.take(picked) for column in self.held]
        return _Spans(self.owners[rows], self.starts_ms[rows], self.ends_ms[rows], self.numbers[rows], held)

    def followed_by(self, others: _Spans) -> _Spans:
        """These, and then others; only one of both may be new rows alone, which have no accumulators."""
        held = [pa.concat_arrays(list(pair)) for pair in zip(self.held, others.held, strict=True)]
        return _Spans(
            np.concatenate([self.owners, others.owners]),
            np.concatenate([self.starts_ms, others.starts_ms]),
            np.concatenate([self.ends_ms, others.ends_ms]),
            np.concatenate([self.numbers, others.numbers]),
            held,
        )


def _stored(rows: TimeRows) -> _Spans:
    ends, *held = rows.values
    return _Spans(rows.key_index, rows.times_ms, ends.to_numpy(), np.full(len(rows), -1), held)


def sessions_of(owners: Int64s, starts_ms: Int64s, ends_ms: Int64s) -> tuple[Int64s, int]:
    """The session of each span, by owner and then by time, and their number: spans that meet are in one session."""
    if not len(owners):
        return owners, 0
    order = np.lexsort((starts_ms, owners))
    # A running maximum of the ends within each owner: the ranks of ends do not decrease from owner to owner.
    by_end = np.lexsort((ends_ms, owners))
    rank = np.empty(len(owners), np.int64)
    rank[by_end] = np.arange(len(owners))
    latest = ends_ms[by_end[np.maximum.accumulate(rank[order])]]
    is_first = np.ones(len(owners), bool)
    is_first[1:] = (np.diff(owners[order]) != 0) | (starts_ms[order[1:]] > latest[:-1])
    index = np.empty(len(owners), np.int64)
    index[order] = np.cumsum(is_first) - 1
    return index, int(is_first.sum())


class Sessions(Windows):
    """Keeps an accumulator per session, and merges sessions that meet.

    The sessions of a key never meet, so in order of their starts they are in order of their ends, too. Only sessions
    that are near new rows or due are read.
    """

    def __init__(self, gap_ms: int, contents: Contents, clock: Clock, shape: WindowShape, codecs: ColumnCodecs) -> None:
        super().__init__(contents, clock, shape, codecs)
        self._gap_ms = gap_ms
        self._schema = schema_behind(SESSION_END_FIELD, contents.schema)

    def _declare(self, handle: Any) -> None:
        self._sessions: TimeColumns = handle.getTimeColumns(SESSIONS_STATE, "start_ms long", self._schema)
        self._timers: TimerColumns = handle.timers

    # ---- Rows ----

    def _process(self, timed: TimedRows, keys: ChunkKeys, times: WindowTimes) -> Iterator[pa.RecordBatch]:
        yield from self._late(timed.take(~timed.has_time))
        rows = self._in_order(timed.take(timed.has_time))
        is_late = np.zeros(len(rows), bool)
        yield from self._add(rows, is_late, keys, times)
        yield from self._late(rows.take(is_late))

    def _add(self, rows: TimedRows, is_late: Mask, keys: ChunkKeys, times: WindowTimes) -> Iterator[pa.RecordBatch]:
        """Merge new rows with the stored sessions that they meet."""
        starts = rows.times_ms
        spans = _Spans(rows.owners, starts, starts + self._gap_ms, np.arange(len(rows)), [])
        owners = np.unique(spans.owners)
        has_few = self._sessions.few()[owners]
        if has_few.any():
            stored = self._sessions.read(owners[has_few])
            new = spans if has_few.all() else spans.take(np.flatnonzero(np.isin(spans.owners, owners[has_few])))
            yield from self._merge(_stored(stored), new, stored.until_ms, rows, is_late, keys, times)
        if has_few.all():
            return
        order = np.lexsort((spans.starts_ms, spans.owners))
        by_owner = spans.owners[order]
        for owner in owners[~has_few].tolist():
            own = spans.take(order[slice(*np.searchsorted(by_owner, [owner, owner + 1]).tolist())])
            first_ms, taken = int(own.starts_ms[0]), 0
            reaching_ms = self._sessions.last_until(owner, first_ms)
            first_ms = first_ms if reaching_ms is None else reaching_ms
            open_ones: _Spans | None = None
            for page in self._sessions.pages(owner, first_ms, int(own.ends_ms.max()) + 1):
                until = int(np.searchsorted(own.starts_ms, page.until_ms))
                held = _stored(page)
                held = held if open_ones is None else open_ones.followed_by(held)
                new = own.take(np.arange(taken, until))
                open_ones = yield from self._merge(held, new, page.until_ms, rows, is_late, keys, times)
                taken = until

    def _merge(
        self,
        held: _Spans,
        new: _Spans,
        until_ms: int,
        rows: TimedRows,
        is_late: Mask,
        keys: ChunkKeys,
        times: WindowTimes,
    ) -> Generator[pa.RecordBatch, None, _Spans]:
        """Merge the spans that meet, and store sessions that no later span can meet; returns the spans of the others.

        Stored sessions that are closed, which a longer lateness has left, are removed.
        """
        is_closed = (held.numbers < 0) & (held.ends_ms <= times.closed_before_ms)
        if is_closed.any():
            self._remove(held.owners[is_closed], held.starts_ms[is_closed], held.ends_ms[is_closed])
            held = held.take(np.flatnonzero(~is_closed))
        spans = held.followed_by(_Spans(new.owners, new.starts_ms, new.ends_ms, new.numbers, self._no_held()))
        index, count = sessions_of(spans.owners, spans.starts_ms, spans.ends_ms)
        owners, starts, ends = _bounds(index, count, spans.owners, spans.starts_ms, spans.ends_ms)
        is_complete, is_new, is_old = ends < until_ms, np.zeros(count, bool), np.zeros(count, bool)
        is_new[index[spans.numbers >= 0]] = True
        is_old[index[spans.numbers < 0]] = True
        is_refused = is_complete & is_new & ~is_old & (ends <= times.closed_before_ms)
        is_late[spans.numbers[is_refused[index] & (spans.numbers >= 0)]] = True
        is_kept = is_complete & is_new & ~is_refused
        rank = np.cumsum(is_kept) - 1
        picked = np.flatnonzero(is_kept[index])
        written = TimeRows(owners[is_kept], starts[is_kept], [pa.array(ends[is_kept])])
        yield from self._write(spans.take(picked), rank[index[picked]], written, rows, keys, times)
        return spans.take(np.flatnonzero(~is_complete[index]))

    def _no_held(self) -> Columns:
        return self._sessions.nothing().values[1:]

    def _write(
        self, spans: _Spans, index: Int64s, written: TimeRows, rows: TimedRows, keys: ChunkKeys, times: WindowTimes
    ) -> Iterator[pa.RecordBatch]:
        """Store sessions in place of those that are merged into them, and return those that are over already.

        `index` has the session of each span; `written` are the sessions without their accumulators.
        """
        owners, starts, ends = written.key_index, written.times_ms, written.values[0].to_numpy()
        if not len(owners):
            return
        contents, key_of = self._contents, keys.of(owners)
        is_stored = spans.numbers < 0
        of_old, old_owners, old_ends = index[is_stored], spans.owners[is_stored], spans.ends_ms[is_stored]
        known, held = of_old, spans.held
        if len(np.unique(of_old)) < len(of_old):  # several stored sessions are merged into one
            known, of_known = np.unique(of_old, return_inverse=True)
            held = contents.merge(contents.opened(held), Groups(of_known, len(known)), key_of_some(key_of, known))
            held = contents.stored(held, key_of_some(key_of, known))
        # The rows of a session are added in their order, whatever the order of spans.
        by_number = np.flatnonzero(~is_stored)[np.argsort(spans.numbers[~is_stored], kind="stable")]
        new = rows.take(spans.numbers[by_number])
        held = contents.add(held, known, new, Groups(index[by_number], len(owners)), key_of)
        old_starts = spans.starts_ms[is_stored]
        has_moved = old_starts != starts[of_old]
        self._sessions.remove(old_owners[has_moved], old_starts[has_moved])
        self._sessions.put(TimeRows(owners, starts, [*written.values, *held]))
        has_timer = np.zeros(len(owners), bool)
        has_timer[of_old[old_ends == ends[of_old]]] = True
        is_over = ends <= times.before_ms
        # A timer deleted here may also be due for the removal of another session. The next timer of the merged session
        # does that removal.
        has_ended = (old_ends > times.before_ms) & (old_ends != ends[of_old])
        self._timers.delete(old_owners[has_ended], old_ends[has_ended])
        due_ms = np.where(is_over, ends + self._lateness_ms, ends)
        self._timers.register(owners[~has_timer], due_ms[~has_timer])
        over = TimeRows(owners, starts, [*written.values, *held]).take(is_over)
        yield from self._returned(over, keys, times.update)

    def _returned(self, sessions: TimeRows, keys: ChunkKeys, context: WindowContext) -> Iterator[pa.RecordBatch]:
        if len(sessions):
            ends, *held = sessions.values
            bounds = [sessions.times_ms, ends.to_numpy()]
            yield from self._results(keys, sessions.key_index, self._contents.opened(held), bounds, context)

    # ---- Timers ----

    def _fire(self, due_ms: Int64s, keys: ChunkKeys, times: WindowTimes) -> Iterator[pa.RecordBatch]:
        sessions = self._sessions
        has_few = sessions.few()
        if has_few.any():
            stored = sessions.read(np.flatnonzero(has_few))
            yield from self._ended(stored, due_ms, keys, times)
            self._close(stored, times)
        for owner in np.flatnonzero(~has_few).tolist():
            first_ms = int(due_ms[owner])
            reaching_ms = sessions.last_until(owner, first_ms - 1)
            for page in sessions.pages(owner, first_ms if reaching_ms is None else reaching_ms, times.now_ms):
                yield from self._ended(page, due_ms, keys, times)
            self._close_large(owner, times)

    def _ended(self, stored: TimeRows, due_ms: Int64s, keys: ChunkKeys, times: WindowTimes) -> Iterator[pa.RecordBatch]:
        ends = stored.values[0].to_numpy()
        is_due = (due_ms[stored.key_index] <= ends) & (ends <= times.now_ms)
        yield from self._returned(stored.take(is_due), keys, times.context)

    def _remove(self, owners: Int64s, starts: Int64s, ends: Int64s) -> None:
        """Remove sessions and their rows, by key and time; no earlier ones are open."""
        self._sessions.remove(owners, starts)
        lasts = last_of_each(owners)
        self._contents.remove(owners[lasts], ends[lasts])

    def _clear(self, owners: Int64s) -> None:
        self._sessions.clear(owners)
        self._contents.clear(owners)

    def _close(self, stored: TimeRows, times: WindowTimes) -> None:
        """Remove the closed sessions, and register timers for the next removals; all sessions of the keys are given."""
        owners, ends = stored.key_index, stored.values[0].to_numpy()
        if not len(owners):
            return
        is_open = ends > times.closed_now_ms
        emptied, is_removed = open_and_closed(stored.key_index, is_open)
        self._clear(emptied)
        self._remove(owners[is_removed], stored.times_ms[is_removed], ends[is_removed])
        owners, ends = owners[is_open], ends[is_open]
        firsts = first_of_each(owners)
        self._schedule(owners[firsts], ends[firsts], times)

    def _close_large(self, owner: int, times: WindowTimes) -> None:
        """Do the same for a key with many sessions, of which only the closed ones are read."""
        sessions, closed_ms = self._sessions, times.closed_now_ms
        removed: list[tuple[Int64s, Int64s]] = []
        open_ends = np.zeros(0, np.int64)
        for page in sessions.pages(owner, end_ms=closed_ms):
            ends = page.values[0].to_numpy()
            removed.append((page.times_ms[ends <= closed_ms], ends[ends <= closed_ms]))
            open_ends = ends[ends > closed_ms]
            if len(open_ends):
                break
        if not len(open_ends):
            later = next((page for page in sessions.pages(owner, closed_ms) if len(page)), None)
            if later is None:
                self._clear(np.array([owner]))
                return
            open_ends = later.values[0].to_numpy()
        for starts, ends in removed:
            self._remove(np.full(len(starts), owner), starts, ends)
        self._schedule(np.array([owner]), open_ends[:1], times)

    def _schedule(self, owners: Int64s, oldest_ends: Int64s, times: WindowTimes) -> None:
        """Register timers; as sessions are closed one after the other, one for the oldest of a key is enough."""
        is_over = oldest_ends <= times.now_ms
        self._timers.register(owners[is_over], oldest_ends[is_over] + self._lateness_ms)


def _bounds(index: Int64s, count: int, owners: Int64s, starts: Int64s, ends: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """The owner, the start and the end of each session, from the spans in it."""
    found, first, last = np.zeros(count, np.int64), np.full(count, END_MS), np.full(count, FIRST_MS)
    found[index] = owners
    np.minimum.at(first, index, starts)
    np.maximum.at(last, index, ends)
    return found, first, last
