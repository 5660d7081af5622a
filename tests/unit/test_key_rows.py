"""Searches in runs: they find what a look at every row finds, and open only the blocks that can hold it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelog.runs.key_rows import BinaryValues, KeyRows
from statelog.runs.reader import Run, RunBlock, RunSection
from statelog.runs.schema import Operation, StateDescriptor, StateKind, change_schema
from statelog.runs.writer import RunWriter, StateChanges, encode_run
from statelog.tables.runs import RunsTable
from tests.contract.table_contract import MAP, TIMERS, VALUE, Change, encode_timers, make_keys, make_run, make_timers


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The first and last hash of every block that is read from now on, in the order of reading."""
    blocks: list[tuple[int, int]] = []
    load = RunBlock.load

    def record(block: RunBlock) -> pa.RecordBatch:
        blocks.append((block.first_hash, block.last_hash))
        return load(block)

    monkeypatch.setattr(RunBlock, "load", record)
    return blocks


def parted_run(changes: Sequence[Change], rows: int, state: StateDescriptor = MAP) -> Run:
    """A run whose blocks have so many rows, also where these part a hash, as rows of a large key are parted."""
    ordered = sorted(changes, key=lambda change: change[:3])
    columns = ["hash", "key", "entry", "op", "v0"]
    batch = pa.RecordBatch.from_pylist(
        [dict(zip(columns, change, strict=True)) for change in ordered], schema=change_schema(state)
    )
    sink = pa.BufferOutputStream()
    writer = RunWriter(sink, compression=None, block_rows=rows)
    for start in range(0, len(batch), rows):
        writer.add(state, batch.slice(start, rows))
    writer.finish()
    return Run(sink.getvalue(), "parted")


# ---- Blocks by hash ----

bounds = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12)
"""Distance of a block's first hash from the last one of the block before, and its width."""
asked = st.lists(st.integers(0, 30), max_size=20)


def section_of(steps: list[tuple[int, int]]) -> RunSection:
    """A section whose blocks have these bounds; a hash may be the last one of a block and the first of the next."""
    changes: list[list[Change]] = []
    at = 0
    for distance, width in steps:
        first, at = at + distance, at + distance + width
        changes.append([(h, b"k%d" % len(changes), b"", Operation.PUT, "x") for h in sorted({first, at})])
    blocks = [block for part in changes for block in make_run(VALUE, part, block_rows=100).sections["value"].blocks]
    return RunSection(VALUE, blocks)


@settings(max_examples=300)
@given(bounds, asked, st.integers(0, 30), st.integers(0, 30))
def test_blocks_are_found_by_hash(steps: list[tuple[int, int]], hashes: list[int], one: int, other: int) -> None:
    section, wanted = section_of(steps), sorted(set(hashes))
    found = list(section.blocks_of(np.array(wanted, np.uint64)))
    expected = [
        (block, [h for h in wanted if block.first_hash <= h <= block.last_hash])
        for block in section.blocks
        if any(block.first_hash <= h <= block.last_hash for h in wanted)
    ]
    assert [(block, wanted[start:end]) for block, start, end in found] == expected
    first, last = sorted((one, other))
    assert section.blocks_between(first, last) == [
        block for block in section.blocks if block.first_hash <= last and first <= block.last_hash
    ]


def test_hashes_are_unsigned() -> None:
    highest = 2**64 - 1
    section = RunSection(
        VALUE,
        [
            block
            for h in (0, 2**63, highest)
            for block in make_run(VALUE, [(h, b"k", b"", Operation.PUT, "x")]).sections["value"].blocks
        ],
    )
    hashes = np.array([1, 2**63, highest], np.uint64)
    assert [(block.first_hash, start, end) for block, start, end in section.blocks_of(hashes)] == [
        (2**63, 1, 2),
        (highest, 2, 3),
    ]
    assert [block.first_hash for block in section.blocks_between(2**63, highest)] == [2**63, highest]


def test_bulk_reads_open_only_blocks_that_can_match(opened: list[tuple[int, int]]) -> None:
    changes: list[Change] = [(h, b"%d" % h, b"e", Operation.PUT, str(h)) for h in range(0, 4000, 4)]
    values: list[Change] = [(h, key, b"", operation, text) for h, key, _, operation, text in changes]
    wanted = [0, 1, 3, 2002, 2004, 3999]  # of 100 blocks, those of 0, 2002 and 2004; between and behind are none
    keys = make_keys(*((h, b"%d" % h) for h in wanted))
    can_match = [(0, 36), (2000, 2036)]
    for state, rows in ((MAP, changes), (VALUE, values)):
        for read in ("get_many", "entries", "count_entries"):
            table = RunsTable([make_run(state, rows, block_rows=10)])
            opened.clear()
            getattr(table, read)(state, keys)
            assert opened == can_match, (state, read)


