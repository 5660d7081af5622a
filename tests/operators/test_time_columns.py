"""States by time in columns: against dictionaries, over several batches, for keys with few and with many entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from statelog.convert.types import row_codec
from statelog.operators.keyed.changes import ChangeBuffer, ListPosition
from statelog.operators.keyed.cursor import KeyCursor
from statelog.operators.keyed.operator import StateBinding
from statelog.operators.keyed.time_columns import TimeColumns, TimeRows
from statelog.operators.keyed.time_reader import AFTER_MS, FIRST_MS, entry_keys, entry_numbers, time_entry
from statelog.runs.byte_slices import Budget, Positions
from statelog.runs.keys import MapKeyCodec
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor, StateKind
from statelog.runs.times import Moment
from statelog.runs.writer import encode_run
from statelog.tables.memory import MemoryTable
from statelog.tables.runs import RunsTable
from statelog.tables.table import EntryPage, EntryRange, EntryRows, KeyBatch, KeyEntries, StateTable
from statelog.windows.rows import RowBlocks
from tests.contract.table_contract import make_keys

NUMBERS = row_codec(StructType().add("n", "long"), "state 'numbers'")
ONE_TIME = row_codec(StructType().add("time_ms", "long"), "map key")
TIME_AND_ORDINAL = row_codec(StructType().add("time_ms", "long").add("ordinal", "long"), "map key")
KEYS = make_keys((1, b"a"), (2, b"b"), (2, b"c"), (7, b"d"))
FIELDS = st.sampled_from([1, 2])

BUDGETS = st.sampled_from([Budget(), Budget(prefetch_entries=1), Budget(prefetch_entries=150), Budget(slice_bytes=100)])
TABLES: st.SearchStrategy[Callable[[], StateTable]] = st.sampled_from([RunsTable, MemoryTable])
LONGS = st.sampled_from([-(1 << 63), -(1 << 40), -1, 0, 1, 255, 256, 1 << 40, (1 << 63) - 1])
Entry = tuple[int, int]
"""A time and an ordinal; without ordinals 0."""


def opened(table: StateTable, budget: Budget, fields: int, batch: int = 0) -> TimeColumns:
    """The state of a key chunk."""
    entry = (ONE_TIME, TIME_AND_ORDINAL)[fields - 1]
    cursor = KeyCursor(table, ListPosition(1, batch), KEYS, Moment(0, 0), position=0, budget=budget)
    state = StateDescriptor("numbers", StateKind.MAP, NUMBERS.schema, entry.schema)
    columns = TimeColumns(cursor, StateBinding("numbers", state, NUMBERS, entry, tuple))
    columns.open()
    return columns


def flush_to(table: StateTable, columns: TimeColumns, block_rows: int = 3) -> int:
    """Apply the changes to the table; returns their number."""
    changes = ChangeBuffer()
    columns.flush(changes)
    count = changes.rows
    table.apply([Run(pa.py_buffer(encode_run(changes.take(), compression=None, block_rows=block_rows)), "run")])
    return count


def rows_of(entries: list[tuple[int, Entry]], numbers: list[int], fields: int) -> TimeRows:
    owners, times, ordinals = (
        np.array([(owner, *entry)[place] for owner, entry in entries], np.int64) for place in range(3)
    )
    return TimeRows(owners, times, [pa.array(numbers, pa.int64())], ordinals=ordinals if fields > 1 else None)


def listed(rows: TimeRows) -> list[tuple[int, Entry, int]]:
    ordinals = np.zeros(len(rows), np.int64) if rows.ordinals is None else rows.ordinals
    entries = zip(rows.times_ms.tolist(), ordinals.tolist(), strict=True)
    return list(zip(rows.key_index.tolist(), entries, rows.values[0].to_pylist(), strict=True))


# ---- Entry keys ----


@given(st.lists(st.tuples(LONGS, LONGS), max_size=5))
def test_entry_keys_are_those_of_map_states(pairs: list[tuple[int, int]]) -> None:
    codec = MapKeyCodec(TIME_AND_ORDINAL)
    columns: list[Positions] = [np.array([pair[place] for pair in pairs], np.int64) for place in range(2)]
    encoded = entry_keys(columns)
    assert encoded.to_pylist() == [codec.encode(pair) for pair in pairs]
    assert [time_entry(time_ms) for time_ms, _ in pairs] == [
        MapKeyCodec(ONE_TIME).encode((time_ms,)) for time_ms, _ in pairs
    ]
    decoded = entry_numbers(pa.chunked_array([encoded.slice(0, 1), encoded.slice(1)], pa.binary()), 2)
    assert [column.tolist() for column in decoded] == [column.tolist() for column in columns]


def test_bounds_beyond_all_times() -> None:
    assert time_entry(FIRST_MS - 5) <= time_entry(FIRST_MS) < time_entry(0) < time_entry(AFTER_MS - 1)
    assert time_entry(AFTER_MS) == time_entry(AFTER_MS + 5) > time_entry(AFTER_MS - 1)


# ---- Against dictionaries ----

ENTRIES = st.lists(st.tuples(st.integers(0, 3), st.tuples(st.integers(-3, 5), st.integers(0, 2))), max_size=8)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["put", "remove"]), ENTRIES),
    st.tuples(st.just("clear"), st.sets(st.integers(0, 3), max_size=3)),
    st.tuples(st.just("read"), st.tuples(st.integers(-4, 6), st.integers(-4, 6))),
)


@given(batches=st.lists(st.lists(STEPS, max_size=5), max_size=5), budget=BUDGETS, new_table=TABLES, fields=FIELDS)
def test_rows_by_time_are_a_sorted_dictionary(
    batches: list[Any], budget: Budget, new_table: Callable[[], StateTable], fields: int
) -> None:
    table, number = new_table(), 0
    held: dict[tuple[int, Entry], int] = {}
    for steps in batches:
        columns, before, is_cleared = opened(table, budget, fields), held.copy(), False
        for action, what in steps:
            if action in ("put", "remove"):
                entries = [(owner, (time, ordinal * (fields - 1))) for owner, (time, ordinal) in what]
                numbers = list(range(number, number + len(entries)))
                number += len(entries)
                rows = rows_of(entries, numbers, fields)
                if action == "put":
                    columns.put(rows)
                    held |= dict(zip(entries, numbers, strict=True))
                else:
                    columns.remove(rows.key_index, rows.times_ms, rows.ordinals)
                    held = {entry: value for entry, value in held.items() if entry not in entries}
            elif action == "clear":
                columns.clear(np.array(sorted(what), np.int64))
                held = {entry: value for entry, value in held.items() if entry[0] not in what}
                is_cleared = True
            else:
                # After a clear, later reads of the same chunk may still show old rows; the engine makes no such reads.
                check(columns, before, what, with_changes=False)
                if not is_cleared:
                    check(columns, held, what, with_changes=True)
        flush_to(table, columns)
    check(opened(table, budget, fields), held, (-10, 10), with_changes=False)


def check(columns: TimeColumns, held: dict[tuple[int, Entry], int], times: Entry, *, with_changes: bool) -> None:
    expected = [(owner, entry, held[owner, entry]) for owner, entry in sorted(held)]
    has_few = columns.few()
    few = np.flatnonzero(has_few)
    found = columns.read(few, with_changes=with_changes)
    assert listed(found) == [row for row in expected if has_few[row[0]]]
    first, end = times
    for owner in np.flatnonzero(~has_few).tolist():
        pages = list(columns.pages(owner, first, end, with_changes=with_changes))
        assert [row for page in pages for row in listed(page)] == [
            row for row in expected if row[0] == owner and first <= row[1][0] < end
        ]
        known_end = min(end, pages[0].until_ms)
        known = [entry for _, entry, _ in listed(pages[0])]
        assert all(
            entry in known for position, entry, _ in expected if position == owner and first <= entry[0] < known_end
        )


def test_what_is_not_there_is_not_cleared() -> None:
    table, columns = RunsTable(), opened(RunsTable(), Budget(), 2)
    columns.put(rows_of([(0, (1, 0)), (1, (1, 0))], [1, 2], 2))
    columns.clear(np.array([0, 2]))
    assert flush_to(table, columns) == 1
    assert listed(opened(table, Budget(), 2).read(np.arange(4))) == [(1, (1, 0), 2)]


def test_appended_rows_follow_those_of_earlier_batches() -> None:
    """Nothing is read to find their places, and rows of one key, time and batch stay in their order."""
    table = RunsTable()
    for batch in (0, 1, 1 << 35):
        columns = opened(table, Budget(), 2, batch)
        columns.append(np.array([3, 0, 0]), np.array([5, 5, -1]), [pa.array([batch, batch, batch])])
        columns.append(np.array([0, 3]), np.array([5, 5]), [pa.array([-batch, -batch])])
        flush_to(table, columns)
    found = listed(opened(table, Budget(), 2).read(np.arange(4)))
    assert [(owner, time, number) for owner, (time, _), number in found] == [
        *((0, -1, batch) for batch in (0, 1, 1 << 35)),
        *((owner, 5, n) for owner in (0, 3) for batch in (0, 1, 1 << 35) for n in (batch, -batch)),
    ]


# ---- Blocks of rows ----


@pytest.mark.parametrize("are_shared", [False, True])
def test_rows_are_made_anew_if_they_are_shared(are_shared: bool) -> None:
    columns = pa.RecordBatch.from_arrays([pa.array([[1], [2], [3]])], names=["l"])
    blocks = RowBlocks(columns, lambda part: list(part.column(0).to_pylist()), are_shared=are_shared)
    for made in blocks.rows(0, 3):
        made.append(0)
    assert list(blocks.rows(0, 3)) == ([[1], [2], [3]] if are_shared else [[1, 0], [2, 0], [3, 0]])


@pytest.mark.parametrize(("size_bytes", "most_rows"), [(10, 1024), (10_000, 104), (3 << 20, 1)])
@pytest.mark.parametrize("step", [1, 7, 5000])
def test_rows_are_made_once_in_blocks_of_bounded_size(size_bytes: int, most_rows: int, step: int) -> None:
    count = min(2000, (16 << 20) // size_bytes)
    columns = pa.RecordBatch.from_pydict({"t": ["x" * size_bytes] * count})
    made: list[int] = []

    def make_rows(part: pa.RecordBatch) -> list[Any]:
        made.append(part.num_rows)
        return list(part.column(0).to_pylist())

    blocks = RowBlocks(columns, make_rows, are_shared=False)
    found = [text for start in range(0, count, step) for text in blocks.rows(start, min(start + step, count))]
    assert [len(text) for text in found] == [size_bytes] * count
    assert sum(made) == count
    assert max(made) == min(most_rows, count)


# ---- What is read ----


class Counting(RunsTable):
    """Counts the entries that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        return self._counted(super().entries(state, keys))

    def entries_of(self, state: StateDescriptor, key_hash: int, key: bytes) -> KeyEntries:
        entries = super().entries_of(state, key_hash, key)
        read = entries.between

        def between(wanted: EntryRange, max_entries: int, max_bytes: int) -> EntryPage:
            page = read(wanted, max_entries, max_bytes)
            self._counted(page.rows)
            return page

        entries.between = between  # type: ignore[method-assign]  # it counts
        return entries

    def _counted(self, rows: EntryRows) -> EntryRows:
        self.read += len(rows.positions)
        return rows


