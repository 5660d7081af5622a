"""Input values as numbers: their stored form, with timestamps as microseconds, and doubles."""

from __future__ import annotations

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


def to_given(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column in stored form, converted back to the type of its input."""
    return column if column.type == kind else column.cast(_in_microseconds(kind)).cast(kind)


def as_doubles(column: pa.Array) -> pa.Array:
    """Numbers as the nearest doubles; Arrow's own conversion of decimals may return another one."""
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.float64(), safe=False)


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.list_(_in_microseconds(kind.value_type)) if pa.types.is_list(kind) else kind
