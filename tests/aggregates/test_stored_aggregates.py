"""Aggregates that a checkpoint describes are those of the query: every kind of them, found by text and fields."""

from __future__ import annotations

import datetime
import inspect
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

import statelog
from statelog import Aggregate
from statelog.aggregates.accumulators import bind_aggregates, value_details
from statelog.aggregates.groups import Groups
from statelog.aggregates.stored_aggregates import StoredAggregates
from statelog.convert.types import arrow_type
from statelog.testing.rows import read_schema

SCHEMA = read_schema(
    "n long, x double, d decimal(10, 2), large decimal(35, 2), time timestamp, local timestamp_ntz, text string",
    "input",
)
AGGREGATES: list[Aggregate] = [
    statelog.Count(),
    statelog.Count("x"),
    statelog.Sum("n"),
    statelog.Sum("d"),
    statelog.Mean("x"),
    statelog.Mean("d"),
    statelog.Mean("large"),
    statelog.Variance("x"),
    statelog.Variance("n", population=True),
    statelog.StandardDeviation("x"),
    statelog.StandardDeviation("x", population=True).alias("spread"),
    statelog.Min("time"),
    statelog.Max("text"),
    statelog.Max("local"),
    statelog.First("text"),
    statelog.Last("n"),
    statelog.First("n", by="time"),
    statelog.Last("text", by="n").alias("of n"),
    statelog.Collect("time"),
    statelog.CountDistinct("text"),
    statelog.ApproxCountDistinct("n"),
    statelog.ApproxCountDistinct("text", rsd=0.2).alias("about"),
]
QUANTILES = [statelog.Quantiles("x", [0.5]), statelog.Quantiles("n", [0.1, 0.9], compression=20).alias("few")]
ROWS = 400


def rows() -> pa.RecordBatch:
    numbers = np.random.default_rng(1).integers(0, 90, ROWS).tolist()
    start = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    values: dict[str, list[Any]] = {
        "n": [None if n % 7 == 0 else n for n in numbers],
        "x": [None if n % 5 == 0 else n / 8 for n in numbers],
        "d": [Decimal(n) / 4 for n in numbers],
        "large": [Decimal(n) / 4 for n in numbers],
        "time": [start + datetime.timedelta(milliseconds=n) for n in numbers],
        "local": [(start + datetime.timedelta(milliseconds=n)).replace(tzinfo=None) for n in numbers],
        "text": [str(n) for n in numbers],
    }
    fields = [pa.field(field.name, arrow_type(field.dataType, "a column")) for field in SCHEMA]
    return pa.RecordBatch.from_arrays([pa.array(values[f.name], f.type) for f in fields], schema=pa.schema(fields))


def described(aggregates: list[Aggregate]) -> dict[str, str]:
    return {one.output_name: str(one) for one in aggregates}


def stored_schema(aggregates: list[Aggregate]) -> pa.Schema:
    schema = bind_aggregates(aggregates, SCHEMA, ansi=True).schema
    return pa.schema([pa.field(field.name, arrow_type(field.dataType, "a field")) for field in schema])


def test_every_kind_of_aggregate_is_here() -> None:
    public = {each for _, each in inspect.getmembers(statelog, inspect.isclass) if issubclass(each, Aggregate)}
    assert {type(one) for one in [*AGGREGATES, *QUANTILES]} == public - {Aggregate}


def test_values_are_those_of_the_query() -> None:
    aggregates = [*AGGREGATES, *QUANTILES]
    bound = bind_aggregates(aggregates, SCHEMA, ansi=True)
    details = value_details(aggregates, bound.result)
    stored = StoredAggregates.of(described(aggregates), stored_schema(aggregates), details)
    assert stored is not None
    lifted = bound.lift(rows(), pa.array(range(ROWS)))
    panes = bound.reduce(lifted, Groups(np.arange(ROWS) // 20, ROWS // 20))
    windows = Groups(np.arange(ROWS // 20) // 7, 3)
    for own, expected in zip(stored.reduce(panes, windows), bound.reduce(panes, windows), strict=True):
        assert own.equals(expected)
    assert stored.result.names == [one.output_name for one in aggregates]
    for name, own, expected in zip(
        stored.result.names, stored.results(panes), bound.results(panes).columns, strict=True
    ):
        assert own.equals(expected), name
        assert own.type == stored.result.field(name).type


def test_what_else_values_follow_from_is_recorded() -> None:
    aggregates = [statelog.Collect("time"), statelog.Count(), statelog.Last("time").alias("at"), *QUANTILES]
    assert value_details(aggregates, bind_aggregates(aggregates, SCHEMA, ansi=True).result) == {
        "collect(time)": "array<timestamp>",
        "at": "timestamp",
        "quantiles(x)": "0.5",
        "few": "0.1, 0.9",
    }


def test_a_mean_of_decimals_has_the_type_of_the_query() -> None:
    aggregates: list[Aggregate] = [statelog.Mean("d"), statelog.Mean("large")]
    stored = StoredAggregates.of(described(aggregates), stored_schema(aggregates), {})
    assert stored is not None
    assert stored.result.types == [pa.decimal128(14, 6), pa.decimal128(38, 6)]


def test_a_removed_aggregate_has_no_value() -> None:
    aggregates: list[Aggregate] = [statelog.Count(), statelog.Mean("x")]
    stored = StoredAggregates.of(described([*AGGREGATES]), stored_schema(aggregates), {})
    assert stored is not None
    assert stored.result.names == ["count", "mean(x)"]


def test_what_is_not_described_is_not_guessed() -> None:
    schema = stored_schema(AGGREGATES[:3])
    assert StoredAggregates.of(described(AGGREGATES[:2]), schema, {}) is None
    assert StoredAggregates.of(described(AGGREGATES[:2]) | {"sum(n)": "median(n)"}, schema, {}) is None
