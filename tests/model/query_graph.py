"""Queries of several operators, and what they compute: in processors, and independently in plain Python.

A row is a key and a number. A keyed operator folds the numbers of each key into one number, which depends on all of
them and on their order. It returns that number after each row, under the next key, so the rows of an operator behind it
go to other subtasks. An unkeyed operator adds up all numbers, and passes the rows on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import statelog
from statelog import OperatorContext, OperatorHandle, OperatorProcessor, Options
from statelog.operators.unkeyed.subtask import UnkeyedInput
from statelog.runs.key_groups import subtasks_of
from statelog.tasks.keyed_task import BatchInput
from statelog.testing.keyed import KeyedQuery
from statelog.testing.query import LocalOperator
from statelog.testing.rows import OperatorArguments
from statelog.testing.unkeyed import UnkeyedQuery

Row = tuple[int, int]
State = Mapping[int, int]

KEYS = 7
_MODULUS = 2**61 - 1
_COLUMNS = "key long, number long"
TOTAL = 0
"""The only key of an unkeyed operator's state."""


def _folded(held: int, number: int) -> int:
    return (held * 1_000_003 + number + 1) % _MODULUS


def _next_key(key: int) -> int:
    return (key + 1) % KEYS


@dataclass(frozen=True)
class Effect:
    """What one attempt of a subtask does with its rows."""

    output: list[Row]
    changes: State
    """Keyed: the new state of each key. Unkeyed: the amount by which the total grows."""


class Operator(Protocol):
    """An operator of a query."""

    @property
    def local(self) -> LocalOperator:
        """The operator as tasks run it."""
        ...

    def parts(self, rows: Sequence[Row], parallelism: int) -> list[list[Row]]:
        """The rows of each subtask, as the shuffle distributes them."""
        ...

    def read(self, rows: Sequence[Row], subtask: int, time_ms: int) -> Any:
        """The input of a task."""
        ...

    def effect(self, before: State, rows: Sequence[Row]) -> Effect:
        """What must come out, computed without the operator."""
        ...

    def after(self, before: State, changes: Iterable[State]) -> State:
        """The state after the changes of all subtasks."""
        ...

    def stored(self, location: str, batch: int | str) -> State:
        """The state in a checkpoint, or in a pinned one, read from the files alone."""
        ...


# ---- Keyed ----


