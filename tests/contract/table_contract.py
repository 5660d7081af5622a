"""The contract of state tables as tests, which a subclass for each table runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statelog.local.runs import LocalRun, LocalRuns
from statelog.operators.keyed.timers import timer_descriptor
from statelog.runs.format import EXPIRY_COLUMN, Operation, change_schema
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor, StateKind, TimeDomain
from statelog.runs.writer import LOCAL_BLOCK_ROWS, StateChanges, encode_run
from statelog.tables.table import EntryRange, KeyBatch, StateTable

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
    data = encode_run([StateChanges(TIMERS, [batch])], compression=None, block_rows=block_rows)
    return Run(pa.py_buffer(data), "test")


def make_keys(*keys: tuple[int, bytes]) -> KeyBatch:
    """Make a batch of keys from (hash, key) pairs, which are sorted first."""
    ordered = sorted(keys)
    hashes = np.array([key_hash for key_hash, _ in ordered], np.uint64)
    return KeyBatch(hashes, pa.array([key for _, key in ordered], pa.binary()))


def _read_range(table: StateTable, key: KeyBatch, wanted: EntryRange) -> list[tuple[bytes, str]]:
    """The entries of a range, with their texts, read page by page."""
    found: list[tuple[bytes, str]] = []
    rest: EntryRange | None = wanted
    while rest is not None:
        page = table.entries_between(MAP, key, rest)
        rows = list(zip(page.rows.entries.to_pylist(), page.rows.values.column(0).to_pylist(), strict=True))
        assert not page.rows.positions.any()
        assert page.rest is None or page.rest.first < page.rest.end <= rest.end or page.rest.first > rest.first
        found = rows + found if wanted.from_end else found + rows
        rest = page.rest
    return found


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
        assert table.count_entries(MAP, keys).tolist() == [0, 0]
        assert table.get_many(MAP, make_keys((1, b"a")), b"e").values.num_rows == 0

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

    def test_clear_removes_what_older_runs_hold(self, table: StateTable, block_rows: int) -> None:
        old: list[Change] = [(1, key, b"e", Operation.PUT, "old") for key in (b"a", b"b")]
        new: list[Change] = [(1, b"a", b"", Operation.CLEAR, None), (1, b"a", b"f", Operation.PUT, "new")]
        table.apply([make_run(MAP, old, block_rows=block_rows), make_run(MAP, new, block_rows=block_rows)])
        keys = make_keys((1, b"a"), (1, b"b"))
        assert self._entries(table, keys) == [(0, b"f", "new"), (1, b"e", "old")]
        assert table.get_many(MAP, make_keys((1, b"a")), b"e").values.num_rows == 0
        assert table.get_many(MAP, make_keys((1, b"a")), b"f").values.column(0).to_pylist() == ["new"]
        assert table.get_many(MAP, make_keys((1, b"b")), b"e").values.column(0).to_pylist() == ["old"]

    def test_get_entry_finds_one_of_many(self, table: StateTable) -> None:
        entries = [number.to_bytes(4, "big") for number in range(1000)]
        changes: list[Change] = [(9, b"k", entry, Operation.PUT, entry.hex()) for entry in entries]
        others: list[Change] = [(9, key, entries[5], Operation.PUT, "x") for key in (b"j", b"l")]
        table.apply([make_run(MAP, changes + others)])
        for entry in (entries[0], entries[5], entries[999]):
            found = table.get_many(MAP, make_keys((9, b"k")), entry)
            assert found.values.column(0).to_pylist() == [entry.hex()]
        assert table.get_many(MAP, make_keys((9, b"k")), b"absent").values.num_rows == 0
        table.apply([make_run(MAP, [(9, b"k", entries[5], Operation.DELETE, None)])])
        assert table.get_many(MAP, make_keys((9, b"k")), entries[5]).values.num_rows == 0

    @pytest.mark.parametrize("from_end", [False, True])
    def test_a_range_is_read_page_by_page(self, table: StateTable, block_rows: int, from_end: bool) -> None:
        rng = random.Random(block_rows)
        names = [b"a", b"b", b"c"]  # keys of one hash
        held: dict[bytes, dict[bytes, str]] = {key: {} for key in names}
        branch = table
        for number in range(8):
            changes: dict[tuple[bytes, bytes], Change] = {}
            for key in names:
                if rng.random() < 0.2:
                    changes[key, b""] = (5, key, b"", Operation.CLEAR, None)
                    held[key].clear()
                for entry in rng.sample([bytes([1, n]) for n in range(1, 30)], rng.randrange(12)):
                    is_put = rng.random() < 0.7
                    changes[key, entry] = (5, key, entry, Operation(not is_put), f"{number}" if is_put else None)
                    held[key].pop(entry, None)
                    if is_put:
                        held[key][entry] = f"{number}"
            run = make_run(MAP, list(changes.values()), block_rows=block_rows)
            if number < 5:
                table.apply([run])
            else:
                branch = branch.branch(run)
            for key in names:
                first, end = sorted(bytes([1, rng.randrange(32)]) for _ in range(2))
                most = rng.choice([1, 2, 5, 100])
                found = _read_range(branch, make_keys((5, key)), EntryRange(first, end, most, from_end))
                assert found == sorted(item for item in held[key].items() if first <= item[0] < end)

    def test_nothing_is_in_the_range_of_an_unknown_key(self, table: StateTable) -> None:
        everything = EntryRange(b"", b"\xff", 5)
        assert _read_range(table, make_keys((1, b"a")), everything) == []
        table.apply([make_run(MAP, [(1, b"a", b"e", Operation.PUT, "entry")], expiry_ms=-7)])
        assert _read_range(table, make_keys((1, b"b")), everything) == []
        assert table.entries_between(MAP, make_keys((1, b"a")), everything).rows.expiry.to_pylist() == [-7]

    @pytest.mark.parametrize("from_end", [False, True])
    def test_a_page_of_large_entries_is_short(self, table: StateTable, from_end: bool) -> None:
        text = "x" * (3 << 20)
        table.apply([make_run(MAP, [(1, b"a", bytes([n]), Operation.PUT, text) for n in range(1, 31)])])
        page = table.entries_between(MAP, make_keys((1, b"a")), EntryRange(b"", b"\xff", 1000, from_end))
        assert 1 <= len(page.rows.positions) <= 20
        assert page.rest is not None

    def test_count_is_an_upper_bound(self, table: StateTable) -> None:
        changes: list[Change] = [(3, b"k", bytes([n]), Operation.PUT, "x") for n in range(1, 6)]
        table.apply([make_run(MAP, changes)])
        counts = table.count_entries(MAP, make_keys((2, b"other"), (3, b"k")))
        assert counts[0] == 0
        assert counts[1] >= 5

    def test_expiry_is_told_and_not_judged(self, table: StateTable) -> None:
        keys = make_keys((1, b"a"), (2, b"b"))
        table.apply([make_run(VALUE, [(1, b"a", b"", Operation.PUT, "mortal")], expiry_ms=5)])
        table.apply([make_run(VALUE, [(2, b"b", b"", Operation.PUT, "immortal")])])
        table.apply([make_run(MAP, [(1, b"a", b"e", Operation.PUT, "entry")], expiry_ms=-7)])
        assert table.get_many(VALUE, keys).expiry.to_pylist() == [5, None]
        assert table.entries(MAP, keys).expiry.to_pylist() == [-7]
        assert table.get_many(MAP, make_keys((1, b"a")), b"e").expiry.to_pylist() == [-7]

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
