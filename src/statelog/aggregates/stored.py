"""The stored form of input values: timestamps as microseconds, which compare, convert and are stored fast."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def stored_arrow_type(kind: pa.DataType) -> pa.DataType:
    """The Arrow type of the stored form: timestamps, also those in arrays, are numbers."""
    if pa.types.is_timestamp(kind):
        return pa.int64()
    return pa.list_(stored_arrow_type(kind.value_type)) if pa.types.is_list(kind) else kind


def stored_column(column: pa.Array) -> pa.Array:
    """A column in stored form."""
    kind = stored_arrow_type(column.type)
    return column if kind == column.type else column.cast(_in_microseconds(column.type)).cast(kind)


def stored_values(column: pa.Array) -> list[Any]:
    """The values of a column in stored form."""
    values: list[Any] = stored_column(column).to_pylist(maps_as_pydicts="strict")
    return values


def to_given(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column in stored form, converted back to the type of its input."""
    return column if column.type == kind else column.cast(_in_microseconds(kind)).cast(kind)


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.list_(_in_microseconds(kind.value_type)) if pa.types.is_list(kind) else kind