class Folding:
    """The processor of a keyed operator."""

    def init(self, handle: Any) -> None:
        self.held = handle.getValueState("held", "field long")

    def handleInputRows(self, key: tuple[int], rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        found = self.held.get()
        held = 0 if found is None else found[0]
        for row in rows:
            held = _folded(held, row.number)
            yield _next_key(key[0]), held
        self.held.update((held,))

    def close(self) -> None:
        pass


class KeyedOperator:
    """Folds the numbers of each key."""

    def __init__(self, uid: str) -> None:
        arguments = OperatorArguments(input=_COLUMNS, output=_COLUMNS, keys=["key"], uid=uid)
        self._query = KeyedQuery(Folding(), arguments, Options())
        self._uid = uid

    @property
    def local(self) -> LocalOperator:
        return self._query.operator

    def parts(self, rows: Sequence[Row], parallelism: int) -> list[list[Row]]:
        parts: list[list[Row]] = [[] for _ in range(parallelism)]
        for row, subtask in zip(rows, subtasks_of(self._query.data(rows).hashes, parallelism), strict=True):
            parts[subtask].append(row)
        return parts

    def read(self, rows: Sequence[Row], subtask: int, time_ms: int) -> BatchInput:
        return BatchInput(self._query.data(rows), subtask, time_ms if rows else None)

    def effect(self, before: State, rows: Sequence[Row]) -> Effect:
        changes: dict[int, int] = {}
        output: list[Row] = []
        for key, number in rows:
            changes[key] = _folded(changes.get(key, before.get(key, 0)), number)
            output.append((_next_key(key), changes[key]))
        return Effect(output, changes)

    def after(self, before: State, changes: Iterable[State]) -> State:
        after = dict(before)
        for one in changes:
            after |= one
        return after

    def stored(self, location: str, batch: int | str) -> State:
        with statelog.open_state(location, self._uid, at=batch) as reader:
            return {row["key_key"]: row["value_field"] for row in reader.read("held").read_all().to_pylist()}


# ---- Unkeyed ----


class Adding(OperatorProcessor):
    """The processor of an unkeyed operator."""

    def init(self, handle: OperatorHandle) -> None:
        self.sums = handle.getListState("sums", "field long")

    def process(self, rows: Iterator[Any], context: OperatorContext) -> Iterator[Row]:
        total = sum(held for (held,) in self.sums.get()) % _MODULUS
        for key, number in rows:
            total = (total + number) % _MODULUS
            yield _next_key(key), number
        self.sums.update([(total,)])


class UnkeyedOperator:
    """Adds up all numbers; its subtasks have a sum each, and after a rescale none or several."""

    def __init__(self, uid: str) -> None:
        arguments = OperatorArguments(input=_COLUMNS, output=_COLUMNS, uid=uid)
        self._query = UnkeyedQuery(Adding(), arguments, Options())
        self._uid = uid

    @property
    def local(self) -> LocalOperator:
        return self._query.operator

    def parts(self, rows: Sequence[Row], parallelism: int) -> list[list[Row]]:
        return [[row for row in rows if row[0] % parallelism == subtask] for subtask in range(parallelism)]

    def read(self, rows: Sequence[Row], subtask: int, time_ms: int) -> UnkeyedInput:
        return UnkeyedInput([self._query.data(rows, ()).rows], None, subtask, time_ms if rows else None)

    def effect(self, before: State, rows: Sequence[Row]) -> Effect:
        return Effect([(_next_key(key), number) for key, number in rows], {TOTAL: sum(number for _, number in rows)})

    def after(self, before: State, changes: Iterable[State]) -> State:
        return {TOTAL: (before.get(TOTAL, 0) + sum(one[TOTAL] for one in changes)) % _MODULUS}

    def stored(self, location: str, batch: int | str) -> State:
        with statelog.open_state(location, self._uid, at=batch) as reader:
            rows = reader.read("sums").read_all().to_pylist()
        return {TOTAL: sum(row["value_field"] for row in rows) % _MODULUS}


@cache
def operator_of(uid: str) -> Operator:
    """The operator with a uid; those with ``total`` in it are unkeyed."""
    return UnkeyedOperator(uid) if "total" in uid else KeyedOperator(uid)


# ---- Graphs ----


@dataclass(frozen=True)
class Graph:
    """The operators of a query in topological order."""

    inputs: Mapping[str, tuple[str, ...]]
    """The operators upstream of an operator, in order; none if it reads a source."""

    @property
    def uids(self) -> list[str]:
        """The operators in such an order that each comes after its inputs."""
        return list(self.inputs)

    @property
    def ends(self) -> list[str]:
        """The operators that write to the sink."""
        read = {uid for inputs in self.inputs.values() for uid in inputs}
        return [uid for uid in self.inputs if uid not in read]

    def needed(self, targets: Iterable[str]) -> list[str]:
        """The operators that an action runs which asks for the output of `targets`."""
        needed = set(targets)
        for uid in reversed(self.uids):
            if uid in needed:
                needed.update(self.inputs[uid])
        return [uid for uid in self.inputs if uid in needed]

    def with_one_more(self, uid: str, inputs: Sequence[str]) -> Graph:
        """The graph with an operator behind others, or behind a source."""
        return Graph({**self.inputs, uid: tuple(inputs)})

    def without(self, uid: str) -> Graph:
        """The graph without an operator: what has read its output reads its input."""
        instead = self.inputs[uid]
        return Graph(
            {
                other: tuple(dict.fromkeys(up for one in inputs for up in (instead if one == uid else (one,))))
                for other, inputs in self.inputs.items()
                if other != uid
            }
        )

    def run(self, before: Mapping[str, State], source: Mapping[str, Sequence[Row]]) -> tuple[dict[str, State], Outputs]:
        """One batch in plain Python: the states after it, and the output of each operator."""
        after: dict[str, State] = {}
        outputs: dict[str, list[Row]] = {}
        for uid, inputs in self.inputs.items():
            rows = [row for one in inputs for row in outputs[one]] if inputs else source[uid]
            operator = operator_of(uid)
            effect = operator.effect(before.get(uid, {}), rows)
            outputs[uid] = effect.output
            after[uid] = operator.after(before.get(uid, {}), [effect.changes])
        return after, outputs


Outputs = dict[str, list[Row]]


def by_key(rows: Iterable[Row]) -> dict[int, list[int]]:
    """The numbers of each key: their order counts, that of different keys does not."""
    found: dict[int, list[int]] = defaultdict(list)
    for key, number in rows:
        found[key].append(number)
    return dict(found)


def chain(length: int) -> Graph:
    """Operators one behind the other."""
    uids = ["first", "total-1", *(f"next-{place}" for place in range(2, length))][:length]
    return Graph({uid: tuple(uids[place - 1 : place]) for place, uid in enumerate(uids)})


def union(width: int) -> Graph:
    """Operators side by side."""
    return Graph({uid: () for uid in [*(f"side-{place}" for place in range(1, width)), "total"]})


GRAPHS: Mapping[str, Graph] = {
    "one": Graph({"only": ()}),
    "chain of 2": chain(2),
    "chain of 5": chain(5),
    "union of 2": union(2),
    "union of 5": union(5),
    "both": Graph({"a": (), "b": ("a",), "c": (), "d": ("b", "c"), "total": ("c",)}),
}
