"""Ranges of map keys, against a plain dictionary; and what is read of a map with many entries."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from statelog import ArrowBatch, ArrowProcessor, ErrorKind, ProcessorError
from statelog.convert.types import row_codec
from statelog.operators.keyed.changes import ChangeBuffer, ListPosition
from statelog.operators.keyed.collections import MapState
from statelog.operators.keyed.cursor import KeyCursor
from statelog.runs.byte_slices import BUDGET, Budget
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor, StateKind, TimeDomain
from statelog.runs.times import Moment, Ttl
from statelog.runs.values import RowCodec
from statelog.runs.writer import encode_run
from statelog.tables.memory import MemoryTable
from statelog.tables.rocksdb import RocksTable
from statelog.tables.runs import RunsTable
from statelog.tables.table import StateTable
from statelog.testing import Harness
from tests.contract.table_contract import make_keys

VALUES = row_codec(StructType().add("v", "string"), "state 'readings'")
TIMES = row_codec(StructType().add("at", "long").add("n", "integer"), "map key of state 'readings'")
KEYS = make_keys((1, b"a"), (2, b"b"))
TTL_MS = 25
Held = dict[tuple[int, int | None], tuple[str, int]]
"""The entries of a key, with the times at which they expire."""


class Chunk:
    """A map state in one batch of two keys."""

    def __init__(
        self, table: StateTable, batch: int, budget: Budget, ttl: Ttl | None, map_keys: RowCodec = TIMES
    ) -> None:
        now_ms = 10 * batch
        self.cursor = KeyCursor(table, ListPosition(1, batch), KEYS, Moment(now_ms, now_ms), budget=budget)
        expires_by = None if ttl is None else TimeDomain.PROCESSING
        state = StateDescriptor("readings", StateKind.MAP, VALUES.schema, map_keys.schema, expires_by)
        self.map = MapState(self.cursor, state, VALUES, map_keys, lambda row: row, ttl)
        self.map.open()

    def at(self, position: int) -> MapState:
        self.cursor.position = position
        return self.map

    def flush(self) -> Run:
        changes = ChangeBuffer()
        self.map.flush(changes)
        return Run(pa.py_buffer(encode_run(changes.sections(), compression=None, block_rows=3)), "run")


def _bound(chance: random.Random) -> tuple[Any, ...] | None:
    at = chance.randrange(-4, 6)
    return chance.choice([None, (at,), (at,), (at, chance.choice([None, 0, 2]))])


def _is_before(key: tuple[int, int | None], bound: tuple[Any, ...]) -> bool:
    """Null is before all numbers."""
    own, other = (
        tuple(-1 if part is None and place else part for place, part in enumerate(one)) for one in (key, bound)
    )
    return own[: len(other)] < other


def _within(held: Held, first: tuple[Any, ...] | None, end: tuple[Any, ...] | None) -> list[tuple[int, int | None]]:
    found = [
        key for key in held if (first is None or not _is_before(key, first)) and (end is None or _is_before(key, end))
    ]
    return sorted(found, key=lambda key: (key[0], -1 if key[1] is None else key[1]))


def _act(chance: random.Random, state: MapState, held: Held, until_ms: int, *, renews: bool) -> None:
    key, value = (chance.randrange(-4, 6), chance.choice([None, 0, 1, 2])), str(chance.randrange(1000))
    first, end = _bound(chance), _bound(chance)
    match chance.randrange(8):
        case 0 | 1 | 2:
            state.updateValue(key, (value,))
            held[key] = value, until_ms
        case 3:
            state.removeKey(key)
            held.pop(key, None)
        case 4 | 5:
            within = _within(held, first, end)
            found = state.range(first, end)
            assert list(found) == [(key, (held[key][0],)) for key in within], (first, end)
            if renews:
                held |= {key: (held[key][0], until_ms) for key in within}
        case 6:
            state.removeRange(first, end)
            for key in _within(held, first, end):
                del held[key]
        case _ if chance.random() < 0.1:
            state.clear()
            held.clear()


@pytest.mark.parametrize("kind", ["runs", "memory", "rocksdb"])
@pytest.mark.parametrize("ttl", [None, Ttl(TTL_MS), Ttl(TTL_MS, renew_on_read=True)], ids=["", "ttl", "renewed"])
@pytest.mark.parametrize("budget", [BUDGET, Budget(prefetch_entries=3)], ids=["", "pages"])
def test_ranges_are_those_of_a_dictionary(
    kind: str, ttl: Ttl | None, budget: Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if budget is not BUDGET:
        monkeypatch.setattr("statelog.operators.keyed.cursor.ENTRIES_PER_LOOKUP", 2)
    make: dict[str, Callable[[], StateTable | None]] = {
        "runs": RunsTable,
        "memory": MemoryTable,
        "rocksdb": lambda: RocksTable.open(tmp_path),
    }
    chance, table, held = random.Random(5), make[kind](), [Held(), Held()]
    assert table is not None
    for batch in range(40):
        chunk = Chunk(table, batch, budget, ttl)
        for position, of_key in enumerate(held):
            now_ms, state = 10 * batch, chunk.at(position)
            for key in [key for key, (_, until_ms) in of_key.items() if until_ms <= now_ms]:
                del of_key[key]
            for _ in range(chance.randrange(20)):
                until_ms = 1 << 60 if ttl is None else now_ms + TTL_MS
                _act(chance, state, of_key, until_ms, renews=ttl is not None and ttl.renew_on_read)
        table.apply([chunk.flush()])


def test_of_a_large_map_no_other_entries_are_read() -> None:
    chunk = Chunk(RunsTable(), 0, BUDGET, None)
    for number in range(20_000):
        chunk.at(1).updateValue((number, 0), ("x" * 20,))
    run = chunk.flush()

    class Watched(RunsTable):
        def entries(self, *arguments: Any) -> Any:
            raise AssertionError("the map is read as a whole")

    chunk = Chunk(Watched([run]), 1, BUDGET, None)
    assert [key for key, _ in chunk.at(1).range((5_000,), (5_010,))] == [(at, 0) for at in range(5_000, 5_010)]
    chunk.map.removeRange(end=(100,))
    assert next(chunk.map.range()) == ((100, 0), ("x" * 20,))
    changed = chunk.flush()
    assert changed.size_bytes < run.size_bytes / 50


def test_map_keys_without_an_order_have_no_ranges() -> None:
    names = row_codec(StructType().add("name", "string"), "map key of state 'readings'")
    state = Chunk(RunsTable(), 0, BUDGET, None, names).at(0)
    for bounds in ((("a",), ("b",)), ()):
        with pytest.raises(ProcessorError, match="map key of state 'readings': field 'name' has type string") as caught:
            state.range(*bounds)
        assert caught.value.kind is ErrorKind.STATE_USAGE


@pytest.mark.parametrize("bound", [(1, 2, 3), ("x",), ()])
def test_a_bound_has_values_of_the_first_fields(bound: tuple[Any, ...]) -> None:
    state = Chunk(RunsTable(), 0, BUDGET, None).at(0)
    with pytest.raises(ProcessorError, match="map key of state 'readings'"):
        state.range(bound)


class Columns(ArrowProcessor):
    """Has a map by time, and does with it what a test says."""

    def __init__(self, act: Callable[[Any, list[str]], None]) -> None:
        self._act = act

    def init(self, handle: Any) -> None:
        self._map = handle.getMapState("readings", "at long, n int", "v string")

    def process(self, batch: ArrowBatch) -> None:
        self._act(self._map, batch.keys.column("user").to_pylist())


@pytest.mark.parametrize("lookup", [2, 256])
def test_ranges_of_many_keys_are_those_of_dictionaries(lookup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statelog.operators.keyed.columns.ENTRIES_PER_LOOKUP", lookup)
    chance, held = random.Random(6), {user: Held() for user in "abcd"}

    def act(state: Any, users: list[str]) -> None:
        for _ in range(chance.randrange(8)):
            first, end = _bound(chance), _bound(chance)
            owners = [chance.randrange(len(users)) for _ in range(5)]
            keys = [(chance.randrange(-4, 6), chance.choice([None, 0, 1, 2])) for _ in owners]
            columns = {"at": [key[0] for key in keys], "n": [key[1] for key in keys]}
            match chance.randrange(6):
                case 0 | 1:
                    values = [str(chance.randrange(1000)) for _ in owners]
                    state.put(owners, columns, {"v": values})
                    for owner, key, value in zip(owners, keys, values, strict=True):
                        held[users[owner]][key] = value, 0
                case 2:
                    state.remove(owners, columns)
                    for owner, key in zip(owners, keys, strict=True):
                        held[users[owner]].pop(key, None)
                case 3 if chance.random() < 0.2:
                    state.clear([0])
                    held[users[0]].clear()
                case 4:
                    state.entries()
                case _:
                    found = state.range(first, end)
                    rows = zip(found.map_keys.to_pylist(), found.values.to_pylist(), strict=True)
                    assert [(key["at"], key["n"], value["v"]) for key, value in rows] == [
                        (*key, held[user][key][0]) for user in users for key in _within(held[user], first, end)
                    ]
                    assert found.key_index.tolist() == [
                        place for place, user in enumerate(users) for _ in _within(held[user], first, end)
                    ]

    with Harness(Columns(act), input="user string", output="user string", keys=["user"], parallelism=1) as harness:
        for batch in range(60):
            harness.push([(user,) for user in chance.sample("abcd", chance.randrange(1, 5))])
            if batch % 20 == 19:
                harness.restart()
