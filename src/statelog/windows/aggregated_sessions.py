"""Ready-made aggregates in session windows, on columns."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from statelog.aggregates.accumulators import Accumulators
from statelog.aggregates.groups import Groups, Int64s
from statelog.aggregates.kernels import Columns
from statelog.convert.codecs import ColumnCodecs
from statelog.history.window_settings import SESSION_END_FIELD, SESSIONS_STATE
from statelog.operators.keyed.column_caller import DueTimers
from statelog.operators.keyed.columns import TimerColumns
from statelog.operators.keyed.indexing import IndexedRows
from statelog.operators.keyed.time_columns import END_MS, TimeColumns, TimeRows
from statelog.operators.keyed.time_reader import FIRST_MS
from statelog.runs.times import Moment
from statelog.tables.table import KeyBatch
from statelog.windows.aggregated import AggregatedWindows, Mask, TimedRows, WindowMoment, WindowShape
from statelog.windows.operator import Clock, schema_behind


@dataclass(frozen=True)
class _Spans:
    """Rows or sessions: whose they are, when they begin and end, and their accumulators."""

    owners: Int64s
    starts_ms: Int64s
    ends_ms: Int64s
    numbers: Int64s
    """The place of new ones among all that are new; -1 for stored sessions."""
    held: Columns

    def __len__(self) -> int:
        return len(self.owners)

    def take(self, rows: Int64s) -> _Spans:
        """Some of them, in any order."""
        picked = pa.array(rows)
        held = [column.take(picked) for column in self.held]
        return _Spans(self.owners[rows], self.starts_ms[rows], self.ends_ms[rows], self.numbers[rows], held)

    def followed_by(self, others: _Spans) -> _Spans:
        """These, and then others."""
        return _Spans(
            np.concatenate([self.owners, others.owners]),
            np.concatenate([self.starts_ms, others.starts_ms]),
            np.concatenate([self.ends_ms, others.ends_ms]),
            np.concatenate([self.numbers, others.numbers]),
            [pa.concat_arrays(list(pair)) for pair in zip(self.held, others.held, strict=True)],
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


class AggregatedSessions(AggregatedWindows):
    """Keeps an accumulator per session, and merges sessions that meet; see :mod:`statelog.windows.session`."""

    def __init__(
        self, gap_ms: int, accumulators: Accumulators, clock: Clock, shape: WindowShape, codecs: ColumnCodecs
    ) -> None:
        super().__init__(accumulators, clock, shape, codecs)
        self._gap_ms = gap_ms
        self._schema = schema_behind(SESSION_END_FIELD, accumulators.schema)

    def init(self, handle: Any) -> None:
        super().init(handle)
        self._sessions: TimeColumns = handle.getTimeColumns(SESSIONS_STATE, "start_ms long", self._schema)
        self._timers: TimerColumns = handle.timers

    # ---- Rows ----

    def process(self, chunk: IndexedRows, moment: Moment) -> Iterator[pa.RecordBatch]:
        times, keys, gap_ms = self._moment(moment), chunk.keys, self._gap_ms
        parts: list[tuple[TimedRows, Int64s]] = []  # rows, and the span that each belongs to
        spans: _Spans | None = None
        for timed in self._timed(chunk, moment):
            yield from self._late(timed, ~timed.has_time)
            kept = self._in_order(timed.filter(timed.has_time))
            owners, starts, held = kept.owners, kept.times_ms, self._lifted(kept)
            span_of, ends = np.arange(len(owners)), starts + gap_ms
            if len(chunk.rows) > 1:
                span_of, count = sessions_of(owners, starts, ends)
                owners, starts, ends = _bounds(span_of, count, owners, starts, ends)
                held = self._reduced(held, Groups(span_of, count), owners, keys)
            before = 0 if spans is None else len(spans)
            parts.append((kept, span_of + before))
            new = _Spans(owners, starts, ends, before + np.arange(len(owners)), held)
            spans = new if spans is None else spans.followed_by(new)
        assert spans is not None
        is_late = np.zeros(len(spans), bool)
        yield from self._add(spans, is_late, keys, times)
        if is_late.any():
            for timed, span_of in parts:
                yield from self._late(timed, is_late[span_of])

    def _add(self, spans: _Spans, is_late: Mask, keys: KeyBatch, times: WindowMoment) -> Iterator[pa.RecordBatch]:
        """Merge new spans with the stored sessions that they meet."""
        owners = np.unique(spans.owners)
        has_few = self._sessions.few()[owners]
        if has_few.any():
            stored = self._sessions.read(owners[has_few])
            new = spans if has_few.all() else spans.take(np.flatnonzero(np.isin(spans.owners, owners[has_few])))
            yield from self._merge(_stored(stored), new, stored.until_ms, is_late, keys, times)
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
                new, held = own.take(np.arange(taken, until)), _stored(page)
                held = held if open_ones is None else open_ones.followed_by(held)
                open_ones = yield from self._merge(held, new, page.until_ms, is_late, keys, times)
                taken = until

    def _merge(
        self, held: _Spans, new: _Spans, until_ms: int, is_late: Mask, keys: KeyBatch, times: WindowMoment
    ) -> Generator[pa.RecordBatch, None, _Spans]:
        """Merge the spans that meet, and store sessions that no later span can meet; returns the spans of the others.

        Stored sessions that are closed, which a longer lateness has left, are removed.
        """
        is_closed = (held.numbers < 0) & (held.ends_ms <= times.closed_before_ms)
        if is_closed.any():
            self._sessions.remove(held.owners[is_closed], held.starts_ms[is_closed])
            held = held.take(np.flatnonzero(~is_closed))
        spans = held.followed_by(new)
        index, count = sessions_of(spans.owners, spans.starts_ms, spans.ends_ms)
        owners, starts, ends = _bounds(index, count, spans.owners, spans.starts_ms, spans.ends_ms)
        is_complete, is_new, is_old = ends < until_ms, np.zeros(count, bool), np.zeros(count, bool)
        is_new[index[spans.numbers >= 0]] = True
        is_old[index[spans.numbers < 0]] = True
        is_refused = is_complete & is_new & ~is_old & (ends <= times.closed_before_ms)
        is_late[spans.numbers[is_refused[index] & (spans.numbers >= 0)]] = True
        is_kept = is_complete & is_new & ~is_refused
        rank = np.cumsum(is_kept) - 1
        rows = np.flatnonzero(is_kept[index])
        # Stored sessions come first, then rows one by one: so sums do not depend on the cut into batches.
        rows = rows[np.argsort(spans.numbers[rows] >= 0, kind="stable")]
        picked = spans.take(rows)
        written = owners[is_kept], starts[is_kept], ends[is_kept]
        yield from self._write(picked, rank[index[rows]], *written, keys, times)
        return spans.take(np.flatnonzero(~is_complete[index]))

    def _write(
        self,
        spans: _Spans,
        index: Int64s,
        owners: Int64s,
        starts: Int64s,
        ends: Int64s,
        keys: KeyBatch,
        times: WindowMoment,
    ) -> Iterator[pa.RecordBatch]:
        """Store sessions in place of those that are merged into them, and return those that are over already.

        `index` has the session of each span; the others are the sessions' owners, starts and ends.
        """
        if not len(owners):
            return
        held = self._reduced(spans.held, Groups(index, len(owners)), owners, keys)
        old = np.flatnonzero(spans.numbers < 0)
        of_old, old_owners, old_ends = index[old], spans.owners[old], spans.ends_ms[old]
        has_moved = spans.starts_ms[old] != starts[of_old]
        self._sessions.remove(old_owners[has_moved], spans.starts_ms[old][has_moved])
        self._sessions.put(TimeRows(owners, starts, [pa.array(ends), *held]))
        has_timer = np.zeros(len(owners), bool)
        has_timer[of_old[old_ends == ends[of_old]]] = True
        is_over = ends <= times.before_ms
        # A timer deleted here may also be due for the removal of another session. The next timer of the merged session
        # does that removal.
        has_ended = (old_ends > times.before_ms) & (old_ends != ends[of_old])
        self._timers.delete(old_owners[has_ended], old_ends[has_ended])
        due_ms = np.where(is_over, ends + self._lateness_ms, ends)
        self._timers.register(owners[~has_timer], due_ms[~has_timer])
        if is_over.any():
            over = np.flatnonzero(is_over)
            picked = pa.array(over)
            held = [column.take(picked) for column in held]
            yield self._returned(self._keys(keys), owners[over], held, [starts[over], ends[over]])

    # ---- Timers ----

    def fire(self, due: DueTimers, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Return the sessions that have ended by now, and remove those whose lateness is over.

        The sessions and the times alone decide what is due: the timers may come from a start with another lateness.
        """
        times, sessions, decoded = self._moment(moment), self._sessions, self._keys(due.keys)
        due_ms = due.times_ms[np.flatnonzero(np.diff(due.key_index, prepend=-1))]
        has_few = sessions.few()
        if has_few.any():
            stored = sessions.read(np.flatnonzero(has_few))
            yield from self._ended(stored, due_ms, decoded, times)
            self._close(stored, times)
        for owner in np.flatnonzero(~has_few).tolist():
            first_ms = int(due_ms[owner])
            reaching_ms = sessions.last_until(owner, first_ms - 1)
            for page in sessions.pages(owner, first_ms if reaching_ms is None else reaching_ms, times.now_ms):
                yield from self._ended(page, due_ms, decoded, times)
            self._close_large(owner, times)

    def _ended(
        self, stored: TimeRows, due_ms: Int64s, decoded: Columns, times: WindowMoment
    ) -> Iterator[pa.RecordBatch]:
        ends = stored.values[0].to_numpy()
        is_due = (due_ms[stored.key_index] <= ends) & (ends <= times.now_ms)
        if is_due.any():
            found = _stored(stored.take(is_due))
            yield self._returned(decoded, found.owners, found.held, [found.starts_ms, found.ends_ms])

    def _close(self, stored: TimeRows, times: WindowMoment) -> None:
        """Remove the closed sessions, and register timers for the next removals; all sessions of the keys are given."""
        owners, ends = stored.key_index, stored.values[0].to_numpy()
        if not len(owners):
            return
        is_open = ends > times.closed_now_ms
        is_kept = np.zeros(int(owners[-1]) + 1, bool)
        is_kept[owners[is_open]] = True
        self._sessions.clear(np.unique(owners[~is_kept[owners]]))
        is_removed = ~is_open & is_kept[owners]
        self._sessions.remove(owners[is_removed], stored.times_ms[is_removed])
        owners, ends = owners[is_open], ends[is_open]
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        self._schedule(owners[firsts], ends[firsts], times)

    def _close_large(self, owner: int, times: WindowMoment) -> None:
        """Do the same for a key with many sessions, of which only the closed ones are read."""
        sessions, closed_ms = self._sessions, times.closed_now_ms
        removed: list[Int64s] = []
        open_ends = np.zeros(0, np.int64)
        for page in sessions.pages(owner, end_ms=closed_ms):
            ends = page.values[0].to_numpy()
            removed.append(page.times_ms[ends <= closed_ms])
            open_ends = ends[ends > closed_ms]
            if len(open_ends):
                break
        if not len(open_ends):
            later = next((page for page in sessions.pages(owner, closed_ms) if len(page)), None)
            if later is None:
                sessions.clear(np.array([owner]))
                return
            open_ends = later.values[0].to_numpy()
        for starts in removed:
            sessions.remove(np.full(len(starts), owner), starts)
        self._schedule(np.array([owner]), open_ends[:1], times)

    def _schedule(self, owners: Int64s, oldest_ends: Int64s, times: WindowMoment) -> None:
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
