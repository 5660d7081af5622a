"""What the tests of :mod:`tests.model.test_aggregates_model` and others share."""

from __future__ import annotations

from typing import Any

import statelog
from statelog import Ttl
from statelog.aggregates.build import (
    KeyedDefinition,
    KeyedPlan,
    plan_aggregates,
)
from statelog.convert.types import key_schema
from statelog.testing.rows import read_schema

INPUT = "user string, time timestamp, n long, x double"


AGGREGATES = {
    "rows": statelog.Count(),
    "total": statelog.Sum("n"),
    "least": statelog.Min("x"),
    "newest": statelog.Max("time"),
    "first": statelog.First("n"),
    "last": statelog.Last("n", by="time"),
    "all": statelog.Collect("n"),
    "distinct": statelog.CountDistinct("x"),
    "about": statelog.ApproxCountDistinct("x"),
    "median": statelog.Quantiles("n", [0.5]),
}


def defined(keys: list[str], event_time: str | None = None) -> KeyedDefinition:
    schema = read_schema(INPUT, "input")
    return KeyedDefinition(
        schema,
        [schema.names.index(name) for name in keys],
        key_schema([schema[name] for name in keys]),
        event_time,
        is_streaming=True,
        ansi=True,
    )


def planned(
    keys: list[str],
    *,
    output_mode: str = "update",
    ttl: int | Ttl | None = None,
    event_time: str | None = None,
    aggregates: dict[str, Any] | None = None,
    combine: bool = False,
) -> KeyedPlan:
    definition = defined(keys, event_time)
    named = AGGREGATES if aggregates is None else aggregates
    return plan_aggregates(definition, [], named, output_mode=output_mode, ttl=ttl, combine=combine)
