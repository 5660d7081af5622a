"""What single operations on states cost inside a subtask, and whether that depends on how much a state holds.

There is no Spark here and no coordinator: :class:`benchmarks.subtask.Subtask` runs batches whose processor does one
thing with every key. Its cost is the batch's time without that of a batch whose processor does nothing.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import LongType, StructType

from benchmarks.figures import median_ratio
from benchmarks.frame import Result, Target
from benchmarks.state_processors import OUTPUT, TTL_MS
from benchmarks.subtask import BatchRun, Subtask

_NUMBER: Final = StructType().add("n", LongType())
_HELD: Final = 10
"""Entries of every list and map that is read as a whole."""
_REGISTERED_MS: Final = 1000
_NOW_MS: Final = 2000
_LATER_MS: Final = 1_000_000
_GROWTH_KEYS: Final = 4
_GROWTH_OPERATIONS: Final = 20_000
_LARGEST_GROWTH: Final = 1.3


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

    def close(self) -> None:
        pass


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

    A batch has an operation for each of `keys`, with 10 entries in its list and its map. All take turns, with the
    processor that does nothing before each.
    """
    growth = _growth_costs(entries, repetitions)
    return {
        "operations": _summaries(_operation_costs(keys, repetitions)),
        "growth": {
            name: {str(size): each for size, each in _summaries(costs).items()} for name, costs in growth.items()
        },
    }


def _operation_costs(keys: int, repetitions: int) -> dict[str, list[_Cost]]:
    states = _Filled(keys, _HELD)
    timers = _Filled(keys, 0)
    timers.subtask.run(timers.data, act=lambda states: states.handle.registerTimer(_REGISTERED_MS))
    no_rows = timers.subtask.data([])
    costs: dict[str, list[_Cost]] = {name: [] for name in (_EMPTY, *_OPERATIONS, _FIRE)}
    for _ in range(repetitions):
        for name, act in _OPERATIONS.items():
            empty = states.run(_nothing)
            costs[_EMPTY].append(_cost(empty, keys))
            costs[name].append(_cost(states.run(act), keys, empty))
        costs[_FIRE].append(_cost(timers.subtask.run(no_rows, now_ms=_NOW_MS, keep=False, act=_nothing), keys))
    return costs


def _growth_costs(entries: Sequence[int], repetitions: int) -> dict[str, dict[int, list[_Cost]]]:
    """Costs with lists and maps of several sizes."""
    each = _GROWTH_OPERATIONS // _GROWTH_KEYS
    filled = {size: _Filled(_GROWTH_KEYS, size) for size in entries}
    acts: dict[str, tuple[int, Callable[[int], Callable[[_Acting], Any]]]] = {
        _APPEND: (_GROWTH_OPERATIONS, lambda size: partial(_append, count=each)),
        _PUT: (_GROWTH_OPERATIONS, lambda size: partial(_put, first=size, count=each)),
        _GET: (_GROWTH_KEYS, lambda size: lambda states: states.map.getValue((size // 2,))),
    }
    costs: dict[str, dict[int, list[_Cost]]] = {name: defaultdict(list) for name in acts}
    for _ in range(repetitions):
        for name, (count, act) in acts.items():
            for size, states in filled.items():
                empty = states.run(_nothing)
                costs[name][size].append(_cost(states.run(act(size)), count, empty))
    return costs


class _Filled:
    """A subtask whose keys have values in every state, and so many entries; without entries it is empty."""

    def __init__(self, keys: int, entries: int) -> None:
        self.subtask = Subtask(_Acting(), "key long", OUTPUT, "ProcessingTime")
        self.data = self.subtask.data([(key,) for key in range(keys)])
        if entries:
            self.subtask.run(self.data, act=partial(_fill, entries=entries))

    def run(self, act: Callable[[_Acting], Any]) -> BatchRun:
        """Do something with every key, and forget it."""
        return self.subtask.run(self.data, keep=False, act=act)


def _cost(done: BatchRun, count: int, empty: BatchRun | None = None) -> _Cost:
    process_s, changeset_s = (empty.process_s, empty.changeset_s) if empty else (0.0, 0.0)
    return (done.process_s - process_s) * 1e6 / count, (done.changeset_s - changeset_s) * 1e6 / count


def _summaries(costs: dict[Any, list[_Cost]]) -> dict[Any, dict[str, Any]]:
    return {
        name: {
            "us": statistics.median(map(sum, each)),
            "process_us": statistics.median(process for process, _ in each),
            "changeset_us": statistics.median(changeset for _, changeset in each),
            "us_by_repetition": list(map(sum, each)),
        }
        for name, each in costs.items()
    }


def as_result(measured: dict[str, Any]) -> Result:
    """The result of the command, from that of :func:`measure`."""
    growth = {name: _growth(measured["growth"][name]) for name in (_APPEND, _PUT)}
    rows = [_row(name, "", each) for name, each in measured["operations"].items()]
    for name, by_size in measured["growth"].items():
        rows.extend(_row(name, f"{int(size):,}", each) for size, each in by_size.items())
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


def _growth(by_size: dict[str, dict[str, Any]]) -> float | None:
    """How much dearer the largest is than the smallest: the median of the repetitions' ratios."""
    if len(by_size) < 2:
        return None
    smallest, *_, largest = (by_size[size]["us_by_repetition"] for size in sorted(by_size, key=int))
    return median_ratio(largest, smallest)


def _row(name: str, entries: str, cost: dict[str, Any]) -> dict[str, str]:
    return {
        "operation": name,
        "entries": entries,
        "us": f"{cost['us']:,.2f}",
        "of it calls and reading": f"{cost['process_us']:,.2f}",
        "collecting and encoding": f"{cost['changeset_us']:,.2f}",
    }
