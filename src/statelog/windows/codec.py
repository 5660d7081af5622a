"""How rows reach a window operator, and how its results and late rows become columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cached_property, partial
from typing import Any, ClassVar, Final

import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, StructField, StructType, TimestampNTZType, TimestampType

from statelog.aggregates.functions import stored_type
from statelog.aggregates.stored import to_given
from statelog.convert.codecs import ProcessorCodecs
from statelog.convert.output import RowOutput
from statelog.convert.python_values import row_maker
from statelog.convert.stored_values import from_storage
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
_MICROSECOND: Final = timedelta(microseconds=1)
_DAY: Final = timedelta(days=1)
_FIRST_US: Final = (datetime.min + _DAY - _NAIVE_EPOCH) // _MICROSECOND
_LAST_US: Final = (datetime.max - _DAY - _NAIVE_EPOCH) // _MICROSECOND


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
    """Makes the rows that a user sees from columns in stored form; timestamps are in the time zone `zone`."""

    schema: StructType
    zone: str

    def __call__(self, columns: pa.RecordBatch | pa.Table) -> list[Any]:
        pairs = zip(self._converters, columns.columns, strict=True)
        return self._make([convert(column) for convert, column in pairs])

    @cached_property
    def _make(self) -> Callable[[list[Any]], list[Any]]:
        return row_maker(self.schema.names)

    @cached_property
    def _converters(self) -> list[Callable[[Any], list[Any]]]:
        return [_converter(field.dataType, self.zone) for field in self.schema]


def _converter(kind: DataType, zone: str) -> Callable[[Any], list[Any]]:
    """What makes values that a user sees of a column in stored form."""
    if isinstance(kind, TimestampType):
        return partial(_instants, time_zone(zone))
    of_value = _instant_converter(kind, zone) or from_storage(kind)

    def convert(column: Any) -> list[Any]:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
        return values if of_value is None else [None if value is None else of_value(value) for value in values]

    return convert


def _instants(zone: tzinfo, column: Any) -> list[Any]:
    """Timestamps from microseconds."""
    if column.null_count or not len(column):
        return [None if us is None else _instant(us, zone) for us in column.to_pylist()]
    numbers = column.to_numpy()
    if numbers.min() < _FIRST_US or numbers.max() > _LAST_US:  # some are beyond Python's datetimes
        return [_instant(us, zone) for us in numbers.tolist()]
    offset = zone.utcoffset(None)
    if offset is None:
        return [at.replace(tzinfo=UTC).astimezone(zone) for at in numbers.view("M8[us]").tolist()]
    local = numbers + offset // _MICROSECOND
    return [at.replace(tzinfo=zone) for at in local.view("M8[us]").tolist()]


def _instant(us: int, zone: tzinfo) -> datetime:
    return (_EPOCH + timedelta(microseconds=us)).astimezone(zone)


def _instant_converter(kind: DataType, zone: str) -> Callable[[Any], Any] | None:
    """What makes a timestamp, or an array of them, from the stored form; None for other types."""
    if isinstance(kind, TimestampType):
        return partial(_instant, zone=time_zone(zone))
    if isinstance(kind, TimestampNTZType):
        return lambda us: _NAIVE_EPOCH + timedelta(microseconds=us)
    of_element = _instant_converter(kind.elementType, zone) if isinstance(kind, ArrayType) else None
    if of_element is None:
        return None
    return lambda values: [None if value is None else of_element(value) for value in values]
