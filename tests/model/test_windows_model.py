"""Windows of random streams, with crashes and restarts with other settings, against a computation over all events."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statelog
from statelog import (
    ConfigurationError,
    CountWindows,
    ErrorKind,
    SessionWindows,
    SlidingWindows,
    Step,
    TumblingWindows,
)
from statelog.runs.byte_slices import Budget
from statelog.testing.harness import parts_of
from statelog.testing.keyed import LocalKeyedOperator
from tests.model.windows_model import (
    BEFORE_ALL,
    KINDS,
    Batch,
    Event,
    Setting,
    answers,
    expected_rows,
    found_rows,
    grid,
    instant,
    window_harness,
    window_operator,
)

USERS = st.sampled_from(["a", "b", "c", None])
EXAMPLES = 24


@dataclass(frozen=True)
class Push:
    """A batch of rows with their times, relative to `jump_ms` more than those of the batch before."""

    rows: list[tuple[str | None, int | None]]
    jump_ms: int
    crash: tuple[Step, int] | None


@dataclass(frozen=True)
class Restart:
    """A restart; `pick` chooses one of the settings that the story is told with."""

    parallelism: int
    keeps_local: bool
    pick: int = 0


@dataclass(frozen=True)
class Story:
    """What happens to a query."""

    steps: list[Push | Restart]
    delay_ms: int = 0
    prefetch_entries: int = Budget().prefetch_entries
    """With few of them, keys with a handful of entries are read page by page."""


@dataclass(frozen=True)
class Told:
    """A step with the setting that is in force after it; of a restart also whether what it asks for is refused."""

    step: Push | Restart
    setting: Setting
    refused: Setting | None = None


def _told(story: Story, choices: list[Setting]) -> list[Told]:
    told: list[Told] = []
    current, recorded = choices[0], None
    for step in story.steps:
        if isinstance(step, Push):
            recorded = current
            told.append(Told(step, current))
            continue
        wanted = choices[step.pick % len(choices)]
        if recorded is None or _is_convertible(recorded, wanted):
            current = wanted
            told.append(Told(step, current))
        else:
            told.append(Told(step, current, wanted))
    return told


def _is_convertible(old: Setting, new: Setting) -> bool:
    """Whether all rows of all windows that can still be open are kept: a look at some hundred windows."""
    if not isinstance(old.windows, TumblingWindows | SlidingWindows):
        return True
    before, after = (
        {start: start + size for start in _starts(slide, offset)} for size, slide, offset in _grids(old, new)
    )
    if before == after:
        return True
    has_gaps = any(size < slide for size, slide, _ in _grids(old, new))
    inner = {start: end for start, end in after.items() if end < 150}
    is_kept = before.keys() == after.keys() and all(before[start] >= end for start, end in inner.items())
    return is_kept and not has_gaps and set(inner.values()) <= {*before.values(), *range(-200, -100)}


def _grids(*settings: Setting) -> list[tuple[int, int, int]]:
    return [grid(setting.windows) for setting in settings]


def _starts(slide: int, offset: int) -> list[int]:
    return [start for start in range(-200, 200) if (start - offset) % slide == 0]


PREFETCHED = st.sampled_from([Budget().prefetch_entries, 1, 100])


def _stories(*, with_nulls: bool = False) -> st.SearchStrategy[Story]:
    times = st.integers(-20, 4)
    rows = st.lists(st.tuples(USERS, times | st.none() if with_nulls else times), min_size=1, max_size=6)
    crashes = st.none() | st.tuples(st.sampled_from(list(Step)), st.integers(0, 2))
    jumps = st.integers(0, 12) | st.just(150)  # many windows end in one batch
    pushes = st.builds(Push, rows, jumps, crashes)
    restarts = st.builds(Restart, st.integers(1, 4), st.booleans(), st.integers(0, 3))
    steps = st.lists(st.one_of(pushes, pushes, pushes, restarts), min_size=6, max_size=12)
    return st.builds(Story, steps, st.integers(0, 6), PREFETCHED)


TUMBLING = st.builds(TumblingWindows, st.integers(1, 12), st.integers(-7, 30))
SLIDING = st.builds(SlidingWindows, st.integers(1, 12), st.integers(1, 14), st.integers(-7, 30))
SESSIONS = st.builds(SessionWindows, st.integers(1, 5))
LATENESS = st.sampled_from([0, 0, 1, 2, 4, 7, 15])


def _settings_of(windows: st.SearchStrategy[Any], lateness: st.SearchStrategy[int]) -> st.SearchStrategy[list[Setting]]:
    """The settings of a story; half of them with windows of the same kind that may take over from each other."""
    sizes = st.sampled_from([-2, -1, 0, 0, 0, 1, 2])

    def beside(setting: Setting) -> st.SearchStrategy[Setting]:
        return st.builds(lambda steps, late: Setting(_beside(setting.windows, steps), late), sizes, lateness)

    first = st.builds(Setting, windows, lateness)
    return first.flatmap(lambda one: st.lists(beside(one) | first, max_size=3).map(lambda more: [one, *more]))


def _beside(windows: Any, steps: int) -> Any:
    """Windows that are some slides, milliseconds or rows longer."""
    match windows:
        case CountWindows(size):
            return CountWindows(max(1, size + 2 * steps))
        case SessionWindows():
            return SessionWindows(max(1, windows.gap_ms + steps))
        case _:
            size_ms, slide_ms, offset_ms = grid(windows)
            return SlidingWindows(max(1, size_ms + steps * slide_ms), slide_ms, offset_ms)


KIND = st.sampled_from(list(KINDS))


def _event_time_batches(told: list[Told], delay_ms: int) -> list[Batch]:
    """The batches with the watermarks that follow from their rows."""
    batches: list[Batch] = []
    now_ms = before_ms = BEFORE_ALL
    seen: list[int] = []
    number = progress_ms = 0
    for step in told:
        push = step.step
        if isinstance(push, Push):
            progress_ms += push.jump_ms
            events = [
                Event(user, None if time_ms is None else progress_ms + time_ms, number + place)
                for place, (user, time_ms) in enumerate(push.rows)
            ]
            number += len(events)
            batches.append(Batch(events, now_ms, before_ms, step.setting))
            seen += [event.time_ms for event in events if event.time_ms is not None]
            before_ms = now_ms
            if seen:
                now_ms = max(now_ms, max(seen) - delay_ms)
    return batches


def _processing_time_batches(told: list[Told]) -> list[Batch]:
    """The batches with their processing times; every row has the time of its batch."""
    batches: list[Batch] = []
    now_ms, before_ms, number = 0, BEFORE_ALL, 0
    for step in told:
        push = step.step
        if isinstance(push, Push):
            now_ms += push.jump_ms
            events = [Event(user, now_ms, number + place) for place, (user, _) in enumerate(push.rows)]
            number += len(events)
            batches.append(Batch(events, now_ms, before_ms, step.setting))
            before_ms = now_ms
    return batches


@dataclass(frozen=True)
class Operator:
    """What all operators of a story have in common."""

    kind: str
    is_event_time: bool
    late_column: str | None

    def make(self, setting: Setting) -> Any:
        return window_operator(
            setting.windows,
            self.kind,
            is_event_time=self.is_event_time,
            lateness_ms=setting.lateness_ms,
            late_column=self.late_column,
        ).operator


def _run(
    harness: Any, operator: Operator, told: list[Told], batches: list[Batch], prefetch_entries: int
) -> list[list[Any]]:
    """The output of each batch."""
    outputs: list[list[Any]] = []
    _bound(harness, prefetch_entries)
    remaining = iter(batches)
    for one in told:
        step = one.step
        if isinstance(step, Restart):
            if one.refused is not None:
                with pytest.raises(ConfigurationError, match="the state was written with.*_ms=.* now has") as caught:
                    harness.restart(processor=operator.make(one.refused))
                assert caught.value.kind is ErrorKind.OTHER_SETTINGS
            harness.restart(step.parallelism, keepLocal=step.keeps_local, processor=operator.make(one.setting))
            _bound(harness, prefetch_entries)
            continue
        batch = next(remaining)
        if step.crash is not None:
            harness.crash(step.crash[0])
        rows = [(event.user, instant(event.time_ms), event.n) for event in batch.events]
        outputs.append(harness.push(rows, None if operator.is_event_time else batch.now_ms))
    return outputs


def _bound(harness: Any, prefetch_entries: int) -> None:
    query = parts_of(harness).query
    assert isinstance(query.operator, LocalKeyedOperator)
    budget = Budget(prefetch_entries=prefetch_entries)
    if prefetch_entries == 1:  # then a key's rows come in several batches, too
        budget = replace(budget, slice_bytes=64, input_bytes=64)
    query.operator = query.operator.with_budget(budget)


def _check(choices: list[Setting], kind: str, story: Story, *, is_event_time: bool, returns_late: bool = False) -> None:
    long_after = [Push([("z", 0)], 100_000, None), Push([], 0, None), Push([], 0, None)]
    told = _told(replace(story, steps=[*story.steps, *long_after]), choices)
    batches = _event_time_batches(told, story.delay_ms) if is_event_time else _processing_time_batches(told)
    windows = choices[0].windows
    operator = Operator(kind, is_event_time, "late" if returns_late else None)
    more: dict[str, Any] = {}
    if is_event_time and not isinstance(windows, CountWindows):
        more["watermark"] = statelog.Watermark("time", story.delay_ms)
    harness = window_harness(
        windows,
        kind,
        is_event_time=is_event_time,
        lateness_ms=choices[0].lateness_ms,
        late_column=operator.late_column,
        **more,
    )
    with harness:
        outputs = _run(harness, operator, told, batches, story.prefetch_entries)
        assert _left_behind(harness, windows, kind) == []
        for number, (output, answer) in enumerate(zip(outputs, answers(batches), strict=True)):
            if returns_late:
                late = [row.late for row in output if row.late is not None]
                assert sorted(row.n for row in late) == sorted(event.n for event in answer.late), f"batch {number}"
                output = [row[:-1] for row in output if row.late is None]
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


NEVER_LATE = st.just(0)


@settings(max_examples=EXAMPLES, deadline=None)
@given(choices=_settings_of(TUMBLING | SLIDING, LATENESS), kind=KIND, story=_stories(with_nulls=True))
def test_windows_of_event_time(choices: list[Setting], kind: str, story: Story) -> None:
    _check(choices, kind, story, is_event_time=True, returns_late=True)


@settings(max_examples=EXAMPLES, deadline=None)
@given(choices=_settings_of(SESSIONS, LATENESS), kind=KIND, story=_stories(with_nulls=True))
def test_sessions_of_event_time(choices: list[Setting], kind: str, story: Story) -> None:
    _check(choices, kind, story, is_event_time=True, returns_late=True)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(
    choices=_settings_of(TUMBLING | SLIDING, NEVER_LATE) | _settings_of(SESSIONS, NEVER_LATE),
    kind=KIND,
    story=_stories(),
)
def test_windows_without_lateness_leave_late_rows_out(choices: list[Setting], kind: str, story: Story) -> None:
    _check(choices, kind, story, is_event_time=True)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(
    choices=_settings_of(TUMBLING | SLIDING, NEVER_LATE) | _settings_of(SESSIONS, NEVER_LATE),
    kind=KIND,
    story=_stories(),
)
def test_windows_of_processing_time(choices: list[Setting], kind: str, story: Story) -> None:
    _check(choices, kind, story, is_event_time=False)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(choices=_settings_of(st.builds(CountWindows, st.integers(1, 7)), NEVER_LATE), kind=KIND, story=_stories())
def test_windows_of_counts(choices: list[Setting], kind: str, story: Story) -> None:
    _check(choices, kind, story, is_event_time=False)


def _long_story(chosen: random.Random) -> Story:
    steps: list[Push | Restart] = []
    for _ in range(chosen.randint(10, 25)):
        rows = [
            (chosen.choice(["a", "b", "c", None]), chosen.choice([*range(-25, 4), None]))
            for _ in range(chosen.randint(0, 9))
        ]
        crash = (chosen.choice(list(Step)), 0) if chosen.random() < 0.2 else None
        steps.append(Push(rows, chosen.choice([0, 1, 3, 9, 60]), crash))
        if chosen.random() < 0.15:
            steps.append(Restart(chosen.randint(1, 4), chosen.random() < 0.7, chosen.randint(0, 3)))
    return Story(steps, chosen.choice([0, 0, 1, 5]), chosen.choice([1, 100, 100_000]))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.extended if seed >= 16 else ()) for seed in range(40)]
)
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
            CountWindows(chosen.randint(3, 9)),
        ]
    )
    kind, is_event_time = chosen.choice(list(KINDS)), not isinstance(windows, CountWindows)
    choices = [
        Setting(
            _beside(windows, chosen.choice([0, 0, 0, -1, 1]) if number else 0),
            chosen.choice([0, 1, 2, 4, 8, 20]) if is_event_time else 0,
        )
        for number in range(4)
    ]
    _check(choices, kind, _long_story(chosen), is_event_time=is_event_time, returns_late=is_event_time)
