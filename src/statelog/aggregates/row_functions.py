"""Ready-made aggregates as functions of one value at a time, for reducing and aggregating state.

A kernel takes some 40 us for the values of one key, and a row processor asks for its state key by key. So the few
aggregates that are one operation per value have that operation here; the tests compare it with the kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from statelog.aggregates.kernels import WIDE, Overflow
from statelog.operators.keyed.cursor import Row
from statelog.operators.keyed.values import AggregateFunction

Merge = Callable[[Any, Any], Any]

_LONGS: Final = 1 << 63


class FoldFunction(AggregateFunction[Any, Any]):
    """Merges values, none of which is null, one by one; the accumulator is the value so far."""

    def __init__(self, merge: Merge) -> None:
        self._merge = merge

    def createAccumulator(self) -> Row:
        return (None,)

    def add(self, value: Any, accumulator: Row) -> Row:
        (held,) = accumulator
        if value is None:
            return accumulator
        return (value,) if held is None else (self._merge(held, value),)

    def getResult(self, accumulator: Row) -> Any:
        return accumulator[0]

    def merge(self, one: Row, other: Row) -> Row:
        return self.add(other[0], one)


class CountFunction(AggregateFunction[Any, int]):
    """Counts all values, or those that are not null."""

    def __init__(self, *, skips_nulls: bool) -> None:
        self._skips_nulls = skips_nulls

    def createAccumulator(self) -> Row:
        return (0,)

    def add(self, value: Any, accumulator: Row) -> Row:
        return accumulator if value is None and self._skips_nulls else (accumulator[0] + 1,)

    def getResult(self, accumulator: Row) -> int:
        count: int = accumulator[0]
        return count

    def merge(self, one: Row, other: Row) -> Row:
        return (one[0] + other[0],)


class MeanFunction(AggregateFunction[Any, Any]):
    """Adds doubles, and counts them."""

    def createAccumulator(self) -> Row:
        return (0.0, 0)

    def add(self, value: Any, accumulator: Row) -> Row:
        return accumulator if value is None else (accumulator[0] + value, accumulator[1] + 1)

    def getResult(self, accumulator: Row) -> Any:
        total, count = accumulator
        return total / count if count else None

    def merge(self, one: Row, other: Row) -> Row:
        return (one[0] + other[0], one[1] + other[1])


def sum_of(kind: pa.DataType) -> Merge:
    """The sum of two values of a type; raises Overflow if it does not fit."""
    if pa.types.is_floating(kind):
        return operator.add
    if pa.types.is_decimal(kind):
        limit, name = 10 ** (kind.precision - kind.scale), f"decimal({kind.precision},{kind.scale})"

        def decimal_sum(held: Any, value: Any) -> Any:
            total = WIDE.add(held, value)
            if total.copy_abs() >= limit:
                raise Overflow(0, name)
            return total

        return decimal_sum

    def long_sum(held: int, value: int) -> int:
        total = held + value
        if not -_LONGS <= total < _LONGS:
            raise Overflow(0, "long")
        return total

    return long_sum


def greatest(held: Any, value: Any) -> Any:
    """The greater of two values; NaN is greater than all others."""
    return value if value > held or value != value else held


def least(held: Any, value: Any) -> Any:
    """The lesser of two values; NaN is greater than all others."""
    return value if value < held or held != held else held
