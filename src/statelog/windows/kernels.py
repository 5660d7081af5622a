"""Kernels compute the ready-made aggregates: on columns for all groups of a batch, then merged group by group."""

from __future__ import annotations

import decimal
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.windows.panes import Int64s

Row = tuple[Any, ...]

_EXACT_SUM: Final = float(1 << 62)
"""Sums below this fit 64 bits; larger ones are computed with Python's integers."""
_WIDE: Final = decimal.Context(prec=77)


class Kernel(ABC):
    """Computes one aggregate. Unless it says otherwise, the result is the accumulator's first field."""

    @abstractmethod
    def partials(self, column: pa.Array, starts: Int64s, times_ms: Int64s | None) -> list[Sequence[Any]]:
        """Compute the groups' accumulators, a list per field; see :data:`statelog.windows.panes.Partials`."""

    @abstractmethod
    def merge(self, one: Row, other: Row) -> Row:
        """Merge two accumulators; `one` is the earlier, and neither is all null."""

    def result(self, held: Row) -> Any:
        """The aggregate's value, from its accumulator."""
        return held[0]


class CountKernel(Kernel):
    """Number of rows, or of values that are not null."""

    def partials(self, column: pa.Array, starts: Int64s, times_ms: Int64s | None) -> list[Sequence[Any]]:
        return [_count_valid(column, starts).tolist()]

    def merge(self, one: Row, other: Row) -> Row:
        return (one[0] + other[0],)

    def result(self, held: Row) -> Any:
        return held[0] or 0


class SumKernel(Kernel):
    """Sum; null if there are no values."""

    def partials(self, column: pa.Array, starts: Int64s, times_ms: Int64s | None) -> list[Sequence[Any]]:
        if pa.types.is_decimal(column.type):
            return [_by_group(column, starts, lambda values: reduce(_WIDE.add, values))]
        if pa.types.is_integer(column.type):
            values = _filled(column, 0, pa.int64())
            largest = np.abs(values.astype(np.float64)).max(initial=0.0)
            if largest * float(np.diff(starts).max()) > _EXACT_SUM:
                return [_by_group(column, starts, sum)]
        else:
            values = _filled(column, 0.0, pa.float64())
        sums = np.add.reduceat(values, starts[:-1]).tolist()
        return [_null_where(sums, _count_valid(column, starts) == 0)]

    def merge(self, one: Row, other: Row) -> Row:
        if isinstance(one[0], decimal.Decimal):
            return (_WIDE.add(one[0], other[0]),)
        return (one[0] + other[0],)


class MeanKernel(Kernel):
    """Sum as a double, and number of values."""

    def partials(self, column: pa.Array, starts: Int64s, times_ms: Int64s | None) -> list[Sequence[Any]]:
        sums = np.add.reduceat(_filled(column, 0, pa.float64()), starts[:-1])
        return [sums.tolist(), _count_valid(column, starts).tolist()]

    def merge(self, one: Row, other: Row) -> Row:
        return (one[0] + other[0], one[1] + other[1])

    def result(self, held: Row) -> Any:
        return held[0] / held[1] if held[1] else None


class ExtremeKernel(Kernel):
    """The least or greatest value; NaN is greater than all others."""

    def __init__(self, *, is_max: bool) -> None:
        self._is_max = is_max

    def partials(self, column: pa.Array, starts: Int64s, times_ms: Int64s | None) -> list[Sequence[Any]]:
        if not pa.types.is_integer(column.type):
            return [_by_group(column, starts, lambda values: reduce(self._better, values))]
        limits = np.iinfo(np.int64)
        values = _filled(column, limits.min if self._is_max else limits.max, pa.int64())
        extreme = np.maximum if self._is_max else np.minimum
        return [_null_where(extreme.reduceat(values, starts[:-1]).tolist(), _count_valid(column, starts) == 0)]

    def merge(self, one: Row, other: Row) -> Row:
        return (self._better(one[0], other[0]),)

    def _better(self, one: Any, other: Any) -> Any:
        if one != one or other != other:  # NaN
            return (one if one != one else other) if self._is_max else (other if one != one else one)
        return max(one, other) if self._is_max else min(one, other)


class FirstLastKernel(Kernel):
    """The value of the first or last row, and its time."""

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last

    def partials(self, column: pa.Array, starts: Int64s, times_ms: Int64s | None) -> list[Sequence[Any]]:
        edges = starts[1:] - 1 if self._is_last else starts[:-1]
        times: list[int] = [0] * len(edges) if times_ms is None else times_ms[edges].tolist()
        return [column.take(pa.array(edges)).to_pylist(maps_as_pydicts="strict"), times]

    def merge(self, one: Row, other: Row) -> Row:
        if self._is_last:
            return other if other[1] >= one[1] else one
        return one if one[1] <= other[1] else other


class CollectKernel(Kernel):
    """All values that are not null."""

    def partials(self, column: pa.Array, starts: Int64s, times_ms: Int64s | None) -> list[Sequence[Any]]:
        return [[values or [] for values in _by_group(column, starts, list)]]

    def merge(self, one: Row, other: Row) -> Row:
        return (one[0] + other[0],)

    def result(self, held: Row) -> Any:
        return held[0] or []


class DistinctKernel(Kernel):
    """Each value once."""

    def partials(self, column: pa.Array, starts: Int64s, times_ms: Int64s | None) -> list[Sequence[Any]]:
        return [[values or [] for values in _by_group(column, starts, _distinct)]]

    def merge(self, one: Row, other: Row) -> Row:
        return (_distinct(one[0] + other[0]),)

    def result(self, held: Row) -> Any:
        return len(held[0] or [])


def _by_group(column: pa.Array, starts: Int64s, function: Callable[[list[Any]], Any]) -> list[Any]:
    """Apply a function to each group's values that are not null; None for groups without any."""
    values = column.to_pylist(maps_as_pydicts="strict")
    found: list[Any] = []
    for start, end in pairwise(starts.tolist()):
        group = [value for value in values[start:end] if value is not None]
        found.append(function(group) if group else None)
    return found


def _count_valid(column: pa.Array, starts: Int64s) -> Int64s:
    if not column.null_count:
        return np.diff(starts)
    valid = column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
    counts: Int64s = np.add.reduceat(valid, starts[:-1])
    return counts


def _filled(column: pa.Array, value: Any, kind: pa.DataType) -> npt.NDArray[Any]:
    """A column of numbers, with `value` in place of nulls."""
    values: npt.NDArray[Any] = column.cast(kind, safe=False).fill_null(value).to_numpy()
    return values


def _null_where(values: list[Any], is_null: npt.NDArray[np.bool_]) -> list[Any]:
    if not is_null.any():
        return values
    return [None if null else value for value, null in zip(values, is_null.tolist(), strict=True)]


def _distinct(values: list[Any]) -> list[Any]:
    return list(dict.fromkeys(math.nan if value != value else value for value in values))
