"""Lists, maps and timers of keys that are too large to be read as a whole, against plain Python containers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from statelog import ErrorKind, ProcessorError
from statelog.convert.types import row_codec
from statelog.operators.keyed.changes import ChangeBuffer, ListPosition
from statelog.operators.keyed.collections import ListState, MapState
from statelog.operators.keyed.cursor import KeyCursor
from statelog.operators.keyed.timers import Timers
from statelog.runs.byte_slices import BUDGET, Budget
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor, StateKind, TimeDomain
from statelog.runs.times import Moment, Ttl
from statelog.runs.writer import encode_run
from statelog.tables.memory import MemoryTable
from statelog.tables.rocksdb import RocksTable
from statelog.tables.runs import RunsTable
from statelog.tables.table import EntryRows, KeyBatch, StateTable
from tests.contract.table_contract import make_keys

TEXTS = row_codec(StructType().add("t", "string"), "state 'texts'")
NAMES = row_codec(StructType().add("n", "string"), "map key of state 'texts'")
KEYS = make_keys((1, b"a"), (2, b"b"), (2, b"c"))
TTL_MS = 25

FEW = Budget(prefetch_entries=6)
SMALL = Budget(slice_bytes=400)


class Chunk:
    """Handles of one batch of the keys a, b and c."""

    def __init__(self, table: StateTable, batch: int, budget: Budget, now_ms: int, ttl: Ttl | None) -> None:
        self.cursor = KeyCursor(table, ListPosition(1, batch), KEYS, Moment(now_ms, now_ms), budget=budget)
        expires_by = None if ttl is None else TimeDomain.PROCESSING
        of_list = StateDescriptor("list", StateKind.LIST, TEXTS.schema, expires_by=expires_by)
        of_map = StateDescriptor("map", StateKind.MAP, TEXTS.schema, NAMES.schema, expires_by)
        self.list = ListState(self.cursor, of_list, TEXTS, ttl)
        self.map = MapState(self.cursor, of_map, TEXTS, NAMES, lambda row: row, ttl)
        self.timers = Timers(self.cursor, TimeDomain.PROCESSING)
        for state in (self.list, self.map, self.timers):
            state.open()

    def flush(self) -> Run:
        changes = ChangeBuffer()
        for state in (self.list, self.map, self.timers):
            state.flush(changes)
        return Run(pa.py_buffer(encode_run(changes.sections(), compression=None, block_rows=3)), "run")


class Held:
    """What a key should have; values come with the time at which they expire."""

    def __init__(self) -> None:
        self.list: list[tuple[str, int]] = []
        self.map: dict[str, tuple[str, int]] = {}
        self.timers: set[int] = set()

    def expire(self, now_ms: int) -> None:
        """Drop what has expired, and put the map's entries in the order of a new batch."""
        self.list = [(text, until) for text, until in self.list if until > now_ms]
        self.map = {name: held for name, held in sorted(self.map.items()) if held[1] > now_ms}


Waiting = list[tuple[Iterator[Any], list[Any]]]
"""Iterators, and what each should give."""


def act(chance: random.Random, chunk: Chunk, held: Held, until_ms: int, waiting: Waiting, *, renews: bool) -> None:
    """Do something with the current key, and with what it should have."""
    name, text = f"{chance.randrange(20):02}", "x" * chance.choice([0, 1, 30, 200])
    values, pairs = [(text,) for text, _ in held.list], [((name,), (text,)) for name, (text, _) in held.map.items()]
    match chance.randrange(15):
        case 0 | 1:
            chunk.list.appendList([(text,), (name,)])
            held.list += [(text, until_ms), (name, until_ms)]
        case 2 | 3 | 4:
            chunk.map.updateValue((name,), (text,))
            held.map[name] = text, until_ms
        case 5:
            chunk.map.removeKey((name,))
            held.map.pop(name, None)
        case 6:
            expected = (held.map[name][0],) if name in held.map else None
            assert chunk.map.getValue((name,)) == expected
            assert chunk.map.containsKey((name,)) == (expected is not None)
            if renews and expected is not None:
                held.map[name] = expected[0], until_ms
        case 7:
            waiting.append((chunk.list.get(), values))
            if renews:
                held.list = [(text, until_ms) for text, _ in held.list]
        case 8 | 9:
            which = chance.choice(["iterator", "keys", "values"])
            expected_of: dict[str, list[Any]] = {
                "iterator": pairs,
                "keys": [pair[0] for pair in pairs],
                "values": [pair[1] for pair in pairs],
            }
            waiting.append((getattr(chunk.map, which)(), expected_of[which]))
            if renews:
                held.map = {name: (text, until_ms) for name, (text, _) in held.map.items()}
        case 10:
            assert chunk.list.exists() == bool(held.list)
            assert chunk.map.exists() == bool(held.map)
        case 11:
            time_ms = chance.randrange(-5, 15)
            chunk.timers.register(time_ms)
            held.timers.add(time_ms)
        case 12:
            time_ms = chance.randrange(-5, 15)
            chunk.timers.delete(time_ms)
            held.timers.discard(time_ms)
        case 13:
            waiting.append((chunk.timers.list(), sorted(held.timers)))
        case 14 if chance.random() < 0.2:
            chunk.list.put([(text,)])
            held.list = [(text, until_ms)]
        case 14 if chance.random() < 0.2:
            chunk.list.clear()
            chunk.map.clear()
            held.list, held.map = [], {}


