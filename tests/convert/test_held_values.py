"""A value is in the state as it was when it was written, whatever the processor does with it before and after."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import Ttl
from statelog.testing import Harness

AT = datetime.datetime(2024, 7, 1, 12, 0, 0, 5, tzinfo=datetime.UTC)
LOCAL = AT.astimezone().replace(tzinfo=None)
SCHEMA = """at timestamp, sum decimal(18,2), items array<long>, ats array<timestamp>, by_key map<string, array<long>>,
    pair struct<n: long, ats: array<timestamp>>, plain struct<n: long>, parts array<struct<items: array<long>>>"""


def given() -> tuple[Any, ...]:
    return (
        *(AT, Decimal("1.005"), [1, None], [AT, None], {"a": [1], "b": None}, Row(n=1, ats=[AT]), {"n": 1}),
        [Row(items=[1, 2]), None],
    )


READ = (
    *(LOCAL, Decimal("1.01"), [1, None], [LOCAL, None], {"a": [1], "b": None}, Row(n=1, ats=[LOCAL]), Row(n=1)),
    [Row(items=[1, 2]), None],
)


def spoil(row: tuple[Any, ...]) -> None:
    """Change everything in a row that can be changed."""
    _, _, items, ats, by_key, pair, _, parts = row
    items.append(9)
    ats.clear()
    by_key["a"].append(9)
    by_key["c"] = [9]
    pair["ats" if isinstance(pair, dict) else 1].append(None)
    parts[0]["items" if isinstance(parts[0], dict) else 0].append(9)
    parts.append(None)


class Spoils(StatefulProcessor):
    """Writes a row with the first batch only, and changes all that it writes and reads."""

    def __init__(self, ttl: Ttl | None) -> None:
        self._ttl = ttl

    def init(self, handle: Any) -> None:
        self._value = handle.getValueState("value", SCHEMA, self._ttl)
        self._list = handle.getListState("list", SCHEMA, self._ttl)
        self._map = handle.getMapState("map", "n long", SCHEMA, self._ttl)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        writes: list[Callable[[Any], None]] = [
            self._value.update,
            self._list.appendValue,
            lambda row: self._list.appendList([row]),
            lambda row: self._map.updateValue((1,), row),
        ]
        for write in writes if next(rows).writes else []:
            row = given()
            write(row)
            spoil(row)
        reads: list[Callable[[], list[tuple[Any, ...]]]] = [
            lambda: [self._value.get()],
            lambda: list(self._list.get()),
            lambda: [self._map.getValue((1,))],
            lambda: list(self._map.values()),
            lambda: [row for _, row in self._map.iterator()],
        ]
        for read in reads:
            for _ in range(2):
                for row in read():
                    assert tuple(row) == READ
                    assert type(row[5]).__fields__ == ["n", "ats"]
                    spoil(row)
        yield Row(n=1)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("ttl", [None, Ttl(1000, renew_on_read=True)])
def test_what_is_written_stays_and_what_is_read_is_a_copy(ttl: Ttl | None) -> None:
    arguments: dict[str, Any] = {"keys": ["k"], "output": "n long", "timeMode": "ProcessingTime"}
    with Harness(Spoils(ttl), input="k long, writes boolean", **arguments) as harness:
        harness.push([(1, True), (2, True)])
        for _ in range(3):
            harness.advanceProcessingTime(900 if ttl else 10_000)
            assert harness.push([(2, False), (1, False)]) == [Row(n=1)] * 2
