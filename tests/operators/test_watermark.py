"""An operator's own watermark: the smallest of its inputs, monotone, the same at any parallelism."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import ConfigurationError, Watermark
from statelog.operators.event_time import WatermarkPolicy
from statelog.runs.times import NO_TIME_MS
from statelog.testing import Harness

times = st.none() | st.integers(-(10**15), 10**15)


delays = st.integers(0, 10**6)


@given(
    batches=st.lists(st.lists(st.tuples(times, times), min_size=1, max_size=4), max_size=8),
    delay_ms=delays | st.tuples(delays, delays),
)
def test_the_watermark_is_the_least_of_the_inputs_maxima(
    batches: list[list[tuple[int | None, int | None]]], delay_ms: int | tuple[int, int]
) -> None:
    policy = WatermarkPolicy.of(Watermark("at", delay_ms, inputs=2, input_column="source"))
    of_inputs = (delay_ms, delay_ms) if isinstance(delay_ms, int) else delay_ms
    watermark = expected = NO_TIME_MS
    held: list[int | None] = [None, None]
    seen: tuple[list[int], list[int]] = ([], [])
    for subtasks in batches:
        held = policy.combine([held, *subtasks])
        for pair in subtasks:
            for index, time_ms in enumerate(pair):
                if time_ms is not None:
                    seen[index].append(time_ms)
        watermark = policy.advance(watermark, held)
        reached = [max(of_input) - own for of_input, own in zip(seen, of_inputs, strict=True) if of_input]
        now = min(reached) if len(reached) == 2 else NO_TIME_MS
        expected = max(expected, now)
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


@given(
    batches=st.lists(st.tuples(st.integers(0, 60), times, times), min_size=1, max_size=12),
    idle_ms=st.tuples(st.none() | st.integers(1, 100), st.none() | st.integers(1, 100)),
)
def test_an_idle_input_does_not_hold_it_back(
    batches: list[tuple[int, int | None, int | None]], idle_ms: tuple[int | None, int | None]
) -> None:
    """The silence of an input is the sum of the gaps since its last batch, each up to a half of what makes it idle."""
    policy = WatermarkPolicy.of(Watermark("at", inputs=2, input_column="source", idle=idle_ms))
    watermark = expected = NO_TIME_MS
    held, silent = policy.combine([]), list[int]()
    for number, (gap_ms, *newest) in enumerate(batches):
        watermark = policy.advance(watermark, held, silent, gap_ms)
        awake, largest = [], []
        for index, own_ms in enumerate(idle_ms):
            before = batches[:number]
            heard = max((at for at, batch in enumerate(before) if batch[1 + index] is not None), default=0)
            gaps = [gap for gap, *_ in batches[heard + 1 : number + 1]]
            seen = [batch[1 + index] for batch in before if batch[1 + index] is not None]
            largest.append(max(seen, default=None))  # type: ignore[type-var]  # of numbers only
            if own_ms is None or sum(min(gap, (own_ms + 1) // 2) for gap in gaps) < own_ms:
                awake.append(largest[-1])
        known = [time_ms for time_ms in awake or largest if time_ms is not None]
        if known and (not awake or len(known) == len(awake)):
            expected = max(expected, min(known) if awake else max(known))
        assert watermark == expected
        silent = policy.silence(silent, [newest, [None, None]], gap_ms)
        held = policy.combine([held, newest])


def test_an_input_that_returns_is_waited_for_again_and_its_old_rows_are_late() -> None:
    with make_harness(Watermark("at", inputs=2, input_column="source", idle=100)) as harness:
        harness.push([("a", 0, at(5000))], 1000)
        harness.push([("a", 0, at(6000))], 1050)
        assert harness.push([], 1099) == []
        fired = harness.push([], 1100)
        assert fired == [Row(what="timer", at=time_ms, watermark=6000) for time_ms in (5000, 6000)]
        assert harness.repeatBatch(restart=True) == fired
        harness.restart(3, keepLocal=False)
        harness.push([("b", 1, at(4000)), ("b", 1, at(6500)), ("a", 0, at(9000))], 1110)
        assert harness.checkpoints[-1].late_rows == 1
        harness.push([("a", 0, at(9500))], 1150)
        harness.push([("a", 0, at(9500))], 1199)
        harness.push([("a", 0, at(9500))], 1209)
        assert harness.watermarkMs == 6500
        harness.push([], 1210)
        assert harness.watermarkMs == 9500


def test_a_query_that_was_stopped_for_long_waits_for_both_inputs() -> None:
    with make_harness(Watermark("at", inputs=2, input_column="source", idle=[100, None])) as harness:
        harness.push([("a", 0, at(5000)), ("b", 1, at(6000))], 1000)
        harness.restart()
        harness.push([("b", 1, at(7000))], 900_000)
        assert harness.watermarkMs == 5000
        harness.push([], 900_010)
        assert harness.watermarkMs == 5000
        harness.push([], 900_050)
        assert harness.watermarkMs == 7000


def test_if_all_inputs_are_idle_the_largest_watermark_counts() -> None:
    with make_harness(Watermark("at", inputs=2, input_column="source", idle=100)) as harness:
        harness.push([("a", 0, at(5000)), ("b", 1, at(6000))], 1000)
        for time_ms, watermark_ms in ((1050, 5000), (1099, 5000), (1100, 6000)):
            harness.push([], time_ms)
            assert harness.watermarkMs == watermark_ms


def test_nothing_is_recorded_of_inputs_that_are_never_idle() -> None:
    for idle in (None, [None, None]):
        policy = WatermarkPolicy.of(Watermark("at", inputs=2, input_column="source", idle=idle))
        assert policy.silence([5, 6], [[1, 2]], 7) == []
    assert WatermarkPolicy.of(Watermark("at", 3, inputs=2, input_column="source", idle=[None, 9])).idle_ms == (None, 9)


HOUR_MS = 3_600_000
NOW_MS = 1_700_000_000_000
FAR_MS = NOW_MS + 20 * 365 * 24 * HOUR_MS


def test_a_row_too_far_ahead_of_processing_time_does_not_move_it() -> None:
    with make_harness(Watermark("at", delay=100, max_ahead=HOUR_MS)) as harness:
        harness.push([("a", 0, at(NOW_MS)), ("broken", 0, at(FAR_MS)), ("b", 0, at(NOW_MS + HOUR_MS + 1))], NOW_MS)
        assert harness.repeatBatch() == harness.repeatBatch(restart=True)
        harness.push([("c", 0, at(NOW_MS + HOUR_MS))])  # not too far
        assert harness.watermarkMs == NOW_MS - 100
        harness.restart(3, keepLocal=False)
        harness.push([])
        assert harness.watermarkMs == NOW_MS + HOUR_MS - 100
        assert [checkpoint.late_rows for checkpoint in harness.checkpoints] == [0] * 4


def test_of_several_inputs_each_may_be_ahead() -> None:
    watermark = Watermark("at", inputs=2, input_column="source", max_ahead=0)
    with make_harness(watermark) as harness:
        harness.push([("a", 0, at(500)), ("b", 1, at(2000)), ("c", 1, at(700))], 1000)
        harness.push([])
        assert harness.watermarkMs == 500
        harness.push([("a", 0, at(900))], 1000)
        harness.push([])
        assert harness.watermarkMs == 700


def test_rows_that_are_late_because_of_a_row_from_the_future_are_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("statelog.coordinator.checkpoint_metrics")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger.name)
    with make_harness(Watermark("at", delay=HOUR_MS)) as harness:
        harness.push([("a", 0, at(NOW_MS))], NOW_MS)
        harness.push([("a", 0, at(NOW_MS - 2 * HOUR_MS))])
        harness.push([("a", 0, at(NOW_MS - 2 * HOUR_MS)), ("broken", 0, at(FAR_MS))])
        assert [checkpoint.late_rows for checkpoint in harness.checkpoints] == [0, 0, 1]
        assert caplog.records == [], "late, and no fault of the clock"
        harness.push([])
        harness.push([])
        harness.push([("a", 0, at(NOW_MS)), ("b", 0, at(NOW_MS))])
        harness.push([("a", 0, at(NOW_MS))])
        said = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert [level for level, _ in said] == ["WARNING", "INFO"]
        assert "late rows: 2 in batch 5, 2 since the watermark has been ahead of the clock" in said[0][1]
        assert "it is 2043-11-09 21:13:20, and the batch's processing time is 2023-11-14" in said[0][1]
        assert "the latest 2043-11-09 22:13:20" in said[0][1]
        assert "late rows: 1 in batch 6, 3 since" in said[1][1]
        harness.restart(2)
        harness.push([("a", 0, at(NOW_MS))])
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


def test_the_warning_is_also_for_sparks_watermark(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("statelog.coordinator.checkpoint_metrics")
    monkeypatch.setattr(logger, "propagate", True)
    arguments: dict[str, Any] = {"input": "k string, at timestamp", "keys": ["k"], "timeMode": "EventTime"}
    output = "what string, at long, watermark long"
    with Harness(Times(), output=output, eventTime="at", **arguments) as harness:
        harness.push([("a", at(NOW_MS))], NOW_MS)
        harness.advanceWatermark(FAR_MS)
        harness.push([("a", at(NOW_MS))])
        assert len(caplog.records) == 1
        harness.push([], FAR_MS)  # the clock has caught up
        harness.push([("a", at(NOW_MS))])
        assert len(caplog.records) == 1
        harness.advanceWatermark(FAR_MS + 2)
        harness.push([("a", at(NOW_MS))])
        assert len(caplog.records) == 2


def test_the_longest_delay_of_several_inputs() -> None:
    watermark = Watermark("at", ["1 second", 200], inputs=2, input_column="source")
    assert watermark.delays_ms == (1000, 200)
    assert watermark.delay_ms == 1000
    assert Watermark("at", [7]) == Watermark("at", 7)
    assert Watermark("at", 7, inputs=2, input_column="source").delays_ms == (7, 7)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"delay": -1}, "delay is int -1"),
        ({"delay": 1.5}, "delay is float 1.5"),
        ({"max_ahead": -1}, "max_ahead is int -1"),
        ({"max_ahead": True}, "max_ahead is bool True"),
        ({"delay": [5, -1], "inputs": 2, "input_column": "source"}, "delay is int -1"),
        ({"delay": [5, 6]}, "2 delays but 1 inputs"),
        ({"delay": ["5 seconds"], "inputs": 2, "input_column": "source"}, "1 delays but 2 inputs"),
        ({"delay": []}, "0 delays but 1 inputs"),
        ({"delay": [], "inputs": 0}, "0 delays but 0 inputs"),
        ({"idle": 0}, "idle is int 0"),
        ({"idle": [5, "soon"], "inputs": 2, "input_column": "source"}, "idle is str 'soon'"),
        ({"idle": [5, 6]}, "2 values of idle but 1 inputs"),
        ({"idle": [], "inputs": 0}, "0 values of idle but 0 inputs"),
        ({"inputs": 0}, "inputs"),
        ({"inputs": 2}, "input_column"),
        ({"input_column": "source"}, "input_column"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        Watermark("at", **arguments)
