"""Groups of rows, given by the group of each row; and the stored form of aggregates and of their input values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.operators.keyed.columns import Mask
from statelog.operators.keyed.indexing import Int64s


@dataclass(frozen=True)
class Groups:
    """Rows in groups; a group may have no rows."""

    index: Int64s
    """The group of each row, from 0."""
    count: int
    """The number of groups."""

    @cached_property
    def order(self) -> Int64s:
        """The rows by group, within a group in their order."""
        return np.argsort(self.index, kind="stable")

    @cached_property
    def sizes(self) -> Int64s:
        """The number of rows of each group."""
        return np.bincount(self.index, minlength=self.count)

    def sums(self, values: Int64s) -> Int64s:
        """The sum of the values of each group; it wraps around."""
        sums = np.zeros(self.count, np.int64)
        np.add.at(sums, self.index, values)
        return sums

    def float_sums(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The sum of the values of each group."""
        return np.bincount(self.index, values, self.count).astype(np.float64, copy=False)  # of no rows it is integers

    def counts(self, mask: Mask) -> Int64s:
        """The number of rows of each group where the mask is set."""
        return np.bincount(self.index[mask], minlength=self.count)

    def has_any(self, mask: Mask) -> Mask:
        """Whether the mask is set for any row of each group."""
        found = np.zeros(self.count, bool)
        found[self.index[mask]] = True
        return found

    def first_where(self, mask: Mask, *, is_last: bool = False) -> tuple[Int64s, Mask]:
        """The first or last row of each group where the mask is set, and whether there is any."""
        rows = np.flatnonzero(mask)
        owners = self.index[rows]
        if not is_last:
            rows, owners = rows[::-1], owners[::-1]
        found = np.full(self.count, -1, np.int64)
        found[owners] = rows  # of several rows of a group the last one stays
        return found, found >= 0


_EXACT_DIGITS: Final = 15
"""Whole numbers of so many digits are doubles without rounding."""


def stored_name(name: str, suffix: str) -> str:
    """The name of a field of an aggregate's accumulator, which no other aggregate has.

    A single dot separates the suffix, so those of the aggregate's own name are doubled.
    """
    own = name.replace(".", "..")
    return f"{own}.{suffix}" if suffix else own


def in_types(columns: Iterable[pa.Array], kinds: Iterable[pa.DataType]) -> list[pa.Array]:
    """Columns in the types that the state has them in.

    Spark's differ where they have times in the session's zone, fields that are never null, or large strings.
    """
    return [column if column.type == kind else column.cast(kind) for column, kind in zip(columns, kinds, strict=True)]


def stored_arrow_type(kind: pa.DataType) -> pa.DataType:
    """The Arrow type of the stored form: timestamps, also those in arrays, are numbers."""
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(stored_arrow_type(kind.value_type)))
    return kind


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
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    return kind
