"""Values that a state cannot hold are refused by the call that writes them, so a processor can put them elsewhere."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import statelog
from statelog import OperatorProcessor, ProcessorError
from statelog.testing import Harness

HALF = "\ud83d"
VALUES: list[tuple[str, Any, Any, str]] = [
    ("byte", 2**7, -(2**7), "it is not between -128 and 127"),
    ("short", -(2**15) - 1, 2**15 - 1, "it is not between"),
    ("int", 2**31, -(2**31), "it is not between"),
    ("int", -(2**31) - 1, 2**31 - 1, "it is not between"),
    ("long", 2**63, -(2**63), "it is not between"),
    ("long", -(2**63) - 1, 2**63 - 1, "it is not between"),
    ("string", HALF, "\u00e4\U0001f600", "half of a surrogate pair"),
    ("interval day to second", datetime.timedelta.max, datetime.timedelta(days=-100_000_000), "more than 64 bits"),
    ("array<int>", [1, 2**31], [1, None, -(2**31)], "it is not between"),
    ("array<byte>", (1, 2**7), [1, -(2**7)], "it is not between"),
    ("array<string>", ["a", HALF], ["a", None, "\u00e4"], "half of a surrogate pair"),
    ("struct<x:long>", {"x": 2**63}, {"x": 2**63 - 1}, "it is not between"),
    ("map<string,short>", {"x": 2**15}, {"x": 2**15 - 1}, "it is not between"),
    ("map<string,short>", {HALF: 1}, {"\u00e4": 1}, "half of a surrogate pair"),
]


class Keeps(statelog.AggregateFunction[Any, Any]):
    def createAccumulator(self) -> tuple[Any, ...]:
        return (None, 0)

    def add(self, value: Any, accumulator: Any) -> tuple[Any, ...]:
        return (value, accumulator[1] + 1)

    def getResult(self, accumulator: Any) -> Any:
        return accumulator


class DeadLetters(StatefulProcessor):
    """Tries to write a value into each kind of state, then writes another one; returns what was refused."""

    def __init__(self, kind: str, bad: Any, good: Any) -> None:
        self._kind, self._bad, self._good = kind, bad, good

    def init(self, handle: Any) -> None:
        kind = self._kind
        self._value = handle.getValueState("value", f"v {kind}")
        self._pair = handle.getValueState("pair", f"n long, v {kind}")
        self._list = handle.getListState("list", f"v {kind}")
        self._map = handle.getMapState("map", "k int", f"v {kind}")
        self._last = handle.getReducingState("last", f"v {kind}", lambda _, added: added)
        self._kept = handle.getAggregatingState("kept", f"v {kind}, n long", Keeps())

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self._last.add((self._good,))
        writes: list[Callable[[Any], Any]] = [
            lambda value: self._value.update((value,)),
            lambda value: self._pair.update((1, value)),
            lambda value: self._list.appendValue((value,)),
            lambda value: self._list.appendList([(value,)]),
            lambda value: self._list.put([(self._good,), (value,)]),
            lambda value: self._map.updateValue((1,), (value,)),
            lambda value: self._last.add((value,)),
            lambda value: self._kept.add(value),
        ]
        for write in writes:
            try:
                write(self._bad)
            except ProcessorError as error:
                yield Row(letter=error.message)
            write(self._good)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("kind", "bad", "good", "reason"), VALUES)
def test_a_call_refuses_what_a_state_cannot_hold(kind: str, bad: Any, good: Any, reason: str) -> None:
    processor = DeadLetters(kind, bad, good)
    with Harness(processor, input="k string", output="letter string", keys=["k"]) as query:
        letters = [row.letter for row in query.push([("a",)])]
        names = ["value", "pair", "list", "list", "list", "map", "last", "kept"]
        assert [letter.split("'")[1] for letter in letters] == names
        assert all(reason in letter and "field 'v'" in letter for letter in letters)
        held = query.value("value", "a")
        assert held is not None
        assert query.list("list", "a") == [held, held]


class OperatorDeadLetters(OperatorProcessor):
    def init(self, handle: Any) -> None:
        self._list = handle.getListState("list", "n int")
        self._union = handle.getUnionListState("union", "n int")

    def process(self, rows: Any, context: Any) -> Iterator[Row]:
        for state in (self._list, self._union):
            for write in (state.add, lambda row, of=state: of.addAll([row]), lambda row, of=state: of.update([row])):
                try:
                    write((2**31,))
                except ProcessorError as error:
                    yield Row(letter=error.message)


def test_a_call_refuses_what_an_operator_state_cannot_hold() -> None:
    with Harness(OperatorDeadLetters(), input="k string", output="letter string", parallelism=1) as query:
        letters = [row.letter for row in query.push([("a",)])]
    assert [letter.split("'")[1] for letter in letters] == ["list"] * 3 + ["union"] * 3
    assert all("it is not between" in letter for letter in letters)
