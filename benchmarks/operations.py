"""What single operations on states cost inside a subtask, and whether that depends on how much a state holds.

There is no Spark here and no coordinator: :class:`benchmarks.subtask.Subtask` runs batches whose processor does one
thing with every key. Its cost is the batch's time without that of a batch whose processor does nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import LongType, StructType

from benchmarks.frame import Result, Target
from benchmarks.state_rows import OUTPUT, TTL_MS
from benchmarks.subtask import BatchRun, Subtask
from statelog.convert.times import TimeMode

__all__ = ["as_result", "measure"]

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

    def __init__(self) -> None:
        self.act: Callable[[_Acting], Any] = _nothing

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


def _fill(states: _Acting, entries: int = _HELD) -> None:
    states.value.update((1,))
    states.expiring.update((1,))
    states.list.appendList([(number,) for number in range(entries)])
    for number in range(entries):
        states.map.updateValue((number,), (number,))


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


@dataclass(frozen=True)
class _Cost:
    """Time of an operation, microseconds."""

    process_us: float
    changeset_us: float

    @classmethod
    def of(cls, done: BatchRun, count: int, baseline: BatchRun | None = None) -> _Cost:
        process_s, changeset_s = done.process_s, done.changeset_s
        if baseline is not None:
            process_s -= baseline.process_s
            changeset_s -= baseline.changeset_s
        return cls(process_s * 1e6 / count, changeset_s * 1e6 / count)

    @property
    def us(self) -> float:
        return self.process_us + self.changeset_us


def measure(keys: int, entries: Sequence[int], repetitions: int) -> dict[str, Any]:
    """Measure all operations.

    Parameters
    ----------
    keys : int
        Keys of a batch; each has one operation, and 10 entries in its list and its map.
    entries : sequence of int
        How many entries the few lists and maps have that grow, ascending.
    repetitions : int
        How often each operation is measured; in turn, with the empty processor before each.

    Returns
    -------
    dict
        Costs by operation in microseconds, and by number of entries those that should not depend on it.
    """
    return {
        "operations": _summaries(_operation_costs(keys, repetitions)),
        "growth": {
            name: {str(size): each for size, each in _summaries(costs).items()}
            for name, costs in _growth_costs(entries, repetitions).items()
        },
    }


def _operation_costs(keys: int, repetitions: int) -> dict[Any, list[_Cost]]:
    processor, subtask = _subtask(keys, _HELD)
    timer_processor, timers = _subtask(keys, 0)
    timer_processor.act = lambda states: states.handle.registerTimer(_REGISTERED_MS)
    timers.run(_keys(keys))
    columns = _keys(keys)
    costs: dict[Any, list[_Cost]] = {name: [] for name in (_EMPTY, *_OPERATIONS, _FIRE)}
    for _ in range(repetitions):
        for name, act in _OPERATIONS.items():
            processor.act = _nothing
            baseline = subtask.run(columns, keep=False)
            processor.act = act
            done = subtask.run(columns, keep=False)
            costs[_EMPTY].append(_Cost.of(baseline, keys))
            costs[name].append(_Cost.of(done, keys, baseline))
        costs[_FIRE].append(_Cost.of(timers.run(now_ms=_NOW_MS, keep=False), keys))
    return costs


def _growth_costs(entries: Sequence[int], repetitions: int) -> dict[str, dict[Any, list[_Cost]]]:
    """Costs with lists and maps of several sizes, which take turns."""
    each = _GROWTH_OPERATIONS // _GROWTH_KEYS
    columns = _keys(_GROWTH_KEYS)
    made = {size: _subtask(_GROWTH_KEYS, size) for size in entries}
    costs: dict[str, dict[Any, list[_Cost]]] = {name: {size: [] for size in entries} for name in (_APPEND, _PUT, _GET)}
    acts: dict[str, tuple[int, Callable[..., Any]]] = {
        _APPEND: (_GROWTH_OPERATIONS, lambda states, size: _append(states, each)),
        _PUT: (_GROWTH_OPERATIONS, lambda states, size: _put(states, size, each)),
        _GET: (_GROWTH_KEYS, lambda states, size: states.map.getValue((size // 2,))),
    }
    for _ in range(repetitions):
        for name, (count, act) in acts.items():
            for size, (processor, subtask) in made.items():
                processor.act = _nothing
                baseline = subtask.run(columns, keep=False)
                processor.act = partial(act, size=size)
                costs[name][size].append(_Cost.of(subtask.run(columns, keep=False), count, baseline))
    return costs


def _subtask(keys: int, entries: int) -> tuple[_Acting, Subtask]:
    """A subtask whose keys have values in every state; without entries it is empty."""
    processor = _Acting()
    subtask = Subtask(processor, OUTPUT, TimeMode.PROCESSING_TIME)
    if entries:
        processor.act = lambda states: _fill(states, entries)
        subtask.run(_keys(keys))
    return processor, subtask


def _keys(count: int) -> dict[str, pa.Array]:
    return {"key": pa.array(np.arange(count))}


def _summaries(costs: dict[Any, list[_Cost]]) -> dict[Any, dict[str, Any]]:
    return {
        name: {
            "us": statistics.median(cost.us for cost in each),
            "process_us": statistics.median(cost.process_us for cost in each),
            "changeset_us": statistics.median(cost.changeset_us for cost in each),
            "us_by_repetition": [cost.us for cost in each],
        }
        for name, each in costs.items()
    }


def as_result(measured: dict[str, Any]) -> Result:
    """What :func:`measure` found, as the result of the command."""
    growth = {name: _growth(measured["growth"][name]) for name in (_APPEND, _PUT)}
    rows = [[name, "", *_cells(each)] for name, each in measured["operations"].items()]
    for name, by_size in measured["growth"].items():
        rows.extend([name, f"{int(size):,}", *_cells(each)] for size, each in by_size.items())
    return Result(
        figures={**measured, "largest_to_smallest": growth},
        targets=[
            Target(f"{name}: cost with the most entries / with the fewest", value, _LARGEST_GROWTH, "at_most")
            for name, value in growth.items()
        ],
        header=["operation", "entries", "us", "of it calls and reading", "collecting and encoding"],
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
    sizes = sorted(by_size, key=int)
    if len(sizes) < 2:
        return None
    pairs = zip(by_size[sizes[-1]]["us_by_repetition"], by_size[sizes[0]]["us_by_repetition"], strict=True)
    return statistics.median(float(large) / float(small) for large, small in pairs)


def _cells(cost: dict[str, Any]) -> list[str]:
    return [f"{cost[name]:,.2f}" for name in ("us", "process_us", "changeset_us")]
