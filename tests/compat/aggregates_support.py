"""What the tests of :mod:`tests.compat.test_aggregates` and others share."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Final

import statelog
from statelog.aggregates.build import (
    KeyedDefinition,
    KeyedPlan,
    plan_aggregates,
    plan_deduplication,
    plan_latest,
    plan_top,
)
from statelog.convert.types import key_schema
from statelog.testing.rows import read_schema

INPUT: Final = "user string, time timestamp, n long, x double, d decimal(38,2)"


EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


AGGREGATES: Final = {
    "rows": statelog.Count(),
    "total": statelog.Sum("n"),
    "mean": statelog.Mean("x"),
    "exact": statelog.Sum("d"),
    "exact mean": statelog.Mean("d"),
    "spread": statelog.StandardDeviation("x"),
    "newest": statelog.Max("time"),
    "least": statelog.Min("x"),
    "first": statelog.First("n"),
    "last": statelog.Last("n", by="time"),
    "all": statelog.Collect("n"),
    "distinct": statelog.CountDistinct("x"),
    "about": statelog.ApproxCountDistinct("n"),
    "quantiles": statelog.Quantiles("x", [0.1, 0.5], compression=20),
}


Rows = list[tuple[str | None, datetime.datetime, int | None, float | None, Decimal | None]]


def rows_of(user: str | None, numbers: range) -> Rows:
    return [(user, EPOCH + datetime.timedelta(seconds=n), n * 7 % 1000, n / 8, Decimal(n) / 4) for n in numbers]


def plan(operator: str) -> KeyedPlan:
    schema = read_schema(INPUT, "input")
    definition = KeyedDefinition(schema, [0], key_schema([schema["user"]]), None, is_streaming=True, ansi=False)
    match operator:
        case "agg":
            return plan_aggregates(definition, [], AGGREGATES, output_mode="update", ttl=None, combine=False)
        case "latest":
            return plan_latest(definition, "time", None, combine=False)
        case "top":
            return plan_top(definition, 3, "x", None, combine=False)
    return plan_deduplication(definition, None, None)
