"""Windows of random streams, with crashes and restarts, against a computation over all events."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statelog
from statelog import CountWindows, SessionWindows, SlidingWindows, Step, TumblingWindows
from tests.model.windows_model import (
    BEFORE_ALL,
    KINDS,
    Batch,
    Event,
    answers,
    expected_rows,
    found_rows,
    instant,
    window_harness,
)

USERS = st.sampled_from(["a", "b", "c", None])
EXAMPLES = 40


@dataclass(frozen=True)
class Push:
    """A batch of rows with their times, relative to `jump_ms` more than those of the batch before."""

    rows: list[tuple[str | None, int | None]]
    jump_ms: int
    crash: tuple[Step, int] | None


@dataclass(frozen=True)
class Restart:
    parallelism: int
    keeps_local: bool


@dataclass(frozen=True)
class Story:
    """What happens to a query."""

    steps: list[Push | Restart]
    delay_ms: int = 0


def _stories(*, with_nulls: bool = False) -> st.SearchStrategy[Story]:
    times = st.integers(-20, 4)
    rows = st.lists(st.tuples(USERS, times | st.none() if with_nulls else times), min_size=1, max_size=6)
    crashes = st.none() | st.tuples(st.sampled_from(list(Step)), st.integers(0, 2))
    pushes = st.builds(Push, rows, st.integers(0, 12), crashes)
    restarts = st.builds(Restart, st.integers(1, 4), st.booleans())
    steps = st.lists(st.one_of(pushes, pushes, pushes, pushes, restarts), min_size=6, max_size=12)
    return st.builds(Story, steps, st.integers(0, 6))


TUMBLING = st.builds(TumblingWindows, st.integers(1, 12), st.integers(-7, 30))
SLIDING = st.builds(SlidingWindows, st.integers(1, 12), st.integers(1, 14), st.integers(-7, 30))
SESSIONS = st.builds(SessionWindows, st.integers(1, 5))
KIND = st.sampled_from(list(KINDS))


def _event_time_batches(story: Story) -> list[Batch]:
    """The batches with the watermarks that follow from their rows."""
    batches: list[Batch] = []
    now_ms = before_ms = BEFORE_ALL
    seen: list[int] = []
    number = progress_ms = 0
    for push in story.steps:
        if isinstance(push, Push):
            progress_ms += push.jump_ms
            events = [
                Event(user, None if time_ms is None else progress_ms + time_ms, number + place)
                for place, (user, time_ms) in enumerate(push.rows)
            ]
            number += len(events)
            batches.append(Batch(events, now_ms, before_ms))
            seen += [event.time_ms for event in events if event.time_ms is not None]
            before_ms = now_ms
            if seen:
                now_ms = max(now_ms, max(seen) - story.delay_ms)
    return batches


def _processing_time_batches(story: Story) -> list[Batch]:
    """The batches with their processing times; every row has the time of its batch."""
    batches: list[Batch] = []
    now_ms, before_ms, number = 0, BEFORE_ALL, 0
    for push in story.steps:
        if isinstance(push, Push):
            now_ms += push.jump_ms
            events = [Event(user, now_ms, number + place) for place, (user, _) in enumerate(push.rows)]
            number += len(events)
            batches.append(Batch(events, now_ms, before_ms))
            before_ms = now_ms
    return batches


def _run(harness: Any, story: Story, batches: list[Batch], *, is_event_time: bool) -> list[list[Any]]:
    """The output of each batch."""
    outputs: list[list[Any]] = []
    remaining = iter(batches)
    for step in story.steps:
        if isinstance(step, Restart):
            harness.restart(step.parallelism, keepLocal=step.keeps_local)
            continue
        batch = next(remaining)
        if step.crash is not None:
            harness.crash(step.crash[0])
        rows = [(event.user, instant(event.time_ms), event.n) for event in batch.events]
        outputs.append(harness.push(rows, None if is_event_time else batch.now_ms))
    return outputs


def _check(
    windows: Any, kind: str, story: Story, *, is_event_time: bool, lateness_ms: int = 0, returns_late: bool = False
) -> None:
    long_after = [Push([("z", 0)], 100_000, None), Push([], 0, None), Push([], 0, None)]
    story = replace(story, steps=[*story.steps, *long_after])
    batches = _event_time_batches(story) if is_event_time else _processing_time_batches(story)
    more: dict[str, Any] = {}
    if is_event_time and not isinstance(windows, CountWindows):
        more["watermark"] = statelog.Watermark("time", story.delay_ms)
    harness = window_harness(
        windows,
        kind,
        is_event_time=is_event_time,
        lateness_ms=lateness_ms,
        late_column="late" if returns_late else None,
        **more,
    )
    with harness:
        outputs = _run(harness, story, batches, is_event_time=is_event_time)
        assert _left_behind(harness, windows, kind) == []
        for number, (output, answer) in enumerate(zip(outputs, answers(batches, windows, lateness_ms), strict=True)):
            if returns_late:
                late = [row.late for row in output if row.late is not None]
                assert sorted(row.n for row in late) == sorted(event.n for event in answer.late), f"batch {number}"
                output = [row[:-1] for row in output if row.late is None]
            else:
                assert harness.checkpoints[number].late_rows == len(answer.late), f"batch {number}"
            found, expected = found_rows(output, kind), expected_rows(answer, kind)
            assert Counter(map(repr, found)) == Counter(map(repr, expected)), f"batch {number}"


def _left_behind(harness: Any, windows: Any, kind: str) -> list[Any]:
    """What is left in the state of keys that have had no rows for long."""
    if isinstance(windows, CountWindows):
        return []
    states = ["window.sessions" if isinstance(windows, SessionWindows) else "window.panes"]
    states += ["window.rows"] if kind == "process" else []
    keys = [("a",), ("b",), ("c",), (None,)]
    held = [harness.map(state, key) for state in states for key in keys]
    return [left for left in [*held, *[harness.timers(key) for key in keys]] if left]


@settings(max_examples=EXAMPLES, deadline=None)
@given(windows=TUMBLING | SLIDING, kind=KIND, story=_stories(with_nulls=True), lateness_ms=st.integers(0, 6))
def test_windows_of_event_time(windows: Any, kind: str, story: Story, lateness_ms: int) -> None:
    _check(windows, kind, story, is_event_time=True, lateness_ms=lateness_ms, returns_late=True)


@settings(max_examples=EXAMPLES, deadline=None)
@given(windows=SESSIONS, kind=KIND, story=_stories(with_nulls=True), lateness_ms=st.integers(0, 6))
def test_sessions_of_event_time(windows: Any, kind: str, story: Story, lateness_ms: int) -> None:
    _check(windows, kind, story, is_event_time=True, lateness_ms=lateness_ms, returns_late=True)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(windows=TUMBLING | SLIDING | SESSIONS, kind=KIND, story=_stories())
def test_windows_without_lateness_leave_late_rows_out(windows: Any, kind: str, story: Story) -> None:
    _check(windows, kind, story, is_event_time=True)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(
    windows=TUMBLING | SLIDING | SESSIONS,
    kind=KIND,
    story=_stories(),
)
def test_windows_of_processing_time(windows: Any, kind: str, story: Story) -> None:
    _check(windows, kind, story, is_event_time=False)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(windows=st.builds(CountWindows, st.integers(1, 7)), kind=KIND, story=_stories())
def test_windows_of_counts(windows: Any, kind: str, story: Story) -> None:
    _check(windows, kind, story, is_event_time=False)


def _long_story(chosen: random.Random) -> Story:
    steps: list[Push | Restart] = []
    for _ in range(chosen.randint(10, 25)):
        rows = [
            (chosen.choice(["a", "b", "c", None]), chosen.choice([*range(-25, 4), None]))
            for _ in range(chosen.randint(0, 9))
        ]
        crash = (chosen.choice(list(Step)), 0) if chosen.random() < 0.2 else None
        steps.append(Push(rows, chosen.choice([0, 1, 3, 9]), crash))
        if chosen.random() < 0.15:
            steps.append(Restart(chosen.randint(1, 4), chosen.random() < 0.7))
    return Story(steps, chosen.choice([0, 0, 1, 5]))


@pytest.mark.parametrize("seed", range(40))
def test_long_stories(seed: int) -> None:
    """More late rows and longer lives of windows than the small examples above have."""
    chosen = random.Random(seed)
    windows = chosen.choice(
        [
            TumblingWindows(chosen.randint(1, 9), chosen.randint(0, 9)),
            SlidingWindows(chosen.randint(1, 12), chosen.randint(1, 6)),
            SlidingWindows(chosen.choice([4, 6, 9, 12]), chosen.choice([2, 3])),
            SessionWindows(chosen.randint(1, 3)),
            SessionWindows(1),
        ]
    )
    kind, lateness_ms = chosen.choice(list(KINDS)), chosen.choice([0, 1, 2, 4, 8])
    _check(windows, kind, _long_story(chosen), is_event_time=True, lateness_ms=lateness_ms, returns_late=True)
