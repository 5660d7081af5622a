"""Output rows of a processor as columns of the declared output type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from statelog.errors import ErrorKind, ProcessorError
from statelog.spark.types import arrow_type, storage_converter
from statelog.state.values import MISFITS

__all__ = ["OutputRows"]

_Convert = Callable[[Any], Any]


class OutputRows:
    """Converts the processor's rows.

    Rows with field names are matched by name, tuples without names by position.

    Parameters
    ----------
    schema : StructType
        The declared output type.
    """

    def __init__(self, schema: StructType) -> None:
        fields = [(field.name, arrow_type(field.dataType, f"output column '{field.name}'")) for field in schema]
        self.schema = pa.schema(fields)
        self._names = schema.names
        self._converters = [storage_converter(field.dataType) for field in schema]

    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        """Convert rows.

        Parameters
        ----------
        rows : sequence of Row or tuple
            The rows.
        owner_of : callable
            Names the key that returned the i-th row, for messages.

        Raises
        ------
        ProcessorError
            If a row does not fit the output type.
        """
        if not rows:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        columns = zip(*self._in_order(rows, owner_of), strict=True)
        arrays = [
            self._column(field, convert, values, owner_of)
            for field, convert, values in zip(self.schema, self._converters, columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _in_order(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> Sequence[Any]:
        names = self._names
        try:
            if all(row.__fields__ == names for row in rows):
                return rows
        except AttributeError:
            pass
        return [self._ordered(row, index, owner_of) for index, row in enumerate(rows)]

    def _ordered(self, row: Any, index: int, owner_of: Callable[[int], str]) -> Any:
        own = getattr(row, "__dict__", {}).get("__fields__") or getattr(type(row), "__fields__", None)
        if own is not None and sorted(own) == sorted(self._names):
            values = dict(zip(own, row, strict=True))
            return tuple(values[name] for name in self._names)
        if own is None and isinstance(row, tuple) and len(row) == len(self._names):
            return row
        shown = f"{type(row).__name__} {row!r:.80}"
        raise ProcessorError(
            f"key {owner_of(index)} returned {shown}, which does not have the output columns"
            f" ({', '.join(self._names)}).",
            kind=ErrorKind.OUTPUT_MISMATCH,
            hint="Return Row objects with exactly these names.",
        )

    def _column(
        self, field: pa.Field, convert: _Convert | None, values: Sequence[Any], owner_of: Callable[[int], str]
    ) -> pa.Array:
        try:
            return _to_array(field.type, convert, values)
        except MISFITS as failure:
            for index, value in enumerate(values):
                try:
                    _to_array(field.type, convert, [value])
                except MISFITS as error:
                    raise ProcessorError(
                        f"key {owner_of(index)} returned {type(value).__name__} {value!r:.80} for output column"
                        f" '{field.name}' of type {field.type}: {error}.",
                        kind=ErrorKind.OUTPUT_MISMATCH,
                        hint="Convert the value, or declare the column with another type.",
                    ) from error
            raise ProcessorError(
                f"output column '{field.name}' of type {field.type}: {failure}.",
                kind=ErrorKind.OUTPUT_MISMATCH,
                hint="Return values of one type per column.",
            ) from failure


def _to_array(kind: pa.DataType, convert: _Convert | None, values: Sequence[Any]) -> pa.Array:
    if convert is not None:
        values = [convert(value) for value in values]
    if pa.types.is_integer(kind):
        _require_whole(values)
    return pa.array(values, kind)


def _require_whole(values: Sequence[Any]) -> None:
    """Refuse numbers with a fraction, which Arrow would cut off."""
    if set(map(type, values)) <= {int, type(None)}:
        return
    for value in values:
        if value is not None and value != int(value):
            raise ValueError("it is not a whole number")
