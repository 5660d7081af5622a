"""Instants in the hour that a clock goes through twice: equal as local times, and yet not the same."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog.testing import Harness

UTC = datetime.UTC
FIRST = datetime.datetime(2024, 10, 27, 0, 30, 1, 7, tzinfo=UTC)
SECOND = datetime.datetime(2024, 10, 27, 1, 30, 1, 7, tzinfo=UTC)
BEFORE_1970 = datetime.datetime(1945, 11, 18, 1, 30, tzinfo=UTC)


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


class Instants(StatefulProcessor):
    """Writes each instant to every kind of state, and returns what these hold."""

    def init(self, handle: Any) -> None:
        self._last = handle.getValueState("last", "at timestamp")
        self._all = handle.getListState("all", "at timestamp")
        self._counts = handle.getMapState("counts", "at timestamp", "n int")
        self._held = handle.getValueState("held", "counts map<timestamp, int>")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            local = datetime.datetime.fromtimestamp(row.at.timestamp())  # without a zone, as everywhere in PySpark
            self._last.update((local,))
            self._all.appendValue(self._last.get())
            count = self._counts.getValue((local,))
            self._counts.updateValue((local,), ((count.n if count else 0) + row.n,))
            held = dict(self._held.get()[0]) if self._held.exists() else {}
            self._held.update(({**held, row.at: row.n},))
        yield Row(
            last=self._last.get()[0],
            all=[at for (at,) in self._all.get()],
            by_map=[(at, n) for (at,), (n,) in self._counts.iterator()],
            held=len(self._held.get()[0]),
        )

    def close(self) -> None:
        pass


def test_both_instants_are_kept() -> None:
    output = "last timestamp, all array<timestamp>, by_map array<struct<at timestamp, n int>>, held int"
    with Harness(Instants(), input="k long, at timestamp, n int", keys=["k"], output=output) as harness:
        for repetition in range(2):
            for batch in ([FIRST, SECOND], [BEFORE_1970]):
                [row] = harness.push([(1, at, 1 + (at == SECOND)) for at in batch])
                assert row.last.astimezone(UTC) == batch[-1]
            assert [at.astimezone(UTC) for at in row.all] == [FIRST, SECOND, BEFORE_1970] * (1 + repetition)
            harness.restart(2, keepLocal=False)
        assert {at.astimezone(UTC): n for at, n in row.by_map} == {FIRST: 2, SECOND: 4, BEFORE_1970: 2}
        assert row.held == 3
