"""What the tests of :mod:`tests.compat.test_windows` and others share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

import statelog
from statelog.convert.times import TimeMode
from statelog.testing import Harness
from statelog.windows.build import WindowDefinition, WindowPlan

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
