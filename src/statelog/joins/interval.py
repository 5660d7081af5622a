"""The operator of interval joins: which rows match, which wait, and which are returned without a match."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BooleanType, StructField, StructType

from statelog.convert.codecs import ColumnCodecs
from statelog.convert.types import arrow_type
from statelog.joins.pairs import Interval, SideRows, in_order, joined_ranges, pairs
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.column_caller import DueTimers
from statelog.operators.keyed.columns import Columns, Mask, TimerColumns
from statelog.operators.keyed.indexing import IndexedRows, Int64s
from statelog.operators.keyed.time_columns import TimeColumns, TimeRows
from statelog.runs.byte_slices import stretches
from statelog.runs.keys import KeyCodec
from statelog.runs.times import LAST_MS, Moment
from statelog.windows.engine import open_and_closed

LEFT_STATE: Final = "join.left"
"""A map from time and order of arrival to the waiting rows of the left side."""
RIGHT_STATE: Final = "join.right"
MATCHED_FIELD: Final = "join_matched"
"""Whether a waiting row has matched one; it precedes the row's columns if the join returns rows without a match."""
_LEFT, _RIGHT = 0, 1


class JoinKind(StrEnum):
    """What an interval join returns."""

    INNER = "inner"
    LEFT = "left"
    RIGHT = "right"
    FULL = "full"
    SEMI = "semi"
    ANTI = "anti"

    @property
    def returns_pairs(self) -> bool:
        """Whether it returns pairs; otherwise rows of the left side, each once."""
        return self not in (JoinKind.SEMI, JoinKind.ANTI)

    @property
    def returns_unmatched(self) -> tuple[bool, bool]:
        """Whether it returns rows of the left and of the right side that match none."""
        return self in (JoinKind.LEFT, JoinKind.FULL, JoinKind.ANTI), self in (JoinKind.RIGHT, JoinKind.FULL)


@dataclass(frozen=True)
class Side:
    """One side of a join; picklable."""

    columns: StructType
    """The columns but for the grouping columns."""
    first_column: int
    """The place of the first of them in the operator's input."""
    time: int
    """The place of the event time among them."""
    interval: Interval
    """Where the rows of the other side match a row."""
    returns_unmatched: bool
    marks_matched: bool
    """Whether waiting rows tell if they have matched one."""

    @property
    def state_schema(self) -> StructType:
        """The value of a waiting row."""
        mark = [StructField(MATCHED_FIELD, BooleanType())] if self.marks_matched else []
        return StructType([*mark, *self.columns.fields])