@pytest.fixture(scope="module")
def long_key() -> Counting:
    """A key with 20,000 rows, one per time."""
    table = Counting()
    columns = opened(table, Budget(), 2)
    columns.put(rows_of([(1, (time_ms, 0)) for time_ms in range(20_000)], list(range(20_000)), 2))
    flush_to(table, columns, 100)
    return table


def test_entries_far_from_the_wanted_ones_are_not_read(long_key: Counting) -> None:
    long_key.read = 0
    pages = opened(long_key, Budget(), 2).pages(1, 10_000, 10_003)
    assert [row[2] for page in pages for row in listed(page)] == [10_000, 10_001, 10_002]
    assert opened(long_key, Budget(), 2).last_until(1, 15_000) == 15_000
    assert 0 < long_key.read < 500


def test_many_times_in_order_are_read_once(long_key: Counting) -> None:
    columns = opened(long_key, Budget(), 2)
    long_key.read = 0
    for time_ms in range(5_000, 15_000, 10):
        pages = columns.pages(1, time_ms, time_ms + 10)
        assert [row[2] for page in pages for row in listed(page)] == list(range(time_ms, time_ms + 10))
    assert 10_000 <= long_key.read < 20_000


def test_pages_are_read_while_they_are_asked_for(long_key: Counting) -> None:
    pages = opened(long_key, Budget(), 2).pages(1)
    long_key.read = 0
    first = len(next(pages))
    assert first == long_key.read < 500
    assert first + sum(map(len, pages)) == 20_000
