"""States of windows by time: against dictionaries, over several batches, for keys with few and with many entries."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, LongType, StructType

from statelog.convert.types import row_codec
from statelog.operators.keyed.changes import ChangeBuffer, ListPosition
from statelog.operators.keyed.cursor import KeyCursor
from statelog.operators.keyed.time_reader import AFTER_MS, FIRST_MS, entry_keys, entry_numbers, time_entry
from statelog.operators.keyed.timed_rows import RowBlocks, TimedRows
from statelog.operators.keyed.timeline import Timeline
from statelog.runs.byte_slices import Budget, Positions
from statelog.runs.format import Operation
from statelog.runs.keys import MapKeyCodec
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor, StateKind
from statelog.runs.times import Moment
from statelog.runs.writer import encode_run
from statelog.tables.memory import MemoryTable
from statelog.tables.runs import RunsTable
from statelog.tables.table import EntryPage, EntryRange, EntryRows, KeyBatch, KeyEntries, StateTable
from tests.contract.table_contract import make_keys

NUMBERS = row_codec(StructType().add("n", "long"), "state 'numbers'")
TEXTS = row_codec(StructType().add("t", "string"), "state 'texts'")
LISTS = row_codec(StructType().add("l", ArrayType(LongType())), "state 'lists'")
ONE_TIME = row_codec(StructType().add("time_ms", "long"), "map key")
TIME_AND_ORDINAL = row_codec(StructType().add("time_ms", "long").add("ordinal", "long"), "map key")
TIMELINE = StateDescriptor("timeline", StateKind.MAP, NUMBERS.schema, ONE_TIME.schema)
ROWS = StateDescriptor("rows", StateKind.MAP, NUMBERS.schema, TIME_AND_ORDINAL.schema)
KEYS = make_keys((1, b"a"), (2, b"b"), (2, b"c"), (7, b"d"))

BUDGETS = st.sampled_from([Budget(), Budget(prefetch_entries=1), Budget(prefetch_entries=150), Budget(slice_bytes=100)])
TABLES: st.SearchStrategy[Callable[[], StateTable]] = st.sampled_from([RunsTable, MemoryTable])
TIMES = st.integers(-6, 12)
LONGS = st.sampled_from([-(1 << 63), -(1 << 40), -1, 0, 1, 255, 256, 1 << 40, (1 << 63) - 1])


class Chunk:
    """The states of a key chunk: the keys are visited in any order, as when timers fire."""

    def __init__(self, table: StateTable, budget: Budget, visits: list[int] | None = None) -> None:
        self.cursor = KeyCursor(table, ListPosition(1, 0), KEYS, Moment(0, 0), budget=budget)
        self.cursor.visits = None if visits is None else np.array(visits)
        self.timeline = Timeline(self.cursor, TIMELINE, NUMBERS)
        self.rows = TimedRows(self.cursor, ROWS, NUMBERS)
        self.rows.bind(lambda columns: [row["n"] for row in columns.to_pylist()], are_shared=False)
        self.timeline.open()
        self.rows.open()

    def flush_to(self, table: StateTable) -> list[tuple[str, bytes, bytes, int]]:
        """Apply the changes to the table, and return them."""
        self.cursor.position = -1
        changes = ChangeBuffer()
        self.timeline.flush(changes)
        self.rows.flush(changes)
        run = Run(pa.py_buffer(encode_run(changes.take(), compression=None, block_rows=3)), "run")
        table.apply([run])
        return [
            (name, row["key"], row["entry"], row["op"])
            for name, section in run.sections.items()
            for block in section.blocks
            for row in block.load().to_pylist()
        ]


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


# ---- Timelines ----

_PUT = st.tuples(st.just("put"), TIMES, st.integers(0, 99))
_OTHERS = st.one_of(
    st.tuples(st.just("remove"), TIMES, st.none()),
    st.tuples(st.just("clear"), st.none(), st.none()),
    st.tuples(st.just("between"), TIMES, TIMES),
    st.tuples(st.just("split"), TIMES, st.none()),
    st.tuples(st.just("get"), TIMES, st.none()),
    st.tuples(st.just("near"), TIMES, st.integers(13, 20))
    | st.tuples(st.just("near"), st.integers(-9, 0), st.integers(1, 9)),
)
STEPS = st.lists(st.tuples(st.integers(0, 3), st.lists(_PUT | _OTHERS, max_size=6)), max_size=5)


@given(batches=st.lists(STEPS, max_size=5), budget=BUDGETS, new_table=TABLES)
def test_a_timeline_is_a_dictionary_in_order_of_time(
    batches: list[Any], budget: Budget, new_table: Callable[[], StateTable]
) -> None:
    table = new_table()
    held: list[dict[int, int]] = [{} for _ in range(len(KEYS))]
    for steps in batches:
        chunk = Chunk(table, budget, [position for position, _ in steps])
        changed: list[set[int]] = [set() for _ in range(len(KEYS))]
        for position, actions in steps:
            chunk.cursor.position = position
            for action in actions:
                _act(chunk.timeline, held[position], changed[position], *action)
            assert list(chunk.timeline.between()) == [(at, (held[position][at],)) for at in sorted(held[position])]
        chunk.flush_to(table)


def _act(timeline: Timeline, held: dict[int, int], changed: set[int], action: str, first: Any, second: Any) -> None:
    match action:
        case "put":
            timeline.put(first, (second,))
            held[first] = second
            changed.add(first)
        case "remove":
            timeline.remove(first)
            held.pop(first, None)
            changed.add(first)
        case "clear":
            timeline.clear()
            held.clear()
        case "between":
            assert list(timeline.between(first, second)) == _within(held, first, second)
        case "split":
            later = [at for at in sorted(held) if at >= first]
            assert timeline.split(first) == (
                [at for at in sorted(held) if at < first],
                later[0] if later else None,
            )
        case "get":
            assert timeline.get(first) == ((held[first],) if first in held else None)
        case "near":
            found = list(timeline.from_last_until(first, second))
            assert [pair for pair in found if pair[0] > first] == _within(held, first + 1, second)
            before = [at for at in held if at <= first]
            if before and not any(max(before) <= at <= first for at in changed):
                assert found == _within(held, max(before), second)


def _within(held: dict[int, int], first: int, end: int) -> list[tuple[int, tuple[int]]]:
    return [(at, (held[at],)) for at in sorted(held) if first <= at < end]


def test_what_is_not_there_is_not_removed() -> None:
    table, chunk = RunsTable(), Chunk(RunsTable(), Budget())
    for position in range(3):
        chunk.cursor.position = position
        assert chunk.timeline.get(1) is None
        chunk.timeline.remove(1)
        chunk.timeline.clear()
        assert list(chunk.rows.between()) == []
        chunk.rows.clear()
        chunk.rows.remove(0, 9)
        if position == 1:
            chunk.timeline.put(2, (5,))
    assert chunk.flush_to(table) == [("timeline", b"b", time_entry(2), Operation.PUT)]


def test_rows_that_the_caller_changes_are_copies() -> None:
    cursor = KeyCursor(RunsTable(), ListPosition(1, 0), KEYS, Moment(0, 0), position=0)
    state = StateDescriptor("lists", StateKind.MAP, LISTS.schema, ONE_TIME.schema)
    timeline = Timeline(cursor, state, LISTS)
    timeline.open()
    timeline.put(1, ([1],))
    for row in (timeline.get(1), dict(timeline.between())[1]):
        assert row == ([1],)
        row[0].append(2)
    assert timeline.get(1) == ([1],)


# ---- Rows ----


class Source:
    """Rows of a batch: numbers, by key and then by time."""

    def __init__(self, rows: list[tuple[int, int]], first: int, *, has_times: bool) -> None:
        """`rows` have position and time."""
        self.stored = [pa.array(range(first, first + len(rows)), pa.int16())]
        times = np.array([time_ms for _, time_ms in rows], np.int64)
        self.times_ms: Positions | None = times if has_times else None


ROW_TIMES = st.integers(-2, 4)
NEW_ROWS = st.lists(st.tuples(st.integers(0, 3), ROW_TIMES), max_size=12).map(sorted)
REMOVED = st.dictionaries(st.integers(0, 3), st.tuples(ROW_TIMES, ROW_TIMES) | st.none(), max_size=3)


@given(
    batches=st.lists(st.tuples(NEW_ROWS, REMOVED, REMOVED, st.booleans(), ROW_TIMES, ROW_TIMES), max_size=5),
    budget=BUDGETS,
    new_table=TABLES,
    order=st.permutations(range(4)),
)
def test_rows_by_time_are_a_sorted_dictionary(
    batches: list[Any], budget: Budget, new_table: Callable[[], StateTable], order: list[int]
) -> None:
    table, written = new_table(), 0
    held: list[dict[tuple[int, int], int]] = [{} for _ in range(len(KEYS))]
    for new_rows, removed, cleared, has_times, first_ms, end_ms in batches:
        rows_phase, source = Chunk(table, budget), Source(new_rows, written, has_times=has_times)
        for position in range(len(KEYS)):
            rows_phase.cursor.position = position
            _remove(rows_phase.rows, held[position], removed, position)
            for number, (owner, time_ms) in enumerate(new_rows):
                if owner == position:
                    # Without times of their own the rows of a group have its time; each row is a group here.
                    rows_phase.rows.add(source, number, number + 1, written + number, time_ms)
                    held[position][time_ms, written + number] = written + number
            _check_rows(rows_phase.rows, held[position], first_ms, end_ms)
            if cleared.get(position, removed) is None:
                rows_phase.rows.clear()
                held[position].clear()
                _check_rows(rows_phase.rows, held[position], first_ms, end_ms)
        rows_phase.flush_to(table)
        written += len(new_rows)
        timers_phase = Chunk(table, budget, [*order, *order])
        for position in [*order, *order]:
            timers_phase.cursor.position = position
            _check_rows(timers_phase.rows, held[position], first_ms, end_ms)
            _remove(timers_phase.rows, held[position], removed, 3 - position)
            _check_rows(timers_phase.rows, held[position], first_ms, end_ms)
        timers_phase.flush_to(table)


def _remove(rows: TimedRows, held: dict[tuple[int, int], int], removed: dict[int, Any], position: int) -> None:
    """Remove a range of a key's rows; None stands for all."""
    if position not in removed:
        return
    if removed[position] is None:
        rows.clear()
        held.clear()
        return
    first_ms, end_ms = removed[position]
    rows.remove(first_ms, end_ms)
    for at in [at for at in held if first_ms <= at[0] < end_ms]:
        del held[at]