def used_up(iterator: Iterator[Any], expected: list[Any]) -> list[Any]:
    """What is left in an iterator; maps have no order that a plain dict would know."""
    found = list(iterator)
    assert sorted(found) == sorted(expected)
    return found


def story(budget: Budget, make: Callable[[], StateTable], ttl: Ttl | None, seed: int) -> list[Any]:
    """Random batches of two phases; returns what iterators gave, and what was written.

    Iterators are used up at any time: between writes, while a later key is processed, in a later batch.
    """
    chance, table = random.Random(seed), make()
    renews = ttl is not None and ttl.renew_on_read
    keys = [Held() for _ in range(len(KEYS))]
    told: list[Any] = []
    waiting: Waiting = []
    for batch in range(6):
        now_ms = 10 * batch
        until_ms = 1 << 60 if ttl is None else now_ms + TTL_MS
        seen = table
        runs: list[Run] = []
        for phase in range(2):
            chunk = Chunk(seen, batch, budget, now_ms, ttl)
            chunk.cursor.list_position = ListPosition(1, batch, phase)
            for position, held in enumerate(keys):
                chunk.cursor.position = position
                held.expire(now_ms)
                for _ in range(chance.randrange(25)):
                    act(chance, chunk, held, until_ms, waiting, renews=renews)
                    if waiting and chance.random() < 0.3:
                        told.append(used_up(*waiting.pop(chance.randrange(len(waiting)))))
            runs.append(chunk.flush())
            seen = seen.branch(runs[-1])
            told.append(rows_of(runs[-1]))
        table.apply(runs)
    return told + [used_up(*each) for each in waiting]


def rows_of(run: Run) -> list[dict[str, Any]]:
    return [row for part in run.sections.values() for block in part.blocks for row in block.load().to_pylist()]


@pytest.mark.parametrize("make", [RunsTable, MemoryTable])
@pytest.mark.parametrize("ttl", [None, Ttl(TTL_MS), Ttl(TTL_MS, renew_on_read=True)], ids=["", "ttl", "renewed"])
@pytest.mark.parametrize("seed", range(2))
def test_large_keys_are_as_plain_containers(make: Callable[[], StateTable], ttl: Ttl | None, seed: int) -> None:
    """And exactly as keys that are read as a whole."""
    whole = story(BUDGET, make, ttl, seed)
    assert len(whole) > 30
    assert story(FEW, make, ttl, seed) == whole
    if make is RunsTable:
        assert story(SMALL, make, ttl, seed) == whole


# ---- Bounds ----


class Watched(RunsTable):
    """Notes the sizes of pages, and refuses to read entries otherwise."""

    def __init__(self, runs: list[Run]) -> None:
        super().__init__(runs)
        self.pages: list[int] = []

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        raise AssertionError("the entries of a large key are read at once")


def filled(count: int, text: str) -> list[Run]:
    """Runs in which the key b has so many elements, entries and timers, and the others have few."""
    table = RunsTable()
    runs: list[Run] = []
    for batch in range(4):
        chunk = Chunk(table, batch, BUDGET, 0, None)
        for position in range(3):
            chunk.cursor.position = position
            for number in range(batch, count if position == 1 else 4, 4):
                chunk.list.appendValue((text,))
                chunk.map.updateValue((f"{number:05}",), (text,))
                chunk.timers.register(number)
        runs.append(chunk.flush())
        table.apply(runs[-1:])
    return runs


