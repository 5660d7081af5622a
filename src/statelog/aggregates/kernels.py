"""Kernels compute the ready-made aggregates on columns.

A kernel makes an accumulator of each row (`lift`), merges the accumulators of each group (`reduce`), and makes the
aggregate's value of an accumulator (`result`). An accumulator is one or more columns. One whose fields are all null has
no values, and changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.aggregates.groups import Groups, as_doubles
from statelog.errors import ProcessorError
from statelog.operators.keyed.columns import Mask
from statelog.operators.keyed.indexing import Int64s

Columns = list[pa.Array]

MAX_PRECISION: Final = 38
SUM_DIGITS: Final = 10
"""How many more digits the sum of decimals has than the decimals."""
MEAN_DIGITS: Final = 4
OVERFLOWED: Final = "overflowed"
"""The field of a sum of decimals that says whether it has not fitted its type."""
_LIMB_BITS: Final = 32
_LOW: Final = (1 << _LIMB_BITS) - 1
_SMALL: Final = 1 << 62
WIDE: Final = Context(prec=100, rounding=ROUND_HALF_UP)
_LONG_DIGITS: Final = 19
"""Numbers of fewer digits fit 64 bits."""
_NEAR: Final = 1e-9
"""Doubles that differ by less may stand for equal numbers."""


class Overflow(ProcessorError):
    """A sum, or another value, does not fit its type."""

    def __init__(self, group: int, kind: str, value: str = "sum") -> None:
        super().__init__(
            f"a {value} is out of range for {kind}",
            hint="Cast the column to a wider type, such as "
            + ("decimal(38, 0) or double." if kind == "long" else "double, or a decimal of fewer decimal places."),
        )
        self.group = group
        """The group with the value."""


class Kernel(ABC):
    """Computes one aggregate."""

    adds_floats = False
    """Whether the last digits depend on the order in which rows are added."""

    @abstractmethod
    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        """The accumulator of each row, from its value and the number or time that orders rows."""

    @abstractmethod
    def reduce(self, held: Columns, groups: Groups) -> Columns:
        """Merge the accumulators of each group, in the order of the rows; a group without values gets nulls."""

    def result(self, held: Columns) -> pa.Array:
        """The aggregate's values, from accumulators; by default the first field."""
        return held[0]


class CountKernel(Kernel):
    """Number of rows, or of values that are not null."""

    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        return [column.is_valid().cast(pa.int64())]

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        return [pa.array(groups.sums(_filled(held[0], 0)))]

    def result(self, held: Columns) -> pa.Array:
        return held[0].fill_null(0)


class SumKernel(Kernel):
    """Sum of integers or floating-point numbers; null if there are no values. `wraps` lets integers wrap around."""

    def __init__(self, kind: pa.DataType, *, wraps: bool) -> None:
        self._kind = kind
        self._wraps = wraps
        self.adds_floats = pa.types.is_floating(kind)

    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        return [column.cast(self._kind)]

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        return [_sums(held[0], groups, wraps=self._wraps)]


class DecimalSumKernel(Kernel):
    """Sum of decimals, and whether it has not fitted its type; then it stays null, whatever comes.

    Only the sum of the values that are reduced together has to fit, not that of the first few of them. With `ansi`, a
    sum that does not fit is an error.
    """

    def __init__(self, kind: pa.DataType, *, ansi: bool) -> None:
        self._kind = kind
        self._ansi = ansi

    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        return [column.cast(self._kind), pa.array(np.zeros(len(column), bool))]

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        sums, had_overflowed = held
        is_empty = ~_any_valid(sums, groups)
        lost = had_overflowed.fill_null(False).to_numpy(zero_copy_only=False) if had_overflowed.true_count else None
        sums, has_overflowed = _decimal_sums(sums, groups, is_empty, lost)
        if self._ansi:
            _refuse(has_overflowed, self._kind)
        return [sums, pa.array(has_overflowed, mask=is_empty & ~has_overflowed)]

    def result(self, held: Columns) -> pa.Array:
        if self._ansi and held[1].true_count:
            _refuse(held[1].fill_null(False).to_numpy(zero_copy_only=False), self._kind)
        return held[0]


class MeanKernel(Kernel):
    """Sum and number of values; the sum is a double."""

    adds_floats = True

    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        return [column.cast(pa.float64(), safe=False), column.is_valid().cast(pa.int64())]

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        return [_sums(held[0], groups, wraps=True), pa.array(groups.sums(_filled(held[1], 0)))]

    def result(self, held: Columns) -> pa.Array:
        return pc.divide(held[0], _counts_above_zero(held[1]).cast(pa.float64()))


