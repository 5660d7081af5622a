"""What operators of joins have in common: their input, the rows of each side in the state, and their output rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from statelog.convert.codecs import ColumnCodecs
from statelog.convert.types import arrow_type
from statelog.joins.pairs import SideRows
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.column_caller import DueTimers
from statelog.operators.keyed.columns import Columns, Mask, TimerColumns
from statelog.operators.keyed.indexing import IndexedRows, Int64s
from statelog.operators.keyed.time_columns import TimeColumns, TimeRows
from statelog.runs.keys import KeyCodec
from statelog.runs.times import LAST_MS, Moment

LEFT_STATE: Final = "join.left"
"""A map from time and order of arrival to the rows of the left side that are in the state."""
RIGHT_STATE: Final = "join.right"
LEFT, RIGHT = 0, 1
"""The places of the sides."""


@dataclass(frozen=True)
class Side:
    """One side of a join; picklable."""

    columns: StructType
    """The columns but for the grouping columns."""
    first_column: int
    """The place of the first of them in the operator's input."""
    time: int
    """The place of the event time among them."""

    @property
    def state_schema(self) -> StructType:
        """The value of a row in the state."""
        return self.columns


@dataclass(frozen=True)
class JoinShape:
    """The input and the output of a join; picklable."""

    key_schema: pa.Schema
    output: StructType
    """The grouping columns, and those of the two sides that the join returns."""


class JoinOperator(ABC):
    """A processor of columns for the rows of two sides, which keeps rows by key and time.

    The input has the grouping columns, the side of a row (0 is left), its event time, and the columns of both sides.
    The first timer of a key that fires in a batch does everything due for the key, and registers the key's next timer.
    """

    def __init__(self, sides: Sequence[Side], shape: JoinShape, codecs: ColumnCodecs) -> None:
        self.codecs = codecs
        self._sides = sides
        self._shape = shape

    def init(self, handle: Any) -> None:
        """Declare the states."""
        self._key_codec = KeyCodec(self._shape.key_schema)
        self._output = pa.schema(
            [(field.name, arrow_type(field.dataType, "an output column")) for field in self._shape.output]
        )
        self._types = [[arrow_type(field.dataType, field.name) for field in side.columns] for side in self._sides]
        self._states: dict[int, TimeColumns] = {
            place: handle.getTimeColumns(
                (LEFT_STATE, RIGHT_STATE)[place], "time_ms long, ordinal long", self._sides[place].state_schema
            )
            for place in self._kept_sides
        }
        self._timers: TimerColumns = handle.timers

    @property
    def _kept_sides(self) -> Sequence[int]:
        """The sides whose rows the state has."""
        return (LEFT, RIGHT)

    def reduce(self, rows: IndexedRows) -> IndexedRows:
        return rows

    @abstractmethod
    def process(self, chunk: IndexedRows, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Take new rows, and return what they make."""

    @abstractmethod
    def fire(self, due: DueTimers, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Do what is due for keys."""

    def load_initial_state(self, chunk: IndexedRows, moment: Moment) -> Iterable[pa.RecordBatch]:
        raise AssertionError("joins take no initial rows")

    def close(self) -> None:  # noqa: B027 - nothing is left to do
        """End the batch."""

    # ---- Rows ----

    def _of_side(self, place: int, part: pa.RecordBatch, owners: Int64s) -> tuple[SideRows, SideRows]:
        """The new rows of a side, in order, and those that match none because their key or their time has a null."""
        side, width = self._sides[place], len(self._shape.key_schema)
        of_side = pc.equal(part.column(width), place).to_numpy(zero_copy_only=False)
        times_us = EventTime(width + 1).times_us(part)
        can_match = times_us.is_valid().to_numpy(zero_copy_only=False)
        for column in part.columns[:width]:
            if column.null_count:
                can_match &= column.is_valid().to_numpy(zero_copy_only=False)
        times = times_us.fill_null(0).to_numpy()

        def picked(mask: Mask) -> SideRows:
            rows = np.flatnonzero(mask)
            rows = rows[np.lexsort((times[rows], owners[rows]))]
            columns = part.columns[side.first_column : side.first_column + len(side.columns)]
            columns = [
                column.take(pa.array(rows)).cast(kind) for column, kind in zip(columns, self._types[place], strict=True)
            ]
            return SideRows(owners[rows], times[rows], columns, np.zeros(len(rows), bool))

        return picked(of_side & can_match), picked(of_side & ~can_match)

    def _opened(self, place: int, stored: TimeRows) -> SideRows:
        """Rows of the state, from their values there."""
        return self._of_values(place, stored, stored.values, np.zeros(len(stored), bool))

    def _of_values(self, place: int, stored: TimeRows, columns: Columns, is_matched: Mask) -> SideRows:
        times_us = _microseconds(columns[self._sides[place].time])
        return SideRows(stored.key_index, times_us, columns, is_matched, stored.ordinals)

    def _of_times(self, stored: TimeRows) -> SideRows:
        """Rows of the state without columns, from their event times alone."""
        (times,) = stored.values
        return SideRows(stored.key_index, _microseconds(times), [], np.zeros(len(stored), bool), stored.ordinals)

    def _values(self, place: int, rows: SideRows) -> Columns:
        """What the state holds of rows."""
        return rows.columns

    def _append(self, place: int, rows: SideRows) -> None:
        self._states[place].append(rows.key_index, rows.times_ms, self._values(place, rows))

    def _remove(self, place: int, rows: SideRows) -> None:
        self._states[place].remove(rows.key_index, rows.times_ms, rows.ordinals)

    # ---- Timers ----

    def _first_end(self, place: int, owner: int, after_ms: int, now_ms: int) -> int | None:
        """When the watermark passes the first row of a key by so much, if it has not done so; None if there is none."""
        for page in self._states[place].pages(owner, now_ms - after_ms):
            ends_ms = self._opened(place, page).ends_ms(after_ms)
            if (ends_ms > now_ms).any():
                return int(ends_ms[ends_ms > now_ms].min())
        return None

    def _register(self, due_ms: Int64s) -> None:
        has_any = due_ms < LAST_MS
        self._timers.register(np.flatnonzero(has_any), due_ms[has_any])

    # ---- Output ----

    def _with_nulls(self, place: int, rows: SideRows, keys: Columns) -> Iterator[pa.RecordBatch]:
        """Rows of one side, with nulls for the columns of the other one."""
        if len(rows):
            nulls = [pa.nulls(len(rows), kind) for kind in self._types[1 - place]]
            columns = [*rows.columns, *nulls] if place == LEFT else [*nulls, *rows.columns]
            yield self._made(rows.key_index, columns, keys)

    def _made(self, owners: Int64s, columns: Columns, keys: Columns) -> pa.RecordBatch:
        picked = pa.array(owners)
        of_keys = [column.take(picked) for column in keys]
        return pa.RecordBatch.from_arrays([*of_keys, *columns], schema=self._output)


def _microseconds(times: pa.Array) -> Int64s:
    found: Int64s = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64()).to_numpy()
    return found


def parts_of(chunk: IndexedRows) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
    """Each batch of rows, with the keys of its rows."""
    start = 0
    for part in chunk.rows:
        yield part, chunk.key_index[start : start + part.num_rows]
        start += part.num_rows