class IntervalJoin:
    """Keeps the rows of both sides by key and time, as long as rows that match them can still come.

    The input has the grouping columns, the side of a row (0 is left), its event time, and the columns of both sides.
    The first timer of a key that fires in a batch does everything due for the key, and registers the key's next timer.
    Of a key with many waiting rows only those are read that are due, or between the times that new rows match.
    """

    def __init__(
        self, kind: JoinKind, sides: tuple[Side, Side], key_schema: pa.Schema, output: StructType, codecs: ColumnCodecs
    ) -> None:
        self.codecs = codecs
        self._kind = kind
        self._sides = sides
        self._key_schema = key_schema
        self._output_type = output

    def init(self, handle: Any) -> None:
        """Declare the states."""
        self._key_codec = KeyCodec(self._key_schema)
        self._output = pa.schema(
            [(field.name, arrow_type(field.dataType, "an output column")) for field in self._output_type]
        )
        self._types = [[arrow_type(field.dataType, field.name) for field in side.columns] for side in self._sides]
        self._states: list[TimeColumns] = [
            handle.getTimeColumns(name, "time_ms long, ordinal long", side.state_schema)
            for name, side in zip((LEFT_STATE, RIGHT_STATE), self._sides, strict=True)
        ]
        self._timers: TimerColumns = handle.timers

    def reduce(self, rows: IndexedRows) -> IndexedRows:
        return rows

    def process(self, chunk: IndexedRows, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Return what new rows match, and let them wait."""
        keys = self._key_codec.decode_columns(chunk.keys.keys)
        new: tuple[list[SideRows], list[SideRows]] = [], []
        for part, owners in _parts(chunk):
            for place in (_LEFT, _RIGHT):
                rows, without_match = self._of_side(place, part, owners)
                yield from self._unmatched(place, without_match, keys)
                if len(rows):
                    new[place].append(in_order(rows))
        left, right = new
        for rows in left:
            for others in right:
                yield from self._matched(rows, others, keys, len(chunk.keys))
        # New rows are added to the state afterwards, so all that is found here was waiting before.
        for rows in left:
            for own, others in self._waiting(_RIGHT, rows):
                was_matched = others.is_matched.copy()
                yield from self._matched(own, others, keys, len(chunk.keys))
                yield from self._note_matches(_RIGHT, others, ~was_matched, keys)
        for rows in right:
            for own, others in self._waiting(_LEFT, rows, is_repeated=len(right) > 1):
                was_matched = others.is_matched.copy()
                yield from self._matched(others, own, keys, len(chunk.keys))
                yield from self._note_matches(_LEFT, others, ~was_matched, keys)
        due_ms = np.full(len(chunk.keys), LAST_MS)
        for place, parts in enumerate(new):
            for rows in parts:
                yield from self._add(place, rows, due_ms, moment.watermark_ms, keys)
        self._register(due_ms)

    def fire(self, due: DueTimers, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Remove the rows that wait for nothing any more, and return those that the join returns without a match."""
        keys, next_ms = self._key_codec.decode_columns(due.keys.keys), np.full(len(due.keys), LAST_MS)
        for place in (_LEFT, _RIGHT):
            has_few = self._states[place].few()
            yield from self._remove_few(place, np.flatnonzero(has_few), next_ms, moment.watermark_ms, keys)
            for owner in np.flatnonzero(~has_few).tolist():
                yield from self._remove_large(place, owner, next_ms, moment.watermark_ms, keys)
        self._register(next_ms)

    def load_initial_state(self, chunk: IndexedRows, moment: Moment) -> Iterable[pa.RecordBatch]:
        raise AssertionError("joins take no initial rows")

    def close(self) -> None:
        """End the batch."""

    # ---- New rows ----

    def _of_side(self, place: int, part: pa.RecordBatch, owners: Int64s) -> tuple[SideRows, SideRows]:
        """The new rows of a side, and those that match none because their key or their time has a null."""
        side, width = self._sides[place], len(self._key_schema)
        of_side = pc.equal(part.column(width), place).to_numpy(zero_copy_only=False)
        times_us = EventTime(width + 1).times_us(part)
        can_match = times_us.is_valid().to_numpy(zero_copy_only=False)
        for column in part.columns[:width]:
            if column.null_count:
                can_match &= column.is_valid().to_numpy(zero_copy_only=False)
        times = times_us.fill_null(0).to_numpy()

        def picked(mask: Mask) -> SideRows:
            rows = np.flatnonzero(mask)
            columns = part.columns[side.first_column : side.first_column + len(side.columns)]
            columns = [
                column.take(pa.array(rows)).cast(kind) for column, kind in zip(columns, self._types[place], strict=True)
            ]
            return SideRows(owners[rows], times[rows], columns, np.zeros(len(rows), bool))

        return picked(of_side & can_match), picked(of_side & ~can_match)

    def _add(self, place: int, rows: SideRows, due_ms: Int64s, now_ms: int, keys: Columns) -> Iterator[pa.RecordBatch]:
        """Let new rows wait, unless they need not; `due_ms` gets the time of the first that is due, for each key."""
        ends_ms = rows.ends_ms(self._sides[place].interval)
        waits = ends_ms > now_ms
        yield from self._unmatched(place, rows.take(~waits & ~rows.is_matched), keys)
        if self._leaves_on_match(place):
            if self._kind is JoinKind.SEMI:
                yield from self._of_one_side(place, rows.take(rows.is_matched), keys)
            waits &= ~rows.is_matched
        waiting = rows.take(waits)
        np.minimum.at(due_ms, waiting.key_index, ends_ms[waits])
        self._states[place].append(waiting.key_index, waiting.times_ms, self._values(place, waiting))

    # ---- Waiting rows ----

    def _waiting(self, place: int, rows: SideRows, *, is_repeated: bool = False) -> Iterator[tuple[SideRows, SideRows]]:
        """The waiting rows of a side near new rows of the other one, in parts, each beside the rows of its keys.

        If the same rows may be asked for again, those that have left in between are not among them.
        """
        state, interval = self._states[place], self._sides[1 - place].interval
        has_few = state.few()
        owners = np.unique(rows.key_index)
        few = owners[has_few[owners]]
        if len(few):
            found = self._opened(place, state.read(few, with_changes=is_repeated))
            yield rows, found
        for owner in owners[~has_few[owners]].tolist():
            own = rows.slice(*np.searchsorted(rows.key_index, [owner, owner + 1]).tolist())
            times_ms = own.times_ms
            for first_ms, last_ms in joined_ranges(times_ms + interval.first_ms, times_ms + interval.last_ms):
                for page in state.pages(owner, first_ms, last_ms + 1, with_changes=is_repeated):
                    yield own, self._opened(place, page)

    def _note_matches(self, place: int, rows: SideRows, was_unmatched: Mask, keys: Columns) -> Iterator[pa.RecordBatch]:
        """Mark or remove waiting rows that have matched for the first time."""
        if not self._sides[place].marks_matched and not self._leaves_on_match(place):
            return
        matched = rows.take(rows.is_matched & was_unmatched)
        if not len(matched):
            return
        if self._leaves_on_match(place):
            self._remove(place, matched)
            if self._kind is JoinKind.SEMI:
                yield from self._of_one_side(place, matched, keys)
            return
        values = self._values(place, matched)
        self._states[place].put(TimeRows(matched.key_index, matched.times_ms, values, ordinals=matched.ordinals))

    def _remove_few(
        self, place: int, owners: Int64s, next_ms: Int64s, now_ms: int, keys: Columns
    ) -> Iterator[pa.RecordBatch]:
        """Remove the rows of keys that wait for nothing any more; `next_ms` gets the time of the first other one."""
        stored = self._states[place].read(owners)
        if not len(stored):
            return
        rows = self._opened(place, stored)
        ends_ms = rows.ends_ms(self._sides[place].interval)
        waits = ends_ms > now_ms
        yield from self._unmatched(place, rows.take(~waits & ~rows.is_matched), keys)
        np.minimum.at(next_ms, rows.key_index[waits], ends_ms[waits])
        emptied, is_removed = open_and_closed(stored, waits)
        self._states[place].clear(emptied)
        self._remove(place, rows.take(is_removed))

    def _remove_large(
        self, place: int, owner: int, next_ms: Int64s, now_ms: int, keys: Columns
    ) -> Iterator[pa.RecordBatch]:
        """Do the same for a key with many rows, of which only those are read that are due, and the first other one."""
        side, state = self._sides[place], self._states[place]
        limit_ms = now_ms - side.interval.last_ms
        first_ms = self._first_end(place, owner, limit_ms, now_ms)
        if first_ms is not None:
            next_ms[owner] = min(int(next_ms[owner]), first_ms)
        elif not side.returns_unmatched:
            state.clear(np.array([owner]))
            return
        for page in state.pages(owner, end_ms=limit_ms + 1):
            rows = self._opened(place, page)
            is_over = rows.ends_ms(side.interval) <= now_ms
            yield from self._unmatched(place, rows.take(is_over & ~rows.is_matched), keys)
            if first_ms is not None:
                self._remove(place, rows.take(is_over))
        if first_ms is None:
            state.clear(np.array([owner]))

    def _first_end(self, place: int, owner: int, from_ms: int, now_ms: int) -> int | None:
        """When the first row of a key is due that is not due now; None if there is none."""
        for page in self._states[place].pages(owner, from_ms):
            ends_ms = self._opened(place, page).ends_ms(self._sides[place].interval)
            if (ends_ms > now_ms).any():
                return int(ends_ms[ends_ms > now_ms].min())
        return None

    def _remove(self, place: int, rows: SideRows) -> None:
        self._states[place].remove(rows.key_index, rows.times_ms, rows.ordinals)

    def _register(self, due_ms: Int64s) -> None:
        has_any = due_ms < LAST_MS
        self._timers.register(np.flatnonzero(has_any), due_ms[has_any])

    def _opened(self, place: int, stored: TimeRows) -> SideRows:
        """Waiting rows, from their values in the state."""
        side, columns, is_matched = self._sides[place], stored.values, np.zeros(len(stored), bool)
        if side.marks_matched:
            mark, *columns = columns
            is_matched = mark.fill_null(False).to_numpy(zero_copy_only=False).copy()
        times = columns[side.time]
        times_us = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64()).to_numpy()
        return SideRows(stored.key_index, times_us, columns, is_matched, stored.ordinals)

    def _values(self, place: int, rows: SideRows) -> Columns:
        """What the state holds of rows."""
        mark = [pa.array(rows.is_matched)] if self._sides[place].marks_matched else []
        return [*mark, *rows.columns]

    def _leaves_on_match(self, place: int) -> bool:
        """Whether a row of a side does not wait any longer once it has matched one."""
        return place == _LEFT and not self._kind.returns_pairs

    # ---- Output ----

    def _matched(self, left: SideRows, right: SideRows, keys: Columns, count: int) -> Iterator[pa.RecordBatch]:
        """Mark the rows that match, and return their pairs if the join returns them."""
        for own, other in pairs(left, right, self._sides[_LEFT].interval, count):
            left.is_matched[own] = True
            right.is_matched[other] = True
            if not self._kind.returns_pairs:
                continue
            ends = np.concatenate(([0], np.cumsum(left.sizes[own] + right.sizes[other])))
            for start, end in stretches(ends, self._states[_LEFT].budget.slice_bytes):
                part, of_part = pa.array(own[start:end]), pa.array(other[start:end])
                columns = [column.take(part) for column in left.columns]
                columns += [column.take(of_part) for column in right.columns]
                yield self._made(left.key_index[own[start:end]], columns, keys)

    def _unmatched(self, place: int, rows: SideRows, keys: Columns) -> Iterator[pa.RecordBatch]:
        """The rows themselves, if the join returns rows of their side that match none."""
        if self._sides[place].returns_unmatched:
            yield from self._of_one_side(place, rows, keys)

    def _of_one_side(self, place: int, rows: SideRows, keys: Columns) -> Iterator[pa.RecordBatch]:
        """Rows with nulls for the columns of the other side, if the output has them."""
        if not len(rows):
            return
        nulls = [pa.nulls(len(rows), kind) for kind in self._types[1 - place]] if self._kind.returns_pairs else []
        columns = [*rows.columns, *nulls] if place == _LEFT else [*nulls, *rows.columns]
        yield self._made(rows.key_index, columns, keys)

    def _made(self, owners: Int64s, columns: Columns, keys: Columns) -> pa.RecordBatch:
        picked = pa.array(owners)
        of_keys = [column.take(picked) for column in keys]
        return pa.RecordBatch.from_arrays([*of_keys, *columns], schema=self._output)


def _parts(chunk: IndexedRows) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
    """Each batch of rows, with the keys of its rows."""
    start = 0
    for part in chunk.rows:
        yield part, chunk.key_index[start : start + part.num_rows]
        start += part.num_rows
