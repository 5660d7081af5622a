"""An operator's own watermark: the smallest of its inputs, monotone, the same at any parallelism."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import ConfigurationError, Watermark
from statelog.operators.watermark import WatermarkPolicy
from statelog.runs.times import NO_TIME_MS
from statelog.testing import Harness

times = st.none() | st.integers(-(10**15), 10**15)


@given(
    batches=st.lists(st.lists(st.tuples(times, times), min_size=1, max_size=4), max_size=8),
    delay_ms=st.integers(0, 10**6),
)
def test_the_watermark_is_the_least_of_the_inputs_maxima(
    batches: list[list[tuple[int | None, int | None]]], delay_ms: int
) -> None:
    policy = WatermarkPolicy(delay_ms, inputs=2)
    watermark = NO_TIME_MS
    held: list[int | None] = [None, None]
    seen: tuple[list[int], list[int]] = ([], [])
    for subtasks in batches:
        held = policy.combine([held, *subtasks])
        for pair in subtasks:
            for index, time_ms in enumerate(pair):
                if time_ms is not None:
                    seen[index].append(time_ms)
        watermark = policy.advance(watermark, held)
        expected = min(map(max, seen)) - delay_ms if all(seen) else NO_TIME_MS
        assert watermark == expected


def test_a_longer_delay_does_not_move_it_back() -> None:
    assert WatermarkPolicy(100).advance(950, [1000]) == 950
    assert WatermarkPolicy(10).advance(950, [1000]) == 990
    assert WatermarkPolicy(0, inputs=2).advance(950, [1000]) == 950


class Times(StatefulProcessor):
    """Returns the watermark; every row asks for a timer at its time."""

    def init(self, handle: Any) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._handle.registerTimer(int(row.at.timestamp() * 1000))
            yield Row(what="row", at=int(row.at.timestamp() * 1000), watermark=timerValues.getCurrentWatermarkInMs())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        yield Row(what="timer", at=at, watermark=timerValues.getCurrentWatermarkInMs())

    def close(self) -> None:
        pass


def at(time_ms: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC)


def make_harness(watermark: Watermark) -> Harness:
    return Harness(
        Times(),
        input="k string, source int, at timestamp",
        keys=["k"],
        output="what string, at long, watermark long",
        timeMode="EventTime",
        watermark=watermark,
        parallelism=2,
    )


def test_it_follows_the_rows_across_restarts_and_parallelisms() -> None:
    with make_harness(Watermark("at", delay=100)) as harness:
        assert [row.watermark for row in harness.push([("a", 0, at(1000)), ("b", 0, at(400))])] == [NO_TIME_MS] * 2
        harness.restart(5, keepLocal=False)
        fired = harness.push([])
        assert fired == [Row(what="timer", at=400, watermark=900)]
        harness.push([("c", 0, at(700))])  # the batch before had watermark 900
        assert harness.checkpoints[-1].late_rows == 1
        harness.restart(1)
        assert harness.push([("d", 0, at(901))]) == [Row(what="row", at=901, watermark=900)]
        assert harness.watermarkMs == 900


def test_an_input_without_rows_holds_it_back() -> None:
    with make_harness(Watermark("at", inputs=2, input_column="source")) as harness:
        harness.push([("a", 0, at(5000))])
        assert harness.push([]) == []
        assert harness.watermarkMs == NO_TIME_MS
        harness.push([("b", 1, at(3000))])
        assert harness.push([]) == [Row(what="timer", at=3000, watermark=3000)]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"delay": -1}, "delay is int -1"),
        ({"delay": 1.5}, "delay is float 1.5"),
        ({"inputs": 0}, "inputs"),
        ({"inputs": 2}, "input_column"),
        ({"input_column": "source"}, "input_column"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        Watermark("at", **arguments)