class DecimalMeanKernel(Kernel):
    """Sum of decimals and number of values; a sum that has not fitted its type is null, and stays so.

    With `ansi`, a sum or a mean that does not fit is an error; otherwise the mean is null.
    """

    def __init__(self, kind: pa.DataType, result: pa.DataType, *, ansi: bool) -> None:
        self._kind = kind
        self._result = result
        self._ansi = ansi

    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        return [column.cast(self._kind), column.is_valid().cast(pa.int64())]

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        sums, counts = held
        lost = ~_valid(sums) & (_filled(counts, 0) > 0) if sums.null_count else None
        totals = groups.sums(_filled(counts, 0))
        sums, has_overflowed = _decimal_sums(sums, groups, totals == 0, lost)
        if self._ansi:
            _refuse(has_overflowed, self._kind)
        return [sums, pa.array(totals)]

    def result(self, held: Columns) -> pa.Array:
        sums, counts = held
        if self._ansi and sums.null_count:
            _refuse(~_valid(sums) & (_filled(counts, 0) > 0), self._kind)
        means, is_beyond = _decimal_quotients(sums, _counts_above_zero(counts), self._result)
        if self._ansi:
            _refuse(is_beyond, self._result, "mean")
        return means


class VarianceKernel(Kernel):
    """Number, mean and sum of squared differences from the mean (Chan, Golub, LeVeque: Updating Formulae, 1979)."""

    def __init__(self, *, is_sample: bool, is_deviation: bool) -> None:
        self.adds_floats = True
        self._is_sample = is_sample
        self._is_deviation = is_deviation

    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        values = as_doubles(column)
        ones = pc.if_else(values.is_valid(), pa.scalar(1, pa.int64()), pa.scalar(None, pa.int64()))
        zeros = pc.if_else(values.is_valid(), pa.scalar(0.0), pa.scalar(None, pa.float64()))
        return [ones, values, zeros]

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        counts, means, squares = _filled(held[0], 0), _filled(held[1], 0.0), _filled(held[2], 0.0)
        totals = groups.sums(counts)
        is_empty = totals == 0
        # Means are added as differences from one of them, so that equal values have no variance.
        pivot = np.zeros(groups.count)
        pivot[groups.index[counts > 0]] = means[counts > 0]
        with np.errstate(invalid="ignore", over="ignore"):
            apart = counts * (means - pivot[groups.index])
            mean = pivot + groups.float_sums(apart) / np.where(is_empty, 1, totals)
            apart = means - mean[groups.index]
            square = groups.float_sums(squares + counts * apart * apart)
        return [
            pa.array(totals, mask=is_empty),
            pa.array(mean, mask=is_empty),
            pa.array(square, mask=is_empty),
        ]

    def result(self, held: Columns) -> pa.Array:
        counts, squares = _filled(held[0], 0), _filled(held[2], 0.0)
        divisors = counts - 1 if self._is_sample else counts
        with np.errstate(invalid="ignore", divide="ignore"):
            values = squares / divisors
            if self._is_deviation:
                values = np.sqrt(values)
        return pa.array(values, mask=divisors <= 0)


class ExtremeKernel(Kernel):
    """The least or greatest value; NaN is greater than all others."""

    def __init__(self, *, is_max: bool) -> None:
        self._is_max = is_max

    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        return [column]

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        column = held[0]
        kind = column.type
        if pa.types.is_date32(kind):
            return [self._of_numbers(column.cast(pa.int32()), groups).cast(kind)]
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            return [self._of_numbers(column, groups)]
        return [_grouped(column, groups, "max" if self._is_max else "min")]

    def _of_numbers(self, column: pa.Array, groups: Groups) -> pa.Array:
        dtype = column.type.to_pandas_dtype()
        is_float = np.issubdtype(dtype, np.floating)
        limits = (-np.inf, np.nan) if is_float else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        start = limits[0] if self._is_max else limits[1]
        best = np.full(groups.count, start, dtype)
        # NaN wins every maximum and loses every fmin.
        extreme: Any = np.maximum if self._is_max else (np.fmin if is_float else np.minimum)
        with np.errstate(invalid="ignore"):
            extreme.at(best, groups.index, _filled(column, start))
        return pa.array(best, mask=~_any_valid(column, groups))


