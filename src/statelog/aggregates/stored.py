"""The stored form of aggregates: their fields' names, and input values as numbers, with timestamps as microseconds."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

_EXACT_DIGITS: Final = 15
"""Whole numbers of so many digits are doubles without rounding."""


def stored_name(name: str, suffix: str) -> str:
    """The name of a field of an aggregate's accumulator, which no other aggregate has.

    A single dot separates the suffix, so those of the aggregate's own name are doubled.
    """
    own = name.replace(".", "..")
    return f"{own}.{suffix}" if suffix else own


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
    if not pa.types.is_decimal(column.type):
        return column.cast(pa.float64(), safe=False)
    if column.type.precision > _EXACT_DIGITS:
        return column.cast(pa.string()).cast(pa.float64())
    # Both numbers are doubles without rounding, so their quotient is the nearest one.
    unscaled = np.frombuffer(column.buffers()[1], "<i8", 2 * len(column), 16 * column.offset)[::2]
    return pa.array(unscaled / 10.0**column.type.scale, mask=column.is_null().to_numpy(zero_copy_only=False))


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.list_(_in_microseconds(kind.value_type)) if pa.types.is_list(kind) else kind
