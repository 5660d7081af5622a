"""Output rows of a processor as columns of the declared output type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from statelog.errors import ErrorKind, ProcessorError
from statelog.spark.types import arrow_type

__all__ = ["OutputRows"]


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
        self._has_nested = any(pa.types.is_nested(kind) for _, kind in fields)

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
        ordered = self._in_order(rows, owner_of)
        arrays: list[pa.Array] = []
        for field, values in zip(self.schema, zip(*ordered, strict=True), strict=True):
            arrays.append(self._column(field, values, owner_of))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _in_order(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> Sequence[Any]:
        names = self._names
        try:
            if all(row.__fields__ == names for row in rows):
                return [self._plain(row) for row in rows] if self._has_nested else rows
        except AttributeError:
            pass
        return [self._ordered(row, index, owner_of) for index, row in enumerate(rows)]

    def _ordered(self, row: Any, index: int, owner_of: Callable[[int], str]) -> Any:
        own = getattr(row, "__dict__", {}).get("__fields__") or getattr(type(row), "__fields__", None)
        if own is not None and sorted(own) == sorted(self._names):
            values = dict(zip(own, row, strict=True))
            return self._plain(tuple(values[name] for name in self._names))
        if own is None and isinstance(row, tuple) and len(row) == len(self._names):
            return self._plain(row)
        shown = f"{type(row).__name__} {row!r:.80}"
        raise ProcessorError(
            f"key {owner_of(index)} returned {shown}, which does not have the output columns"
            f" ({', '.join(self._names)}).",
            kind=ErrorKind.OUTPUT_MISMATCH,
            hint="Return Row objects with exactly these names.",
        )

    def _plain(self, row: Any) -> tuple[Any, ...]:
        """The row with nested rows as dictionaries, which Arrow takes."""
        return tuple(_plain_value(value) for value in row) if self._has_nested else row

    def _column(self, field: pa.Field, values: Sequence[Any], owner_of: Callable[[int], str]) -> pa.Array:
        try:
            if pa.types.is_integer(field.type):
                _require_whole(values)
            return pa.array(values, field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as failure:
            for index, value in enumerate(values):
                try:
                    if pa.types.is_integer(field.type):
                        _require_whole([value])
                    pa.scalar(value, field.type)
                except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
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


def _require_whole(values: Sequence[Any]) -> None:
    """Refuse numbers with a fraction, which Arrow would cut off."""
    if set(map(type, values)) <= {int, type(None)}:
        return
    for value in values:
        if value is not None and value != int(value):
            raise ValueError("it is not a whole number")


def _plain_value(value: Any) -> Any:
    if hasattr(type(value), "asDict"):
        return {name: _plain_value(item) for name, item in value.asDict().items()}
    if isinstance(value, list):
        return [_plain_value(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain_value(item) for name, item in value.items()}
    return value
