"""The operator of interval joins: which rows match, which wait, and which are returned without a match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import acero
from pyspark.sql.types import BooleanType, LongType, StructField, StructType

from statelog.convert.codecs import ColumnCodecs
from statelog.errors import ProcessorError
from statelog.joins.pairs import Interval, SideRows, joined_ranges, pairs
from statelog.joins.sides import LEFT, RIGHT, JoinOperator, JoinShape, Side, parts_of
from statelog.operators.keyed.column_caller import DueTimers
from statelog.operators.keyed.columns import Arrivals, Columns, Mask
from statelog.operators.keyed.indexing import IndexedRows, Int64s
from statelog.operators.keyed.time_columns import TimeRows
from statelog.runs.byte_slices import stretches
from statelog.runs.times import LAST_MS, Moment
from statelog.windows.engine import open_and_closed

MATCHED_FIELD: Final = "join_matched"
"""Whether a waiting row has matched one; it precedes the row's columns if the join returns rows without a match."""


ARRIVED_FIELD: Final = "join_arrived_ms"
"""The processing time at which a waiting row came, if the join had a timeout then; it is behind `join_matched`."""
_ARRIVALS_STATE: Final = "join.arrivals"
"""The times at which keys got rows that have a time limit."""


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
class IntervalSide(Side):
    """One side of an interval join."""

    interval: Interval
    """Where the rows of the other side match a row."""
    returns_unmatched: bool
    marks_matched: bool
    """Whether waiting rows tell if they have matched one."""

    @property
    def own_fields(self) -> list[StructField]:
        """The fields of a waiting row that precede its columns."""
        mark = [StructField(MATCHED_FIELD, BooleanType())] if self.marks_matched else []
        return [*mark, *([StructField(ARRIVED_FIELD, LongType())] if self.returns_unmatched else [])]

    @property
    def state_schema(self) -> StructType:
        """The value of a waiting row."""
        return StructType([*self.own_fields, *self.columns.fields])


@dataclass(frozen=True)
class Condition:
    """A further condition on pairs; picklable."""

    expression: pc.Expression
    names: Sequence[str]
    """Those of a pair's columns: the grouping columns, and the other columns of the left and of the right side."""

    def holds(self, columns: Columns) -> Mask:
        """Whether it is true for each pair, which it is not if it is null; raises what Arrow does for other types."""
        table = pa.Table.from_arrays(columns, names=list(self.names))
        plan = [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(table)),
            acero.Declaration("project", acero.ProjectNodeOptions([self.expression], ["holds"])),
        ]
        (holds,) = acero.Declaration.from_sequence(plan).to_table(use_threads=False).columns
        if not pa.types.is_boolean(holds.type):
            raise TypeError(f"it is of type {holds.type}, not bool")
        found: Mask = holds.combine_chunks().fill_null(False).to_numpy(zero_copy_only=False)
        return found