def _check_rows(rows: TimedRows, held: dict[tuple[int, int], int], first_ms: int, end_ms: int) -> None:
    assert list(rows.between()) == [held[at] for at in sorted(held)]
    assert list(rows.between(first_ms, end_ms)) == [held[at] for at in sorted(held) if first_ms <= at[0] < end_ms]


@given(groups=st.lists(st.integers(1, 400), min_size=1, max_size=8), cut=st.integers(0, 1000))
def test_groups_of_many_rows(groups: list[int], cut: int) -> None:
    """Rows are made in blocks; a group is stored with successive ordinals."""
    table, chunk = RunsTable(), Chunk(RunsTable(), Budget())
    count = sum(groups)
    source = Source([(0, time_ms) for time_ms in range(count)], 0, has_times=True)
    chunk.cursor.position, start = 0, 0
    for size in groups:
        chunk.rows.add(source, start, start + size, 7, start)
        start += size
    assert list(chunk.rows.between()) == list(range(count))
    chunk.flush_to(table)
    found = entry_numbers(table.entries(ROWS, KEYS).entries, 2)
    assert found[0].tolist() == list(range(count))
    assert found[1].tolist() == [7 + place for size in groups for place in range(size)]
    later = Chunk(table, Budget())
    later.cursor.position = 0
    assert list(later.rows.between(cut, cut + 1100)) == list(range(min(cut, count), min(cut + 1100, count)))


