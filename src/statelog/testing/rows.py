"""The description of an operator that a test passes to the harness, and its rows as the columns of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from statelog.convert.ddl import parse_ddl
from statelog.convert.python_values import row_maker
from statelog.convert.types import field_codecs, parse_schema, row_codec
from statelog.errors import ConfigurationError, ErrorKind
from statelog.runs.times import Watermark
from statelog.runs.values import MISFITS


class ColumnWriter:
    """Makes columns, as Spark hands them to a task, from rows; `subject` names the rows in messages."""

    def __init__(self, schema: StructType, subject: str, zone: str) -> None:
        self._names = schema.names
        self._subject = subject
        self._fields = field_codecs(schema, f"{subject}: column")
        self._schema = pa.schema(
            [(f"c{place}", _in_zone(field.type, zone)) for place, field in enumerate(self._fields)]
        )

    def batch(self, rows: Sequence[Any]) -> pa.RecordBatch:
        """Make columns named c0, c1, ... from rows; raises ConfigurationError if a row or value does not fit.

        Dicts and named Rows are matched by name, and a column that a dict omits is null; other rows are matched by
        position.
        """
        if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Sequence):
            raise self._misuse(f"takes a list of rows, not {rows!r:.80}")
        ordered = [self._in_order(row, index) for index, row in enumerate(rows)]
        columns = zip(*ordered, strict=True) if ordered else [()] * len(self._names)
        arrays = [self._column(place, list(values)) for place, values in enumerate(columns)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _in_order(self, row: Any, index: int) -> tuple[Any, ...]:
        names = getattr(row, "__fields__", None)
        if isinstance(row, Mapping):
            held = dict(row)
        elif isinstance(row, (tuple, list)) and names:
            held = dict(zip(names, row, strict=True))
        elif isinstance(row, (tuple, list)) and len(row) == len(self._names):
            return tuple(row)
        else:
            raise self._misuse(f"row {index} is {row!r:.80}, which does not have the columns")
        unknown = [name for name in held if name not in self._names]
        if unknown or (names and len(held) < len(self._names)):
            raise self._misuse(f"row {index} has the columns ({', '.join(map(str, held))})")
        return tuple(held.get(name) for name in self._names)

    def _column(self, place: int, values: list[Any]) -> pa.Array:
        field = self._fields[place]
        try:
            return field.to_array(values).cast(self._schema.field(place).type)
        except MISFITS:
            for index, value in enumerate(values):
                if (reason := field.misfit(value)) is not None:
                    raise self._misuse(
                        f"row {index} has {type(value).__name__} {value!r:.80} in column '{field.name}' of type"
                        f" {field.declared}: {reason}"
                    ) from reason
            raise

    def _misuse(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._subject}: {what}.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint=f"The columns are: {', '.join(self._names)}.",
        )


class ColumnReader:
    """Makes rows, like those of ``collect()``, from the columns that tasks return."""

    def __init__(self, schema: StructType) -> None:
        self._codec = row_codec(schema, "output")
        self._make = row_maker(schema.names)

    def rows(self, batches: Sequence[pa.RecordBatch]) -> list[Any]:
        """The rows of the batches, in order."""
        tuples = [row for batch in batches for row in self._codec.decode(batch)]
        return self._make([list(values) for values in zip(*tuples, strict=True)]) if tuples else []


def _in_zone(kind: pa.DataType, zone: str) -> pa.DataType:
    """The type with its timestamps in a time zone."""
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, zone)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_zone(field.type, zone)) for field in kind.fields])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_zone(kind.value_type, zone)))
    if pa.types.is_map(kind):
        return pa.map_(
            kind.key_field.with_type(_in_zone(kind.key_type, zone)),
            kind.item_field.with_type(_in_zone(kind.item_type, zone)),
        )
    return kind


@dataclass(frozen=True)
class OperatorArguments:
    """The arguments of :class:`statelog.testing.Harness` that describe the operator."""

    input: StructType | str
    output: StructType | str
    keys: Sequence[str] = ()
    timeMode: str = "None"
    pandas: bool = False
    initialState: tuple[StructType | str, Sequence[Any]] | None = None
    eventTime: str | None = None
    eventTimeColumnName: str = ""
    watermark: Watermark | None = None
    keyHash: Callable[[tuple[Any, ...]], int] | None = None
    broadcast: StructType | str | None = None
    sessionTimeZone: str = "UTC"
    uid: str | None = None


def read_schema(schema: StructType | str, subject: str) -> StructType:
    """Parse the columns that a test names; `subject` is their argument, for messages."""
    parsed = parse_schema(schema, f"Harness: {subject}", parse_ddl)
    if len(set(parsed.names)) < len(parsed):
        raise ConfigurationError(f"Harness: two columns of {subject} have the same name.", hint="Rename one of them.")
    return parsed
