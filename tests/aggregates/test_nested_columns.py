"""Columns that Spark sends in other Arrow types than the state has: nested ones, times in a zone, and large strings."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

import statelog
from statelog import Aggregate
from statelog.aggregates.accumulators import bind_aggregates
from statelog.aggregates.build import KeyedDefinition, KeyedPlan, plan_aggregates, plan_latest, plan_top
from statelog.convert.types import arrow_type, key_schema
from statelog.testing import Harness

VISIT = StructType([StructField("at", TimestampType())])
TIMES = [datetime.datetime(2026, 1, 1, hour, tzinfo=datetime.UTC) for hour in range(3)]


def shown(value: Any) -> Any:
    """A value as it is returned: structs are rows, and instants local times."""
    if isinstance(value, dict):
        return tuple(map(shown, value.values()))
    if isinstance(value, list):
        return list(map(shown, value))
    return value.astimezone().replace(tzinfo=None) if isinstance(value, datetime.datetime) else value


def defined(**columns: DataType) -> KeyedDefinition:
    """The rows of users, with these columns."""
    kinds: dict[str, DataType] = {"user": StringType(), **columns}
    schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
    return KeyedDefinition(schema, [0], key_schema([schema["user"]]), None, is_streaming=True, ansi=True)


# ---- Rows ----


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (ArrayType(StringType(), containsNull=False), [["x"], [], ["y", "z"]]),
        (VISIT, [{"at": time} for time in TIMES]),
        (ArrayType(VISIT), [[{"at": time}] for time in TIMES]),
    ],
    ids=["array without nulls", "struct", "array of structs"],
)
def test_nested_values_are_merged_with_those_that_are_stored(kind: DataType, values: list[Any]) -> None:
    definition = defined(value=kind, n=LongType())
    aggregates: list[Aggregate] = [
        statelog.First("value", by="n"),
        statelog.Last("value", by="n"),
        statelog.Last("value"),
        statelog.Collect("value"),
    ]
    plan = plan_aggregates(definition, aggregates, {}, output_mode="update", ttl=None, combine=False)
    with Harness(
        plan.operator, input=definition.schema, output=plan.output, keys=["user"], sessionTimeZone="America/New_York"
    ) as query:
        for n, value in enumerate(values):
            (row,) = query.push([("a", value, n)])
            assert tuple(row[1:]) == (shown(values[0]), shown(value), shown(value), shown(values[: n + 1]))


def without_nulls(kind: pa.DataType) -> pa.DataType:
    """A list of elements of a type, none of which is null."""
    return pa.list_(pa.field("element", kind, nullable=False))


IN_ZONE = pa.timestamp("us", "Asia/Tokyo")


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        (StringType(), pa.array(["x", None], pa.large_string())),
        (BinaryType(), pa.array([b"x", None], pa.large_binary())),
        (ArrayType(StringType(), containsNull=False), pa.array([["x"], []], without_nulls(pa.large_string()))),
        (ArrayType(TimestampType(), containsNull=False), pa.array([TIMES, []], without_nulls(IN_ZONE))),
        (VISIT, pa.array([{"at": TIMES[0]}] * 2, pa.struct([pa.field("at", IN_ZONE, nullable=False)]))),
    ],
    ids=["large strings", "large binaries", "arrays of large strings", "arrays of times", "structs without nulls"],
)
def test_accumulators_have_the_types_of_the_state(kind: DataType, sent: pa.Array) -> None:
    schema = StructType([StructField("value", kind), StructField("n", LongType())])
    aggregates: list[Aggregate] = [statelog.First("value", by="n"), statelog.Last("value"), statelog.Collect("value")]
    bound = bind_aggregates(aggregates, schema, ansi=True)
    rows = pa.RecordBatch.from_arrays([sent, pa.array([1, 2])], names=["value", "n"])
    held = bound.lift(rows, pa.array([0, 0]))
    assert [column.type for column in held] == [arrow_type(field.dataType, field.name) for field in bound.schema]


# ---- Partial aggregates ----


def combined(plan: KeyedPlan) -> Harness:
    """A query whose rows are partial aggregates, with their times in another zone than the state's."""
    assert plan.step is not None
    partials = plan.step(None).output
    return Harness(plan.operator, input=partials, output=plan.output, keys=["p0"], sessionTimeZone="Europe/Berlin")


def test_the_newest_row_is_found_among_partials_and_the_stored_one() -> None:
    definition = defined(at=TimestampType(), n=LongType())
    with combined(plan_latest(definition, "at", None, combine=True)) as query:
        for n, newest in ((1, 1), (0, 1), (2, 2)):
            assert query.push([("a", TIMES[n], n)]) == [("a", shown(TIMES[newest]), newest)]


def test_the_greatest_rows_are_found_among_partials_and_the_stored_ones() -> None:
    definition = defined(at=TimestampType(), n=LongType())
    with combined(plan_top(definition, 2, "at", None, combine=True)) as query:
        assert query.push([("a", [{"at": TIMES[1], "n": 1}])]) == [("a", 1, shown(TIMES[1]), 1)]
        assert query.push([("a", [{"at": TIMES[2], "n": 2}, {"at": TIMES[0], "n": 0}])]) == [
            ("a", 1, shown(TIMES[2]), 2),
            ("a", 2, shown(TIMES[1]), 1),
        ]


def test_the_last_struct_is_found_among_partials_and_the_stored_one() -> None:
    definition = defined(visit=VISIT, n=LongType())
    last: list[Aggregate] = [statelog.Last("visit", by="n")]
    plan = plan_aggregates(definition, last, {}, output_mode="update", ttl=None, combine=True)
    with combined(plan) as query:
        for n, newest in ((1, 1), (0, 1), (2, 2)):
            assert query.push([("a", {"at": TIMES[n]}, n)]) == [("a", (shown(TIMES[newest]),))]