class IntervalJoin(JoinOperator):
    """Keeps the rows of both sides by key and time, as long as rows that match them can still come.

    Of a key with many waiting rows, only those are read that are due, or between the times that new rows match.
    """

    def __init__(
        self,
        kind: JoinKind,
        sides: tuple[IntervalSide, IntervalSide],
        shape: JoinShape,
        codecs: ColumnCodecs,
        timeout_ms: int | None = None,
        condition: Condition | None = None,
    ) -> None:
        super().__init__(sides, shape, codecs)
        self._kind = kind
        self._condition = condition
        self._intervals = sides
        self._timeout_ms = timeout_ms

    def init(self, handle: Any) -> None:
        super().init(handle)
        if any(self._kind.returns_unmatched):
            # The state is the same with a timeout and without, so that it may be set and removed at any start.
            limit_ms = LAST_MS if self._timeout_ms is None else self._timeout_ms
            self._arrivals: Arrivals = handle.getArrivals(_ARRIVALS_STATE, limit_ms, self._time_out)

    def process(self, chunk: IndexedRows, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Return what new rows match, and let them wait."""
        keys = self._key_codec.decode_columns(chunk.keys.keys)
        new: tuple[list[SideRows], list[SideRows]] = [], []
        for part, owners in parts_of(chunk):
            for place in (LEFT, RIGHT):
                rows, without_match = self._of_side(place, part, owners)
                yield from self._unmatched(place, without_match, keys)
                if len(rows):
                    new[place].append(rows)
        left, right = new
        for rows in left:
            for others in right:
                yield from self._matched(rows, others, keys, len(chunk.keys))
        # New rows are added to the state afterwards, so all that is found here was waiting before.
        for rows in left:
            for own, others in self._waiting(RIGHT, rows):
                was_matched = others.is_matched.copy()
                yield from self._matched(own, others, keys, len(chunk.keys))
                yield from self._note_matches(RIGHT, others, ~was_matched, keys)
        for rows in right:
            for own, others in self._waiting(LEFT, rows, is_repeated=len(right) > 1):
                was_matched = others.is_matched.copy()
                yield from self._matched(others, own, keys, len(chunk.keys))
                yield from self._note_matches(LEFT, others, ~was_matched, keys)
        due_ms = np.full(len(chunk.keys), LAST_MS)
        for place, parts in enumerate(new):
            for rows in parts:
                yield from self._add(place, rows, due_ms, moment, keys)
        self._register(due_ms)

    def fire(self, due: DueTimers, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Remove the rows that no longer wait for anything, and return those that the join returns without a match."""
        keys, next_ms = self._key_codec.decode_columns(due.keys.keys), np.full(len(due.keys), LAST_MS)
        for place in (LEFT, RIGHT):
            has_few = self._states[place].few()
            yield from self._remove_few(place, np.flatnonzero(has_few), next_ms, moment.watermark_ms, keys)
            for owner in np.flatnonzero(~has_few).tolist():
                yield from self._remove_large(place, owner, next_ms, moment.watermark_ms, keys)
        self._register(next_ms)

    def _time_out(self, due: DueTimers, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Remove and return the rows without a match whose time limit is over, of keys that got such rows."""
        assert self._timeout_ms is not None
        keys, next_ms = self._key_codec.decode_columns(due.keys.keys), np.full(len(due.keys), LAST_MS)
        until_ms = moment.processing_ms - self._timeout_ms
        for place in (LEFT, RIGHT):
            state, has_few = self._states[place], self._states[place].few()
            rows = self._opened(place, state.read(np.flatnonzero(has_few)))
            is_over = rows.are_over(until_ms)
            yield from self._timed_out(place, rows, is_over, next_ms, keys)
            if is_over.any():
                self._timers.delete(rows.key_index[is_over], self._ends_ms(place, rows)[is_over])
                emptied, is_removed = open_and_closed(rows.key_index, ~is_over)
                state.clear(emptied)
                self._remove(place, rows.take(is_removed))
            for owner in np.flatnonzero(~has_few).tolist():
                yield from self._time_out_large(place, owner, next_ms, until_ms, moment.watermark_ms, keys)
        self._register(next_ms)

    def _time_out_large(
        self, place: int, owner: int, next_ms: Int64s, until_ms: int, now_ms: int, keys: Columns
    ) -> Iterator[pa.RecordBatch]:
        """Do the same for a key with many rows, page by page."""
        side, state = self._intervals[place], self._states[place]
        if not side.returns_unmatched:
            first_ms = self._first_end(place, owner, side.interval.last_ms, now_ms)
            next_ms[owner] = min(int(next_ms[owner]), LAST_MS if first_ms is None else first_ms)
            return
        gone: list[SideRows] = []
        is_emptied = True
        for page in state.pages(owner):
            rows = self._opened(place, page)
            is_over = rows.are_over(until_ms)
            yield from self._timed_out(place, rows, is_over, next_ms, keys)
            gone.append(replace(rows, columns=[]).take(is_over))
            is_emptied &= bool(is_over.all())
        self._timers.delete_all(owner)
        if is_emptied:
            state.clear(np.array([owner]))
            return
        for rows in gone:
            self._remove(place, rows)

    def _timed_out(
        self, place: int, rows: SideRows, is_over: Mask, next_ms: Int64s, keys: Columns
    ) -> Iterator[pa.RecordBatch]:
        """Return rows that leave the state; `next_ms` gets the time of the first other one."""
        np.minimum.at(next_ms, rows.key_index[~is_over], self._ends_ms(place, rows)[~is_over])
        yield from self._unmatched(place, rows.take(is_over), keys)

    def _ends_ms(self, place: int, rows: SideRows) -> Int64s:
        return rows.ends_ms(self._intervals[place].interval.last_ms)

    # ---- New rows ----

    def _add(
        self, place: int, rows: SideRows, due_ms: Int64s, moment: Moment, keys: Columns
    ) -> Iterator[pa.RecordBatch]:
        """Let new rows wait, unless they need not; `due_ms` gets the time of the first that is due, for each key."""
        ends_ms = rows.ends_ms(self._intervals[place].interval.last_ms)
        waits = ends_ms > moment.watermark_ms
        yield from self._unmatched(place, rows.take(~waits & ~rows.is_matched), keys)
        if self._leaves_on_match(place):
            if self._kind is JoinKind.SEMI:
                yield from self._of_one_side(place, rows.take(rows.is_matched), keys)
            waits &= ~rows.is_matched
        waiting = rows.take(waits)
        np.minimum.at(due_ms, waiting.key_index, ends_ms[waits])
        if self._intervals[place].returns_unmatched:
            has_limit = self._timeout_ms is not None
            arrived_ms = np.full(len(waiting), moment.processing_ms if has_limit else LAST_MS)
            waiting = replace(waiting, arrived_ms=arrived_ms)
            if has_limit:
                owners = np.unique(waiting.key_index[~waiting.is_matched])
                self._arrivals.register(owners, np.full(len(owners), moment.processing_ms))
        self._append(place, waiting)

    # ---- Waiting rows ----

    def _waiting(self, place: int, rows: SideRows, *, is_repeated: bool = False) -> Iterator[tuple[SideRows, SideRows]]:
        """The waiting rows of a side near new rows of the other one, in parts, each beside the rows of its keys.

        If the same rows may be requested again, those that have left in between are not among them.
        """
        state, interval = self._states[place], self._intervals[1 - place].interval
        has_few = state.few()
        owners = np.unique(rows.key_index)
        few = owners[has_few[owners]]
        if len(few):
            found = self._opened(place, state.read(few, with_changes=is_repeated))
            yield rows, found
        for owner in owners[~has_few[owners]].tolist():
            own = rows.of_key(owner)
            times_ms = own.times_ms
            for first_ms, last_ms in joined_ranges(times_ms + interval.first_ms, times_ms + interval.last_ms):
                for page in state.pages(owner, first_ms, last_ms + 1, with_changes=is_repeated):
                    yield own, self._opened(place, page)

    def _note_matches(self, place: int, rows: SideRows, was_unmatched: Mask, keys: Columns) -> Iterator[pa.RecordBatch]:
        """Mark or remove waiting rows that have matched for the first time."""
        if not self._intervals[place].marks_matched and not self._leaves_on_match(place):
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
        """Remove the rows of keys that no longer wait for anything; `next_ms` gets the time of the first other one."""
        side, state = self._intervals[place], self._states[place]
        if side.returns_unmatched:
            rows = self._opened(place, state.read(owners))
        else:
            name = side.columns.names[side.time]
            rows = self._of_times(state.read_fields(owners, [name]))
        if not len(rows):
            return
        ends_ms = rows.ends_ms(side.interval.last_ms)
        waits = ends_ms > now_ms
        yield from self._unmatched(place, rows.take(~waits & ~rows.is_matched), keys)
        np.minimum.at(next_ms, rows.key_index[waits], ends_ms[waits])
        emptied, is_removed = open_and_closed(rows.key_index, waits)
        self._states[place].clear(emptied)
        self._remove(place, rows.take(is_removed))

    def _remove_large(
        self, place: int, owner: int, next_ms: Int64s, now_ms: int, keys: Columns
    ) -> Iterator[pa.RecordBatch]:
        """Do the same for a key with many rows, of which only those are read that are due, and the first other one."""
        side, state = self._intervals[place], self._states[place]
        limit_ms = now_ms - side.interval.last_ms
        first_ms = self._first_end(place, owner, side.interval.last_ms, now_ms)
        if first_ms is not None:
            next_ms[owner] = min(int(next_ms[owner]), first_ms)
        elif not side.returns_unmatched:
            state.clear(np.array([owner]))
            return
        for page in state.pages(owner, end_ms=limit_ms + 1):
            rows = self._opened(place, page)
            is_over = rows.ends_ms(side.interval.last_ms) <= now_ms
            yield from self._unmatched(place, rows.take(is_over & ~rows.is_matched), keys)
            if first_ms is not None:
                self._remove(place, rows.take(is_over))
        if first_ms is None:
            state.clear(np.array([owner]))

    def _opened(self, place: int, stored: TimeRows) -> SideRows:
        side, columns = self._intervals[place], stored.values
        is_matched, arrived_ms = np.zeros(len(stored), bool), None
        if side.marks_matched:
            mark, *columns = columns
            is_matched = mark.fill_null(False).to_numpy(zero_copy_only=False).copy()
        if side.returns_unmatched:
            arrived, *columns = columns
            arrived_ms = arrived.fill_null(LAST_MS).to_numpy()
        return replace(self._of_values(place, stored, columns, is_matched), arrived_ms=arrived_ms)

    def _values(self, place: int, rows: SideRows) -> Columns:
        """What the state holds of rows."""
        own = [pa.array(rows.is_matched)] if self._intervals[place].marks_matched else []
        if rows.arrived_ms is not None:
            own.append(pa.array(rows.arrived_ms, mask=rows.arrived_ms == LAST_MS))
        return [*own, *rows.columns]

    def _leaves_on_match(self, place: int) -> bool:
        """Whether a row of a side does not wait any longer once it has matched one."""
        return place == LEFT and not self._kind.returns_pairs

    # ---- Output ----

    def _matched(self, left: SideRows, right: SideRows, keys: Columns, count: int) -> Iterator[pa.RecordBatch]:
        """Mark the rows that match, and return their pairs if the join returns them."""
        for found in pairs(left, right, self._intervals[LEFT].interval, count):
            for own, other in self._fitting(left, right, found, keys):
                left.is_matched[own] = True
                right.is_matched[other] = True
                if self._kind.returns_pairs:
                    for own_part, other_part in self._bounded(left, right, own, other):
                        yield self._made(left.key_index[own_part], _paired(left, right, own_part, other_part), keys)

    def _fitting(
        self, left: SideRows, right: SideRows, found: tuple[Int64s, Int64s], keys: Columns
    ) -> Iterator[tuple[Int64s, Int64s]]:
        """The pairs that fulfil the condition, as places."""
        if self._condition is None:
            yield found
            return
        for own, other in self._bounded(left, right, *found):
            of_keys = _picked(keys, left.key_index[own])
            try:
                holds = self._condition.holds([*of_keys, *_paired(left, right, own, other)])
            except pa.ArrowException as error:
                raise ProcessorError(
                    f"join_interval: condition {self._condition.expression} failed for a pair: {error}.",
                    hint="Change the condition; waiting rows are joined by the new one.",
                ) from error
            yield own[holds], other[holds]

    def _bounded(self, left: SideRows, right: SideRows, own: Int64s, other: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
        """Pairs in parts of bounded bytes."""
        ends = np.concatenate(([0], np.cumsum(left.sizes[own] + right.sizes[other])))
        for start, end in stretches(ends, self._states[LEFT].budget.slice_bytes):
            yield own[start:end], other[start:end]

    def _unmatched(self, place: int, rows: SideRows, keys: Columns) -> Iterator[pa.RecordBatch]:
        """The rows themselves, if the join returns rows of their side that match none."""
        if self._intervals[place].returns_unmatched:
            yield from self._of_one_side(place, rows, keys)

    def _of_one_side(self, place: int, rows: SideRows, keys: Columns) -> Iterator[pa.RecordBatch]:
        """Rows with nulls for the columns of the other side, if the output has them."""
        if self._kind.returns_pairs:
            yield from self._with_nulls(place, rows, keys)
        elif len(rows):
            yield self._made(rows.key_index, rows.columns, keys)


def _paired(left: SideRows, right: SideRows, own: Int64s, other: Int64s) -> Columns:
    """The columns of pairs, but for the grouping columns."""
    return [*_picked(left.columns, own), *_picked(right.columns, other)]


def _picked(columns: Columns, places: Int64s) -> Columns:
    picked = pa.array(places)
    return [column.take(picked) for column in columns]
