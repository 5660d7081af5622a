"""deleteIfExists: the state is gone for good once a checkpoint says so, and its name can be used anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import ConfigurationError, Options, ProcessorError, Step
from statelog.operators.keyed.collections import ListState, MapState
from statelog.operators.keyed.values import AggregatingState, ReducingState, ValueState
from statelog.options import TABLES, Tuning
from statelog.runs.schema import StateKind
from statelog.spark.plan.states import DeletedState
from statelog.testing import Harness, TwsTester
from statelog.windows.processor import WindowHandle

COLUMNS = "k string, n long"


class Processor(StatefulProcessor):
    """Adds to a state, if this version has one, and deletes others."""

    def __init__(self, kind: str | None, *, deletes: tuple[str, ...] = (), schema: str = "n long") -> None:
        self._kind = kind
        self._deletes = deletes
        self._schema = schema

    def init(self, handle: Any) -> None:
        for name in self._deletes:
            handle.deleteIfExists(name)
        if self._kind == "value":
            self._value = handle.getValueState("sum", self._schema)
        elif self._kind == "list":
            self._list = handle.getListState("sum", self._schema)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        added = sum(row.n for row in rows)
        if self._kind == "value":
            total = (self._value.get() or (0,))[0] + added
            self._value.update((total,))
            yield Row(k=key[0], n=total)
        elif self._kind == "list":
            self._list.appendValue((str(added),))
            yield Row(k=key[0], n=len(list(self._list.get())))

    def close(self) -> None:
        pass


def harness_of(processor: Processor, table: str) -> Harness:
    return Harness(
        processor,
        input=COLUMNS,
        keys=["k"],
        output=COLUMNS,
        options=Options(table=table, tuning=Tuning(merge_fan_in=2)),
        parallelism=2,
    )


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("keep_local", [True, False])
def test_a_deleted_state_does_not_come_back(table: str, keep_local: bool) -> None:
    with harness_of(Processor("value"), table) as harness:
        assert harness.push([("a", 1), ("b", 2)])
        harness.restart(3, keepLocal=keep_local, processor=Processor(None, deletes=("sum", "unknown")))
        harness.push([("a", 1)])
        harness.restart(2, keepLocal=keep_local, processor=Processor("list", schema="text string"))
        assert harness.push([("a", 5)]) == [Row(k="a", n=1)]
        for _ in range(4):  # enough for merges
            harness.push([("b", 1)])
        harness.restart(1, keepLocal=keep_local, processor=Processor(None, deletes=("sum",)))
        harness.push([])
        harness.restart(2, keepLocal=keep_local, processor=Processor("value"))
        assert sorted(harness.push([("a", 7), ("b", 8)])) == [Row(k="a", n=7), Row(k="b", n=8)]
        assert harness.push([("a", 1)]) == [Row(k="a", n=8)]


@pytest.mark.parametrize("table", TABLES)
def test_a_deletion_that_no_checkpoint_has_did_not_happen(table: str) -> None:
    """The run that deletes dies before its first checkpoint, and the version before takes over again."""
    with harness_of(Processor("value"), table) as harness:
        for _ in range(3):
            harness.push([("a", 1), ("b", 1)])
        harness.restart(processor=Processor(None, deletes=("sum",)))
        harness.crash(Step.LAST_ACK)
        snapshot = harness.snapshot()
        harness.restart(processor=Processor("value"))
        assert harness.push([("a", 1)]) == [Row(k="a", n=4)]
        with Harness.restore(snapshot, Processor("value")) as other:
            assert other.push([("b", 1)]) == [Row(k="b", n=4)]


@pytest.mark.parametrize("table", TABLES)
def test_a_batch_that_deletes_can_be_repeated_by_a_version_that_does_not(table: str) -> None:
    """Its checkpoint is durable, but not certain: what local merges drop meanwhile is gone from the one before, too."""
    with harness_of(Processor("value"), table) as harness:
        for _ in range(5):
            harness.push([("a", 1), ("b", 1)])
        harness.restart(processor=Processor(None, deletes=("sum",)))
        assert harness.push([]) == []
        harness.restart(processor=Processor("value"))
        assert harness.repeatBatch(restart=True) == []
        assert sorted(harness.push([("a", 1), ("b", 1)])) == [Row(k="a", n=6), Row(k="b", n=6)]


STATES = ("value", "list", "map", "reducing", "aggregating")
GONE = "State {} is not initialized: init() of operator 'main' declares it and then deletes it"


class Both(StatefulProcessor):
    """Declares states of all kinds and deletes them, in an order; shows what they hold, then writes to them."""

    def __init__(self, order: str, ttl: statelog.Ttl | None = None) -> None:
        self._order = order
        self._ttl = ttl

    def init(self, handle: Any) -> None:
        self._handle = handle
        for step in self._order.split():
            if step == "delete":
                for name in STATES:
                    handle.deleteIfExists(name)
            else:
                self._declare(handle)

    def _declare(self, handle: Any) -> None:
        self.value = handle.getValueState("value", "n long", self._ttl)
        self.list = handle.getListState("list", "n long", self._ttl)
        self.map = handle.getMapState("map", "k string", "n long", self._ttl)
        self.reducing = handle.getReducingState(
            "reducing", "n long", lambda one, other: (one[0] + other[0],), self._ttl
        )
        self.aggregating = handle.getAggregatingState("aggregating", "n long", Adds(), self._ttl)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield from self._shown(key)
        self.value.update((1,))
        self.list.appendList([(1,), (2,)])
        self.map.updateValue(("a",), (1,))
        self.reducing.add((1,))
        self.aggregating.add(1)
        yield from self._shown(key)
        self._handle.registerTimer(0)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield from self._shown(key)
        self.list.appendValue((3,))
        yield from self._shown(key)

    def _shown(self, key: Any) -> Iterator[Row]:
        held = [self.value.get(), [n for (n,) in self.list.get()], dict(self.map.iterator()), self.map.getValue(("a",))]
        yield Row(k=key[0], seen=repr([*held, self.reducing.get(), self.aggregating.get()]))

    def close(self) -> None:
        pass


class Adds(statelog.AggregateFunction[int, int]):
    """The sum of numbers."""

    def createAccumulator(self) -> tuple[int]:
        return (0,)

    def add(self, value: int, accumulator: tuple[Any, ...]) -> tuple[int]:
        return (accumulator[0] + value,)

    def getResult(self, accumulator: tuple[Any, ...]) -> int:
        return int(accumulator[0])


def both(processor: StatefulProcessor, table: str = "runs") -> Harness:
    return Harness(
        processor,
        input=COLUMNS,
        keys=["k"],
        output="k string, seen string",
        timeMode="ProcessingTime",
        options=Options(table=table, tuning=Tuning(merge_fan_in=2)),
        parallelism=2,
    )


EMPTY = "[None, [], {}, None, None, None]"
WRITTEN = "[(1,), [1, 2], {('a',): (1,)}, Row(n=1), (1,), 1]"
AT_TIMER = "[(1,), [1, 2, 3], {('a',): (1,)}, Row(n=1), (1,), 1]"


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("ttl", [None, statelog.Ttl(10**9)], ids=["kept", "ttl"])
def test_a_state_that_is_deleted_and_then_declared_lives_for_a_batch(table: str, ttl: statelog.Ttl | None) -> None:
    of_a_batch = [EMPTY, WRITTEN, WRITTEN, AT_TIMER]
    with both(Both("declare", ttl), table) as harness:
        assert [row.seen for row in harness.push([("a", 1)])] == of_a_batch
        assert harness.push([("a", 1)])[0].seen == AT_TIMER
        with pytest.warns(statelog.ConfigurationWarning, match="empty at the start of every batch") as told:
            harness.restart(3, processor=Both("delete declare", ttl))
        assert str(told[0].message).count("(value, list, map, reducing, aggregating)") == 1
        for _ in range(4):
            assert [row.seen for row in harness.push([("a", 1)])] == of_a_batch
        harness.restart(2, processor=Both("declare", ttl))
        assert [row.seen for row in harness.push([("a", 1)])] == of_a_batch


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("order", ["declare delete", "delete declare delete"])
def test_a_state_that_is_declared_and_then_deleted_cannot_be_used(table: str, order: str) -> None:
    with both(Both("declare"), table) as harness:
        harness.push([("a", 1), ("b", 1)])
        with pytest.warns(statelog.ConfigurationWarning, match="reading and writing them fails"):
            harness.restart(3, processor=Both(order))
        with pytest.raises(ProcessorError, match=re.escape(GONE.format("value").replace("State", "Value state"))):
            harness.push([("a", 1)])
        harness.restart(2, processor=Both("declare"))
        assert harness.push([("a", 1)])[0].seen != EMPTY, "no batch has deleted it"
        with pytest.warns(statelog.ConfigurationWarning):
            harness.restart(processor=Both(order))
        harness.push([])
        harness.restart(processor=Both("declare"))
        assert {row.seen for row in harness.push([("a", 1), ("b", 1)])} == {EMPTY, WRITTEN, AT_TIMER}


CALLS: dict[StateKind, dict[str, tuple[Any, ...]]] = {
    StateKind.VALUE: {"exists": (), "get": (), "update": ((1,),), "clear": ()},
    StateKind.LIST: {"exists": (), "put": ([(1,)],), "appendValue": ((1,),), "appendList": ([(1,)],), "clear": ()},
    StateKind.MAP: {
        "exists": (),
        "getValue": ((1,),),
        "containsKey": ((1,),),
        "updateValue": ((1,), (1,)),
        "removeKey": ((1,),),
        "removeRange": ((1,), (2,)),
        "clear": (),
    },
    StateKind.REDUCING: {"exists": (), "get": (), "add": ((1,),), "clear": ()},
    StateKind.AGGREGATING: {
        "exists": (),
        "get": (),
        "add": (1,),
        "clear": (),
        "getAccumulator": (),
        "mergeAccumulator": ((1,),),
    },
}
HANDLES: dict[StateKind, type] = {
    StateKind.VALUE: ValueState,
    StateKind.LIST: ListState,
    StateKind.MAP: MapState,
    StateKind.REDUCING: ReducingState,
    StateKind.AGGREGATING: AggregatingState,
}


@pytest.mark.parametrize("kind", CALLS)
def test_every_method_of_a_deleted_state_says_that_it_is_deleted(kind: StateKind) -> None:
    state = DeletedState("gone", kind, "main")
    for method, arguments in CALLS[kind].items():
        with pytest.raises(PySparkRuntimeError, match=r"^Error .*: \w+ state gone is not initialized: init\(\)"):
            getattr(state, method)(*arguments)
    for method in {"get", "iterator", "keys", "values", "range"} - CALLS[kind].keys():
        if hasattr(HANDLES[kind], method):
            assert list(getattr(state, method)()) == [], "as on Spark"
    if kind is StateKind.MAP:
        assert list(state.range((1,), end=(2,))) == []  # type: ignore[attr-defined]  # set for the kind
    own = {name for name in dir(HANDLES[kind]) if not name.startswith("_")} - {"open", "flush", "used_as"}
    assert own <= {name for name in dir(state) if not name.startswith("_")}


class DeletesPanes(statelog.WindowProcessor):
    def init(self, handle: Any) -> None:
        handle.deleteIfExists("window.panes")

    def process(self, key: Any, window: Any, rows: Iterator[Row], context: Any) -> Iterator[Row]:
        yield from ()


def test_a_state_of_the_windows_themselves_cannot_be_deleted() -> None:
    with pytest.raises(ConfigurationError, match=r"deletes 'window.panes', a state of the windows themselves"):
        DeletesPanes().init(WindowHandle(Mock()))


def test_a_state_that_is_declared_deleted_and_declared_again_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"declares state 'value', deletes it and declares it again"):
        both(Both("declare delete declare"))


@pytest.mark.parametrize("order", ["declare delete", "delete declare"])
def test_the_tester_of_spark_knows_deleted_states(order: str) -> None:
    tester = TwsTester(Both(order), timeMode="ProcessingTime")
    if order == "delete declare":
        for _ in range(2):
            assert tester.test("a", [Row(n=1)])[0].seen == EMPTY
        return
    with pytest.raises(PySparkRuntimeError, match="^Error getting value state: Value state value is not initialized"):
        tester.test("a", [Row(n=1)])


def test_a_state_that_is_only_not_declared_any_more_stays() -> None:
    with harness_of(Processor("value"), "runs") as harness:
        harness.push([("a", 1)])
        harness.restart(processor=Processor(None))
        harness.push([("a", 1)])
        harness.restart(processor=Processor("value"))
        assert harness.push([("a", 1)]) == [Row(k="a", n=2)]
