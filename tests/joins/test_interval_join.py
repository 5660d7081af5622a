"""Interval joins against a brute-force model, without Spark: late rows, silences, restarts, rescaling, large keys."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import statelog
from statelog import ConfigurationError, ProcessorError
from statelog.runs.byte_slices import BUDGET, Budget
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from tests.joins.joins_model import Event, JoinModel, join_harness, join_plan, numbers, with_budget

KINDS = ["inner", "left", "right", "full", "semi", "anti"]

BOUNDS = st.tuples(st.integers(-12, 12), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))
BUDGETS = st.sampled_from([BUDGET, Budget(prefetch_entries=1), Budget(prefetch_entries=120), Budget(slice_bytes=200)])
KEYS = st.sampled_from(["a", "b", "c", None])
ROWS = st.lists(
    st.tuples(st.integers(0, 1), KEYS, st.none() | st.integers(-4, 8), st.sampled_from([0, 0, 0, 1, 999])), max_size=8
)
STEPS = st.lists(
    st.tuples(st.integers(0, 9), ROWS, st.sampled_from([None, None, "restart", "repeat"]), st.integers(1, 3)),
    min_size=1,
    max_size=7,
)


DELAYS = st.tuples(st.integers(0, 6), st.integers(0, 6))
IDLE = st.none() | st.integers(1, 15)
TIMEOUTS = st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=4)


@pytest.mark.parametrize("how", KINDS)
@settings(max_examples=25)
@given(bounds=BOUNDS, delays_ms=DELAYS, idle_ms=IDLE, budget=BUDGETS, steps=STEPS)
def test_batches_are_those_of_the_model(
    how: str, bounds: tuple[int, int], delays_ms: tuple[int, int], idle_ms: int | None, budget: Budget, steps: list[Any]
) -> None:
    compare_with_model(_model(how, bounds, delays_ms, idle_ms), budget, steps, [None])


@pytest.mark.parametrize("how", KINDS)
@settings(max_examples=25)
@given(bounds=BOUNDS, delays_ms=DELAYS, budget=BUDGETS, steps=STEPS)
def test_batches_with_a_condition_are_those_of_the_model(
    how: str, bounds: tuple[int, int], delays_ms: tuple[int, int], budget: Budget, steps: list[Any]
) -> None:
    """It is null if the left row has number 1 or 2, which is no match."""
    left, right = pc.field("n_left"), pc.field("n_right")
    mixed = pc.bit_wise_and(pc.bit_wise_xor(left, right), 3)
    condition = pc.if_else(pc.is_in(left, pa.array([1, 2])), pa.scalar(None, pa.bool_()), mixed != 0)
    model = _model(how, bounds, delays_ms, None)
    model.condition = lambda one, other: one.n not in (1, 2) and (one.n ^ other.n) & 3 != 0
    compare_with_model(model, budget, steps, [None], condition)


@pytest.mark.parametrize("how", ["left", "right", "full", "anti"])
@settings(max_examples=25)
@given(bounds=BOUNDS, delays_ms=DELAYS, idle_ms=IDLE, budget=BUDGETS, steps=STEPS, timeouts_ms=TIMEOUTS)
@example(
    bounds=(0, 5),
    delays_ms=(0, 0),
    idle_ms=None,
    budget=Budget(prefetch_entries=1),
    steps=[(1, [(0, "a", 0, 0), (0, "a", 3, 0), (1, "a", 1, 0)], None, 1), (4, [], "restart", 2), (4, [], "repeat", 1)],
    timeouts_ms=[20, 5],
)
def test_batches_with_a_timeout_are_those_of_the_model(
    how: str,
    bounds: tuple[int, int],
    delays_ms: tuple[int, int],
    idle_ms: int | None,
    budget: Budget,
    steps: list[Any],
    timeouts_ms: list[int | None],
) -> None:
    """A start has the next one of the timeouts."""
    compare_with_model(_model(how, bounds, delays_ms, idle_ms), budget, steps, timeouts_ms)


def _model(how: str, bounds: tuple[int, int], delays_ms: tuple[int, int], idle_ms: int | None) -> JoinModel:
    return JoinModel(how=how, lower_ms=bounds[0], upper_ms=bounds[1], delays_ms=delays_ms, idle_ms=idle_ms)


def compare_with_model(
    model: JoinModel, budget: Budget, steps: list[Any], timeouts_ms: list[int | None], condition: Any = None
) -> None:
    """Each batch is as many milliseconds after the one before as its step says, and its rows are around that time."""
    how, starts = model.how, 0
    plans = [join_plan(how, model.lower_ms, model.upper_ms, timeout_ms, condition) for timeout_ms in timeouts_ms]
    model.timeout_ms = timeouts_ms[0]
    with join_harness(plans[0], model.delays_ms, model.idle_ms, parallelism=2) as harness:
        with_budget(harness, budget)
        now_ms = number = 0
        for step_ms, rows, action, parallelism in [*steps, *_last_steps()]:
            now_ms += step_ms
            events: list[Event] = []
            for side, key, distance_ms, us in rows:
                time_us = None if distance_ms is None else (now_ms + distance_ms) * 1000 + us
                events.append(Event(side, key, time_us, number))
                number += 1
            found = harness.push([event.row for event in events], now_ms)
            late = model.late
            assert numbers(found, how) == model.push(events, step_ms)
            assert harness.checkpoints[-1].late_rows == model.late - late
            if action == "restart":
                starts += 1
                model.timeout_ms = timeouts_ms[starts % len(plans)]
                harness.restart(parallelism, keepLocal=parallelism == 2, processor=plans[starts % len(plans)].operator)
                with_budget(harness, budget)
            elif action == "repeat":
                harness.repeatBatch(restart=parallelism == 2)
        for key in ("a", "b", "c"):
            assert not harness.map("join.left", key)
            assert not harness.map("join.right", key)
            assert not harness.timers(key)


A, B = 0, 1
"""Sides."""


def _push(harness: Harness, how: str, *rows: tuple[int, str | None, int | None, int]) -> list[Any]:
    """Run a batch of rows, each a side, a key, a time in milliseconds, and a number; returns the pairs of numbers."""
    events = [Event(side, key, None if ms is None else ms * 1000, n) for side, key, ms, n in rows]
    return sorted(numbers(harness.push([event.row for event in events]), how).elements(), key=str)


def test_rows_that_wait_are_joined_by_new_bounds() -> None:
    with join_harness(join_plan("left", 0, 10), delays_ms=(100, 100)) as harness:
        assert _push(harness, "left", (A, "a", 100, 1), (B, "a", 120, 2), (B, "z", 100, 3)) == []
        harness.restart(processor=join_plan("left", 0, 30).operator)
        assert _push(harness, "left", (B, "a", 125, 4), (A, "a", 90, 5)) == [(1, 4), (5, 2)]
        harness.restart(processor=join_plan("left", 25, 26).operator)
        assert _push(harness, "left", (B, "a", 126, 6), (A, "a", 94, 7)) == [(1, 6), (7, 2)]
        assert _push(harness, "left", (A, "y", 1000, 8), (B, "y", 2000, 9)) == []
        assert _push(harness, "left") == []
        assert not harness.map("join.left", "a")
        assert not harness.map("join.right", "a")


def test_rows_that_wait_are_joined_by_a_new_condition() -> None:
    """A row that has met a match by the old one is not returned without one."""
    left, right = pc.field("n_left"), pc.field("n_right")
    with join_harness(join_plan("left", 0, 10, condition=right > left)) as harness:
        assert _push(harness, "left", (A, "a", 100, 3), (A, "a", 100, 5), (B, "a", 101, 4)) == [(3, 4)]
        harness.restart(processor=join_plan("left", 0, 10, condition=right < left).operator)
        assert _push(harness, "left", (B, "a", 102, 2)) == [(3, 2), (5, 2)]
        harness.restart(processor=join_plan("left", 0, 10).operator)
        assert _push(harness, "left", (B, "a", 103, 6), (A, "a", 104, 7)) == [(3, 6), (5, 6)]
        assert _push(harness, "left", (A, "z", 1000, 8), (B, "z", 1001, 9)) == [(8, 9)]
        assert _push(harness, "left") == [(7, None)]


def test_a_condition_that_fails_for_a_pair_is_named() -> None:
    condition = pc.divide(pc.field("n_left"), pc.field("n_right")) > 1
    with (
        join_harness(join_plan("left", 0, 10, condition=condition)) as harness,
        pytest.raises(ProcessorError, match=r"join_interval: condition .*divide.* failed for a pair: divide by zero"),
    ):
        _push(harness, "left", (A, "a", 100, 1), (B, "a", 101, 0))


@pytest.mark.parametrize(("before", "after"), [("inner", "left"), ("left", "full"), ("semi", "anti")])
def test_another_kind_of_join_is_refused_at_a_restart(before: str, after: str) -> None:
    with join_harness(join_plan(before, 0, 10)) as harness:
        _push(harness, before, (A, "a", 100, 1))
        with pytest.raises(ConfigurationError, match=f"join='{before}, by at and seen'.*join='{after}, by"):
            harness.restart(processor=join_plan(after, 0, 10).operator)


def test_a_row_waits_until_the_watermark_has_passed_its_interval() -> None:
    """A row that comes after its counterpart was returned without a match is late itself."""
    with join_harness(join_plan("left", 0, 10), delays_ms=(0, 0)) as harness:
        assert _push(harness, "left", (A, "a", 100, 1), (A, "b", 100, 2), (A, "y", 109, 3), (B, "z", 109, 4)) == []
        assert _push(harness, "left", (A, "y", 110, 5), (B, "z", 110, 6)) == []
        assert _push(harness, "left", (B, "a", 110, 7)) == [(1, 7), (2, None)]
        assert harness.watermarkMs == 110
        assert _push(harness, "left", (B, "b", 110, 8)) == []
        assert harness.checkpoints[-1].late_rows == 1


def test_a_row_waits_for_those_of_the_same_millisecond_that_are_not_late() -> None:
    with join_harness(join_plan("left", 0, 0)) as harness:
        harness.push([Event(A, "a", 100_500, 1).row, Event(B, "z", 100_000, 2).row])
        assert harness.push([]) == []
        assert harness.watermarkMs == 100
        assert numbers(harness.push([Event(B, "a", 100_500, 3).row]), "left") == {(1, 3): 1}


def test_rows_with_a_null_match_none_and_are_returned_at_once() -> None:
    with join_harness(join_plan("full", 0, 10)) as harness:
        found = _push(harness, "full", (A, None, 100, 1), (B, None, 100, 2), (A, "a", None, 3), (B, "a", None, 4))
        assert found == [(1, None), (3, None), (None, 2), (None, 4)]
        assert not harness.map("join.left", None)
        assert not harness.map("join.right", "a")


def test_a_silent_side_holds_back_the_watermark() -> None:
    with join_harness(join_plan("left", 0, 10)) as harness:
        assert _push(harness, "left", (A, "a", 100, 1)) == []
        assert _push(harness, "left", (A, "b", 10_000, 2)) == []
        assert _push(harness, "left") == []
        assert _push(harness, "left", (B, "a", 105, 3)) == [(1, 3)]


def test_an_idle_side_does_not_hold_back_the_watermark() -> None:
    with join_harness(join_plan("left", 0, 10), idle_ms=1000) as harness:
        assert _push(harness, "left", (A, "a", 100, 1)) == []
        returned = {}
        for time_ms in (400, 800, 1200):
            found = harness.push([Event(A, "b", time_ms * 1000, time_ms).row], time_ms)
            returned[harness.watermarkMs] = sorted(row.n_left for row in found)
        assert returned == {-(1 << 63): [], 800: [1, 400]}
        assert [row.n_left for row in harness.push([], 1201)] == [800]
        found = _push(harness, "left", (B, "b", 1205, 2), (B, "b", 805, 3))
        assert found == [(1200, 2)]
        assert harness.checkpoints[-1].late_rows == 1


def _arrivals(harness: Harness) -> list[Any]:
    """The key and the time of each arrival in the state."""
    location = parts_of(harness).query.location
    rows = statelog.read_state(location, state="join.arrivals", columns=["key_k", "time_ms"]).read_all()
    return sorted(tuple(row.values()) for row in rows.to_pylist())


def _push_at(harness: Harness, how: str, now_ms: int, *rows: tuple[int, str | None, int, int]) -> list[Any]:
    """As :func:`_push`, at a processing time."""
    found = harness.push([Event(side, key, ms * 1000, n).row for side, key, ms, n in rows], now_ms)
    return sorted(numbers(found, how).elements(), key=str)


def test_a_row_waits_for_its_first_match_until_its_timeout() -> None:
    """The right side is silent, so the watermark stands still; nothing stays in the state of what was returned."""
    with join_harness(join_plan("left", 0, 10, timeout=1000)) as harness:
        assert _push_at(harness, "left", 0, (A, "a", 100, 1), (A, "b", 200, 2)) == []
        assert _push_at(harness, "left", 600, (A, "a", 300, 3)) == []
        assert _arrivals(harness) == [("a", 0), ("a", 600), ("b", 0)]
        assert _push_at(harness, "left", 999) == []
        assert _push_at(harness, "left", 1000) == [(1, None), (2, None)]
        assert [list(harness.timers(key)) for key in ("a", "b")] == [[310], []]
        assert _push_at(harness, "left", 1599) == []
        assert _push_at(harness, "left", 1600) == [(3, None)]
        assert not harness.map("join.left", "a")
        assert not harness.timers("a")
        assert _arrivals(harness) == []


@pytest.mark.parametrize(
    ("how", "first", "later", "last"),
    [
        ("left", [(1, None)], [(4, 2)], []),
        ("right", [(None, 2)], [(1, 3)], []),
        ("full", [(1, None), (None, 2)], [], [(4, None), (None, 3)]),
        ("anti", [(1, None)], [], []),
    ],
)
def test_a_row_that_was_returned_without_a_match_matches_no_later_one(
    how: str, first: list[Any], later: list[Any], last: list[Any]
) -> None:
    """The later row is like any other: it has pairs with rows that still wait, and a timeout of its own."""
    with join_harness(join_plan(how, -10, 10, timeout=1000)) as harness:
        assert _push_at(harness, how, 0, (A, "a", 100, 1), (B, "b", 100, 2)) == []
        assert _push_at(harness, how, 1000) == first
        assert _push_at(harness, how, 1500, (B, "a", 105, 3), (A, "b", 105, 4)) == later
        assert _push_at(harness, how, 2500) == last


def test_a_match_in_the_batch_of_the_timeout_counts() -> None:
    with join_harness(join_plan("left", 0, 10, timeout=1000)) as harness:
        assert _push_at(harness, "left", 0, (A, "a", 100, 1)) == []
        assert _push_at(harness, "left", 5000, (B, "a", 105, 2)) == [(1, 2)]
        assert _push_at(harness, "left", 9000, (B, "a", 106, 3)) == [(1, 3)]


def test_a_repeated_batch_goes_by_its_recorded_time() -> None:
    with join_harness(join_plan("left", 0, 10, timeout=1000)) as harness:
        _push_at(harness, "left", 0, (A, "a", 100, 1))
        assert _push_at(harness, "left", 1000) == [(1, None)]
        assert len(harness.repeatBatch(restart=True)) == 1
        assert _push_at(harness, "left", 1001) == []


def test_waiting_rows_go_by_the_timeout_of_the_newest_start() -> None:
    """It counts from their arrival; a row that came while there was none waits for the watermark."""
    plans = {timeout_ms: join_plan("left", 0, 10, timeout_ms).operator for timeout_ms in (None, 1000, 5000)}
    with join_harness(join_plan("left", 0, 10)) as harness:
        _push_at(harness, "left", 0, (A, "a", 100, 1), (B, "z", 50, 2))
        harness.restart(processor=plans[5000])
        assert _push_at(harness, "left", 10, (A, "a", 100, 3)) == []
        harness.restart(processor=plans[1000])
        assert _push_at(harness, "left", 1009) == []
        assert _push_at(harness, "left", 1010, (A, "a", 101, 4)) == [(3, None)]
        harness.restart(processor=plans[None])
        assert _push_at(harness, "left", 9000) == []
        harness.restart(processor=plans[5000])
        assert _push_at(harness, "left", 9001) == [(4, None)]
        assert _push_at(harness, "left", 9002, (B, "z", 300, 5), (A, "z", 300, 6)) == [(6, 5)]
        assert _push_at(harness, "left", 9003) == [(1, None)]


def test_rows_that_a_smaller_bound_has_made_due_are_returned_after_others_of_their_key_have_timed_out() -> None:
    """The timeout registers the key's next timer anew, at a time that the watermark has passed."""
    with join_harness(join_plan("left", 0, 1000, timeout=100)) as harness:
        assert _push_at(harness, "left", 0, (A, "a", 100, 1)) == []
        assert _push_at(harness, "left", 50, (A, "a", 101, 2), (A, "y", 500, 3), (B, "z", 500, 4)) == []
        harness.restart(processor=join_plan("left", 0, 10, timeout=100).operator)
        with_budget(harness, Budget(prefetch_entries=1))
        assert _push_at(harness, "left", 100) == [(1, None)]
        assert harness.watermarkMs == 500
        assert list(harness.timers("a")) == [111]
        assert _push_at(harness, "left", 101) == [(2, None)]
        assert not harness.timers("a")


def test_each_side_has_a_delay_of_its_own() -> None:
    with join_harness(join_plan("left", 0, 0), delays_ms=(5, 50)) as harness:
        _push(harness, "left", (A, "a", 100, 1), (B, "z", 140, 2))
        _push(harness, "left", (B, "z", 150, 3))
        assert harness.watermarkMs == 90
        _push(harness, "left")
        assert harness.watermarkMs == 95


def test_microseconds_decide_at_the_bounds() -> None:
    with join_harness(join_plan("inner", -1, 1)) as harness:
        times_us = [98_999, 99_000, 99_001, 101_999, 102_000, 101_000, 101_001]
        events = [Event(A, "a", 100_000, 1), *(Event(B, "a", us, us) for us in times_us)]
        found = numbers(harness.push([event.row for event in events]), "inner")
        assert sorted(other for _, other in found) == [99_000, 99_001, 101_000]


def _last_steps() -> list[Any]:
    """Two batches that end the intervals of all rows before, with a row of each side."""
    return [(100, [(0, None, 0, 0), (1, None, 0, 0)], None, 1), (0, [], None, 1)]