class FirstLastKernel(Kernel):
    """The value of the first or last row by order, and its order; of rows of one order the first or last to arrive."""

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last

    def lift(self, column: pa.Array, by: pa.Array) -> Columns:
        return [column, by]

    def reduce(self, held: Columns, groups: Groups) -> Columns:
        value, by = held
        picked = self.rows(by, groups)
        return [value.take(picked), by.take(picked)]

    def rows(self, by: pa.Array, groups: Groups, *, nulls_are_least: bool = False) -> pa.Array:
        """The first or last row of each group by order; rows without an order do not count, or come first."""
        numbers = order_of(by)
        valid = np.ones(len(by), bool) if nulls_are_least else _valid(by)
        best = np.full(groups.count, np.iinfo(np.int64).min if self._is_last else np.iinfo(np.int64).max)
        extreme: Any = np.maximum if self._is_last else np.minimum
        extreme.at(best, groups.index[valid], numbers[valid])
        found, has_any = groups.first_where(valid & (numbers == best[groups.index]), is_last=self._is_last)
        return pa.array(found, mask=~has_any)


# ---- Columns ----


def order_of(column: pa.Array) -> Int64s:
    """Numbers in the order of the values: nulls are least, NaN is greatest."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_temporal(kind):
        whole = column.cast(pa.int32()) if pa.types.is_date32(kind) else column
        numbers: Int64s = _filled(whole.cast(pa.int64()), 0)
    else:
        numbers = pc.rank(column, sort_keys="ascending", tiebreaker="dense").to_numpy().astype(np.int64)
    return np.where(_valid(column), numbers, np.iinfo(np.int64).min) if column.null_count else numbers


def _filled(column: pa.Array, value: Any) -> npt.NDArray[Any]:
    """A column of numbers, with `value` in place of nulls."""
    values: npt.NDArray[Any] = (column.fill_null(value) if column.null_count else column).to_numpy()
    return values


def _valid(column: pa.Array) -> Mask:
    if not column.null_count:
        return np.ones(len(column), bool)
    valid: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _any_valid(column: pa.Array, groups: Groups) -> Mask:
    return groups.has_any(_valid(column))


def _counts_above_zero(counts: pa.Array) -> pa.Array:
    """Numbers of values, null where there are none."""
    counts = counts.fill_null(0)
    return pc.if_else(pc.equal(counts, 0), pa.scalar(None, pa.int64()), counts)


def _sums(column: pa.Array, groups: Groups, *, wraps: bool) -> pa.Array:
    """The sum of each group's integers or doubles; null where there are none."""
    is_empty = ~_any_valid(column, groups)
    if pa.types.is_floating(column.type):
        return pa.array(groups.float_sums(_filled(column, 0.0)), mask=is_empty)
    values = _filled(column, 0)
    if not wraps:
        _require_fitting(values, groups)
    return pa.array(groups.sums(values), mask=is_empty)


def _require_fitting(values: Int64s, groups: Groups) -> None:
    """Raise Overflow if the sum of a group does not fit 64 bits."""
    if not len(values):
        return
    largest = max(-int(values.min()), int(values.max()))
    if largest * int(groups.sizes.max()) <= _SMALL:
        return
    low, high = groups.sums(values & _LOW), groups.sums(values >> _LIMB_BITS)
    carried = high + (low >> _LIMB_BITS)
    beyond = np.flatnonzero((carried < -(1 << 31)) | (carried >= 1 << 31))
    if len(beyond):
        raise Overflow(int(beyond[0]), "long")


def _refuse(mask: Mask, kind: pa.DataType, value: str = "sum") -> None:
    """Raise Overflow for the first group where the mask is set."""
    if mask.any():
        raise Overflow(int(mask.argmax()), f"decimal({kind.precision},{kind.scale})", value)


# ---- Decimals ----


def _decimal_sums(column: pa.Array, groups: Groups, is_empty: Mask, lost: Mask | None) -> tuple[pa.Array, Mask]:
    """The sum of each group's decimals, null where there are none or it does not fit, and where it does not fit.

    `is_empty` are the groups without values, `lost` the rows that stand for sums that did not fit; None for none.
    """
    kind = column.type
    low, high = _words(column)
    if _sums_fit_longs(low, high, groups):
        low = groups.sums(low)
        high = low >> 63
        is_beyond = np.abs(low) >= 10**kind.precision if kind.precision < _LONG_DIGITS else np.zeros(len(low), bool)
    else:
        limbs = _limb_sums(low, high, groups)
        low, high = limbs[0] | limbs[1] << _LIMB_BITS, limbs[2] | limbs[3] << _LIMB_BITS
        is_beyond = _are_beyond(limbs, 10**kind.precision)
    if lost is not None:
        is_beyond |= groups.has_any(lost)
    return _decimals_of(kind, low, high, is_empty | is_beyond), is_beyond


