"""How rows reach a window operator, and how its results and late rows become columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, ClassVar, Final

import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, StructField, StructType, TimestampNTZType, TimestampType

from statelog.aggregates.functions import stored_type
from statelog.aggregates.stored import to_given
from statelog.convert.codecs import ProcessorCodecs
from statelog.convert.output import RowOutput
from statelog.convert.python_values import row_maker
from statelog.convert.types import arrow_type
from statelog.operators.event_time import EventTime
from statelog.time_zones import time_zone
from statelog.windows.panes import Cut, WindowInput
from statelog.windows.processor import LateRow


class WindowOutput:
    """Converts results and late rows to one batch of columns.

    `kept` names the columns whose values come in stored form; with `returns_late` the last column has the late rows.
    """

    def __init__(self, schema: StructType, kept: list[int], *, returns_late: bool, uid: str) -> None:
        self.schema = pa.schema(
            [(field.name, arrow_type(field.dataType, f"output column '{field.name}'")) for field in schema]
        )
        stored = [
            StructField(field.name, stored_type(field.dataType) if index in kept else field.dataType)
            for index, field in enumerate(schema.fields[:-1] if returns_late else schema.fields)
        ]
        self._kept = kept
        self._results = RowOutput(StructType(stored), uid)
        self._late = RowOutput(StructType(schema.fields[-1:]), uid) if returns_late else None
        self.hold = None if self._results.hold is None else self._held

    def _held(self, row: Any) -> Any:
        """Hold a result; late rows need no copy, as nobody changes input rows."""
        return row if type(row) is LateRow or self._results.hold is None else self._results.hold(row)

    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        if self._late is None:
            return pa.RecordBatch.from_arrays(self._result_columns(rows, owner_of), schema=self.schema)
        late = [index for index, row in enumerate(rows) if type(row) is LateRow]
        results = rows if not late else [row for row in rows if type(row) is not LateRow]
        columns = self._result_columns(results, owner_of)
        late_rows = self._late.encode([(rows[index].row,) for index in late], owner_of).column(0)
        return pa.RecordBatch.from_arrays(
            [
                *[pa.concat_arrays([column, pa.nulls(len(late), column.type)]) for column in columns],
                pa.concat_arrays([pa.nulls(len(results), late_rows.type), late_rows]),
            ],
            schema=self.schema,
        )

    def _result_columns(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> list[pa.Array]:
        columns: list[pa.Array] = self._results.encode(rows, owner_of).columns
        for index in self._kept:
            columns[index] = to_given(columns[index], self.schema.field(index).type)
        return columns


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NAIVE_EPOCH: Final = datetime(1970, 1, 1)


@dataclass(frozen=True)
class WindowCodecs(ProcessorCodecs):
    """The codecs of a window operator's rows."""

    event_time: EventTime | None
    """The rows' event time; None in processing time and for count windows."""
    cut: Cut | None
    """Where a key's rows are cut; None leaves them in one group."""
    kept: list[int]
    """Output columns with values in stored form."""
    returns_late: bool
    """Whether the last output column holds late rows."""

    drops_late: bool = field(default=False, kw_only=True)
    """A late row may belong to a window that is still open, so the operator sees all rows."""
    batch_watermark_ms: ClassVar[int] = (1 << 63) - 1
    """A batch query has all its rows, so every window is complete."""

    def input(self, columns: list[str]) -> WindowInput:
        return WindowInput(columns, self.event_time, self.cut)

    def output(self, schema: StructType, zone: str, uid: str) -> WindowOutput:
        """Times without a zone are in the process's zone, not the session's."""
        return WindowOutput(schema, self.kept, returns_late=self.returns_late, uid=uid)


@dataclass(frozen=True)
class GivenRows:
    """Makes the rows that a user sees from stored rows; timestamps are in the time zone `zone`."""

    schema: StructType
    zone: str

    def __call__(self, rows: list[tuple[Any, ...]]) -> list[Any]:
        columns: list[Any] = list(zip(*rows, strict=True))
        for index, convert in self._converted.items():
            columns[index] = [None if value is None else convert(value) for value in columns[index]]
        return self._make(columns)

    @cached_property
    def _make(self) -> Callable[[list[Any]], list[Any]]:
        return row_maker(self.schema.names)

    @cached_property
    def _converted(self) -> dict[int, Callable[[Any], Any]]:
        """A converter for each column whose stored form differs, by position."""
        converters = {index: _converter(field.dataType, self.zone) for index, field in enumerate(self.schema)}
        return {index: convert for index, convert in converters.items() if convert is not None}


def _converter(kind: DataType, zone: str) -> Callable[[Any], Any] | None:
    if isinstance(kind, TimestampType):
        info = time_zone(zone)
        return lambda us: (_EPOCH + timedelta(microseconds=us)).astimezone(info)
    if isinstance(kind, TimestampNTZType):
        return lambda us: _NAIVE_EPOCH + timedelta(microseconds=us)
    of_element = _converter(kind.elementType, zone) if isinstance(kind, ArrayType) else None
    if of_element is None:
        return None
    return lambda values: [None if value is None else of_element(value) for value in values]
