"""The work that each row costs, counted: a path that makes a call more per row, key or window fails here.

Calls of functions, in Python and in C, are counted by the interpreter, so other work on the machine does not matter.
The cost of a batch without rows is taken off: a figure is the difference of two batches, divided by that of their rows.
A path may cost half a call more than its figure. Who makes a path cheaper sets its figure anew; and so does who has a
reason to make it dearer, in the commit that says why.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import statelog
from benchmarks.processors import Append, Count, CountItems, Time
from statelog import Options
from statelog.aggregates.build import KeyedDefinition, plan_aggregates, plan_deduplication
from statelog.clock import SystemClock
from statelog.convert.ddl import parse_ddl
from statelog.convert.times import TimeMode
from statelog.convert.types import key_schema
from statelog.operators.keyed.operator import BatchContext
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.runs.reader import Run
from statelog.runs.times import Moment
from statelog.stopwatch import Stopwatch
from statelog.tables.runs import RunsTable
from statelog.testing.keyed import KeyedQuery
from statelog.testing.rows import OperatorArguments, read_schema
from statelog.windows.build import WindowDefinition

INPUT = "key long, item long, time timestamp, x double, checks boolean"
OUTPUT = "key long, n long"
FEW, MANY = 600, 1_800
SECOND = 1_000_000
TOLERANCE = 0.5
"""Calls per row: less than one. The versions of Python differ by less, or make fewer."""


class Total(StatefulProcessor):
    """Reads columns of each row, and keeps nothing."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        total = 0
        for row in rows:
            total += row.item
        yield Row(key=key[0], n=total)


class CountColumns(statelog.ArrowProcessor):
    """Counts rows by key, with arrays."""

    def init(self, handle: Any) -> None:
        self._n = handle.getValueState("n", "n long")

    def process(self, batch: statelog.ArrowBatch) -> pa.RecordBatch:
        before = self._n.get().column(0).fill_null(0).to_numpy(zero_copy_only=False)
        n = before + np.bincount(batch.key_index, minlength=len(before))
        self._n.put({"n": n})
        return pa.RecordBatch.from_pydict({"key": batch.keys.column(0), "n": n})


