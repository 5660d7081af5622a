"""Aggregates of keys, sketches among them, and newest, greatest and first rows, as each version has stored them."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pytest

from statelog.aggregates.build import (
    KeyedPlan,
)
from statelog.testing import Harness
from tests.compat.aggregates_support import EPOCH, INPUT, Rows, plan, rows_of
from tests.compat.stored import read_query, write_query

FIXTURES: Final = Path(__file__).parent / "aggregates"
OPERATORS: Final = ("agg", "latest", "top", "dedup")

MOST: Final = Decimal("9" * 36)


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