def _sums_fit_longs(low: Int64s, high: Int64s, groups: Groups) -> bool:
    """Whether the sums of groups of 128-bit numbers are known to fit 64 bits."""
    if not len(low):
        return True
    if (high != low >> 63).any():
        return False
    largest = max(-int(low.min()), int(low.max()))
    return largest * int(groups.sizes.max()) <= _SMALL


def _limb_sums(low: Int64s, high: Int64s, groups: Groups) -> list[Int64s]:
    """The exact sums of 128-bit numbers, in limbs of 32 bits from the lowest to the highest, which has the sign."""
    limbs = [low & _LOW, low >> _LIMB_BITS & _LOW, high & _LOW, high >> _LIMB_BITS]
    sums, carry = [], np.zeros(groups.count, np.int64)
    for limb in limbs[:-1]:
        total = groups.sums(limb) + carry
        sums.append(total & _LOW)
        carry = total >> _LIMB_BITS
    return [*sums, groups.sums(limbs[-1]) + carry]


def _are_beyond(limbs: Sequence[Int64s], limit: int) -> Mask:
    """Which numbers are not between a limit and its negative."""
    about = sum(limb * 2.0 ** (_LIMB_BITS * place) for place, limb in enumerate(limbs))
    is_beyond: Mask = np.abs(about) > limit * (1 + _NEAR)
    near = ~is_beyond & (np.abs(about) > limit * (1 - _NEAR))
    for group in np.flatnonzero(near).tolist():
        exact = sum(int(limb[group]) << _LIMB_BITS * place for place, limb in enumerate(limbs))
        is_beyond[group] = abs(exact) >= limit
    return is_beyond


def _words(column: pa.Array) -> tuple[Int64s, Int64s]:
    """The lower and the upper 64 bits of decimals, 0 for nulls; the lower ones as signed numbers."""
    if column.null_count:
        column = pc.fill_null(column, Decimal(0))
    words = np.frombuffer(column.buffers()[1], "<i8", 2 * len(column), 16 * column.offset).reshape(-1, 2)
    return words[:, 0], words[:, 1]


def _decimals_of(kind: pa.DataType, low: Int64s, high: Int64s, is_null: Mask) -> pa.Array:
    """Decimals from the lower and the upper 64 bits of their unscaled values."""
    validity = pa.array(~is_null).buffers()[1] if is_null.any() else None
    words = pa.py_buffer(np.ascontiguousarray(np.stack([low, high], axis=1).astype("<i8", copy=False)))
    return pa.Array.from_buffers(kind, len(low), [validity, words])


def _decimal_quotients(sums: pa.Array, counts: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Mask]:
    """Quotients, rounded half up; null where they do not fit, and where that is."""
    low, high = _words(sums)
    divisors = _filled(counts, 1)
    factor = 10 ** (kind.scale - sums.type.scale)
    is_beyond = np.zeros(len(sums), bool)
    largest = max(-int(low.min()), int(low.max())) if len(low) else 0
    if not (high != low >> 63).any() and 2 * largest * factor + int(divisors.max(initial=1)) <= _SMALL:
        quotients = np.sign(low) * ((2 * factor * np.abs(low) + divisors) // (2 * divisors))
        return _decimals_of(kind, quotients, quotients >> 63, ~_valid(sums) | ~_valid(counts)), is_beyond
    unit, limit = Decimal(1).scaleb(-kind.scale, WIDE), Decimal(1).scaleb(kind.precision - kind.scale, WIDE)
    pairs = zip(sums.to_pylist(), counts.to_pylist(), strict=True)
    exact = [
        None if one is None or n is None else WIDE.divide(one, Decimal(n)).quantize(unit, context=WIDE)
        for one, n in pairs
    ]
    if kind.precision == MAX_PRECISION:  # others have room for every mean
        is_beyond[:] = [one is not None and one.copy_abs() >= limit for one in exact]
        for place in np.flatnonzero(is_beyond).tolist():
            exact[place] = None
    return pa.array(exact, kind), is_beyond


def _grouped(column: pa.Array, groups: Groups, function: str) -> pa.Array:
    """Arrow's aggregate of each group."""
    table = pa.table({"group": groups.index, "value": column})
    found = table.group_by("group", use_threads=False).aggregate([("value", function)])
    places = np.zeros(groups.count, np.int64)
    owners = found.column("group").to_numpy()
    places[owners] = np.arange(len(owners))
    is_missing = np.ones(groups.count, bool)
    is_missing[owners] = False
    values = found.column(f"value_{function}").combine_chunks()
    return values.take(pa.array(places, mask=is_missing))