def test_counting_a_large_key_opens_no_block_that_it_fills(opened: list[tuple[int, int]]) -> None:
    changes: list[Change] = [(h, b"k", bytes([1, e]), Operation.PUT, "x" * 100) for h in (4, 5, 6) for e in range(90)]
    run = parted_run(changes, 10)
    blocks = run.sections["map"].blocks
    assert len(blocks) >= 27
    counts = RunsTable([run]).count_entries(MAP, make_keys((3, b"k"), (5, b"k"), (7, b"k")))
    assert counts.entries.tolist() == [0, 90, 0]
    assert counts.size_bytes[1] >= 9000
    assert all(first < 5 or last > 5 for first, last in opened)


# ---- Rows of a key ----


def key_changes(chance: random.Random, count: int) -> list[Change]:
    """Keys of three hashes, some of which share one, with a different number of entries each."""
    changes: list[Change] = []
    for key_hash, key in ((4, b"a"), (5, b"a"), (5, b"ab"), (5, b"b"), (6, b"a")):
        if chance.random() < 0.3:
            changes.append((key_hash, key, b"", Operation.CLEAR, None))
        for entry in chance.sample(range(400), chance.randrange(count)):
            operation = chance.choice([Operation.PUT, Operation.DELETE])
            text = str(entry) if operation is Operation.PUT else None
            changes.append((key_hash, key, b"\x01" * (entry % 4) + b"%03d" % entry, operation, text))
    return sorted(changes, key=lambda change: change[:3])