def rows_of(count: int, per_key: int, batch: int) -> list[Any]:
    """So many rows; both batches have the same keys."""
    numbers = np.arange(count)
    times = (numbers % 10 + 10 * batch) * SECOND
    instants = pa.array(times, pa.timestamp("us", "UTC")).to_pylist()
    return [
        (number // per_key * 7919, number % 16, at, number / 2, False)
        for number, at in zip(numbers.tolist(), instants, strict=True)
    ]


@dataclass(frozen=True)
class Path:
    """An operator, the rows that a key has in a batch, and the calls per row.

    The figures are those of processing new keys, of processing them again, and of making changesets of their writes.
    """

    make: Callable[[], tuple[Any, OperatorArguments]]
    per_key: int
    figures: tuple[float, float, float]


def processor(make: Callable[[], Any], time_mode: str = "None") -> Callable[[], tuple[Any, OperatorArguments]]:
    arguments = OperatorArguments(INPUT, OUTPUT, keys=["key"], timeMode=time_mode)
    return lambda: (make(), arguments)


def _defined() -> KeyedDefinition:
    schema = read_schema(INPUT, "input")
    return KeyedDefinition(schema, [0], key_schema([schema["key"]]), None, is_streaming=True, ansi=True)


def aggregates() -> tuple[Any, OperatorArguments]:
    named = {"n": statelog.Count(), "total": statelog.Sum("item"), "x": statelog.Max("x")}
    plan = plan_aggregates(_defined(), [], named, output_mode="update", ttl=None, combine=False)
    return plan.operator, OperatorArguments(INPUT, plan.output, keys=["key"], timeMode=plan.time_mode)


def dedup() -> tuple[Any, OperatorArguments]:
    plan = plan_deduplication(_defined(), None, None)
    return plan.operator, OperatorArguments(INPUT, plan.output, keys=["key"], timeMode=plan.time_mode)


def windows() -> tuple[Any, OperatorArguments]:
    assigner = statelog.TumblingWindows(10_000)
    definition = WindowDefinition(
        read_schema(INPUT, "input"), ["key"], "UTC", assigner, TimeMode.EVENT_TIME, "time", 0, parse=parse_ddl
    )
    plan = definition.aggregated([statelog.Count().alias("n"), statelog.Sum("item").alias("total")])
    return plan.operator, OperatorArguments(INPUT, plan.output, keys=["key"], timeMode="EventTime", eventTime="time")


PATHS = {
    "rows of few keys": Path(processor(Total), 100, (0.12, 0.12, 0)),
    "rows of many keys": Path(processor(Total), 1, (12.07, 12.07, 0)),
    "value": Path(processor(Count), 1, (21.12, 21.15, 0.01)),
    "value with a TTL": Path(processor(lambda: Count(ttl_ms=3_600_000), "ProcessingTime"), 1, (21.13, 21.15, 0.01)),
    "list": Path(processor(Append), 20, (9.64, 9.64, 0.01)),
    "map": Path(processor(CountItems), 20, (30.89, 35.69, 0.01)),
    "timer": Path(processor(Time, "ProcessingTime"), 1, (52.26, 52.26, 0.01)),
    "Arrow processor": Path(processor(CountColumns), 1, (0, 0, 0)),
    "aggregates": Path(aggregates, 1, (0, 0, 0)),
    "dedup": Path(dedup, 1, (0, 0, 0)),
    "windows": Path(windows, 1, (45.2, 112.5, 0.02)),
}


class Subtask:
    """The only subtask of a path's operator, batch after batch, with its state in memory."""

    def __init__(self, path: Path) -> None:
        operator, arguments = path.make()
        self._query = KeyedQuery(operator, arguments, Options())
        self._path = path
        self._table = RunsTable()
        self._batch = 0
        self.returned = 0
        """Rows of all batches so far."""

    def run(self, rows: int, measured: Callable[[Callable[[], Any]], float]) -> tuple[float, float]:
        """Run a batch: what processing it has cost, and making its changeset."""
        batch, self._batch = self._batch, self._batch + 1
        data = self._query.data(rows_of(rows, self._path.per_key, batch))
        operator = self._query.operator.make()
        moment = Moment(1_000, 10_000 * batch, 10_000 * batch - 1)
        subtask = KeyedSubtask(operator, self._table, BatchContext(1, batch, moment), Stopwatch(SystemClock()))
        output: list[pa.RecordBatch] = []
        processed = measured(lambda: output.extend(subtask.process(data)))
        self.returned += sum(map(len, output))
        local = pa.BufferOutputStream()

        def make_changeset() -> None:
            subtask.changes.write_local(local)
            subtask.changes.take_part("lz4")

        made = measured(make_changeset)
        self._table.apply([Run(local.getvalue(), f"batch {batch}")])
        return processed, made


def calls_of(work: Callable[[], Any]) -> float:
    """How many functions are called meanwhile; a generator that goes on counts as one."""
    calls = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    with without_collection():
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(before)
    return calls


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection, whose callbacks would be counted."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def calls_per_row(path: Path) -> list[float]:
    """Of processing new keys, processing them again, and making the changesets of both."""
    few, many = Subtask(path), Subtask(path)
    (new, changed), (again, changed_again) = (
        [
            (more - less) / (MANY - FEW)
            for less, more in zip(few.run(FEW, calls_of), many.run(MANY, calls_of), strict=True)
        ]
        for _ in range(2)
    )
    assert many.returned - few.returned >= (MANY - FEW) / path.per_key
    return [new, again, max(changed, changed_again)]


@pytest.mark.parametrize("name", PATHS)
def test_a_row_costs_no_more_calls_than_allowed(name: str) -> None:
    path = PATHS[name]

    found = calls_per_row(path)

    for what, calls, figure in zip(("new keys", "the same keys again", "changesets"), found, path.figures, strict=True):
        assert calls < figure + TOLERANCE, (
            f"{name}, {what}: {calls:.2f} calls per row, where there were {figure}. If that has a reason, set it anew."
        )


class OneMore(Count):
    """Counts rows with a call more for each key."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        return Count.handleInputRows(self, key, rows, timerValues)


def test_a_call_more_per_row_is_seen() -> None:
    path = PATHS["value"]

    usual, dearer = calls_per_row(path), calls_per_row(replace(path, make=processor(OneMore)))

    assert [more - less for more, less in zip(dearer, usual, strict=True)] == pytest.approx([1, 1, 0])


def test_columns_cost_a_fraction_of_rows() -> None:
    """Of processor time, for a count by key; the least of several batches, so that other work hardly matters."""
    cost = {
        name: min(sum(Subtask(PATHS[name]).run(6_000, cpu_s_of)) for _ in range(5)) for name in ("value", "aggregates")
    }

    assert cost["aggregates"] < cost["value"] / 3


def cpu_s_of(work: Callable[[], Any]) -> float:
    """The processor time of this process meanwhile."""
    with without_collection():
        started_s = time.process_time()
        work()
        return time.process_time() - started_s
