"""The operator of as-of joins: the right row that a left row gets, and the right rows that no left row can need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from statelog.convert.codecs import ColumnCodecs
from statelog.joins.pairs import SideRows, in_order, newest_until
from statelog.joins.sides import LEFT, RIGHT, JoinOperator, JoinShape, Side, parts_of
from statelog.numbers import LONGEST_MS
from statelog.operators.keyed.column_caller import DueTimers
from statelog.operators.keyed.columns import Columns, Mask
from statelog.operators.keyed.indexing import IndexedRows, Int64s
from statelog.operators.keyed.time_reader import FIRST_MS
from statelog.runs.byte_slices import stretches
from statelog.runs.times import LAST_MS, Moment
from statelog.windows.engine import open_and_closed


class AsofJoin(JoinOperator):
    """Gives each left row the newest right row that is not later.

    A right row that the watermark has passed is kept only while it is the newest such row of its key, and within the
    tolerance of left rows that are not late. Left rows that wait for the watermark are kept until then.

    Of a key with many rows, only those are read that the watermark has passed since they came or, for left rows that
    are answered at once, the right rows from the newest one before them to the last of them.
    """

    def __init__(
        self,
        sides: Sequence[Side],
        shape: JoinShape,
        codecs: ColumnCodecs,
        *,
        tolerance_ms: int | None,
        waits: bool,
        returns_unmatched: bool,
    ) -> None:
        super().__init__(sides, shape, codecs)
        self._tolerance_ms = tolerance_ms
        self._waits = waits
        self._returns_unmatched = returns_unmatched

    @property
    def _kept_sides(self) -> Sequence[int]:
        return (LEFT, RIGHT) if self._waits else (RIGHT,)

    def process(self, chunk: IndexedRows, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Keep new rows, and answer the left ones that need not wait."""
        keys, due_ms = self._key_codec.decode_columns(chunk.keys.keys), np.full(len(chunk.keys), LAST_MS)
        new: tuple[list[SideRows], list[SideRows]] = [], []
        for part, owners in parts_of(chunk):
            for place in (LEFT, RIGHT):
                rows, without_match = self._of_side(place, part, owners)
                if place == LEFT and self._returns_unmatched:
                    yield from self._with_nulls(LEFT, without_match, keys)
                if len(rows):
                    new[place].append(rows)
        left, right = new
        # The right rows of the same batch came before its left rows, wherever they are in it.
        for rows in left:
            waits = rows.ends_ms() > moment.watermark_ms if self._waits else np.zeros(len(rows), bool)
            answered = rows.take(~waits)
            owners = np.unique(answered.key_index)
            found = self._right(owners[self._states[RIGHT].few()[owners]])
            yield from self._answer(answered, found, keys, right)
            if self._waits:
                self._add(LEFT, rows.take(waits), due_ms)
        for rows in right:
            self._add(RIGHT, rows, due_ms)
        self._register(due_ms)

    def fire(self, due: DueTimers, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Answer the left rows that the watermark has passed, then remove the right rows that none can need."""
        keys, next_ms = self._key_codec.decode_columns(due.keys.keys), np.full(len(due.keys), LAST_MS)
        now_ms, few = moment.watermark_ms, self._states[RIGHT].few()
        found = self._right(np.flatnonzero(few))
        if self._waits:
            has_few = self._states[LEFT].few()
            yield from self._answer_few(np.flatnonzero(has_few), found, next_ms, now_ms, keys)
            for owner in np.flatnonzero(~has_few).tolist():
                yield from self._answer_large(owner, found, next_ms, now_ms, keys)
        self._drop_few(found, next_ms, now_ms)
        for owner in np.flatnonzero(~few).tolist():
            self._drop_large(owner, next_ms, now_ms)
        self._register(next_ms)

    def _add(self, place: int, rows: SideRows, due_ms: Int64s) -> None:
        """Keep new rows; `due_ms` gets the time of the first, for each key."""
        np.minimum.at(due_ms, rows.key_index, rows.ends_ms())
        self._append(place, rows)

    def _right(self, owners: Int64s) -> SideRows:
        """The right rows in the state of keys that have few, in order."""
        return in_order(self._opened(RIGHT, self._states[RIGHT].read(owners)))

    # ---- Waiting left rows ----

    def _answer_few(
        self, owners: Int64s, found: SideRows, next_ms: Int64s, now_ms: int, keys: Columns
    ) -> Iterator[pa.RecordBatch]:
        """Answer the rows of keys that the watermark has passed; `next_ms` gets the time of the first other one."""
        rows = self._opened(LEFT, self._states[LEFT].read(owners))
        if not len(rows):
            return
        ends_ms = rows.ends_ms()
        waits = ends_ms > now_ms
        yield from self._answer(in_order(rows.take(~waits)), found, keys)
        np.minimum.at(next_ms, rows.key_index[waits], ends_ms[waits])
        emptied, is_removed = open_and_closed(rows.key_index, waits)
        self._states[LEFT].clear(emptied)
        self._remove(LEFT, rows.take(is_removed))

    def _answer_large(
        self, owner: int, found: SideRows, next_ms: Int64s, now_ms: int, keys: Columns
    ) -> Iterator[pa.RecordBatch]:
        """Do the same for a key with many rows, page by page."""
        state, first_ms = self._states[LEFT], self._first_end(LEFT, owner, 0, now_ms)
        if first_ms is not None:
            next_ms[owner] = min(int(next_ms[owner]), first_ms)
        for page in state.pages(owner, end_ms=now_ms + 1):
            rows = self._opened(LEFT, page)
            rows = rows.take(rows.ends_ms() <= now_ms)
            yield from self._answer(in_order(rows), found, keys)
            if first_ms is not None:
                self._remove(LEFT, rows)
        if first_ms is None:
            state.clear(np.array([owner]))

    # ---- Answers ----

    def _answer(
        self, rows: SideRows, found: SideRows, keys: Columns, new: Sequence[SideRows] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Return left rows, in order, with their right rows.

        These are `found`, the rows in the state of keys that have few, those of the other keys, and `new` ones.
        """
        has_few = self._states[RIGHT].few()[rows.key_index]
        yield from self._matched(rows.take(has_few), [found, *new], keys)
        for owner in np.unique(rows.key_index[~has_few]).tolist():
            yield from self._answer_from_pages(owner, rows.of_key(owner), keys, [part.of_key(owner) for part in new])

    def _answer_from_pages(
        self, owner: int, rows: SideRows, keys: Columns, new: Sequence[SideRows]
    ) -> Iterator[pa.RecordBatch]:
        """Return the left rows of a key with many right rows, of which a page is held, and what is needed before it."""
        state, times_ms, start = self._states[RIGHT], rows.times_ms, 0
        first_ms = state.last_until(owner, int(times_ms[0]) - 1)
        held = self._opened(RIGHT, state.nothing())
        for page in state.pages(owner, FIRST_MS if first_ms is None else first_ms, int(times_ms[-1]) + 1):
            held = in_order(held.followed_by(self._opened(RIGHT, page)))
            end = int(np.searchsorted(times_ms, page.until_ms))
            yield from self._matched(rows.slice(start, end), [held, *new], keys)
            held, start = held.take(_needed_from(held, page.until_ms)), end

    def _matched(self, rows: SideRows, sources: Sequence[SideRows], keys: Columns) -> Iterator[pa.RecordBatch]:
        """Return left rows with the newest right row that is not later; of two of one time that of the later source."""
        if not len(rows):
            return
        most_ms = LONGEST_MS if self._tolerance_ms is None else self._tolerance_ms
        source, place, times_us = np.full(len(rows), -1), np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for number, others in enumerate(sources):
            places = newest_until(rows, others, most_ms, self._states[RIGHT].key_count)
            better = np.flatnonzero(places >= 0)
            better = better[(source[better] < 0) | (others.times_us[places[better]] >= times_us[better])]
            source[better], place[better] = number, places[better]
            times_us[better] = others.times_us[place[better]]
        for number, others in enumerate(sources):
            own = np.flatnonzero(source == number)
            yield from self._pairs(rows.take(own), others, place[own], keys)
        if self._returns_unmatched:
            yield from self._with_nulls(LEFT, rows.take(source < 0), keys)

    def _pairs(self, rows: SideRows, others: SideRows, places: Int64s, keys: Columns) -> Iterator[pa.RecordBatch]:
        """Rows with some of the others, in parts of bounded size."""
        if not len(rows):
            return
        ends = np.concatenate(([0], np.cumsum(rows.sizes + others.sizes[places])))
        for start, end in stretches(ends, self._states[RIGHT].budget.slice_bytes):
            picked = pa.array(places[start:end])
            columns = [column.slice(start, end - start) for column in rows.columns]
            columns += [column.take(picked) for column in others.columns]
            yield self._made(rows.key_index[start:end], columns, keys)

    # ---- Right rows that no left row can need ----

    def _drop_few(self, rows: SideRows, next_ms: Int64s, now_ms: int) -> None:
        """Remove those of keys that have few; `next_ms` gets the time when the first other one may be removed."""
        if not len(rows):
            return
        ends_ms = rows.ends_ms()
        is_past = ends_ms <= now_ms
        is_newest = is_past.copy()
        is_newest[:-1] &= ~(is_past[1:] & (rows.key_index[1:] == rows.key_index[:-1]))
        is_newest &= self._is_near(ends_ms, now_ms)
        np.minimum.at(next_ms, rows.key_index[~is_past], ends_ms[~is_past])
        if self._tolerance_ms is not None:
            np.minimum.at(next_ms, rows.key_index[is_newest], ends_ms[is_newest] + self._tolerance_ms)
        emptied, is_removed = open_and_closed(rows.key_index, ~is_past | is_newest)
        self._states[RIGHT].clear(emptied)
        self._remove(RIGHT, rows.take(is_removed))

    def _drop_large(self, owner: int, next_ms: Int64s, now_ms: int) -> None:
        """Do the same for a key with many rows, of which those are read that the watermark has passed."""
        state, first_ms = self._states[RIGHT], self._first_end(RIGHT, owner, 0, now_ms)
        newest = self._opened(RIGHT, state.nothing())
        for page in state.pages(owner, end_ms=now_ms + 1):
            rows = in_order(newest.followed_by(self._opened(RIGHT, page)))
            rows = rows.take(rows.ends_ms() <= now_ms)
            last = max(0, len(rows) - 1)
            self._remove(RIGHT, rows.slice(0, last))
            newest = rows.slice(last, len(rows))
        ends_ms = newest.ends_ms()
        is_kept = self._is_near(ends_ms, now_ms)
        if first_ms is None and not is_kept.any():
            state.clear(np.array([owner]))
            return
        self._remove(RIGHT, newest.take(~is_kept))
        of_newest = [] if self._tolerance_ms is None else (ends_ms[is_kept] + self._tolerance_ms).tolist()
        next_ms[owner] = min([int(next_ms[owner]), *of_newest, *([] if first_ms is None else [first_ms])])

    def _is_near(self, ends_ms: Int64s, now_ms: int) -> Mask:
        """Whether a left row that is not late can be within the tolerance of rows."""
        if self._tolerance_ms is None:
            return np.ones(len(ends_ms), bool)
        return ends_ms + self._tolerance_ms > now_ms


def _needed_from(rows: SideRows, until_ms: int) -> Int64s:
    """The places of one key's rows, in order, that left rows from a time on may get: the last of each time.

    Of the rows before that time, it is only the last one. As a time has a thousand microseconds, few rows are left.
    """
    is_last = np.ones(len(rows), bool)
    is_last[:-1] = rows.times_us[1:] != rows.times_us[:-1]
    before = int(np.searchsorted(rows.times_ms, until_ms))
    is_last[: max(0, before - 1)] = False
    return np.flatnonzero(is_last)