@pytest.mark.parametrize("rows", [1, 3, 40, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_key_are_those_that_a_look_at_every_row_finds(rows: int, seed: int) -> None:
    chance = random.Random(seed)
    changes = key_changes(chance, 200)
    section = parted_run(changes, rows).sections["map"]
    asked = [b"\x01" * (entry % 4) + b"%03d" % entry for entry in range(-1, 401)] + [b"", b"\xff"]
    for key_hash, key in ((4, b"a"), (5, b"a"), (5, b"ab"), (5, b"b"), (5, b"c"), (5, b""), (6, b"a"), (7, b"a")):
        own = {entry: (op, text) for h, k, entry, op, text in changes if (h, k) == (key_hash, key)}
        found = KeyRows(section, key_hash, key)
        assert found.may_exist or not own
        assert found.is_cleared == (b"" in own)
        for entry in chance.sample(asked, len(asked)):  # many searches: the later ones use samples
            at = found.find(entry)
            assert (None if at is None else row_at(*at)) == own.get(entry)
        for rows_of_key in (found, KeyRows(section, key_hash, key)):
            stretches = [(b, row) for b, low, high in rows_of_key.stretches() for row in range(low, high)]
            assert [block.batch.column(2)[row].as_py() for block, row in stretches] == sorted(own)


def test_large_entries_are_found_however_often_they_are_searched() -> None:
    entries = [number.to_bytes(2, "big") * 10_000 for number in range(1, 600, 2)]
    table = RunsTable([make_run(MAP, [(5, b"k", entry, Operation.PUT, str(entry[1])) for entry in entries])])
    found = table.entries_of(MAP, 5, b"k")
    for number in random.Random(1).sample(range(600), 600):
        entry = found.find(number.to_bytes(2, "big") * 10_000)
        assert (entry is not None) == (number % 2 == 1)
        assert entry is None or entry.values.column(0).to_pylist() == [str(number % 256)]


def row_at(block: RunBlock, row: int) -> tuple[int, str | None]:
    return int(block.operations[row]), block.batch.column(5)[row].as_py()


@pytest.mark.parametrize("key", [b"a", b"k", b"z"])
def test_an_entry_of_a_large_key_is_found_by_opening_few_blocks(opened: list[tuple[int, int]], key: bytes) -> None:
    """Of 1,000 blocks, all of one hash, a search opens no more than a bisection; later ones open even fewer."""
    entries = [number.to_bytes(4, "big") for number in range(4000)]
    changes: list[Change] = [(5, b"k", entry, Operation.PUT, "x") for entry in entries]
    changes += [(5, other, b"e", Operation.PUT, "x") for other in (b"a", b"z")]
    run = parted_run(changes, 4)
    assert len(run.sections["map"].blocks) > 1000
    found = RunsTable([run]).entries_of(MAP, 5, key)
    opened.clear()
    assert (found.find(entries[1234]) is not None) == (key == b"k")
    assert len(opened) <= math.ceil(math.log2(1001)) + 2
    before = len(opened)
    found.find(entries[1235])
    assert len(opened) <= before + 2


@pytest.mark.parametrize("key", [b"a", b"z"])
def test_a_small_key_with_the_hash_of_a_large_one_is_read_by_opening_few_blocks(
    opened: list[tuple[int, int]], key: bytes
) -> None:
    entries = [number.to_bytes(4, "big") for number in range(4000)]
    changes: list[Change] = [(5, b"k", entry, Operation.PUT, "x") for entry in entries]
    changes += [(5, other, b"e", Operation.PUT, "x") for other in (b"a", b"z")]
    found = RunsTable([parted_run(changes, 4)]).entries_of(MAP, 5, key)
    [page] = found.pages(10, 1 << 20)
    assert page.entries.to_pylist() == [b"e"]
    assert len(opened) <= math.ceil(math.log2(1001)) + 2


def test_a_page_opens_only_its_own_blocks(opened: list[tuple[int, int]]) -> None:
    entries = [number.to_bytes(4, "big") for number in range(4000)]
    runs = [parted_run([(5, b"k", entry, Operation.PUT, "x") for entry in entries[start::3]], 4) for start in range(3)]
    pages = RunsTable(runs).entries_of(MAP, 5, b"k").pages(24, 1 << 20)
    opened.clear()
    assert len(next(pages).positions) <= 24
    assert len(opened) <= 3 * (math.ceil(math.log2(334)) + 6)
    before = len(opened)
    next(pages)
    assert len(opened) <= before + 10


def test_due_timers_open_no_block_twice_and_skip_what_is_not_due(opened: list[tuple[int, int]]) -> None:
    timers = [(h, b"%d" % h, h * 10 + n, True) for h in range(50) for n in range(3)]
    run = make_timers(timers, block_rows=6)
    table = RunsTable([run])
    assert len(table.due_timers(TIMERS, -1, 100).keys) == 31
    assert len(opened) == len(set(opened)) == len(run.sections[TIMERS.name].blocks)
    for after, until in ((-1, 0), (0, 0), (99, 102), (489, 492), (492, 10**9), (-5, -1), (5, 3)):
        expected = sorted(timer[:3] for timer in timers if after < timer[2] <= until)
        found = table.due_timers(TIMERS, after, until)
        assert (
            list(zip(found.keys.hashes.tolist(), found.keys.keys.to_pylist(), found.times_ms.tolist(), strict=True))
            == expected
        )
    assert len(opened) == len(run.sections[TIMERS.name].blocks)


def test_blocks_without_due_timers_are_not_searched_again() -> None:
    data = bytearray(encode_timers([(1, b"a", 5, True), (2, b"b", 7, True)]))
    table = RunsTable([Run(pa.py_buffer(data), "timers")])
    assert len(table.due_timers(TIMERS, 0, 4).keys) == 0
    data[8:] = bytes(len(data) - 8)  # whoever looks at the rows now sees timers of time 0
    assert len(table.due_timers(TIMERS, -1, 4).keys) == 0
    assert len(table.due_timers(TIMERS, 7, 9).keys) == 0


# ---- Columns ----


@given(st.lists(st.binary(max_size=3), max_size=20), st.integers(0, 5), st.integers(0, 20))
def test_single_binaries_are_read(values: list[bytes], start: int, count: int) -> None:
    column = pa.array(values, pa.binary()).slice(start, count)
    read = BinaryValues(column)
    assert [read[row] for row in range(len(read))] == values[start : start + count]


MIXED = StateDescriptor(
    "mixed",
    StateKind.MAP,
    pa.schema(
        [
            ("t", pa.string()),
            ("l", pa.list_(pa.string())),
            ("s", pa.struct([("a", pa.int32()), ("b", pa.map_(pa.string(), pa.list_(pa.int64())))])),
        ]
    ),
)


def test_sizes_of_stretches_are_the_sums_of_their_rows() -> None:
    chance = random.Random(1)

    def text() -> str | None:
        return chance.choice([None, "x" * chance.randrange(30)])

    rows = [
        {
            "hash": number // 3,
            "key": b"k" * chance.randrange(4),
            "entry": b"%03d" % number,
            "op": 0,
            "v0": text(),
            "v1": chance.choice([None, [text() for _ in range(chance.randrange(4))]]),
            "v2": {"a": 1, "b": [(str(at), [1] * at) for at in range(chance.randrange(3))]},
        }
        for number in range(60)
    ]
    rows.sort(key=lambda row: (row["hash"], row["key"], row["entry"]))
    batch = pa.RecordBatch.from_pylist(rows, schema=change_schema(MIXED))
    [block] = (
        Run(pa.py_buffer(encode_run([StateChanges(MIXED, [batch])], compression=None, block_rows=100)), "x")
        .sections["mixed"]
        .blocks
    )
    ends = np.arange(61)
    each = block.sizes(ends[:-1], ends[1:])
    assert each.sum() == block.sizes(ends[:1], ends[-1:])[0]
    assert (each > 0).all()
    low = np.array([0, 5, 5, 59])
    high = np.array([5, 5, 40, 60])
    assert block.sizes(low, high).tolist() == [each[a:b].sum() for a, b in zip(low, high, strict=True)]
    assert each.sum() <= block.batch.nbytes <= each.sum() + 500
