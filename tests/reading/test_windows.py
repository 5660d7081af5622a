"""Open windows are read window by window, as a computation over all rows has them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import statelog
from statelog import (
    ConfigurationError,
    CountWindows,
    Options,
    ProcessorError,
    SessionWindows,
    SlidingWindows,
    TumblingWindows,
)
from statelog.reading.open import open_logged
from statelog.reading.states import tables_of
from statelog.reading.windows import window_columns
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from tests.model.windows_model import (
    BEFORE_ALL,
    INPUT,
    KINDS,
    Answer,
    Batch,
    Event,
    Returned,
    Setting,
    answers,
    grid,
    instant,
    window_definition,
    window_harness,
    window_operator,
)
from tests.reading.saved import save
from tests.reading.savepoints_support import same

USERS = ["a", "b", "c", None]
BATCHES = 12
DELAY_MS = 3


def location_of(harness: Harness) -> str:
    return parts_of(harness).query.location


def read(harness: Harness, state: str | None = "windows", **arguments: Any) -> list[dict[str, Any]]:
    return list(statelog.read_state(location_of(harness), state=state, **arguments).read_all().to_pylist())


# ---- The rows that a reader must return ----


def _aggregates(rows: tuple[Event, ...]) -> dict[str, Any]:
    numbers = [row.n for row in rows]
    times = [row.time_ms for row in rows if row.time_ms is not None]
    return {
        "count": len(rows),
        "sum(n)": sum(numbers),
        "min(n)": min(numbers),
        "max(time)": instant(max(times)),
        "first(n)": rows[0].n,
        "last(time)": instant(rows[-1].time_ms),
        "collect(n)": sorted(numbers),
        "count_distinct(time)": len(set(times)),
        "mean(n)": sum(numbers) / len(numbers),
        "last(time by n)": instant(max(rows, key=lambda row: row.n).time_ms),
    }


CONTENTS: dict[str, Callable[[tuple[Event, ...]], dict[str, Any]]] = {
    "agg": _aggregates,
    "reduce": lambda rows: {"total": sum(row.n for row in rows), "last": max(row.n for row in rows)},
    "aggregate": lambda rows: {"squares": sum(row.n**2 for row in rows), "rows": len(rows)},
}


def _contents(kind: str, rows: tuple[Event, ...]) -> dict[str, Any]:
    if kind == "process":
        return {"rows": len(rows)}
    return {f"value_{name}": value for name, value in CONTENTS[kind](rows).items()}


def _row(one: Returned, kind: str, now_ms: int) -> dict[str, Any]:
    row: dict[str, Any] = {"key_user": one.user}
    if one.window is None:
        row["rows"] = len(one.events)
    else:
        start, end = one.window
        row |= {"window_start": instant(start), "window_end": instant(end), "is_complete": end <= now_ms}
    return row | _contents(kind, one.events)


def _panes(answer: Answer, kind: str, width: int, offset: int) -> list[dict[str, Any]]:
    """The parts of the open windows, each once."""
    found: dict[tuple[str | None, int], set[Event]] = {}
    for window in answer.open:
        for row in window.events:
            assert row.time_ms is not None
            start = row.time_ms - (row.time_ms - offset) % width
            found.setdefault((window.user, start), set()).add(row)
    return [
        {"key_user": user, "pane_start": instant(start), "pane_end": instant(start + width)}
        | _contents(kind, tuple(sorted(rows, key=lambda row: (row.time_ms, row.n))))
        for (user, start), rows in found.items()
    ]


def expected(answer: Answer, batch: Batch, kind: str) -> tuple[str, list[dict[str, Any]]]:
    """The name of the state, and its rows after a batch."""
    windows = batch.setting.windows
    if isinstance(windows, SlidingWindows) and windows.slide_ms < windows.size_ms and kind in ("reduce", "aggregate"):
        size, slide, offset = grid(windows)
        return "panes", _panes(answer, kind, math.gcd(size, slide), offset)
    return "windows", [_row(one, kind, batch.now_ms) for one in answer.open]


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in any order, and lists of values too."""
    sorted_lists = [{name: sorted(v) if isinstance(v, list) else v for name, v in row.items()} for row in rows]
    return sorted(sorted_lists, key=lambda row: repr(list(row.values())))


# ---- Random stories ----

WINDOWS: dict[str, Callable[[random.Random], Any]] = {
    "tumbling": lambda chosen: TumblingWindows(chosen.randint(2, 9), chosen.randint(-3, 9)),
    "sliding": lambda chosen: SlidingWindows(chosen.choice([6, 9, 12, 15]), chosen.choice([1, 2, 3]), 2),
    "apart": lambda chosen: SlidingWindows(4, 7),
    "sessions": lambda chosen: SessionWindows(chosen.randint(1, 4)),
    "counts": lambda chosen: CountWindows(chosen.randint(2, 9)),
}


