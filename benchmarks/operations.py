"""What single operations on states cost inside a subtask, and whether that depends on how much a state holds.

There is no Spark here and no coordinator: a :class:`Subtask` runs batches whose processor does one thing with every
key. Its cost is the batch's time without that of a batch whose processor does nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from benchmarks.figures import median_ratio
from benchmarks.frame import Result, Target, alternate
from benchmarks.processors import OUTPUT, TTL_MS
from statelog import Options
from statelog.clock import SystemClock
from statelog.operators.keyed.operator import BatchContext, KeyedRows
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.runs.reader import Run
from statelog.runs.times import Moment
from statelog.stopwatch import Part, Stopwatch
from statelog.tables.runs import RunsTable
from statelog.testing.keyed import KeyedQuery
from statelog.testing.rows import OperatorArguments

_NUMBER: Final = "n long"
_HELD: Final = 10
"""Entries of every list and map that is read as a whole."""
_REGISTERED_MS: Final = 1000
_NOW_MS: Final = 2000
_LATER_MS: Final = 1_000_000
_GROWTH_KEYS: Final = 4
_GROWTH_OPERATIONS: Final = 20_000
_LARGEST_GROWTH: Final = 1.3


@dataclass(frozen=True)
class BatchRun:
    """One batch as it was run."""

    rows: list[Any]
    """The output."""
    process_s: float
    """Time for the processor's calls, reading the state and converting the rows."""
    changeset_s: float
    """Time for collecting the writes and encoding them, once to be searched and once to be stored."""


class Subtask:
    """The only subtask of an operator, batch after batch, with its state in memory."""

    def __init__(
        self, processor: Any, columns: str, output: str, time_mode: str = "None", *, uses_frames: bool = False
    ) -> None:
        arguments = OperatorArguments(columns, output, keys=["key"], timeMode=time_mode, pandas=uses_frames)
        self._query = KeyedQuery(processor, arguments, Options())
        self._table = RunsTable()
        self._batch = 0

    def data(self, rows: Sequence[Any]) -> KeyedRows:
        """The input of a batch."""
        return self._query.data(rows)

    def run(self, data: KeyedRows, *, now_ms: int = 0, keep: bool = True, act: Any = None) -> BatchRun:
        """Run a batch at this time; without `keep` the next one does not see its changes.

        `act` becomes the processor's attribute of that name.
        """
        operator = self._query.operator.make()
        if act is not None:
            processor: Any = operator.processor
            processor.act = act
        context = BatchContext(epoch=1, batch=self._batch, moment=Moment(now_ms, now_ms))
        started_s, stopwatch = time.perf_counter(), Stopwatch(SystemClock())
        subtask = KeyedSubtask(operator, self._table, context, stopwatch)
        output = list(subtask.process(data))
        processed_s = time.perf_counter()
        local = pa.BufferOutputStream()
        subtask.changes.write_local(local)
        subtask.changes.take_part("lz4")
        ended_s = time.perf_counter()
        if keep:
            self._table.apply([Run(local.getvalue(), f"batch {self._batch}")])
            self._batch += 1
        return BatchRun(
            rows=self._query.output(output),
            process_s=processed_s - started_s - stopwatch.spent_s(Part.ENCODE),
            changeset_s=ended_s - processed_s + stopwatch.spent_s(Part.ENCODE),
        )


class _Acting(StatefulProcessor):
    """Has states of all kinds, and does with them what it is told to; returns nothing."""

    act: Callable[[_Acting], Any]

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", _NUMBER)
        self.expiring = handle.getValueState("expiring", _NUMBER, ttlDurationMs=TTL_MS)
        self.list = handle.getListState("list", _NUMBER)
        self.map = handle.getMapState("map", _NUMBER, _NUMBER)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        self.act(self)
        return ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        return ()


def _nothing(states: _Acting) -> None:
    pass


def _fill(states: _Acting, entries: int) -> None:
    states.value.update((1,))
    states.expiring.update((1,))
    states.list.appendList([(number,) for number in range(entries)])
    _put(states, 0, entries)


def _append(states: _Acting, count: int) -> None:
    for number in range(count):
        states.list.appendValue((number,))


def _put(states: _Acting, first: int, count: int) -> None:
    for number in range(first, first + count):
        states.map.updateValue((number,), (number,))


def _get(states: _Acting, number: int) -> None:
    states.map.getValue((number,))


_OPERATIONS: Final[dict[str, Callable[[_Acting], Any]]] = {
    "value get": lambda states: states.value.get(),
    "value update": lambda states: states.value.update((2,)),
    "value update with a TTL": lambda states: states.expiring.update((2,)),
    "list append": lambda states: states.list.appendValue((2,)),
    "list get, 10 elements": lambda states: list(states.list.get()),
    "map get": lambda states: states.map.getValue((5,)),
    "map put": lambda states: states.map.updateValue((5,), (2,)),
    "map iterate, 10 entries": lambda states: list(states.map.iterator()),
    "timer register": lambda states: states.handle.registerTimer(_LATER_MS),
}
_FIRE: Final = "timer fire"
_EMPTY: Final = "processor that does nothing"
_APPEND: Final = "list append"
_PUT: Final = "map put"
_GET: Final = "map get, first of a batch"

