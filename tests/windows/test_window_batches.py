"""Windows do not depend on the places where a stream is cut into batches, down to the last bit of a double."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row

import statelog
from statelog import SessionWindows, SlidingWindows, TumblingWindows, Watermark
from statelog.convert.ddl import parse_ddl
from statelog.convert.times import TimeMode
from statelog.testing import Harness
from statelog.testing.rows import read_schema
from statelog.windows.build import WindowDefinition, WindowPlan
from tests.model.windows_model import grid, instant

INPUT = "user string, time timestamp, x double"


class Total(statelog.AggregateFunction[Any, Any]):
    """The sum."""

    def createAccumulator(self) -> tuple[Any, ...]:
        return (0.0, 0)

    def add(self, value: Any, accumulator: Any) -> tuple[Any, ...]:
        return (accumulator[0] + value.x, accumulator[1] + 1)

    def getResult(self, accumulator: Any) -> tuple[Any, ...]:
        return tuple(accumulator)

    def merge(self, one: Any, other: Any) -> tuple[Any, ...]:
        return (one[0] + other[0], one[1] + other[1])


class Sum(statelog.WindowProcessor):
    """The sum, one row after the other."""

    def process(self, key: Any, window: Any, rows: Any, context: Any) -> Iterator[Row]:
        total, count = 0.0, 0
        for row in rows:
            total, count = total + row.x, count + 1
        yield Row(user=key[0], start=window.start, end=window.end, total=total, count=count)


KINDS: dict[str, Callable[[WindowDefinition], WindowPlan]] = {
    "agg": lambda windows: windows.aggregated([statelog.Sum("x"), statelog.Count()]),
    "aggregate": lambda windows: windows.folded(Total(), "total double, count int", "total double, count int"),
    "reduce": lambda windows: windows.reduced(
        lambda one, other: (one[0] + other[0], one[1] + other[1]), "total double, count long", lambda row: (row.x, 1)
    ),
    "process": lambda windows: windows.processed(
        Sum(), "user string, start timestamp, end timestamp, total double, count long"
    ),
}
WINDOWS = st.one_of(
    st.builds(TumblingWindows, st.integers(1, 30), st.integers(-9, 9)),
    st.builds(SlidingWindows, st.integers(1, 60), st.integers(1, 9), st.integers(-9, 9)),
    st.builds(SessionWindows, st.integers(1, 5)),
)
Event = tuple[str, int, float]


def _events(seed: int, steps: list[int]) -> list[Event]:
    """Events in order of time, with numbers whose sum depends on the order of the additions."""
    rng, now_ms = random.Random(seed), 0
    events: list[Event] = []
    for step_ms in steps:
        now_ms += step_ms
        events.append((rng.choice("ab"), now_ms, rng.random() * 10.0 ** rng.randrange(-8, 9)))
    return events


def _run(windows: Any, kind: str, events: list[Event], cuts: list[int]) -> list[tuple[Any, ...]]:
    """All results of the stream, cut before each of these events; the last events complete all windows."""
    definition = WindowDefinition(
        read_schema(INPUT, "input"), ["user"], "UTC", windows, TimeMode.EVENT_TIME, "time", parse=parse_ddl
    )
    plan = KINDS[kind](definition)
    rows = [(user, instant(time_ms), x) for user, time_ms, x in [*events, ("z", 100_000, 0.0)]]
    with Harness(
        plan.operator,
        input=INPUT,
        output=plan.output,
        keys=["user"],
        timeMode=plan.time_mode,
        watermark=Watermark("time"),
        parallelism=1,
    ) as harness:
        bounds = [0, *cuts, len(rows)]
        found = [row for start, end in pairwise(bounds) for row in harness.push(rows[start:end])]
        return sorted(tuple(row) for row in [*found, *harness.push([])])


def _by_hand(windows: Any, events: list[Event]) -> dict[tuple[str, int, int], list[float]]:
    """The numbers in each window."""
    found: dict[tuple[str, int, int], list[float]] = {}
    for user in "ab":
        own = [(time_ms, x) for name, time_ms, x in events if name == user]
        if isinstance(windows, SessionWindows):
            start = end = 0
            for place, (time_ms, x) in enumerate(own):
                if not place or time_ms > end:
                    start = time_ms
                numbers = found.pop((user, start, end), [])
                end = time_ms + windows.gap_ms
                found[user, start, end] = [*numbers, x]
            continue
        size, slide, offset = grid(windows)
        for time_ms, x in own:
            for first in range(time_ms - size + 1, time_ms + 1):
                if (first - offset) % slide == 0:
                    found.setdefault((user, first, first + size), []).append(x)
    return found


@settings(deadline=None, max_examples=40)
@given(
    windows=WINDOWS,
    kind=st.sampled_from(list(KINDS)),
    seed=st.integers(0, 999),
    steps=st.lists(st.sampled_from([0, 1, 1, 2, 3, 20, 70]), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=8).map(sorted),
)
def test_the_cut_into_batches_makes_no_difference(
    windows: Any, kind: str, seed: int, steps: list[int], cuts: list[int]
) -> None:
    events = _events(seed, steps)
    at_once = _run(windows, kind, events, [])
    assert _run(windows, kind, events, [min(cut, len(events)) for cut in cuts]) == at_once
    expected = _by_hand(windows, events)
    assert len(at_once) == len(expected)
    for (user, start_ms, end_ms), row in zip(sorted(expected), at_once, strict=True):
        numbers = expected[user, start_ms, end_ms]
        bounds = [_local(start_ms), _local(end_ms)]
        assert [*row[:3], row[4]] == [user, *bounds, len(numbers)]
        assert math.isclose(row[3], math.fsum(numbers), rel_tol=1e-9)
        if kind == "process":
            assert row[3] == reduce(operator.add, numbers, 0.0)


def _local(time_ms: int) -> Any:
    """As Spark's collect() returns an instant."""
    at = instant(time_ms)
    assert at is not None
    return at.astimezone().replace(tzinfo=None)


@pytest.mark.parametrize("kind", list(KINDS))
def test_sums_of_overlapping_windows_are_the_same_in_every_cut(kind: str) -> None:
    """Many panes, and many windows in a batch: here another order of the additions would show."""
    windows, events = SlidingWindows(200, 7), _events(3, [1] * 700)
    at_once = _run(windows, kind, events, [])
    assert len(at_once) > 200
    for batches in (2, 7, 60):
        cuts = sorted(random.Random(batches).sample(range(len(events)), batches - 1))
        assert _run(windows, kind, events, cuts) == at_once
