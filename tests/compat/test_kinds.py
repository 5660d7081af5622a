"""A location with timers, TTL, reducing and aggregating states and a deleted one, as each version has stored it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import AggregateFunction, Options, Ttl
from statelog.testing import Harness
from tests.compat.stored import read_query, write_query

FIXTURES = Path(__file__).parent / "kinds"
BATCHES_MS = [1_000, 2_000, 3_000, 4_000]


class Mean(AggregateFunction[int, float]):
    def createAccumulator(self) -> tuple[int, int]:
        return (0, 0)

    def add(self, value: int, accumulator: tuple[Any, ...]) -> tuple[Any, ...]:
        return (accumulator[0] + value, accumulator[1] + 1)

    def getResult(self, accumulator: tuple[Any, ...]) -> float:
        return float(accumulator[0] / accumulator[1])


class Kinds(StatefulProcessor):
    """Every row goes into every state, and asks for a timer."""

    def __init__(self, *, deletes: bool = False) -> None:
        self._deletes = deletes

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._brief = handle.getMapState("brief", "n long", "n long", Ttl(2_000))
        self._most = handle.getReducingState("most", "n long", max)
        self._mean = handle.getAggregatingState("mean", "total long, count long", Mean())
        if self._deletes:
            handle.deleteIfExists("gone")
        else:
            self._gone = handle.getValueState("gone", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._brief.updateValue((row.n,), (row.n,))
            self._most.add((row.n,))
            self._mean.add(row.n)
            self._handle.registerTimer(row.n * 1_000)
            if not self._deletes:
                self._gone.update((row.n,))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], at=expiredTimerInfo.getExpiryTimeInMs(), most=self._most.get()[0], mean=self._mean.get())

    def close(self) -> None:
        pass


def make_harness() -> Harness:
    return Harness(
        Kinds(),
        input="k string, n long",
        keys=["k"],
        output="k string, at long, most long, mean double",
        timeMode="ProcessingTime",
        options=Options(file_merging="within"),
    )


def write(directory: Path) -> None:
    """Write the fixture: four batches, two runs, and a state that is deleted by the second."""
    with make_harness() as harness:
        harness.push([("a", 3), ("b", 9), (None, 8)], BATCHES_MS[0])
        harness.push([("a", 5), ("b", 1)], BATCHES_MS[1])
        harness.restart(3, processor=Kinds(deletes=True))
        harness.push([("a", 7)], BATCHES_MS[2])
        harness.push([], BATCHES_MS[3])
        write_query(directory, harness)


@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
@pytest.mark.parametrize("parallelism", [1, 3, 4])
def test_fixture_is_read(fixture: Path, parallelism: int) -> None:
    with Harness.restore(
        read_query(fixture, make_harness(), BATCHES_MS), Kinds(deletes=True), parallelism=parallelism
    ) as harness:
        assert harness.map("brief", "a") == {(7,): (7,)}
        assert harness.map("brief", "b") == {}
        assert [harness.value("most", key) for key in ("a", "b", (None,))] == [(7,), (9,), (8,)]
        assert [harness.value("mean", key) for key in ("a", "b", (None,))] == [(15, 3), (10, 2), (8, 1)]
        assert [harness.timers(key) for key in ("a", "b", (None,))] == [[5_000, 7_000], [9_000], [8_000]]
        assert sorted(map(tuple, harness.advanceProcessingTime(7_000))) == [("a", 5_000, 7, 5.0), ("a", 7_000, 7, 5.0)]
        harness.restart(processor=Kinds())
        assert harness.value("gone", "a") is None
        assert sorted(map(tuple, harness.advanceProcessingTime(10_000)), key=str) == [
            ("b", 9_000, 9, 5.0),
            (None, 8_000, 8, 8.0),
        ]
