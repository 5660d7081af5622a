"""The contract of state tables as tests, which a subclass for each table runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statelog.local.runs import LocalRun, LocalRuns
from statelog.operators.keyed.timers import timer_descriptor
from statelog.runs.reader import Run
from statelog.runs.schema import EXPIRY_COLUMN, Operation, StateDescriptor, StateKind, TimeDomain, change_schema
from statelog.runs.writer import LOCAL_BLOCK_ROWS, StateChanges, encode_run
from statelog.tables.table import EntryRange, KeyBatch, KeyEntries, StateTable

Change = tuple[int, bytes, bytes, Operation, Any]
TimerChange = tuple[int, bytes, int, bool]

_TEXT = pa.schema([("text", pa.string())])
VALUE = StateDescriptor("value", StateKind.VALUE, _TEXT)
MAP = StateDescriptor("map", StateKind.MAP, _TEXT, _TEXT)
TIMERS = timer_descriptor(TimeDomain.EVENT)


def make_run(
    state: StateDescriptor,
    changes: Sequence[Change],
    *,
    block_rows: int = LOCAL_BLOCK_ROWS,
    expiry_ms: int | None = None,
) -> Run:
    """Make a run from (hash, key, entry, operation, text) changes, which are sorted first; all have one expiry."""
    return Run(pa.py_buffer(encode_changes(state, changes, block_rows=block_rows, expiry_ms=expiry_ms)), "test")


def encode_changes(
    state: StateDescriptor,
    changes: Sequence[Change],
    *,
    block_rows: int = LOCAL_BLOCK_ROWS,
    expiry_ms: int | None = None,
) -> bytes:
    """Encode the run of :func:`make_run`."""
    ordered = sorted(changes, key=lambda change: change[:3])
    columns: list[tuple[Any, ...]] = list(zip(*ordered, strict=True)) if ordered else [()] * 5
    columns.insert(EXPIRY_COLUMN, (expiry_ms,) * len(ordered))
    schema = change_schema(state)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return encode_run([StateChanges(state, [batch])], compression=None, block_rows=block_rows)


def write_run(local: LocalRuns, local_run: LocalRun, data: bytes, token: str) -> None:
    """Write a local run as a task does."""
    local.keep(local.write_new(lambda sink: sink.write(data), token), local_run)


def make_timers(changes: Sequence[TimerChange], *, block_rows: int = LOCAL_BLOCK_ROWS) -> Run:
    """Make a run from timer changes (hash, key, time in ms, whether the timer is set), which are sorted first."""
    return Run(pa.py_buffer(encode_timers(changes, block_rows=block_rows)), "test")


def encode_timers(changes: Sequence[TimerChange], *, block_rows: int = LOCAL_BLOCK_ROWS) -> bytes:
    """Encode the run of :func:`make_timers`."""
    ordered = sorted(changes)
    operations = [Operation.PUT if is_set else Operation.DELETE for *_, is_set in ordered]
    columns = [
        pa.array([key_hash for key_hash, *_ in ordered], pa.uint64()),
        pa.array([key for _, key, *_ in ordered], pa.binary()),
        pa.array([(time + (1 << 63)).to_bytes(8, "big") for _, _, time, _ in ordered], pa.binary()),
        pa.array(operations, pa.uint8()),
        pa.nulls(len(ordered), pa.int64()),
        pa.array([time for _, _, time, _ in ordered], pa.int64()),
        pa.nulls(len(ordered), pa.uint32()),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=change_schema(TIMERS))
    return encode_run([StateChanges(TIMERS, [batch])], compression=None, block_rows=block_rows)


def make_keys(*keys: tuple[int, bytes]) -> KeyBatch:
    """Make a batch of keys from (hash, key) pairs, which are sorted first."""
    ordered = sorted(keys)
    hashes = np.array([key_hash for key_hash, _ in ordered], np.uint64)
    return KeyBatch(hashes, pa.array([key for _, key in ordered], pa.binary()))


def _pages(entries: KeyEntries, max_entries: int, max_bytes: int) -> list[list[tuple[bytes, str]]]:
    """The entries of a key page by page, with their texts."""
    pages: list[list[tuple[bytes, str]]] = []
    for page in entries.pages(max_entries, max_bytes):
        assert not page.positions.any()
        assert len(page.positions) == len(page.expiry)
        pages.append(list(zip(page.entries.to_pylist(), page.values.column(0).to_pylist(), strict=True)))
    return pages


def _read_range(entries: KeyEntries, wanted: EntryRange, most: int) -> list[tuple[bytes, str]]:
    """The entries of a range, with their texts, read page by page."""
    found: list[tuple[bytes, str]] = []
    rest: EntryRange | None = wanted
    while rest is not None:
        page = entries.between(rest, most, 1 << 20)
        rows = list(zip(page.rows.entries.to_pylist(), page.rows.values.column(0).to_pylist(), strict=True))
        assert not page.rows.positions.any()
        assert len(page.rows.expiry) == len(rows)
        if page.rest is not None:  # it is shorter
            assert (page.rest.first > rest.first, page.rest.end < rest.end) == (not wanted.from_end, wanted.from_end)
        found = rows + found if wanted.from_end else found + rows
        rest = page.rest
    return found


def _text_at(table: StateTable, key_hash: int, key: bytes, entry: bytes) -> str | None:
    """The text of a map's entry; None if there is none."""
    found = table.entries_of(MAP, key_hash, key).find(entry)
    if found is None:
        return None
    [text] = found.values.column(0).to_pylist()
    return str(text)


