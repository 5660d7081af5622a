"""Aggregates of keys, sketches among them, and newest, greatest and first rows, as each version has stored them."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pytest

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
from statelog.testing import Harness
from statelog.testing.rows import read_schema
from tests.compat.stored import read_query, write_query

FIXTURES: Final = Path(__file__).parent / "aggregates"
INPUT: Final = "user string, time timestamp, n long, x double, d decimal(38,2)"
EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
OPERATORS: Final = ("agg", "latest", "top", "dedup")
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
MOST: Final = Decimal("9" * 36)


def rows_of(user: str | None, numbers: range) -> Rows:
    return [(user, EPOCH + datetime.timedelta(seconds=n), n * 7 % 1000, n / 8, Decimal(n) / 4) for n in numbers]


# Few values, and more than a sketch holds as such; and decimals whose sum does not fit.
FIRST: Final[Rows] = [
    *rows_of("a", range(5)),
    *rows_of("b", range(900)),
    (None, EPOCH, None, None, None),
    *[("lost", EPOCH, 1, 1.0, MOST)] * 2,
]
SECOND: Final[Rows] = [
    *rows_of("a", range(3, 9)),
    *rows_of("b", range(800, 1000)),
    *rows_of(None, range(2)),
    *rows_of("c", range(3)),
    *rows_of("lost", range(2)),
]


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


def make_harness(made: KeyedPlan) -> Harness:
    return Harness(
        made.operator, input=INPUT, output=made.output, keys=["user"], timeMode=made.time_mode, parallelism=2
    )


def write(directory: Path) -> None:
    """Write the fixture: one batch of each operator."""
    for operator in OPERATORS:
        with make_harness(plan(operator)) as harness:
            harness.push(FIRST, 1_000)
            write_query(directory / operator, harness)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
def test_stored_aggregates_go_on(fixture: Path, operator: str) -> None:
    made = plan(operator)
    snapshot = read_query(fixture / operator, make_harness(made), [1_000])
    with Harness.restore(snapshot, made.operator, parallelism=3) as harness:
        found = _by_user(harness.push(SECOND, 2_000))
    with make_harness(plan(operator)) as harness:
        harness.push(FIRST, 1_000)
        harness.restart(3)
        assert found == _by_user(harness.push(SECOND, 2_000))
    if operator == "agg":
        assert [(user, row.rows, row.all) for user, row in found] == [
            ("None", 3, [0, 7]),
            *map(_counted, ["a", "b", "c", "lost"]),
        ]
        assert {user: row.exact for user, row in found if user in ("c", "lost")} == {"c": Decimal("0.75"), "lost": None}


def _by_user(rows: list[Any]) -> list[tuple[str, Any]]:
    return sorted((str(row[0]), row) for row in rows)


def _counted(user: str) -> tuple[str, int, list[int | None]]:
    numbers = [n for key, _, n, _, _ in FIRST + SECOND if key == user]
    return user, len(numbers), numbers
