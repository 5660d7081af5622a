"""What windows read and write: only what is due, however many windows and rows a key has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import statelog
from statelog import SessionWindows, SlidingWindows, TumblingWindows
from statelog.clock import SystemClock
from statelog.convert.ddl import parse_ddl
from statelog.convert.times import TimeMode
from statelog.operators.keyed.operator import BatchContext
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.options import Options
from statelog.runs.byte_slices import BUDGET, Budget
from statelog.runs.reader import Run
from statelog.runs.times import NO_TIME_MS, Moment
from statelog.spark.worker.specs import NO_ROWS
from statelog.stopwatch import Stopwatch
from statelog.testing.keyed import KeyedQuery
from statelog.testing.rows import OperatorArguments, read_schema
from statelog.windows.build import WindowDefinition
from tests.counting_table import Counting
from tests.model.windows_model import INPUT, instant


class Count(statelog.WindowProcessor):
    """Counts the rows of a window."""

    def process(self, key: Any, window: Any, rows: Any, context: Any) -> Iterator[Any]:
        yield (key[0], window.end_ms, sum(1 for _ in rows))


class Stream:
    """A subtask over runs, batch by batch; all rows have one user."""

    def __init__(self, windows: Any, kind: str, lateness_ms: int = 0) -> None:
        self.merges = 0
        definition = WindowDefinition(
            read_schema(INPUT, "input"),
            ["user"],
            "UTC",
            windows,
            TimeMode.EVENT_TIME,
            "time",
            lateness_ms,
            parse=parse_ddl,
        )
        if kind == "process":
            self.plan = definition.processed(Count(), "user string, end long, n long")
        elif kind == "reduce":
            self.plan = definition.reduced(_added, "n long", None)
        else:
            self.plan = definition.aggregated([statelog.Sum("n")])
        arguments = OperatorArguments(
            input=INPUT, output=self.plan.output, keys=["user"], timeMode="EventTime", eventTime="time"
        )
        self.query = KeyedQuery(self.plan.operator, arguments, Options())
        self.runs: list[Run] = []
        self.read: dict[str, int] = {}
        self.now_ms = NO_TIME_MS
        self.batch = 0
        self.budget = BUDGET

    def push(self, times_ms: list[int], watermark_ms: int) -> list[int]:
        """Run a batch; returns the number of rows, or their sum, of each returned window."""
        read = NO_ROWS
        if times_ms:
            read = self.query.data([("a", instant(time_ms), 1) for time_ms in times_ms])
        moment = Moment(0, watermark_ms, self.now_ms)
        context = BatchContext(1, self.batch, moment, timers_after_ms=self.now_ms)
        self.read.clear()
        table, stopwatch = Counting(self.runs, self.read), Stopwatch(SystemClock())
        subtask = KeyedSubtask(replace(self.query.operator.make(), budget=self.budget), table, context, stopwatch)
        found = [row for batch in subtask.process(read) for row in batch.column(batch.num_columns - 1).to_pylist()]
        sink = pa.BufferOutputStream()
        subtask.changes.write_local(sink)
        self.changes = subtask.changes.rows
        self.runs = [*self.runs, Run(sink.getvalue(), "run")]
        self.now_ms, self.batch = watermark_ms, self.batch + 1
        return found


def _added(one: Any, other: Any) -> Any:
    return (one[0] + other[0],)


COUNT = 5_000
A_FEW = 600
"""Entries of some small pages."""


@pytest.mark.parametrize("kind", ["process", "reduce", "agg"])
@pytest.mark.parametrize("lateness_ms", [0, 1_000_000])
def test_a_tumbling_window_is_returned_without_the_others(kind: str, lateness_ms: int) -> None:
    stream = Stream(TumblingWindows(10), kind, lateness_ms)
    stream.push([10 * number + place for number in range(COUNT) for place in (1, 2)], 0)
    assert stream.push([], 10 * COUNT // 2) == [2] * (COUNT // 2)
    for number in range(COUNT // 2 + 1, COUNT // 2 + 4):
        assert stream.push([], 10 * number) == [2]
        assert sum(stream.read.values()) < A_FEW
        assert stream.changes < 12
    assert stream.push([75], 10 * number + 1) == ([3] if lateness_ms else [])
    assert sum(stream.read.values()) < A_FEW


@pytest.mark.parametrize("kind", ["process", "reduce", "agg"])
def test_many_windows_of_a_key_are_read_once(kind: str) -> None:
    stream = Stream(TumblingWindows(10), kind)
    stream.push([10 * number + place for number in range(COUNT) for place in (1, 2, 3)], 0)
    assert stream.push([], 10 * COUNT - 10) == [3] * (COUNT - 1)
    assert stream.read["window.panes"] < 2 * COUNT + A_FEW
    assert stream.read.get("window.rows", 0) < 2 * 3 * COUNT + A_FEW
    assert stream.push([], 10 * COUNT) == [3]


@pytest.mark.parametrize("kind", ["reduce", "agg"])
def test_the_panes_of_other_sliding_windows_are_not_read(kind: str) -> None:
    stream = Stream(SlidingWindows(100, 7), kind)
    stream.push(list(range(20_000)), 0)
    stream.push([], 10_007)
    for number in range(1, 4):
        assert stream.push([], 10_007 + 7 * number) == [100]
        assert stream.read["window.panes"] < A_FEW


@pytest.mark.parametrize("kind", ["process", "reduce", "agg"])
@pytest.mark.parametrize("lateness_ms", [0, 1_000_000])
def test_sessions_far_from_new_rows_are_not_read(kind: str, lateness_ms: int) -> None:
    stream = Stream(SessionWindows(3), kind, lateness_ms)
    stream.push([10 * number for number in range(COUNT)], 0)
    assert stream.push([], 10 * COUNT // 2) == [1] * (COUNT // 2)
    start_ms = 10 * (COUNT // 2 + 100)
    assert stream.push([start_ms + 1, start_ms + 2, start_ms + 25, start_ms + 52], 10 * COUNT // 2 + 5) == [1]
    assert sum(stream.read.values()) < 2 * A_FEW
    assert stream.push([], start_ms + 4) == [1] * 99
    assert stream.push([], start_ms + 5) == [3]
    assert sum(stream.read.values()) < A_FEW


def test_returning_a_window_lists_no_timers() -> None:
    stream = Stream(TumblingWindows(10), "reduce")
    stream.push([10 * number for number in range(COUNT)], 0)
    assert stream.push([], 50) == [1] * 5
    assert "$timers" not in stream.read


@pytest.mark.parametrize("kind", ["reduce", "agg"])
def test_all_timers_of_a_key_are_deleted_when_they_are_due(kind: str) -> None:
    stream = Stream(TumblingWindows(10), kind)
    stream.push([10 * number for number in range(COUNT)], 0)
    assert len(stream.push([], 10 * COUNT)) == COUNT
    timers = [run.sections["$timers"] for run in stream.runs if "$timers" in run.sections]
    operations = np.concatenate([block.load().column(3).to_numpy() for section in timers for block in section.blocks])
    assert operations.tolist() == [0] * COUNT + [1] * COUNT


# ---- Time ----


def _new_sessions(count: int, kind: str) -> None:
    stream = Stream(SessionWindows(3), kind)
    stream.push([10 * number for number in range(count)], 0)
    assert len(stream.push([], 10 * count)) == count


def _updates(count: int, kind: str) -> None:
    stream = Stream(TumblingWindows(10), kind, lateness_ms=1_000_000)
    stream.push([10 * number for number in range(count)], 0)
    assert len(stream.push([], 10 * count)) == count
    assert stream.push([10 * number + 5 for number in range(count)], 10 * count) == [2] * count


def _bridged_sessions(count: int, kind: str) -> None:
    stream = Stream(SessionWindows(3), kind, lateness_ms=1_000_000)
    stream.push([5 * number for number in range(count)], 0)
    assert stream.push([5 * number + 3 for number in range(count - 1)], 10) == []
    assert stream.push([], 10 * count) == [2 * count - 1]


def _sliding_windows(count: int, kind: str) -> None:
    stream = Stream(SlidingWindows(count // 10, 1), kind)
    stream.push(list(range(count)), 0)
    assert len(stream.push([], count)) == count


RUNS = [(_new_sessions, "process"), (_updates, "process"), (_bridged_sessions, "reduce"), (_sliding_windows, "reduce")]


@pytest.mark.parametrize(("run", "kind"), [*RUNS, *[(run, "agg") for run, _ in RUNS]])
def test_the_time_grows_with_the_windows_not_with_their_square(run: Callable[[int, str], None], kind: str) -> None:
    def seconds(count: int) -> float:
        started = time.process_time()
        run(count, kind)
        return time.process_time() - started

    seconds(100)
    small = min(seconds(2_000) for _ in range(2))
    assert any(seconds(16_000) < 24 * small for _ in range(2))


def test_late_rows_of_a_large_key_are_seen_by_the_sessions_that_they_update() -> None:
    """The second session is on another page than the first; the page of rows that is held is older than its new row."""
    stream = Stream(SessionWindows(3), "process", lateness_ms=1_000_000)
    stream.budget = Budget(prefetch_entries=150)
    stream.push([10 * number for number in range(50)], 0)
    assert stream.push([], 1000) == [1] * 50
    assert stream.push([10 * 28 + 1, 10 * 33 + 1], 1000) == [2, 2]