def test_new_rows_stand_between_stored_ones() -> None:
    table, chunk = RunsTable(), Chunk(RunsTable(), Budget())
    chunk.cursor.position = 0
    chunk.rows.add(Source([(0, time_ms) for time_ms in range(0, 20, 2)], 0, has_times=True), 0, 10, 0, 0)
    chunk.flush_to(table)
    later = Chunk(table, Budget())
    later.cursor.position = 0
    later.rows.add(Source([(0, time_ms) for time_ms in range(1, 21, 2)], 100, has_times=True), 0, 10, 10, 1)
    assert list(later.rows.between()) == [number for place in range(10) for number in (place, 100 + place)]
    later.rows.remove(4, 9)
    found = list(later.rows.between())
    assert [number for number in found if number < 100] == [0, 1, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("are_shared", [False, True])
def test_rows_with_lists_are_made_anew_if_they_are_shared(are_shared: bool) -> None:
    state = StateDescriptor("lists", StateKind.MAP, LISTS.schema, TIME_AND_ORDINAL.schema)
    cursor = KeyCursor(RunsTable(), ListPosition(1, 0), KEYS, Moment(0, 0), position=0)
    rows = TimedRows(cursor, state, LISTS)
    rows.bind(lambda columns: list(columns.column(0).to_pylist()), are_shared=are_shared)
    rows.open()
    source = Source([(0, time_ms) for time_ms in range(3)], 0, has_times=True)
    source.stored = [pa.array([[1], [2], [3]])]
    rows.add(source, 0, 3, 0, 0)
    for made in rows.between():
        made.append(0)
    assert list(rows.between()) == ([[1], [2], [3]] if are_shared else [[1, 0], [2, 0], [3, 0]])


@pytest.mark.parametrize(("size_bytes", "most_rows"), [(10, 1024), (10_000, 104), (3 << 20, 1)])
@pytest.mark.parametrize("step", [1, 7, 5000])
def test_rows_are_made_once_in_blocks_of_bounded_size(size_bytes: int, most_rows: int, step: int) -> None:
    count = min(2000, (16 << 20) // size_bytes)
    columns = pa.table({"t": ["x" * size_bytes] * count})
    made: list[int] = []

    def make_rows(part: pa.RecordBatch | pa.Table) -> list[Any]:
        made.append(part.num_rows)
        return list(part.column(0).to_pylist())

    blocks = RowBlocks(columns, make_rows, are_shared=False)
    found = [text for start in range(0, count, step) for text in blocks.rows(start, min(start + step, count))]
    assert [len(text) for text in found] == [size_bytes] * count
    assert sum(made) == count
    assert max(made) == min(most_rows, count)


def test_the_last_time_before_a_written_one() -> None:
    table, chunk = RunsTable(), Chunk(RunsTable(), Budget())
    chunk.cursor.position = 0
    for time_ms in (2, 5, 9):
        chunk.timeline.put(time_ms, (time_ms,))
    chunk.flush_to(table)
    for budget in (Budget(), Budget(prefetch_entries=1)):
        later = Chunk(table, budget)
        later.cursor.position = 0
        later.timeline.put(7, (70,))
        assert list(later.timeline.from_last_until(6, 9)) == [(5, (5,)), (7, (70,))]
        assert list(later.timeline.from_last_until(2, 3)) == [(2, (2,))]
        assert list(later.timeline.from_last_until(1, 3)) == [(2, (2,))]
        later.timeline.remove(5)
        assert list(later.timeline.from_last_until(6, 8)) == [(7, (70,))]


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
    """A key with 20,000 rows in either state, one per time."""
    table = Counting()
    chunk = Chunk(table, Budget())
    chunk.cursor.position = 1
    source = Source([(1, time_ms) for time_ms in range(20_000)], 0, has_times=True)
    chunk.rows.add(source, 0, 20_000, 0, 0)
    for time_ms in range(20_000):
        chunk.timeline.put(time_ms, (time_ms,))
    chunk.flush_to(table)
    return table


def _opened(table: StateTable) -> Chunk:
    chunk = Chunk(table, Budget())
    chunk.cursor.position = 1
    return chunk


FEW = 1000
"""Entries of a small page of each of the two states."""


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda chunk: chunk.timeline.get(10_000), (10_000,)),
        (lambda chunk: list(chunk.timeline.between(10_000, 10_002)), [(10_000, (10_000,)), (10_001, (10_001,))]),
        (lambda chunk: next(chunk.timeline.between(15_000)), (15_000, (15_000,))),
        (lambda chunk: next(chunk.timeline.from_last_until(10_000, AFTER_MS)), (10_000, (10_000,))),
        (lambda chunk: chunk.timeline.split(2), ([0, 1], 2)),
        (lambda chunk: list(chunk.rows.between(10_000, 10_003)), [10_000, 10_001, 10_002]),
        (lambda chunk: chunk.rows.remove(10_000, 10_003), None),
    ],
)
def test_entries_far_from_the_wanted_ones_are_not_read(
    long_key: Counting, read: Callable[[Chunk], Any], expected: Any
) -> None:
    long_key.read = 0
    assert read(_opened(long_key)) == expected
    assert 0 < long_key.read < FEW


