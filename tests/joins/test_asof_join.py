"""As-of joins against a brute-force model, without Spark: late rows, silences, restarts, tolerances, large keys."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelog import ConfigurationError
from statelog.runs.byte_slices import BUDGET, Budget
from statelog.testing import Harness
from tests.joins.joins_model import AsofModel, Event, asof_plan, join_harness, join_plan, numbers, with_budget

TOLERANCES = st.none() | st.integers(0, 12)
BUDGETS = st.sampled_from([BUDGET, Budget(prefetch_entries=1), Budget(prefetch_entries=120), Budget(slice_bytes=200)])
ROWS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["a", "a", "b", "c", None]),
        st.none() | st.integers(-4, 8),
        st.sampled_from([0, 0, 0, 1, 999]),
    ),
    max_size=9,
)
STEPS = st.lists(
    st.tuples(st.integers(0, 9), ROWS, st.sampled_from([None, None, "restart", "repeat"]), st.integers(1, 3)),
    min_size=1,
    max_size=7,
)
LAST_STEPS: list[Any] = [(100, [(0, None, 0, 0), (1, None, 0, 0)], None, 1), (0, [], None, 1)]
"""Two batches after which the watermark has passed all rows before."""


def _events(rows: list[Any], now_ms: int, first: int) -> list[Event]:
    """Rows at these distances from a time, numbered from `first` on."""
    return [
        Event(side, key, None if distance_ms is None else (now_ms + distance_ms) * 1000 + us, first + place)
        for place, (side, key, distance_ms, us) in enumerate(rows)
    ]


def _answers(harness: Harness, events: list[Event], now_ms: int) -> dict[int, int | None]:
    """Run a batch; returns the number of the right row that each returned left row got."""
    found = numbers(harness.push([event.row for event in events], now_ms), "left")
    assert set(found.values()) <= {1}
    answers = {one: other for one, other in found if one is not None}
    assert len(answers) == len(found)
    return answers


def _kept(harness: Harness, key: str, *, wait: bool) -> tuple[list[int], list[int]]:
    left, right = [
        sorted(row[1] for row in harness.map(state, key).values()) if wait or state == "join.right" else []
        for state in ("join.left", "join.right")
    ]
    return left, right


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("how", ["inner", "left"])
@settings(max_examples=25)
@given(
    tolerance_ms=TOLERANCES,
    delays_ms=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    idle_ms=st.none() | st.integers(1, 15),
    budget=BUDGETS,
    steps=STEPS,
)
def test_batches_and_state_are_those_of_the_model(
    how: str,
    wait: bool,
    tolerance_ms: int | None,
    delays_ms: tuple[int, int],
    idle_ms: int | None,
    budget: Budget,
    steps: list[Any],
) -> None:
    """Each batch is as many milliseconds after the one before as its step says, and its rows are around that time."""
    model = AsofModel(how=how, tolerance_ms=tolerance_ms, wait=wait, delays_ms=delays_ms, idle_ms=idle_ms)
    with join_harness(asof_plan(how, tolerance_ms, wait=wait), delays_ms, idle_ms, parallelism=2) as harness:
        with_budget(harness, budget)
        now_ms = number = 0
        for step_ms, rows, action, parallelism in [*steps, *LAST_STEPS]:
            now_ms += step_ms
            events = _events(rows, now_ms, number)
            number += len(events)
            late = model.late
            answers = _answers(harness, events, now_ms)
            expected = {one: other for one, (other,) in model.push(events, step_ms).items()}
            assert answers == {one: other for one, other in expected.items() if how == "left" or other is not None}
            assert harness.checkpoints[-1].late_rows == model.late - late
            for key in ("a", "b", "c"):
                assert _kept(harness, key, wait=wait) == model.kept(key)
            if action == "restart":
                harness.restart(parallelism, keepLocal=parallelism == 2)
                with_budget(harness, budget)
            elif action == "repeat":
                harness.repeatBatch(restart=parallelism == 2)
        for key in ("a", "b", "c"):
            timers = harness.timers(key)
            assert not timers or (tolerance_ms is not None and _kept(harness, key, wait=wait)[1])


@pytest.mark.parametrize("wait", [True, False])
@settings(max_examples=25)
@given(steps=st.lists(st.tuples(st.integers(0, 9), ROWS, TOLERANCES), min_size=2, max_size=7), budget=BUDGETS)
def test_the_tolerance_may_change_at_every_restart(wait: bool, steps: list[Any], budget: Budget) -> None:
    """A row gets the right row of the new tolerance, or none if that row had expired by one before."""
    model = AsofModel(how="left", tolerance_ms=steps[0][2], wait=wait)
    with join_harness(asof_plan("left", steps[0][2], wait=wait)) as harness:
        now_ms = number = 0
        for step_ms, rows, tolerance_ms in [*steps, *[(*step[:2], steps[-1][2]) for step in LAST_STEPS]]:
            if tolerance_ms != model.tolerance_ms:
                harness.restart(processor=asof_plan("left", tolerance_ms, wait=wait).operator)
                model.tolerance_ms = tolerance_ms
            with_budget(harness, budget)
            now_ms += step_ms
            events = _events(rows, now_ms, number)
            number += len(events)
            answers, allowed = _answers(harness, events, now_ms), model.push(events, step_ms)
            assert answers.keys() == allowed.keys()
            assert all(answers[one] in allowed[one] for one in answers)


A, B = 0, 1
"""Sides."""


def _push(harness: Harness, *rows: tuple[int, str | None, int | None, int]) -> list[Any]:
    """Run a batch of rows, each a side, a key, a time in milliseconds, and a number; returns the pairs of numbers."""
    events = [Event(side, key, None if ms is None else ms * 1000, n) for side, key, ms, n in rows]
    return sorted(numbers(harness.push([event.row for event in events]), "left").elements(), key=str)


def test_a_row_that_waits_gets_the_right_row_that_comes_later() -> None:
    with join_harness(asof_plan("left", None, wait=True)) as harness:
        assert _push(harness, (B, "a", 10, 1), (A, "a", 100, 2), (A, "b", 100, 3)) == []
        assert _push(harness, (B, "a", 99, 4), (B, "a", 101, 5), (A, "z", 120, 6)) == []
        assert harness.watermarkMs == 10
        # Rows at 100 are answered with the batch that the watermark 101 belongs to.
        assert _push(harness, (B, "a", 100, 7)) == [(2, 7), (3, None)]
        assert _push(harness, (B, "a", 100, 8)) == []
        assert harness.checkpoints[-1].late_rows == 1


def test_a_row_that_does_not_wait_is_never_corrected() -> None:
    with join_harness(asof_plan("left", None, wait=False)) as harness:
        found = _push(harness, (A, "a", 100, 1), (B, "a", 10, 2), (A, "b", 100, 3), (A, None, 100, 4))
        assert found == [(1, 2), (3, None), (4, None)]
        assert _push(harness, (B, "a", 99, 5), (B, "b", 99, 6)) == []
        assert _push(harness, (A, "a", 100, 7), (A, "a", 98, 8)) == [(7, 5), (8, 2)]


def test_the_last_of_several_rows_of_one_time_counts() -> None:
    with join_harness(asof_plan("left", 0, wait=False)) as harness:
        found = _push(harness, (B, "a", 10, 1), (B, "a", 10, 2), (A, "a", 10, 3), (B, "a", 10, 4))
        assert found == [(3, 4)]
        # One of the same batch comes after one of the state.
        assert _push(harness, (A, "a", 10, 5), (B, "a", 10, 6), (B, "a", 11, 7)) == [(5, 6)]
        found = _push(harness, (A, "a", 11, 8), (A, "a", 12, 9), (A, "a", 10, 10))
        assert found == [(8, 7), (9, None)]
        assert harness.checkpoints[-1].late_rows == 1


@pytest.mark.parametrize("wait", [True, False])
def test_rows_of_one_millisecond_may_be_on_several_pages(wait: bool) -> None:
    """In the state they are by arrival; of them the newest by microseconds counts, then the last to arrive."""
    rng = random.Random(7)
    right_us = [rng.randrange(2000, 4000, 20) for _ in range(600)]
    left_us = [rng.randrange(1900, 4100) for _ in range(100)]
    left = [Event(A, "a", time_us, n) for n, time_us in enumerate(left_us)]
    with join_harness(asof_plan("left", None, wait=wait), delays_ms=(10, 10)) as harness:
        with_budget(harness, Budget(prefetch_entries=50))
        _answers(harness, [Event(B, "a", time_us, n) for n, time_us in enumerate(right_us)], 0)
        found = _answers(harness, [*left, Event(A, None, 90_000, -1), Event(B, None, 90_000, -1)], 1)
        found |= _answers(harness, [], 2)
    expected = {
        n: max(((other_us, m) for m, other_us in enumerate(right_us) if other_us <= time_us), default=(0, None))[1]
        for n, time_us in enumerate(left_us)
    }
    assert found == {**expected, -1: None}


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("budget", [BUDGET, Budget(prefetch_entries=1)])
def test_a_later_row_of_the_same_millisecond_does_not_hide_the_one_before(wait: bool, budget: Budget) -> None:
    with join_harness(asof_plan("left", None, wait=wait), delays_ms=(10, 10)) as harness:
        with_budget(harness, budget)
        _answers(harness, [Event(B, "a", 5000, 1), Event(B, "a", 10_500, 2)], 0)
        found = _answers(harness, [Event(A, "a", 10_100, 3), Event(A, None, 90_000, 4), Event(B, None, 90_000, 5)], 1)
        found |= _answers(harness, [], 2)
    assert found == {3: 1, 4: None}


def test_a_silent_side_makes_rows_wait_unless_it_is_idle() -> None:
    with join_harness(asof_plan("left", None, wait=True), idle_ms=1000) as harness:
        assert _push(harness, (B, "a", 5, 1)) == []
        found = [harness.push([Event(A, "a", time_ms * 1000, time_ms).row], time_ms) for time_ms in (400, 800, 1200)]
        assert [[row.n_left for row in rows] for rows in found] == [[], [], [400, 800]]
        assert {row.n_right for rows in found for row in rows} == {1}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (asof_plan("inner", 5, wait=True), asof_plan("left", 5, wait=True)),
        (asof_plan("left", 5, wait=True), asof_plan("left", 5, wait=False)),
        (asof_plan("left", 5, wait=True), join_plan("left", -5, 0)),
    ],
)
def test_another_kind_of_join_is_refused_at_a_restart(before: Any, after: Any) -> None:
    with join_harness(before) as harness:
        _push(harness, (A, "a", 100, 1))
        with pytest.raises(ConfigurationError, match=r"the state was written with .* and the operator now has"):
            harness.restart(processor=after.operator)


def test_without_a_tolerance_a_key_keeps_its_newest_row() -> None:
    with join_harness(asof_plan("left", None, wait=True)) as harness:
        _push(harness, *[(B, "a", time_ms, time_ms) for time_ms in range(100)], (A, "z", 1000, 0), (B, "z", 900, 0))
        _push(harness)
        assert [row[1] for row in harness.map("join.right", "a").values()] == [99]
        assert not harness.timers("a")
        assert _push(harness, (A, "a", 100_000, 1), (B, "z", 100_000, 2)) == []
        assert _push(harness) == [(0, 0), (1, 99)]


def test_a_tolerance_lets_the_last_row_of_a_key_go() -> None:
    with join_harness(asof_plan("left", 50, wait=False)) as harness:
        _push(harness, (B, "a", 100, 1), (A, "z", 149, 2), (B, "z", 149, 3))
        _push(harness)
        assert len(harness.map("join.right", "a")) == 1
        assert _push(harness, (A, "a", 150, 4), (A, "a", 151, 5), (B, "z", 150, 6)) == [(4, 1), (5, None)]
        _push(harness)
        assert not harness.map("join.right", "a")
        assert not harness.timers("a")