class TableContract:
    """Conformance tests of a state table; pytest collects them from a subclass.

    A subclass overrides the fixture :meth:`table`, which gives an empty table for each test.
    """

    @pytest.fixture
    def table(self) -> StateTable:
        raise NotImplementedError

    @pytest.fixture(params=[1, 2, LOCAL_BLOCK_ROWS], ids=["blocks-of-1", "blocks-of-2", "one-block"])
    def block_rows(self, request: pytest.FixtureRequest) -> int:
        rows: int = request.param
        return rows

    def _values(self, table: StateTable, keys: KeyBatch) -> dict[int, str]:
        found = table.get_many(VALUE, keys)
        return dict(zip(found.positions.tolist(), found.values.column(0).to_pylist(), strict=True))

    def _entries(self, table: StateTable, keys: KeyBatch) -> list[tuple[int, bytes, str]]:
        found = table.entries(MAP, keys)
        columns = (found.positions.tolist(), found.entries.to_pylist(), found.values.column(0).to_pylist())
        return list(zip(*columns, strict=True))

    def test_empty_table_has_nothing(self, table: StateTable) -> None:
        keys = make_keys((1, b"a"), (2, b"b"))
        assert self._values(table, keys) == {}
        assert self._entries(table, keys) == []
        assert table.count_entries(MAP, keys).entries.tolist() == [0, 0]
        assert _text_at(table, 1, b"a", b"e") is None

    def test_no_keys_find_nothing(self, table: StateTable) -> None:
        table.apply([make_run(VALUE, [(1, b"a", b"", Operation.PUT, "x")])])
        assert self._values(table, make_keys()) == {}
        assert self._entries(table, make_keys()) == []

    def test_values_are_found_by_key(self, table: StateTable, block_rows: int) -> None:
        changes: list[Change] = [
            (0, b"", b"", Operation.PUT, "empty key"),
            (0, b"k", b"", Operation.PUT, "lowest hash"),
            (5, b"five", b"", Operation.PUT, "five"),
            (6, b"six", b"", Operation.PUT, "not asked for"),
            (2**64 - 1, b"last", b"", Operation.PUT, "highest hash"),
        ]
        table.apply([make_run(VALUE, changes, block_rows=block_rows)])
        keys = make_keys((0, b""), (0, b"k"), (0, b"other"), (3, b"three"), (5, b"five"), (2**64 - 1, b"last"))
        assert self._values(table, keys) == {0: "empty key", 1: "lowest hash", 4: "five", 5: "highest hash"}

    def test_keys_of_one_hash_are_apart(self, table: StateTable, block_rows: int) -> None:
        changes: list[Change] = [(7, key, b"", Operation.PUT, key.decode()) for key in (b"a", b"b", b"c")]
        table.apply([make_run(VALUE, changes, block_rows=block_rows)])
        table.apply([make_run(VALUE, [(7, b"b", b"", Operation.DELETE, None)], block_rows=block_rows)])
        assert self._values(table, make_keys((7, b"a"), (7, b"b"), (7, b"c"), (7, b"d"))) == {0: "a", 2: "c"}

    def test_newer_runs_win(self, table: StateTable) -> None:
        runs = [make_run(VALUE, [(1, b"a", b"", Operation.PUT, text)]) for text in ("old", "new")]
        table.apply(runs)
        assert self._values(table, make_keys((1, b"a"))) == {0: "new"}
        table.apply([make_run(VALUE, [(1, b"a", b"", Operation.DELETE, None)])])
        assert self._values(table, make_keys((1, b"a"))) == {}
        table.apply([make_run(VALUE, [(1, b"a", b"", Operation.PUT, "again")])])
        assert self._values(table, make_keys((1, b"a"))) == {0: "again"}

    def test_null_fields_are_values(self, table: StateTable) -> None:
        table.apply([make_run(VALUE, [(1, b"a", b"", Operation.PUT, None)])])
        found = table.get_many(VALUE, make_keys((1, b"a")))
        assert found.positions.tolist() == [0]
        assert found.values.column(0).to_pylist() == [None]

    def test_entries_are_sorted_and_merged(self, table: StateTable, block_rows: int) -> None:
        old: list[Change] = [
            (h, k, e, Operation.PUT, f"old {e!r}")
            for h, k in ((1, b"one"), (2, b"two"))
            for e in (b"\x01", b"\x01b", b"\x02")
        ]
        new: list[Change] = [
            (1, b"one", b"\x01", Operation.DELETE, None),
            (1, b"one", b"\x02", Operation.PUT, "new"),
            (2, b"two", b"\x00", Operation.PUT, "first"),
        ]
        table.apply([make_run(MAP, old, block_rows=block_rows), make_run(MAP, new, block_rows=block_rows)])
        assert self._entries(table, make_keys((1, b"one"), (2, b"two"), (3, b"three"))) == [
            (0, b"\x01b", "old b'\\x01b'"),
            (0, b"\x02", "new"),
            (1, b"\x00", "first"),
            (1, b"\x01", "old b'\\x01'"),
            (1, b"\x01b", "old b'\\x01b'"),
            (1, b"\x02", "old b'\\x02'"),
        ]

    def test_some_of_the_fields_can_be_read(self, table: StateTable, block_rows: int) -> None:
        """Of entries in several runs, and beside those of a branch."""
        fields = [pa.field("first", pa.string()), pa.field("second", pa.int64()), pa.field("third", pa.string())]
        state = replace(MAP, value_schema=pa.schema(fields))

        def run(entry: bytes, numbers: dict[bytes, int]) -> Run:
            count, keys = len(numbers), sorted(numbers)
            values = [numbers[key] for key in keys]
            columns = [
                pa.array([key[0] for key in keys], pa.uint64()),
                pa.array(keys, pa.binary()),
                pa.array([entry] * count, pa.binary()),
                pa.array([Operation.PUT] * count, pa.uint8()),
                pa.nulls(count, pa.int64()),
                pa.array([f"first {number}" for number in values]),
                pa.array(values, pa.int64()),
                pa.array([f"third {number}" for number in values]),
            ]
            batch = pa.RecordBatch.from_arrays(columns, schema=change_schema(state))
            data = encode_run([StateChanges(state, [batch])], compression=None, block_rows=block_rows)
            return Run(pa.py_buffer(data), "test")

        table.apply([run(b"d", {b"a": 1, b"b": 2, b"c": 3}), run(b"e", {b"b": 4})])
        branch = table.branch(run(b"c", {b"a": 5, b"c": 6}))
        keys = make_keys((ord("a"), b"a"), (ord("b"), b"b"), (ord("c"), b"c"))
        for names in (["second"], ["third", "first"]):
            wanted = replace(state, value_schema=pa.schema([state.value_schema.field(name) for name in names]))
            for held, numbers in ((table, [1, 2, 4, 3]), (branch, [5, 1, 2, 4, 6, 3])):
                found = held.entries(wanted, keys).values
                assert found.column_names == names
                for name in names:
                    expected = numbers if name == "second" else [f"{name} {number}" for number in numbers]
                    assert found.column(name).to_pylist() == expected

    def test_clear_removes_what_older_runs_hold(self, table: StateTable, block_rows: int) -> None:
        old: list[Change] = [(1, key, b"e", Operation.PUT, "old") for key in (b"a", b"b")]
        new: list[Change] = [(1, b"a", b"", Operation.CLEAR, None), (1, b"a", b"f", Operation.PUT, "new")]
        table.apply([make_run(MAP, old, block_rows=block_rows), make_run(MAP, new, block_rows=block_rows)])
        keys = make_keys((1, b"a"), (1, b"b"))
        assert self._entries(table, keys) == [(0, b"f", "new"), (1, b"e", "old")]
        assert _text_at(table, 1, b"a", b"e") is None
        assert _text_at(table, 1, b"a", b"f") == "new"
        assert _text_at(table, 1, b"b", b"e") == "old"

    def test_get_entry_finds_one_of_many(self, table: StateTable) -> None:
        entries = [number.to_bytes(4, "big") for number in range(1000)]
        changes: list[Change] = [(9, b"k", entry, Operation.PUT, entry.hex()) for entry in entries]
        others: list[Change] = [(9, key, entries[5], Operation.PUT, "x") for key in (b"j", b"l")]
        table.apply([make_run(MAP, changes + others)])
        for entry in (entries[0], entries[5], entries[999]):
            assert _text_at(table, 9, b"k", entry) == entry.hex()
        assert _text_at(table, 9, b"k", b"absent") is None
        table.apply([make_run(MAP, [(9, b"k", entries[5], Operation.DELETE, None)])])
        assert _text_at(table, 9, b"k", entries[5]) is None

    def test_a_key_is_read_entry_by_entry_and_page_by_page(self, table: StateTable, block_rows: int) -> None:
        """Random runs, with keys of one hash, against dictionaries; the last runs are branches."""
        rng = random.Random(block_rows)
        keys = [(5, b"a"), (5, b"b"), (5, b"bb"), (6, b"c")]
        names = [bytes([1, number]) for number in range(30)] + [b"\x02" * 3, b"\x02" * 4]
        held: dict[bytes, dict[bytes, str]] = {key: {} for _, key in keys}
        seen = table
        for number in range(9):
            changes: dict[tuple[bytes, bytes], Change] = {}
            for key_hash, key in keys:
                if rng.random() < 0.2:
                    changes[key, b""] = (key_hash, key, b"", Operation.CLEAR, None)
                    held[key].clear()
                for entry in rng.sample(names, rng.randrange(14)):
                    is_put = rng.random() < 0.7
                    text = f"{number}" * rng.randrange(1, 4) if is_put else None
                    changes[key, entry] = (key_hash, key, entry, Operation(not is_put), text)
                    held[key].pop(entry, None)
                    if text is not None:
                        held[key][entry] = text
            run = make_run(MAP, list(changes.values()), block_rows=block_rows)
            if number < 6:
                table.apply([run])
            else:
                seen = seen.branch(run)
            for key_hash, key in keys:
                entries = seen.entries_of(MAP, key_hash, key)
                for entry in names:
                    assert _text_at(seen, key_hash, key, entry) == held[key].get(entry)
                    found = entries.find(entry)
                    assert (None if found is None else found.values.column(0).to_pylist()) == (
                        [held[key][entry]] if entry in held[key] else None
                    )
                most = rng.choice([1, 2, 5, 100])
                pages = _pages(entries, most, 1 << 20)
                assert [item for page in pages for item in page] == sorted(held[key].items())
                assert all(1 <= len(page) <= most for page in pages)
                first, end = sorted(rng.choice([b"", *names, b"\x03"]) for _ in range(2))
                for wanted in (EntryRange(first, end), EntryRange(first, end, from_end=True)):
                    inside = [item for item in sorted(held[key].items()) if first <= item[0] < end]
                    assert _read_range(entries, wanted, most) == inside
                counts = seen.count_entries(MAP, make_keys((key_hash, key)))
                assert counts.entries[0] >= len(held[key])

    def test_nothing_is_found_of_an_unknown_key(self, table: StateTable) -> None:
        for _ in range(2):
            unknown = table.entries_of(MAP, 1, b"b")
            assert unknown.find(b"e") is None
            assert _pages(unknown, 5, 1 << 20) == []
            assert _read_range(unknown, EntryRange(b"", b"\xff"), 5) == []
            table.apply([make_run(MAP, [(1, key, b"e", Operation.PUT, "entry") for key in (b"a", b"c")], expiry_ms=-7)])
        [page] = table.entries_of(MAP, 1, b"a").pages(5, 1 << 20)
        assert page.expiry.to_pylist() == [-7]

    def test_pages_are_bounded_in_bytes(self, table: StateTable, block_rows: int) -> None:
        texts = [str(number % 10) * (1000 if number % 3 else 9000) for number in range(60)]
        names = [bytes([1, number]) for number in range(60)]
        changes: list[Change] = [
            (1, b"a", entry, Operation.PUT, text) for entry, text in zip(names, texts, strict=True)
        ]
        table.apply([make_run(MAP, part, block_rows=block_rows) for part in (changes[::2], changes[1::2])])
        pages = _pages(table.entries_of(MAP, 1, b"a"), 1000, 20_000)
        assert [item for page in pages for item in page] == list(zip(names, texts, strict=True))
        assert all(len(page) == 1 or sum(len(text) for _, text in page) <= 20_000 for page in pages)
        assert len(pages) < 40

    @pytest.mark.parametrize("from_end", [False, True])
    def test_a_page_of_a_range_is_bounded_in_bytes(self, table: StateTable, block_rows: int, from_end: bool) -> None:
        names = [bytes([1, number >> 8, number & 255]) for number in range(3000)]
        changes: list[Change] = [(1, b"a", name, Operation.PUT, "x" * 1000) for name in names]
        table.apply([make_run(MAP, changes, block_rows=block_rows)])
        page = table.entries_of(MAP, 1, b"a").between(EntryRange(names[10], names[2990], from_end), 3000, 100_000)
        found = page.rows.entries.to_pylist()
        assert 1 <= len(found) <= 300
        inside = names[10:2990]
        assert found == (inside[-len(found) :] if from_end else inside[: len(found)])
        assert page.rest is not None
        least = table.entries_of(MAP, 1, b"a").between(EntryRange(names[10], names[12], from_end), 1000, 10)
        assert least.rows.entries.to_pylist() in ([names[11 if from_end else 10]], names[10:12])

    def test_entries_of_a_key_stay_as_they_are(self, table: StateTable) -> None:
        names = [bytes([1, number]) for number in range(20)]
        table.apply([make_run(MAP, [(1, b"a", entry, Operation.PUT, "old") for entry in names])])
        branch = table.branch(make_run(MAP, [(1, b"a", names[0], Operation.DELETE, None)]))
        entries = table.entries_of(MAP, 1, b"a").pages(3, 1 << 20)
        first = next(entries).entries.to_pylist()
        branched = _pages(branch.entries_of(MAP, 1, b"a"), 3, 1 << 20)
        assert first + [entry for page in entries for entry in page.entries.to_pylist()] == names
        assert [entry for page in branched for entry, _ in page] == names[1:]

    def test_count_is_an_upper_bound(self, table: StateTable) -> None:
        changes: list[Change] = [(3, b"k", bytes([n]), Operation.PUT, "x") for n in range(1, 6)]
        table.apply([make_run(MAP, changes)])
        counts = table.count_entries(MAP, make_keys((2, b"other"), (3, b"k")))
        assert counts.entries[0] == 0
        assert counts.entries[1] >= 5
        assert counts.size_bytes[0] == 0

    def test_sizes_are_known_or_nothing_is_said(self, table: StateTable, block_rows: int) -> None:
        changes: list[Change] = [(3, b"k", bytes([n]), Operation.PUT, "x" * 1000 * n) for n in range(1, 6)]
        table.apply([make_run(MAP, [*changes, (3, b"l", b"e", Operation.PUT, "x")], block_rows=block_rows)])
        [size_bytes] = table.count_entries(MAP, make_keys((3, b"k"))).size_bytes.tolist()
        assert size_bytes == 0 or 15_000 <= size_bytes < 20_000

    def test_expiry_is_told_and_not_judged(self, table: StateTable) -> None:
        keys = make_keys((1, b"a"), (2, b"b"))
        table.apply([make_run(VALUE, [(1, b"a", b"", Operation.PUT, "mortal")], expiry_ms=5)])
        table.apply([make_run(VALUE, [(2, b"b", b"", Operation.PUT, "immortal")])])
        table.apply([make_run(MAP, [(1, b"a", b"e", Operation.PUT, "entry")], expiry_ms=-7)])
        assert table.get_many(VALUE, keys).expiry.to_pylist() == [5, None]
        assert table.entries(MAP, keys).expiry.to_pylist() == [-7]
        found = table.entries_of(MAP, 1, b"a").find(b"e")
        assert found is not None
        assert found.expiry_ms == -7

    def test_a_branch_leaves_the_table_as_it_is(self, table: StateTable) -> None:
        keys = make_keys((1, b"a"), (2, b"b"), (3, b"c"))
        table.apply([make_run(VALUE, [(1, b"a", b"", Operation.PUT, "old"), (2, b"b", b"", Operation.PUT, "old")])])
        table.apply([make_run(MAP, [(1, b"a", b"e", Operation.PUT, "old"), (2, b"b", b"e", Operation.PUT, "old")])])
        branch = table.branch(
            make_run(VALUE, [(1, b"a", b"", Operation.DELETE, None), (3, b"c", b"", Operation.PUT, "new")])
        )
        changes: list[Change] = [(1, b"a", b"", Operation.CLEAR, None), (1, b"a", b"f", Operation.PUT, "new")]
        second = branch.branch(make_run(MAP, changes))
        assert self._values(table, keys) == {0: "old", 1: "old"}
        assert self._values(branch, keys) == {1: "old", 2: "new"}
        assert self._entries(branch, keys) == [(0, b"e", "old"), (1, b"e", "old")]
        assert self._entries(second, keys) == [(0, b"f", "new"), (1, b"e", "old")]
        assert self._entries(table, keys) == [(0, b"e", "old"), (1, b"e", "old")]

    def test_due_timers_are_those_of_the_newest_word(self, table: StateTable, block_rows: int) -> None:
        rng = random.Random(block_rows)
        keys = [(rng.choice((1, 5, 2**64 - 1)), bytes([letter])) for letter in b"abcdef"]
        times = [-(2**62), -1, 0, 1, 2, 3, 10**15]
        held: set[tuple[int, bytes, int]] = set()
        for _ in range(12):
            changes = {(*rng.choice(keys), rng.choice(times)): rng.random() < 0.6 for _ in range(rng.randrange(9))}
            table.apply([make_timers([(*timer, is_set) for timer, is_set in changes.items()], block_rows=block_rows)])
            held |= {timer for timer, is_set in changes.items() if is_set}
            held -= {timer for timer, is_set in changes.items() if not is_set}
            for after, until in ((-(2**63), 2**62), (-1, 2), (0, 0), (2, 10**15), (3, 1)):
                found = table.due_timers(TIMERS, after, until)
                due = list(
                    zip(found.keys.hashes.tolist(), found.keys.keys.to_pylist(), found.times_ms.tolist(), strict=True)
                )
                assert due == sorted(timer for timer in held if after < timer[2] <= until)