def test_many_times_in_order_are_read_once(long_key: Counting) -> None:
    chunk = _opened(long_key)
    long_key.read = 0
    for time_ms in range(5_000, 15_000):
        assert chunk.timeline.get(time_ms) == (time_ms,)
        assert list(chunk.rows.between(time_ms, time_ms + 1)) == [time_ms]
    assert 20_000 <= long_key.read < 2 * 20_000 + FEW


def test_rows_are_read_while_they_are_asked_for(long_key: Counting) -> None:
    rows = _opened(long_key).rows.between()
    long_key.read = 0
    assert [next(rows) for _ in range(100)] == list(range(100))
    assert 0 < long_key.read < FEW
    assert list(rows) == list(range(100, 20_000))


def test_rows_can_be_read_after_their_key(long_key: Counting) -> None:
    chunk = _opened(long_key)
    rows = chunk.rows.between(3, 15_000)
    assert next(rows) == 3
    chunk.cursor.position = 0
    assert list(chunk.rows.between()) == []
    chunk.flush_to(RunsTable())
    assert list(rows) == list(range(4, 15_000))


@pytest.mark.parametrize("backwards", [False, True])
def test_keys_with_few_entries_are_read_once_in_the_order_of_the_visits(backwards: bool) -> None:
    table, keys = Counting(), make_keys(*[(number, b"%d" % number) for number in range(100)])
    visits = list(reversed(range(100))) if backwards else list(range(100))

    def opened(budget: Budget) -> tuple[KeyCursor, Timeline]:
        cursor = KeyCursor(table, ListPosition(1, 0), keys, Moment(0, 0), budget=budget)
        cursor.visits = np.array(visits) if backwards else None
        timeline = Timeline(cursor, TIMELINE, NUMBERS)
        timeline.open()
        return cursor, timeline

    cursor, timeline = opened(Budget())
    for cursor.position in range(100):
        for time_ms in range(3):
            timeline.put(time_ms, (cursor.position,))
    changes = ChangeBuffer()
    timeline.flush(changes)
    table.apply([Run(pa.py_buffer(encode_run(changes.take(), compression=None, block_rows=1 << 20)), "run")])
    for budget, first_read in ((Budget(), 300), (Budget(prefetch_entries=160), 159), (Budget(slice_bytes=1600), 9)):
        table.read = 0
        cursor, timeline = opened(budget)
        cursor.position = visits[0]
        assert timeline.get(1) == (visits[0],)
        assert 3 <= table.read <= first_read
        for position in visits:
            cursor.position = position
            assert list(timeline.between()) == [(time_ms, (position,)) for time_ms in range(3)]
        assert table.read == 300
        assert cursor.loaded_bytes >= 300 * (8 + 9)


