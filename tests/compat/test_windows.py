"""Aggregates in windows, computed on columns, as each version has stored them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

import statelog
from statelog.convert.times import TimeMode
from statelog.testing import Harness
from statelog.windows.build import WindowDefinition, WindowPlan
from tests.compat.stored import read_query, write_query

FIXTURES: Final = Path(__file__).parent / "windows"
INPUT: Final = StructType(
    [StructField("user", StringType()), StructField("time", TimestampType()), StructField("value", LongType())]
)
WINDOWS: Final[dict[str, Any]] = {
    "tumbling": statelog.TumblingWindows(10),
    "sliding": statelog.SlidingWindows(20, 10),
    "session": statelog.SessionWindows(10),
    "count": statelog.CountWindows(3),
}
FIRST: Final = [("a", 1), ("a", 5), ("a", 12), ("a", 33), ("b", 40)]
SECOND: Final = [("a", 3), ("a", 14), ("a", 38), ("a", 60)]


def definition(windows: str) -> WindowDefinition:
    has_time = windows != "count"
    return WindowDefinition(
        INPUT,
        ["user"],
        "UTC",
        WINDOWS[windows],
        TimeMode.EVENT_TIME if has_time else TimeMode.NONE,
        "time" if has_time else None,
    )


def plan(windows: str) -> WindowPlan:
    return definition(windows).aggregated(
        [
            statelog.Count(),
            statelog.Sum("value"),
            statelog.Mean("value"),
            statelog.Max("value"),
            statelog.CountDistinct("value"),
            statelog.Collect("value"),
            statelog.Last("value"),
        ]
    )


def make_harness(windows: str, made: WindowPlan | None = None) -> Harness:
    made = made or plan(windows)
    return Harness(
        made.operator,
        input=INPUT,
        output=made.output,
        keys=["user"],
        timeMode=made.time_mode,
        eventTime=None if windows == "count" else "time",
    )


def rows_at(times: list[tuple[str, int]]) -> list[tuple[Any, ...]]:
    return [(user, datetime.fromtimestamp(ms / 1000, UTC), ms) for user, ms in times]


def write(directory: Path) -> None:
    """Write the fixture: one batch, after which every kind of window has rows."""
    for windows in WINDOWS:
        with make_harness(windows) as harness:
            harness.push(rows_at(FIRST), 1_000)
            write_query(directory / windows, harness)


def in_windows(windows: str) -> list[list[int]]:
    """The values of each window that ends after the first batch, by hand."""
    if windows == "count":
        return [[33, 3, 14]]
    if windows == "session":
        return [[1, 3, 5, 12, 14], [33, 38], [40], [60]]
    size, slide = (10, 10) if windows == "tumbling" else (20, 10)
    found: list[list[int]] = []
    for user in ("a", "b"):
        times = sorted(ms for one, ms in FIRST + SECOND if one == user)
        inside = [[ms for ms in times if start <= ms < start + size] for start in range(slide - size, 100, slide)]
        found += [each for each in inside if each]
    return found


OPEN: Final = {
    "tumbling": [[1, 5], [12], [33], [40]],
    "sliding": [[1, 5], [1, 5, 12], [12], [33], [33], [40], [40]],
    "session": [[1, 5, 12], [33], [40]],
    "count": [[33], [40]],
}
"""The values of each window after the first batch, by hand."""


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
def test_windows_of_a_fixture_are_read_without_the_query(fixture: Path, windows: str, tmp_path: Path) -> None:
    location = shutil.copytree(fixture / windows, tmp_path / "location")  # a reader writes a pin
    rows = statelog.read_state(location, state="windows").read_all().to_pylist()
    values = [sorted(row["value_collect(value)"]) for row in rows]
    assert sorted(values) == OPEN[windows]
    for row, own in zip(rows, values, strict=True):
        found = [row[f"value_{name}"] for name in ("count", "sum(value)", "mean(value)", "max(value)", "last(value)")]
        assert found == [len(own), sum(own), sum(own) / len(own), max(own), max(own)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
@pytest.mark.parametrize("parallelism", [1, 3])
def test_fixture_is_read(fixture: Path, windows: str, parallelism: int) -> None:
    snapshot = read_query(fixture / windows, make_harness(windows), [1_000])
    with Harness.restore(snapshot, plan(windows).operator, parallelism=parallelism) as harness:
        found = harness.push(rows_at(SECOND), 2_000)
        found += [] if windows == "count" else harness.advanceWatermark(1_000)
    last: Callable[[list[int]], int] = (lambda values: values[-1]) if windows == "count" else max
    assert sorted(((*row[-7:-2], sorted(row[-2]), row[-1]) for row in map(tuple, found)), key=str) == sorted(
        (
            (
                len(values),
                sum(values),
                sum(values) / len(values),
                max(values),
                len(values),
                sorted(values),
                last(values),
            )
            for values in in_windows(windows)
        ),
        key=str,
    )
