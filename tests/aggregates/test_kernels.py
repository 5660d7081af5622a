"""Each kernel against a plain computation, however the rows are split into parts that are reduced first."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

import statelog
from statelog import Aggregate
from statelog.aggregates.accumulators import bind_aggregates
from statelog.aggregates.groups import Groups, as_doubles
from statelog.aggregates.kernels import WIDE, Columns, Overflow
from statelog.aggregates.list_kernels import ListKernel, ListTooLarge
from statelog.convert.types import arrow_type

UTC = datetime.UTC
LONGS = st.integers(-(2**63), 2**63 - 1)
DOUBLES = st.floats(allow_subnormal=False)
VALUES: dict[str, tuple[DataType, st.SearchStrategy[Any]]] = {
    "int": (IntegerType(), st.integers(-(2**31), 2**31 - 1)),
    "long": (LongType(), LONGS | st.integers(-3, 3)),
    "double": (DoubleType(), DOUBLES | st.sampled_from([0.0, -0.0, math.nan, math.inf])),
    "float": (FloatType(), st.floats(width=32)),
    "decimal": (DecimalType(10, 2), st.integers(-(10**10) + 1, 10**10 - 1).map(lambda n: Decimal(n) / 100)),
    "bool": (BooleanType(), st.booleans()),
    "text": (StringType(), st.text(max_size=3)),
    "binary": (BinaryType(), st.binary(max_size=3)),
    "date": (DateType(), st.dates()),
    "time": (TimestampType(), st.datetimes(timezones=st.just(UTC))),
}
SMALL: dict[str, tuple[DataType, st.SearchStrategy[Any]]] = {
    "int": VALUES["int"],
    "long": (LongType(), st.integers(-(10**6), 10**6)),
    "double": (DoubleType(), st.integers(-(10**6), 10**6).map(float)),
    "decimal": VALUES["decimal"],
}


EXACT = Context(prec=38)


@dataclass(frozen=True)
class Rows:
    """Rows with a value and an order, their groups, and where they are cut into parts."""

    kind: DataType
    values: list[Any]
    order: list[Any]
    groups: list[int]
    count: int
    cuts: list[int]

    def of(self, group: int) -> list[tuple[Any, Any]]:
        """The values of a group, each with its order."""
        triples = zip(self.groups, self.values, self.order, strict=True)
        return [(value, order) for own, value, order in triples if own == group]


@st.composite
def rows_of(draw: st.DrawFn, kinds: dict[str, tuple[DataType, st.SearchStrategy[Any]]]) -> Rows:
    kind, values = kinds[draw(st.sampled_from(sorted(kinds)))]
    rows = draw(st.lists(st.tuples(st.none() | values, st.none() | st.integers(0, 3), st.integers(0, 3)), max_size=12))
    cuts = draw(st.lists(st.integers(0, len(rows)), max_size=2))
    return Rows(kind, [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], 5, sorted(cuts))


def computed(rows: Rows, aggregate: Aggregate, *, ansi: bool = True) -> list[Any]:
    """The aggregate of each group: of parts, then of the accumulators of the parts."""
    schema = StructType([StructField("x", rows.kind), StructField("o", LongType())])
    bound = bind_aggregates([aggregate], schema, ansi=ansi)
    columns = [pa.array(rows.values, arrow_type(rows.kind, "x")), pa.array(rows.order, pa.int64())]
    batch = pa.RecordBatch.from_arrays(columns, names=["x", "o"])
    parts: list[Columns] = []
    owners: list[int] = []
    for start, end in zip([0, *rows.cuts], [*rows.cuts, len(rows.values)], strict=True):
        part = batch.slice(start, end - start)
        groups = Groups(np.array(rows.groups[start:end], np.int64), rows.count)
        parts.append(bound.reduce(bound.lift(part, pa.array(np.zeros(end - start, np.int64))), groups))
        owners += range(rows.count)
    held = [pa.concat_arrays(list(column)) for column in zip(*parts, strict=True)]
    (result,) = bound.results(bound.reduce(held, Groups(np.array(owners), rows.count))).columns
    assert result.type == arrow_type(bound.result[0].dataType, "result")
    found: list[Any] = result.to_pylist()
    return found


def expected(rows: Rows, of_group: Callable[[list[Any]], Any]) -> list[Any]:
    """A plain computation over the values of each group that are not null; None for none of them."""
    valid = ([value for value, _ in rows.of(group) if value is not None] for group in range(rows.count))
    return [of_group(values) if values else None for values in valid]


def same(found: list[Any], wanted: list[Any]) -> bool:
    def is_same(one: Any, other: Any) -> bool:
        if isinstance(one, float) and isinstance(other, float):
            return (math.isnan(one) and math.isnan(other)) or one == other
        if isinstance(one, list) and isinstance(other, list):
            return same(one, other)
        return type(one) is type(other) and bool(one == other)

    return len(found) == len(wanted) and all(map(is_same, found, wanted))


def greatest(values: list[Any]) -> Any:
    nans = [value for value in values if value != value]
    return nans[0] if nans else max(values)


def least(values: list[Any]) -> Any:
    numbers = [value for value in values if value == value]
    return min(numbers) if numbers else values[0]


@given(rows_of(VALUES))
def test_count(rows: Rows) -> None:
    assert computed(rows, statelog.Count("x")) == [count or 0 for count in expected(rows, len)]
    assert computed(rows, statelog.Count()) == [len(rows.of(group)) for group in range(rows.count)]


@given(rows_of(SMALL))
def test_sum_and_mean(rows: Rows) -> None:
    is_float, is_decimal = isinstance(rows.kind, DoubleType), isinstance(rows.kind, DecimalType)
    assert same(computed(rows, statelog.Sum("x")), expected(rows, sum))

    def mean(values: list[Any]) -> Any:
        if is_decimal:
            return (sum(values) / Decimal(len(values))).quantize(Decimal("1e-6"), ROUND_HALF_UP)
        return sum(values) / len(values) if is_float else float(sum(values)) / len(values)

    assert same(computed(rows, statelog.Mean("x")), expected(rows, mean))


@given(rows_of({"double": (DoubleType(), st.floats(-1e6, 1e6))}))
def test_variance(rows: Rows) -> None:
    def close(found: list[Any], wanted: list[Any]) -> bool:
        pairs = zip(found, wanted, strict=True)
        return all((a is None) == (b is None) and (a is None or math.isclose(a, b, abs_tol=1e-3)) for a, b in pairs)

    def of_several(function: Callable[[list[Any]], float]) -> Callable[[list[Any]], Any]:
        return lambda values: function(values) if len(values) > 1 else None

    assert close(computed(rows, statelog.Variance("x")), expected(rows, of_several(statistics.variance)))
    assert close(computed(rows, statelog.Variance("x", population=True)), expected(rows, statistics.pvariance))
    assert close(computed(rows, statelog.StandardDeviation("x")), expected(rows, of_several(statistics.stdev)))


@given(rows_of(VALUES))
def test_min_and_max(rows: Rows) -> None:
    assert same(computed(rows, statelog.Min("x")), expected(rows, least))
    assert same(computed(rows, statelog.Max("x")), expected(rows, greatest))


@given(rows_of(VALUES))
def test_first_and_last(rows: Rows) -> None:
    groups = [rows.of(group) for group in range(rows.count)]
    assert same(computed(rows, statelog.First("x")), [group[0][0] if group else None for group in groups])
    assert same(computed(rows, statelog.Last("x")), [group[-1][0] if group else None for group in groups])
    ordered = [[pair for pair in group if pair[1] is not None] for group in groups]
    first = [min(group, key=lambda pair: pair[1])[0] if group else None for group in ordered]
    last = [max(reversed(group), key=lambda pair: pair[1])[0] if group else None for group in ordered]
    assert same(computed(rows, statelog.First("x", by="o")), first)
    assert same(computed(rows, statelog.Last("x", by="o")), last)


@given(rows_of(VALUES))
def test_order_by_values_of_any_type(rows: Rows) -> None:
    """By a column of its own values the last value is the greatest, and the first the least."""
    assert same(computed(rows, statelog.Last("x", by="x")), expected(rows, greatest))
    assert same(computed(rows, statelog.First("x", by="x")), expected(rows, least))


@given(rows_of(VALUES))
def test_collected_and_distinct_values(rows: Rows) -> None:
    collected = computed(rows, statelog.Collect("x"))
    valid = [[value for value, _ in rows.of(group) if value is not None] for group in range(rows.count)]
    assert all(map(same, collected, valid))
    distinct = [len({"nan" if value != value else value for value in values}) for values in valid]
    assert computed(rows, statelog.CountDistinct("x")) == distinct
    assert computed(rows, statelog.ApproxCountDistinct("x")) == distinct


@given(
    st.sampled_from([(10, 2), (15, 0), (15, 15), (16, 3), (38, 10)]).flatmap(
        lambda digits: st.tuples(
            st.just(pa.decimal128(*digits)),
            st.lists(
                st.none()
                | st.integers(1 - 10 ** digits[0], 10 ** digits[0] - 1).map(
                    lambda unscaled: Decimal(unscaled).scaleb(-digits[1], EXACT)
                )
            ),
        )
    )
)
def test_doubles_of_decimals_are_the_nearest_ones(column: tuple[pa.DataType, list[Decimal | None]]) -> None:
    kind, values = column
    sliced = pa.array([None, *values], kind).slice(1)
    assert as_doubles(sliced).to_pylist() == [None if value is None else float(value) for value in values]


@given(rows_of(VALUES | SMALL))
@example(Rows(DecimalType(10, 2), [Decimal("15936.05")], [None], [0], 1, []))  # Arrow's double is the next one
def test_quantiles_of_few_values(rows: Rows) -> None:
    assume(not isinstance(rows.kind, (BooleanType, StringType, BinaryType, DateType, TimestampType)))
    fractions = [0.0, 0.3, 0.5, 1.0]

    def quantiles(values: list[Any]) -> list[float]:
        ordered = sorted(map(float, values), key=lambda value: (value != value, value))
        return [ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] for fraction in fractions]

    assert same(computed(rows, statelog.Quantiles("x", fractions)), expected(rows, quantiles))


def rows_in_one_group(kind: DataType, values: list[Any], cuts: list[int]) -> Rows:
    return Rows(kind, values, [0] * len(values), [1] * len(values), 2, cuts)


@given(st.lists(LONGS, min_size=1, max_size=8), st.integers(0, 8))
def test_a_sum_of_integers_fits_or_is_refused(values: list[int], cut: int) -> None:
    rows = rows_in_one_group(LongType(), values, [min(cut, len(values))])
    wrapped = (sum(values) + 2**63) % 2**64 - 2**63
    assert computed(rows, statelog.Sum("x"), ansi=False) == [None, wrapped]
    in_one = rows_in_one_group(LongType(), values, [])
    if sum(values) == wrapped:
        assert computed(in_one, statelog.Sum("x")) == [None, wrapped]
    else:
        with pytest.raises(Overflow, match="out of range for long") as caught:
            computed(in_one, statelog.Sum("x"))
        assert caught.value.group == 1


@pytest.mark.parametrize("count", [2, 4, 30])
def test_a_sum_of_decimals_fits_or_is_refused(count: int) -> None:
    kind, most = DecimalType(38, 2), Decimal("9" * 36 + ".99")
    assert computed(rows_in_one_group(kind, [most, most.copy_negate(), Decimal("0.01")], [1]), statelog.Sum("x")) == [
        None,
        Decimal("0.01"),
    ]
    rows = rows_in_one_group(kind, [most] * count, [])
    for aggregate in (statelog.Sum("x"), statelog.Mean("x")):
        with pytest.raises(Overflow, match=r"a sum is out of range for decimal\(38,2\)") as caught:
            computed(rows, aggregate)
        assert caught.value.group == 1
        assert computed(rows, aggregate, ansi=False) == [None, None]


@st.composite
def decimals_at_their_limits(draw: st.DrawFn) -> Rows:
    """Values of any precision, most of them near the greatest or the least, so that sums overflow and come back."""
    precision = draw(st.integers(1, 38))
    scale = draw(st.integers(0, precision))
    most = 10**precision - 1
    unscaled = st.integers(-most, most) | st.sampled_from([most, -most, most // 2 + 1, -(most // 2) - 1, 1, -1, 0])
    values = draw(st.lists(st.none() | unscaled.map(lambda number: Decimal(number).scaleb(-scale, EXACT)), max_size=12))
    groups = draw(st.lists(st.integers(0, 2), min_size=len(values), max_size=len(values)))
    cuts = draw(st.lists(st.integers(0, len(values)), max_size=4))
    return Rows(DecimalType(precision, scale), values, groups, groups, 3, sorted(cuts))


def unscaled_parts(rows: Rows, scale: int, group: int) -> list[list[int]]:
    """The values of a group as whole numbers, by part."""
    parts = []
    for start, end in zip([0, *rows.cuts], [*rows.cuts, len(rows.values)], strict=True):
        pairs = zip(rows.values[start:end], rows.groups[start:end], strict=True)
        parts.append([int(value.scaleb(scale, EXACT)) for value, own in pairs if own == group and value is not None])
    return parts


@settings(max_examples=300)
@given(decimals_at_their_limits())
def test_a_sum_of_decimals_that_has_overflowed_stays_null(rows: Rows) -> None:
    """The model adds whole numbers: the rows of a part are added first, and then the sums of all parts."""
    kind = rows.kind
    assert isinstance(kind, DecimalType)
    limit = 10 ** min(kind.precision + 10, 38)
    mean_scale = min(kind.scale + 4, 38)
    mean_limit = 10 ** (min(kind.precision + 4, 38) - mean_scale)
    wanted: dict[Aggregate, list[Decimal | None]] = {statelog.Sum("x"): [], statelog.Mean("x"): []}
    for group in range(rows.count):
        parts = unscaled_parts(rows, kind.scale, group)
        count, sums = sum(map(len, parts)), [*map(sum, parts)]
        total = mean = None
        if count and all(abs(number) < limit for number in [*sums, sum(sums)]):
            total = Decimal(sum(sums)).scaleb(-kind.scale, WIDE)
            mean = WIDE.divide(total, Decimal(count)).quantize(Decimal(1).scaleb(-mean_scale), context=WIDE)
            mean = mean if mean.copy_abs() < mean_limit else None
        wanted[statelog.Sum("x")].append(total)
        wanted[statelog.Mean("x")].append(mean)
    has_values = [any(value is not None for value, _ in rows.of(group)) for group in range(rows.count)]
    for aggregate, values in wanted.items():
        assert same(computed(rows, aggregate, ansi=False), values)
        if all(value is not None or not has for value, has in zip(values, has_values, strict=True)):
            assert same(computed(rows, aggregate), values)
        else:
            with pytest.raises(Overflow):
                computed(rows, aggregate)


@pytest.mark.parametrize(
    ("digits", "unscaled", "expected"),
    [((38, 38), 5, "0E-38"), ((38, 38), -6, "-1E-38"), ((36, 34), 1, "909E-38"), ((36, 34), -10, "-9091E-38")],
)
def test_a_mean_of_decimals_is_rounded_once(digits: tuple[int, int], unscaled: int, expected: str) -> None:
    """5 / 11 of the last digit is 0.4545...: rounded at the next digit first it would be a half."""
    values = [Decimal(unscaled).scaleb(-digits[1], EXACT), *[Decimal(0)] * 10]
    rows = rows_in_one_group(DecimalType(*digits), values, [])
    _, mean = computed(rows, statelog.Mean("x"))
    assert mean.as_tuple().exponent == -38
    assert mean == Decimal(expected)


def test_many_decimals_are_added_exactly() -> None:
    """Rounding in the check whether a sum fits would grow with their number."""
    numbers = np.random.default_rng(0).integers(0, 10**18, 4_000).tolist()
    limit = 10**38
    values = [sign * (limit - 1 - number) for number in numbers for sign in (1, -1)] + [limit - 1]
    kind = DecimalType(38, 0)
    assert computed(rows_in_one_group(kind, [Decimal(value) for value in values], []), statelog.Sum("x")) == [
        None,
        Decimal(limit - 1),
    ]
    with pytest.raises(Overflow):
        computed(rows_in_one_group(kind, [Decimal(value) for value in [*values, 1]], []), statelog.Sum("x"))


def test_an_overflow_of_another_mode_is_refused_in_ansi_mode() -> None:
    most = Decimal(10**38 - 1)
    schema = StructType([StructField("x", DecimalType(38, 0))])
    aggregates: list[Aggregate] = [statelog.Sum("x"), statelog.Mean("x")]
    rows = pa.RecordBatch.from_arrays([pa.array([most, most], pa.decimal128(38, 0))], names=["x"])
    one = Groups(np.zeros(2, np.int64), 1)
    for aggregate in aggregates:
        before = bind_aggregates([aggregate], schema, ansi=False)
        held = before.reduce(before.lift(rows, pa.array([0, 0])), one)
        now = bind_aggregates([aggregate], schema, ansi=True)
        with pytest.raises(Overflow, match="a sum"):
            now.results(held)
        with pytest.raises(Overflow, match="a sum"):
            now.reduce(held, Groups(np.zeros(1, np.int64), 1))


def test_lists_are_bounded_by_bytes() -> None:
    kernel = ListKernel(max_bytes=1000)
    values = pa.array(["x" * 100] * 20)
    groups = Groups(np.array([0] * 5 + [1] * 15), 2)
    with pytest.raises(ListTooLarge, match=r"its values take 1,\d\d\d bytes; the limit is 1,000") as caught:
        kernel.reduce(kernel.lift(values, values), groups)
    assert caught.value.group == 1
    kernel.reduce(kernel.lift(values, values), Groups(np.arange(20) % 10, 10))


@given(rows_of(VALUES))
def test_accumulators_without_values_change_nothing(rows: Rows) -> None:
    """They were stored before the aggregate was added to the query."""
    schema = StructType([StructField("x", rows.kind), StructField("o", LongType())])
    functions: list[Aggregate] = [statelog.Count("x"), statelog.Min("x"), statelog.Last("x"), statelog.Collect("x")]
    functions.append(statelog.ApproxCountDistinct("x"))
    bound = bind_aggregates(functions, schema, ansi=True)
    columns = [pa.array(rows.values, arrow_type(rows.kind, "x")), pa.array(rows.order, pa.int64())]
    batch = pa.RecordBatch.from_arrays(columns, names=["x", "o"])
    held = bound.lift(batch, pa.array(np.zeros(len(rows.values), np.int64)))
    groups = np.array(rows.groups, np.int64)
    nulls = [pa.nulls(rows.count, column.type) for column in held]
    with_nulls = [pa.concat_arrays([null, column]) for null, column in zip(nulls, held, strict=True)]
    alone = bound.results(bound.reduce(held, Groups(groups, rows.count))).columns
    twice = Groups(np.concatenate([np.arange(rows.count), groups]), rows.count)
    both = bound.results(bound.reduce(with_nulls, twice)).columns
    assert all(same(one.to_pylist(), other.to_pylist()) for one, other in zip(alone, both, strict=True))