_Cost = tuple[float, float]
"""Time of an operation, microseconds: for processing, and for the changeset."""


def measure(keys: int, entries: Sequence[int], repetitions: int) -> dict[str, Any]:
    """Costs by operation, and by number of entries (ascending) those that should not depend on it.

    A batch has an operation for each of `keys`, with 10 entries in its list and its map. All take turns, most of them
    with the processor that does nothing before each.
    """
    growth = _growth_costs(entries, repetitions)
    states, timers = _Filled(keys, _HELD), _Filled(keys, 0)
    timers.run(timers.rows, act=lambda states: states.handle.registerTimer(_REGISTERED_MS))
    no_rows = timers.data([])
    operations: dict[str, Callable[[], _Cost]] = {
        _EMPTY: lambda: _cost(states.run(states.rows, keep=False, act=_nothing), keys),
        **{name: partial(states.cost, act, keys) for name, act in _OPERATIONS.items()},
        _FIRE: lambda: _cost(timers.run(no_rows, now_ms=_NOW_MS, keep=False, act=_nothing), keys),
    }
    return {
        "operations": {name: _summary(costs) for name, costs in alternate(operations, repetitions).items()},
        "growth": {name: {size: _summary(growth[name, size]) for size in entries} for name in (_APPEND, _PUT, _GET)},
    }


def _growth_costs(entries: Sequence[int], repetitions: int) -> dict[tuple[str, int], list[_Cost]]:
    """Costs by operation and number of entries."""
    each = _GROWTH_OPERATIONS // _GROWTH_KEYS
    growing: dict[tuple[str, int], Callable[[], _Cost]] = {}
    for size in entries:
        states = _Filled(_GROWTH_KEYS, size)
        growing[_APPEND, size] = partial(states.cost, partial(_append, count=each), _GROWTH_OPERATIONS)
        growing[_PUT, size] = partial(states.cost, partial(_put, first=size, count=each), _GROWTH_OPERATIONS)
        growing[_GET, size] = partial(states.cost, partial(_get, number=size // 2), _GROWTH_KEYS)
    return alternate(growing, repetitions)


class _Filled(Subtask):
    """A subtask whose keys have values in every state, and so many entries; without entries it is empty."""

    def __init__(self, keys: int, entries: int) -> None:
        super().__init__(_Acting(), "key long", OUTPUT, "ProcessingTime")
        self.rows = self.data([(key,) for key in range(keys)])
        if entries:
            self.run(self.rows, act=partial(_fill, entries=entries))

    def cost(self, act: Callable[[_Acting], Any], count: int) -> _Cost:
        """The cost of each of `count` operations that are done in a batch and forgotten."""
        empty, done = (_cost(self.run(self.rows, keep=False, act=each), count) for each in (_nothing, act))
        return done[0] - empty[0], done[1] - empty[1]


def _cost(batch: BatchRun, count: int) -> _Cost:
    return batch.process_s * 1e6 / count, batch.changeset_s * 1e6 / count


def _summary(costs: list[_Cost]) -> dict[str, Any]:
    return {
        "us": statistics.median(map(sum, costs)),
        "process_us": statistics.median(process for process, _ in costs),
        "changeset_us": statistics.median(changeset for _, changeset in costs),
        "us_by_repetition": list(map(sum, costs)),
    }


def as_result(measured: dict[str, Any]) -> Result:
    """The result of the command, from that of :func:`measure`."""
    growth = {name: _growth(measured["growth"][name]) for name in (_APPEND, _PUT)}
    rows = [_row(name, "", each) for name, each in measured["operations"].items()]
    for name, by_size in measured["growth"].items():
        rows.extend(_row(name, f"{size:,}", each) for size, each in by_size.items())
    return Result(
        figures={**measured, "largest_to_smallest": growth},
        targets=[
            Target(f"{name}: cost with the most entries / with the fewest", value, _LARGEST_GROWTH, "at_most")
            for name, value in growth.items()
        ],
        rows=rows,
        remarks=[
            "us: microseconds per operation, median of the repetitions, less those of a processor that does nothing,"
            " in a subtask without Spark.",
            f"Rows with a number of entries: {_GROWTH_KEYS} keys whose lists and maps have so many;"
            f" {_GROWTH_OPERATIONS:,} appends or puts of new entries in a batch, or one read per key.",
        ],
    )


def _growth(by_size: dict[int, dict[str, Any]]) -> float | None:
    """How much dearer the largest is than the smallest: the median of the repetitions' ratios."""
    if len(by_size) < 2:
        return None
    smallest, *_, largest = (by_size[size]["us_by_repetition"] for size in sorted(by_size))
    return median_ratio(largest, smallest)


def _row(name: str, entries: str, cost: dict[str, Any]) -> dict[str, str]:
    return {
        "operation": name,
        "entries": entries,
        "us": f"{cost['us']:,.2f}",
        "of it calls and reading": f"{cost['process_us']:,.2f}",
        "collecting and encoding": f"{cost['changeset_us']:,.2f}",
    }