@pytest.mark.parametrize(("count", "size_bytes"), [(5000, 2000), (1000, 10_000)])
def test_the_rows_of_a_key_are_never_in_memory_together(count: int, size_bytes: int) -> None:
    budget = Budget(slice_bytes=200_000)
    table = RunsTable(budget=budget)
    state = StateDescriptor("texts", StateKind.MAP, TEXTS.schema, TIME_AND_ORDINAL.schema)
    texts = pa.array(["x" * size_bytes] * count)
    seen: list[int] = []

    def make_rows(columns: pa.RecordBatch | pa.Table) -> list[str]:
        seen.append(columns.num_rows)
        made: list[str] = columns.column(0).to_pylist()
        return made

    def opened() -> TimedRows:
        cursor = KeyCursor(table, ListPosition(1, 0), KEYS, Moment(0, 0), position=1, budget=budget)
        rows = TimedRows(cursor, state, TEXTS)
        rows.bind(make_rows, are_shared=False)
        rows.open()
        return rows

    source = Source([(1, time_ms) for time_ms in range(count)], 0, has_times=True)
    source.stored = [texts]
    for part in (slice(0, count // 2), slice(count // 2, count)):
        rows = opened()
        rows.add(source, part.start, part.stop, 0, part.start)
        changes = ChangeBuffer(budget)
        rows.flush(changes)
        table.apply([Run(pa.py_buffer(encode_run(changes.take(), compression=None, block_rows=1 << 20)), "run")])
    rows = opened()
    tracemalloc.start()
    try:
        assert sum(len(text) for text in rows.between()) == count * size_bytes
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert sum(seen) == count
    assert max(seen) * size_bytes <= 200_000