def _changed(windows: Any, chosen: random.Random) -> Any:
    """Windows that may take over from others."""
    match windows:
        case CountWindows():
            return CountWindows(chosen.randint(2, 9))
        case SessionWindows():
            return SessionWindows(chosen.randint(1, 4))
        case SlidingWindows() if windows.size_ms > windows.slide_ms + 3:
            size_ms = windows.size_ms - windows.slide_ms * chosen.randint(0, 1)
            return SlidingWindows(size_ms, windows.slide_ms, windows.offset_ms)
    return windows


def _batches(windows: Any, is_event_time: bool, chosen: random.Random) -> list[Batch]:
    latenesses = [0, 0, 2, 5, 20] if is_event_time else [0]
    setting = Setting(windows, chosen.choice(latenesses))
    batches: list[Batch] = []
    before_ms, number, at_ms = BEFORE_ALL, 0, 0
    now_ms = BEFORE_ALL if is_event_time else 0
    seen: list[int] = []
    for _ in range(BATCHES):
        if chosen.random() < 0.25:
            setting = Setting(_changed(setting.windows, chosen), chosen.choice(latenesses))
        at_ms += chosen.choice([0, 1, 2, 5, 9])
        now_ms = now_ms if is_event_time else at_ms
        count = chosen.randint(0, 12)
        times = [at_ms + chosen.randint(-14, 4) if is_event_time else now_ms for _ in range(count)]
        events = [Event(chosen.choice(USERS), time, number + place) for place, time in enumerate(times)]
        number += count
        batches.append(Batch(events, now_ms, before_ms, setting))
        before_ms = now_ms
        if is_event_time:
            seen += times
            now_ms = max([now_ms, *([max(seen) - DELAY_MS] if seen else [])])
    return batches


def _harness(batches: list[Batch], kind: str, *, is_event_time: bool, **more: Any) -> Harness:
    """The query after all batches, with restarts of other settings and parallelisms."""
    setting = batches[0].setting
    if is_event_time:
        more["watermark"] = statelog.Watermark("time", DELAY_MS)
    options = Options(retained_checkpoints=BATCHES)
    harness = window_harness(
        setting.windows,
        kind,
        is_event_time=is_event_time,
        lateness_ms=setting.lateness_ms,
        options=options,
        parallelism=3,
        **more,
    )
    for number, batch in enumerate(batches):
        if batch.setting != setting or number == BATCHES // 2:
            setting = batch.setting
            plan = window_operator(setting.windows, kind, is_event_time=is_event_time, lateness_ms=setting.lateness_ms)
            harness.restart(1 + number % 4, processor=plan.operator)
        rows = [(event.user, instant(event.time_ms), event.n) for event in batch.events]
        harness.push(rows, None if is_event_time else batch.now_ms)
    return harness


STORIES = [
    (windows, kind, is_event_time)
    for windows in WINDOWS
    for kind in KINDS
    for is_event_time in ((True, False) if windows != "counts" else (False,))
]


@pytest.mark.parametrize(("windows", "kind", "is_event_time"), STORIES)
def test_the_open_windows_of_every_checkpoint(windows: str, kind: str, is_event_time: bool, tmp_path: Path) -> None:
    some = 0
    for seed in range(2):
        chosen = random.Random(f"{windows} {seed}")
        batches = _batches(WINDOWS[windows](chosen), is_event_time, chosen)
        with _harness(batches, kind, is_event_time=is_event_time) as harness:
            for number, (answer, batch) in enumerate(zip(answers(batches), batches, strict=True)):
                state, rows = expected(answer, batch, kind)
                assert in_order(read(harness, state, at=number)) == in_order(rows), f"seed {seed}, batch {number}"
                of_keys = [row for row in rows if row["key_user"] in ("a", None)]
                assert in_order(read(harness, state, at=number, keys=["a", None])) == in_order(of_keys)
                some += len(rows)
            location, target = location_of(harness), tmp_path / str(seed)
            save(location, target, BATCHES - 1, part_bytes=40_000, slice_bytes=50)
            same(location, target, state=state)
            same(location, target, state=state, keys=["a", None, "x"])
            same(location, target, state=state, columns=["hash", "key_user"])
    assert some > 20, "the stories have open windows"


# ---- States and columns ----

SLIDING = SlidingWindows(6, 2)


