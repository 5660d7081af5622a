"""deleteIfExists: the state is gone for good once a checkpoint says so, and its name can be used anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import ConfigurationError, Options, Step
from statelog.options import TABLES
from statelog.testing import Harness

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
        options=Options(table=table, merge_fan_in=2),
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


def test_a_state_that_is_declared_cannot_be_deleted() -> None:
    with pytest.raises(ConfigurationError, match=r"both declares and deletes state 'sum'"):
        harness_of(Processor("value", deletes=("sum",)), "runs")


def test_a_state_that_is_only_not_declared_any_more_stays() -> None:
    with harness_of(Processor("value"), "runs") as harness:
        harness.push([("a", 1)])
        harness.restart(processor=Processor(None))
        harness.push([("a", 1)])
        harness.restart(processor=Processor("value"))
        assert harness.push([("a", 1)]) == [Row(k="a", n=2)]
