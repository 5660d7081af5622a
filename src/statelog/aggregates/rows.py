"""Reduces the rows of a key to some of them: the newest, the greatest few, the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, BooleanType, LongType, StructField, StructType

from statelog.aggregates.accumulators import Results, held_types
from statelog.aggregates.groups import Groups, in_types
from statelog.aggregates.kernels import Columns, FirstLastKernel
from statelog.aggregates.list_kernels import MAX_LIST_BYTES, TopKernel
from statelog.convert.codecs import ColumnCodecs
from statelog.convert.types import arrow_type
from statelog.operators.keyed.columns import ValueColumns
from statelog.operators.keyed.indexing import IndexedRows
from statelog.runs.times import Moment, Ttl

RANK: Final = "rank"
SEEN_STATE: Final = "seen"
_ROWS_FIELD: Final = "rows"


@dataclass(frozen=True)
class LatestRow:
    """The row of each key with the greatest value of a column; of several, the last to arrive. Nulls are least."""

    schema: StructType
    """The columns of the input but for the key."""
    columns: Sequence[int]
    """Their places in the input."""
    by: int
    """The place of the ordering column among them."""

    depends_on_arrival: ClassVar[bool] = False
    adds_floats: ClassVar[bool] = False

    @property
    def result(self) -> StructType:
        """The columns of the output but for the key."""
        return self.schema

    def lift(self, rows: pa.RecordBatch, times: pa.Array) -> Columns:
        """The rows themselves."""
        return _stored(rows, self.columns, self.schema)

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        """The row of each group that counts."""
        picked = FirstLastKernel(is_last=True).rows(held[self.by], groups, nulls_are_least=True)
        return [column.take(picked) for column in held]

    def results(self, held: Columns) -> Results:
        return Results(held)


@dataclass(frozen=True)
class TopRows:
    """The rows of each key with the greatest values of a column, and their rank; at most 64 MB."""

    row: StructType
    """The columns of the input but for the key, the ordering column first."""
    columns: Sequence[int]
    """Their places in the input."""
    size: int

    depends_on_arrival: ClassVar[bool] = False
    adds_floats: ClassVar[bool] = False

    @property
    def schema(self) -> StructType:
        """The state: a list of rows."""
        return StructType([StructField(_ROWS_FIELD, ArrayType(self.row))])

    @property
    def result(self) -> StructType:
        """The columns of the output but for the key."""
        return StructType([StructField(RANK, LongType()), *self.row.fields])

    def lift(self, rows: pa.RecordBatch, times: pa.Array) -> Columns:
        """A list of one row each."""
        kind = arrow_type(self.row, "a row")
        structs = pa.StructArray.from_arrays(_stored(rows, self.columns, self.row), fields=kind.fields)
        offsets = pa.array(np.arange(rows.num_rows + 1, dtype=np.int32))
        return [pa.ListArray.from_arrays(offsets, structs, type=arrow_type(ArrayType(self.row), "a row"))]

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        """The greatest rows of each group."""
        return TopKernel(self.size, MAX_LIST_BYTES).reduce(held, groups)

    def results(self, held: Columns) -> Results:
        lists = held[0]
        counts = pc.list_value_length(lists).fill_null(0).to_numpy().astype(np.int64)
        owners = np.repeat(np.arange(len(lists)), counts)
        starts = np.concatenate(([0], np.cumsum(counts)))[:-1]
        ranks = np.arange(len(owners)) - np.repeat(starts, counts) + 1
        rows = lists.flatten()
        return Results([pa.array(ranks), *rows.flatten()], owners)


class Deduplicate:
    """Returns the first row of each key, and remembers the key."""

    def __init__(
        self, output: StructType, ttl: Ttl | None, codecs: ColumnCodecs, *, lives_by_late_rows: bool = False
    ) -> None:
        self.codecs = codecs
        self._output = output
        self._ttl = ttl
        self._lives_by_late_rows = lives_by_late_rows

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self._seen: ValueColumns = handle.getValueState(
            SEEN_STATE, StructType([StructField("seen", BooleanType())]), self._ttl
        )

    def reduce(self, rows: IndexedRows) -> IndexedRows:
        return rows

    def process(self, chunk: IndexedRows, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Return the first rows of the keys that are new."""
        # While a row can come that is not late, its key must be remembered: that is until the watermark of the batch
        # before has passed the expiry.
        alive_after_ms = moment.late_watermark_ms if self._lives_by_late_rows else None
        _, has = self._seen.read(alive_after_ms)
        new = np.flatnonzero(~has)
        if len(new):
            self._seen.write([pa.array(np.ones(len(new), bool))], new)
            rows = chunk.rows[0].take(pa.array(np.sort(chunk.firsts[new])))
            schema = pa.schema([(field.name, arrow_type(field.dataType, "a column")) for field in self._output])
            yield pa.RecordBatch.from_arrays(_stored(rows, range(len(self._output)), self._output), schema=schema)

    def fire(self, due: Any, moment: Moment) -> Iterable[pa.RecordBatch]:
        raise AssertionError("there are no timers")

    def load_initial_state(self, chunk: IndexedRows, moment: Moment) -> Iterable[pa.RecordBatch]:
        raise AssertionError("there are no initial rows")

    def close(self) -> None:
        """End the batch."""


def _stored(rows: pa.RecordBatch, places: Iterable[int], schema: StructType) -> Columns:
    """Columns of the input in storage types."""
    return in_types([rows.column(place) for place in places], held_types(schema))