def test_a_large_key_is_never_read_as_a_whole() -> None:
    chunk = Chunk(Watched(filled(500, "x" * 100)), 9, Budget(slice_bytes=20_000), 0, None)
    chunk.cursor.position = 1
    for iterator in (chunk.list.get(), chunk.map.iterator(), chunk.map.keys(), chunk.map.values()):
        assert sum(1 for _ in iterator) == 500
    assert chunk.list.exists()
    assert chunk.map.exists()
    assert chunk.map.getValue(("00077",)) == ("x" * 100,)
    assert chunk.map.getValue(("x",)) is None


def test_a_large_map_without_its_entries_does_not_exist() -> None:
    chunk = Chunk(RunsTable(filled(50, "x")), 9, FEW, 0, None)
    chunk.cursor.position = 1
    for number in range(50):
        assert chunk.map.exists()
        chunk.map.removeKey((f"{number:05}",))
    assert not chunk.map.exists()
    assert list(chunk.map.keys()) == []
    chunk.map.updateValue(("x",), ("y",))
    assert chunk.map.exists()


def test_a_large_list_of_which_all_has_expired_does_not_exist() -> None:
    ttl, table = Ttl(TTL_MS), RunsTable()
    chunk = Chunk(table, 0, BUDGET, 0, ttl)
    chunk.cursor.position = 1
    chunk.list.appendList([("x",)] * 50)
    table.apply([chunk.flush()])
    for now_ms, exists in ((TTL_MS - 1, True), (TTL_MS, False)):
        chunk = Chunk(table, 1, FEW, now_ms, ttl)
        chunk.cursor.position = 1
        assert chunk.list.exists() == exists
        chunk.list.appendValue(("y",))
        assert chunk.list.exists()


def test_many_timers_of_a_key_are_read_in_pages() -> None:
    chunk = Chunk(Watched(filled(500, "")), 9, Budget(prefetch_entries=100), 0, None)
    chunk.cursor.position = 1
    assert list(chunk.timers.list()) == list(range(500))


@pytest.mark.parametrize("budget", [Budget(slice_bytes=20_000), Budget(prefetch_entries=50)])
def test_a_fetch_ends_before_a_large_key(budget: Budget) -> None:
    chunk = Chunk(RunsTable(filled(500, "x" * 100)), 9, budget, 0, None)
    for position, count in enumerate((4, 500, 4)):
        chunk.cursor.position = position
        assert len(list(chunk.list.get())) == count
        assert len(list(chunk.map.iterator())) == count
    assert chunk.cursor.loaded_bytes < 5000, "pages are not kept"


def test_renewing_a_large_key_writes_its_entries_in_order() -> None:
    ttl = Ttl(TTL_MS, renew_on_read=True)
    runs: list[list[Any]] = []
    for budget in (BUDGET, Budget(slice_bytes=5_000)):
        chunk = Chunk(RunsTable(filled(300, "x" * 50)), 9, budget, 100, ttl)
        chunk.cursor.position = 1
        chunk.map.updateValue(("00005x",), ("new",))
        chunk.map.updateValue(("00007",), ("other",))
        chunk.map.removeKey(("00009",))
        chunk.map.keys()
        chunk.map.removeKey(("00299",))
        chunk.map.updateValue(("9",), ("last",))
        chunk.list.appendValue(("new",))
        chunk.list.get()
        runs.append(rows_of(chunk.flush()))
    assert runs[0] == runs[1]
    assert len(runs[1]) == 301 + 300 + 2
    assert {row["expiry"] for row in runs[1] if row["op"] == 0} == {100 + TTL_MS}


def test_an_iterator_of_a_closed_table_says_so(tmp_path: Path) -> None:
    table = RocksTable.open(tmp_path)
    assert table is not None
    table.apply(filled(50, "x"))
    chunk = Chunk(table, 9, Budget(prefetch_entries=10), 0, None)
    chunk.cursor.position = 1
    elements, entries = chunk.list.get(), chunk.map.iterator()
    assert next(elements) == ("x",)
    table.close()
    for iterator in (elements, entries):
        with pytest.raises(ProcessorError, match="used after its batch") as caught:
            list(iterator)
        assert caught.value.kind is ErrorKind.STATE_USAGE
    with pytest.raises(ProcessorError, match="used after its batch"):
        chunk.map.getValue(("00001",))