def _pushed(windows: Any, kind: str, rows: list[tuple[str, int, int]], **more: Any) -> Harness:
    if not isinstance(windows, CountWindows):
        more["watermark"] = statelog.Watermark("time", DELAY_MS)
    harness = window_harness(windows, kind, is_event_time=not isinstance(windows, CountWindows), **more)
    harness.push([(user, instant(time_ms), n) for user, time_ms, n in rows])
    return harness


def _states(location: str | Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {one.state: (one.kind, one.columns) for one in statelog.list_states(location)}


TIME = "timestamp[us, tz=UTC]"


@pytest.mark.parametrize(
    ("windows", "kind", "name", "columns"),
    [
        (
            TumblingWindows(5),
            "reduce",
            "windows",
            (f"window_start {TIME}", f"window_end {TIME}", "is_complete bool", "value_total int64", "value_last int64"),
        ),
        (
            SLIDING,
            "process",
            "windows",
            (f"window_start {TIME}", f"window_end {TIME}", "is_complete bool", "rows int64"),
        ),
        (
            SLIDING,
            "aggregate",
            "panes",
            (f"pane_start {TIME}", f"pane_end {TIME}", "value_squares int64", "value_rows int64"),
        ),
        (CountWindows(5), "aggregate", "windows", ("rows int64", "value_squares int64", "value_rows int64")),
        (CountWindows(5), "process", "windows", ("rows int64",)),
    ],
)
def test_windows_are_listed_as_a_state(
    windows: Any, kind: str, name: str, columns: tuple[str, ...], tmp_path: Path
) -> None:
    with _pushed(windows, kind, [("a", 1, 10)]) as harness:
        location = location_of(harness)
        listed = _states(location)
        assert list(listed) == sorted(listed)
        assert listed[name] == (name, ("key_user string", *columns))
        [operator] = statelog.list_operators(location)
        assert operator.states == tuple(listed)
        save(location, tmp_path / "saved", 0)
        assert _states(tmp_path / "saved") == listed
        assert statelog.list_operators(tmp_path / "saved")[0].states == operator.states
        with statelog.open_state(location) as reader:
            assert reader.states == list(listed)
            for keys in (None, ["a"], ["a"]):
                assert reader.read(name, keys=keys).read_all().to_pylist() == read(harness, name)
            assert reader.read(name, keys=["b"]).read_all().num_rows == 0


def test_windows_are_read_unless_another_state_is_named() -> None:
    with _pushed(SLIDING, "agg", [("a", 1, 10)]) as harness:
        assert read(harness, None) == read(harness, "windows")
        assert len(read(harness, "windows")) == 3
        assert len(read(harness, "window.panes")) == 1
        found = statelog.read_state(location_of(harness), columns=["value_mean(n)", "window_end"]).read_all()
        assert found.column_names == ["value_mean(n)", "window_end"]
        assert set(found["value_mean(n)"].to_pylist()) == {10.0}
        with pytest.raises(ConfigurationError, match="has no column 'value_n'") as caught:
            statelog.read_state(location_of(harness), columns=["value_n"])
        assert "'value_sum(n)'" in str(caught.value)
    with _pushed(SLIDING, "reduce", [("a", 1, 10)]) as harness:
        assert read(harness, None) == read(harness, "panes")
        with pytest.raises(ConfigurationError, match="only the query's own functions") as caught:
            read(harness, "windows")
        assert "'panes'" in str(caught.value)
    several = pytest.raises(ConfigurationError, match="has the states 'returned', 'windows'")
    with _pushed(SLIDING, "process", [("a", 1, 10)]) as harness, several:
        read(harness, None)


def test_quantiles_have_the_fractions_of_the_start() -> None:
    plans = [
        window_definition(SLIDING).aggregated([statelog.Quantiles("n", fractions, name="q")])
        for fractions in ([0.5], [0.0, 1.0])
    ]
    more: dict[str, Any] = {"timeMode": "EventTime", "watermark": statelog.Watermark("time", DELAY_MS)}
    with Harness(plans[0].operator, input=INPUT, output=plans[0].output, keys=["user"], **more) as harness:
        harness.push([("a", instant(time_ms), n) for time_ms, n in ((0, 1), (1, 2), (3, 3))])
        harness.restart(processor=plans[1].operator)
        harness.push([("a", instant(1), 9)])
        found = [{row["window_start"]: row["value_q"] for row in read(harness, at=batch)} for batch in (0, 1)]
        assert found[0] == {instant(-4): [1.0], instant(-2): [2.0], instant(0): [2.0], instant(2): [3.0]}
        least_and_most = [1.0, 9.0]
        assert found[1] == {instant(start): least_and_most for start in (-4, -2, 0)} | {instant(2): [3.0, 3.0]}


class Windows(statelog.WindowProcessor):
    """Has a state that is called as the windows are."""

    def init(self, handle: Any) -> None:
        self._own = handle.getValueState("windows", "n long")

    def process(self, key: Any, window: Any, rows: Any, context: Any) -> Any:
        self._own.update((1,))
        yield from ()


def test_a_state_of_the_query_that_is_called_so_is_the_one_that_is_meant() -> None:
    plan = window_definition(CountWindows(2)).processed(Windows(), "user string")
    with Harness(plan.operator, input=INPUT, output=plan.output, keys=["user"]) as harness:
        harness.push([("a", None, 1), ("a", None, 2), ("b", None, 3)])
        assert read(harness, "windows") == [{"key_user": "a", "value_n": 1}]
        assert [row["key_user"] for row in read(harness, "window.count")] == ["b"]


def test_the_rows_of_process_windows_are_a_state_of_their_own() -> None:
    pushed = [("a", 1, 10), ("a", 3, 11), ("b", 7, 12), ("a", 2, 13)]
    with _pushed(SLIDING, "process", pushed) as harness:
        rows = [
            (row["key_user"], row["mapkey_time_ms"], row["value_n"], row["value_time"])
            for row in read(harness, "window.rows")
        ]
        assert sorted(rows) == sorted((user, time_ms, n, time_ms * 1000) for user, time_ms, n in pushed)
        for window in read(harness):
            start, end = (window[f"window_{side}"].timestamp() * 1000 for side in ("start", "end"))
            assert window["rows"] == sum(
                user == window["key_user"] and start <= time_ms < end for user, time_ms, _, _ in rows
            )


def test_changes_and_comparisons_are_those_of_the_stored_states() -> None:
    with _pushed(SLIDING, "agg", [("a", 1, 10)]) as harness, _pushed(SLIDING, "agg", [("a", 1, 10)]) as other:
        location = location_of(harness)
        assert statelog.read_changes(location).read_all()["value_count"].to_pylist() == [1]
        assert statelog.read_history(location, "a").read_all()["value_count"].to_pylist() == [1, 1]
        for harnesses in (harness, other):
            harnesses.push([("a", instant(1), 11)])
        assert statelog.read_diff(location, 0).read_all()["value_count"].to_pylist() == [2]
        with pytest.raises(ConfigurationError, match="has no state 'windows'") as caught:
            statelog.read_changes(location, state="windows")
        assert "'window.panes'" in str(caught.value)
        found = statelog.compare(location, location_of(other))
        assert [(one.state, one.is_equal) for one in found] == [("timers", True), ("window.panes", True)]


# ---- Bounds and errors ----


def test_a_key_with_many_windows_is_read_in_parts() -> None:
    windows = SlidingWindows(40, 1)
    rows = [("a", time_ms, time_ms) for time_ms in range(400)]
    with _pushed(windows, "agg", [*rows, ("b", 1000, 1)]) as harness:
        point = open_logged(location_of(harness), None, None)
        made = window_columns(point, max_bytes=20_000)
        assert made is not None
        [table] = [table for table in tables_of(point) if table.name == "windows"]
        whole = pa.Table.from_batches(list(table.rows(point, table.schema.names)))
        entries = point.changes(table.stored, ["a", "b"])
        slices = [batch.slice(first, 7) for batch in entries for first in range(0, batch.num_rows, 7)]
        parts = list(made.rows(slices))
        assert whole.num_rows == 439 + 40
        assert in_order(pa.Table.from_batches(parts).to_pylist()) == in_order(whole.to_pylist())
        assert max(part.nbytes for part in parts) < 20_000
        assert max(part.num_rows for part in made.rows([pa.concat_batches(slices)])) < 100


def test_a_window_without_a_value_is_named() -> None:
    largest = 2**63 - 1
    with _pushed(SLIDING, "agg", [("b", 1, 5), ("a", 1, largest), ("a", 3, 1)]) as harness:
        with pytest.raises(ProcessorError, match=r"A window of key \('a',\).*out of range for long") as caught:
            read(harness)
        assert "'window.panes'" in str(caught.value)
        assert len(read(harness, keys=["b"])) == 3
        assert len(read(harness, "window.panes")) == 3


def test_windows_that_no_settings_describe_are_not_listed() -> None:
    with _pushed(SLIDING, "agg", [("a", 1, 10)]) as harness:
        point = open_logged(location_of(harness), None, None)
        older = replace(point, settings={})
        assert [table.name for table in tables_of(older)] == ["timers", "window.panes"]
