"""Ready-made aggregates as functions of reducing and aggregating state, beside those of whole columns."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import DataType, DateType, DecimalType, DoubleType, LongType, StringType, StructField, StructType

import statelog
from statelog import Aggregate, ConfigurationError, ProcessorError
from statelog.aggregates.accumulators import bind_aggregates
from statelog.aggregates.groups import Groups
from statelog.aggregates.kernels import WIDE, Overflow
from statelog.convert.types import arrow_type
from statelog.testing import Harness

LONG, DOUBLE, DECIMAL = LongType(), DoubleType(), DecimalType(38, 2)
VALUES: dict[DataType, st.SearchStrategy[Any]] = {
    LONG: st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3),
    DOUBLE: st.floats() | st.sampled_from([math.nan, math.inf, -math.inf]),
    DECIMAL: st.sampled_from([10**38 - 1, 1 - 10**38, 1, -7, 10**30 + 3]).map(lambda n: Decimal(n).scaleb(-2, WIDE)),
    StringType(): st.text(max_size=3),
    DateType(): st.dates(),
}
AGGREGATES: list[tuple[Aggregate, DataType]] = [
    *[(aggregate, kind) for aggregate in (statelog.Min("x"), statelog.Max("x")) for kind in VALUES],
    *[(statelog.Sum("x"), kind) for kind in (LONG, DOUBLE, DECIMAL)],
    *[(statelog.Count("x"), kind) for kind in VALUES],
    (statelog.Count(), LONG),
    (statelog.Mean("x"), DOUBLE),
]


def of_columns(aggregate: Aggregate, kind: DataType, values: list[Any]) -> Any:
    bound = bind_aggregates([aggregate], StructType([StructField("x", kind)]), ansi=True)
    numbers = np.zeros(len(values), np.int64)
    rows = pa.RecordBatch.from_arrays([pa.array(values, arrow_type(kind, "x"))], names=["x"])
    return bound.results(bound.reduce(bound.lift(rows, pa.array(numbers)), Groups(numbers, 1))).columns[0][0].as_py()


def fits(kind: DataType, total: Any) -> bool:
    return -(2**63) <= total < 2**63 if kind == LONG else abs(int(total.scaleb(2, WIDE))) < 10**38


@given(st.data(), st.sampled_from(AGGREGATES), st.integers(0, 5))
def test_values_one_by_one_make_what_columns_make(
    data: st.DataObject, one: tuple[Aggregate, DataType], cut: int
) -> None:
    """Also of two parts that are merged. A sum must fit after each value."""
    aggregate, kind = one
    values = data.draw(st.lists(st.none() | VALUES[kind], max_size=6))
    function = aggregate.row_function(arrow_type(kind, "x"))

    def added(part: list[Any]) -> tuple[Any, ...]:
        held = function.createAccumulator()
        for value in part:
            held = function.add(value, held)
        return held

    if isinstance(aggregate, statelog.Sum) and kind != DOUBLE:
        with localcontext(prec=100):
            numbers = [[value for value in part if value is not None] for part in (values[:cut], values[cut:])]
            sums = [sum(part[:end]) for part in numbers for end in range(1, len(part) + 1)]
            sums += [sum(part) for part in (numbers[0] + numbers[1],) if part]
        if not all(fits(kind, total) for total in sums):
            with pytest.raises(Overflow, match="out of range for"):
                function.merge(added(values[:cut]), added(values[cut:]))
            return
    found = function.getResult(function.merge(added(values[:cut]), added(values[cut:])))
    expected = of_columns(aggregate, kind, values)
    if isinstance(expected, float) and not isinstance(aggregate, statelog.Min | statelog.Max):
        # They are added in another order, and a huge part may be infinite.
        assert found == pytest.approx(expected, nan_ok=True, abs=1e300) or not math.isfinite(found)
    elif expected != expected:
        assert found != found
    else:
        assert (type(found), found) == (type(expected), expected)


class Held(StatefulProcessor):
    """Adds to one state, of the kind and the schema given, and returns what it holds as a text."""

    def __init__(self, kind: str, schema: str, aggregate: Aggregate) -> None:
        self._arguments = (kind, schema, aggregate)

    def init(self, handle: Any) -> None:
        kind, schema, aggregate = self._arguments
        get = handle.getReducingState if kind == "reducing" else handle.getAggregatingState
        self._state = get("held", schema, aggregate)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self._state.add((row.x,) if self._arguments[0] == "reducing" else row.x)
        yield Row(k=key[0], held=repr(self._state.get()))

    def close(self) -> None:
        pass


def harness(kind: str, schema: str, aggregate: Aggregate, column: str = "long") -> Harness:
    output = "k string, held string"
    return Harness(Held(kind, schema, aggregate), input=f"k string, x {column}", keys=["k"], output=output)


@pytest.mark.parametrize(
    ("kind", "schema", "aggregate", "batches", "expected"),
    [
        ("reducing", "x long", statelog.Sum("x"), [[1, 2], [3]], "(6,)"),
        ("reducing", "x long", statelog.Max("x"), [[1, None], [3]], "(3,)"),
        ("reducing", "x long", statelog.Min("x"), [[None], [3, 1]], "(1,)"),
        ("aggregating", "n long", statelog.Count(), [[None, 2], [3]], "3"),
        ("aggregating", "n long", statelog.Count("x"), [[None, 2], [3]], "2"),
        ("aggregating", "n long", statelog.Sum("x"), [[None, 2], [3]], "5"),
        ("aggregating", "total double, n long", statelog.Mean("x"), [[1, 2], [6, None]], "3.0"),
    ],
)
def test_states_take_ready_made_aggregates(
    kind: str, schema: str, aggregate: Aggregate, batches: list[list[Any]], expected: str
) -> None:
    """The state continues in the next batch; the added values are integers in all of them."""
    with harness(kind, schema, aggregate) as query:
        for batch in batches:
            rows = query.push([("a", value) for value in batch])
        assert rows == [Row(k="a", held=expected)]


@pytest.mark.parametrize(
    ("schema", "column", "most", "name"),
    [
        ("x long", "long", 2**63 - 1, "long"),
        ("x decimal(38,2)", "decimal(38,2)", Decimal("9" * 36), "decimal(38,2)"),
        ("x decimal(10,2)", "decimal(10,2)", Decimal("9" * 8), "decimal(10,2)"),
    ],
)
def test_a_sum_that_does_not_fit_names_the_key(schema: str, column: str, most: Any, name: str) -> None:
    negative = most.copy_negate() if isinstance(most, Decimal) else -most
    with harness("reducing", schema, statelog.Sum("x"), column) as query:
        assert query.push([("a", most), ("a", negative), ("a", most)]) == [
            Row(k="a", held=repr((most,)).replace("9'", "9.00'"))
        ]
        with pytest.raises(ProcessorError, match=r"key \('a',\): a sum is out of range for " + re.escape(name)):
            query.push([("a", most)])


@pytest.mark.parametrize(
    ("kind", "schema", "aggregate", "message"),
    [
        ("reducing", "x int", statelog.Sum("x"), r"state 'held': .* sum\(x\) is 'x bigint', not struct<x:int>"),
        ("reducing", "x long, y long", statelog.Max("x"), "'x bigint', not struct<x:bigint,y:bigint>"),
        ("reducing", "y long", statelog.Max("x"), "its field is 'y'"),
        ("reducing", "x long", statelog.Count("x"), "does not combine two values of .* aggregating state takes Count"),
        ("reducing", "x double, n long", statelog.Mean("x"), "does not combine two values of"),
        ("reducing", "x string", statelog.Sum("x"), r"state 'held': Sum\('x'\): the column is string"),
        ("reducing", "x long", statelog.First("x"), r"first\(x\) cannot be a state's function"),
        ("aggregating", "x double", statelog.Mean("x"), "is 'sum double, count bigint'"),
        ("aggregating", "x decimal(38,2), n long", statelog.Mean("x"), "of decimals"),
        ("aggregating", "x long", statelog.Variance("x"), "cannot be a state's function"),
        ("aggregating", "n int", statelog.Count(), "'n bigint'"),
    ],
)
def test_an_aggregate_that_does_not_fit_the_schema_is_refused(
    kind: str, schema: str, aggregate: Aggregate, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message), harness(kind, schema, aggregate):
        pass


def test_times_are_compared() -> None:
    time = datetime.datetime(2026, 1, 1)
    with harness("reducing", "x timestamp_ntz", statelog.Max("x"), "timestamp_ntz") as query:
        assert query.push([("a", time), ("a", time.replace(year=2025))]) == [Row(k="a", held=repr((time,)))]
