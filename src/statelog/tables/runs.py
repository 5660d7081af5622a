"""The default table: it searches the runs, newest first. Also a branch of any table: later runs above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.runs.byte_slices import BUDGET, Budget, Positions, gather_rows, joined_column
from statelog.runs.format import EXPIRY_COLUMN, VALUE_COLUMN, Operation, change_schema
from statelog.runs.key_columns import differs_from_previous
from statelog.runs.reader import Run, RunBlock, RunSection
from statelog.runs.schema import StateDescriptor, StateKind
from statelog.runs.writer import LOCAL_BLOCK_ROWS, StateChanges, encode_run
from statelog.tables.ranges import page_of_runs
from statelog.tables.table import EntryPage, EntryRange, EntryRows, KeyBatch, StateTable, TimerRows, ValueRows

_PART_ROWS: Final = 16_384


class RunsTable(StateTable):
    """Searches sorted runs, given oldest first. Applying a run only remembers it; nothing is copied.

    `budget` bounds the batches that values come in.
    """

    def __init__(self, runs: Sequence[Run] = (), budget: Budget = BUDGET) -> None:
        self._runs = list(runs)
        self._budget = budget

    def apply(self, runs: Sequence[Run]) -> None:
        self._runs.extend(runs)

    def branch(self, run: Run) -> RunsTable:
        return RunsTable([*self._runs, run], self._budget)

    def mean_bytes(self, state: StateDescriptor) -> int:
        sections = [section for run in self._runs if (section := run.section(state)) is not None]
        return sum([part.size_bytes for part in sections]) // max(1, sum([part.rows for part in sections]))

    def get_many(self, state: StateDescriptor, keys: KeyBatch, entry: bytes = b"") -> ValueRows:
        if entry:
            return self._get_entry(state, keys, entry)
        found = _Gatherer(state, self._budget)
        open_keys = np.arange(len(keys))
        for run in reversed(self._runs):
            if not len(open_keys):
                break
            decided = np.zeros(len(open_keys), bool)
            for block, queries, rows in _matches(run, state, keys.take(open_keys)):
                decided[queries] = True
                found.add_puts(block, open_keys[queries], rows)
            open_keys = open_keys[~decided]
        return found.values()

    def _get_entry(self, state: StateDescriptor, key: KeyBatch, entry: bytes) -> ValueRows:
        key_hash, key_bytes = int(key.hashes[0]), key.keys[0].as_py()
        for run in reversed(self._runs):
            section = run.section(state)
            is_cleared = False
            for block in section.blocks_between(key_hash, key_hash) if section else ():
                row = block.find(key_hash, key_bytes, entry)
                if row is not None:
                    found = _Gatherer(state, self._budget)
                    found.add_puts(block, np.zeros(1, np.int64), np.array([row]))
                    return found.values()
                is_cleared |= block.find(key_hash, key_bytes, b"") is not None
            if is_cleared:
                return _nothing(state)
        return _nothing(state)

    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> Positions:
        counts = np.zeros(len(keys), np.int64)
        for run in self._runs:
            section = run.section(state)
            for block in section.blocks if section else ():
                low, high = block.spans(keys.hashes)
                counts += high - low
        return counts

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        found = _Gatherer(state, self._budget)
        open_keys = np.arange(len(keys))
        for age, run in enumerate(reversed(self._runs)):
            if not len(open_keys):
                break
            cleared = np.zeros(len(open_keys), bool)
            for block, queries, rows in _matches(run, state, keys.take(open_keys)):
                found.add(block, open_keys[queries], rows, age)
                is_clear = block.batch.column(3).to_numpy()[rows] == Operation.CLEAR
                cleared[queries[is_clear]] = True
            open_keys = open_keys[~cleared]
        return found.entries()

    def entries_between(self, state: StateDescriptor, key: KeyBatch, wanted: EntryRange) -> EntryPage:
        return page_of_runs(state, self._newest_sections(state), key, wanted, self._budget)

    def _newest_sections(self, state: StateDescriptor) -> Iterator[RunSection]:
        return (section for run in reversed(self._runs) if (section := run.section(state)) is not None)

    def due_timers(self, state: StateDescriptor, after_ms: int, until_ms: int) -> TimerRows:
        due: list[pa.RecordBatch] = []
        ages: list[Positions] = []
        for age, run in enumerate(reversed(self._runs)):
            section = run.section(state)
            for block in section.blocks if section else ():
                rows = block.due(after_ms, until_ms)
                if len(rows):
                    due.append(block.take(rows))
                    ages.append(np.full(len(rows), age, np.int64))
        if not due:
            return TimerRows(KeyBatch(np.zeros(0, np.uint64), pa.array([], pa.binary())), np.zeros(0, np.int64))
        columns = {
            name: joined_column([batch.column(column) for batch in due])
            for name, column in (("hash", 0), ("key", 1), ("time", VALUE_COLUMN), ("operation", 3))
        }
        timers = pa.RecordBatch.from_pydict({**columns, "age": pa.array(np.concatenate(ages))})
        timers = timers.take(pc.sort_indices(timers, [(name, "ascending") for name in ("hash", "key", "time", "age")]))
        is_newest = differs_from_previous(timers["key"]) | differs_from_previous(timers["time"])
        kept = is_newest & (timers["operation"].to_numpy() == Operation.PUT)
        timers = timers.filter(pa.array(kept))
        return TimerRows(KeyBatch(timers["hash"].to_numpy(), timers["key"]), timers["time"].to_numpy())


class BranchedTable(RunsTable):
    """Runs, oldest first, over a table, which stays as it is.

    A read takes the table's rows of the keys in question as one more run, older than the others.
    """

    def __init__(self, table: StateTable, runs: Sequence[Run]) -> None:
        super().__init__(runs)
        self._table = table

    def branch(self, run: Run) -> BranchedTable:
        return BranchedTable(self._table, [*self._runs, run])

    def mean_bytes(self, state: StateDescriptor) -> int:
        return max(self._table.mean_bytes(state), super().mean_bytes(state))

    def get_many(self, state: StateDescriptor, keys: KeyBatch, entry: bytes = b"") -> ValueRows:
        found = self._table.get_many(state, keys, entry)
        entries = pa.chunked_array([[entry] * len(found.positions)], pa.binary())
        return self._over(state, keys, found, entries).get_many(state, keys, entry)

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        found = self._table.entries(state, keys)
        return self._over(state, keys, found, found.entries).entries(state, keys)

    def entries_between(self, state: StateDescriptor, key: KeyBatch, wanted: EntryRange) -> EntryPage:
        found = self._table.entries_between(state, key, wanted)
        return page_of_runs(state, self._newest_sections(state), key, wanted, self._budget, found)

    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> npt.NDArray[np.int64]:
        return self._table.count_entries(state, keys) + super().count_entries(state, keys)

    def due_timers(self, state: StateDescriptor, after_ms: int, until_ms: int) -> TimerRows:
        due = self._table.due_timers(state, after_ms, until_ms)
        times = pa.Table.from_arrays([pa.array(due.times_ms, pa.int64())], schema=state.value_schema)
        big_endian = (due.times_ms.astype(np.uint64) + np.uint64(1 << 63)).astype(">u8").tobytes()
        entries = pa.Array.from_buffers(pa.binary(8), len(times), [None, pa.py_buffer(big_endian)]).cast(pa.binary())
        found = ValueRows(np.arange(len(times)), times, pa.nulls(len(times), pa.int64()))
        return self._over(state, due.keys, found, pa.chunked_array([entries])).due_timers(state, after_ms, until_ms)

    def _over(self, state: StateDescriptor, keys: KeyBatch, found: ValueRows, entries: pa.ChunkedArray) -> RunsTable:
        """The runs over the rows that the table has found; `found.positions` are positions in `keys`."""
        positions = found.positions
        if not len(positions):
            return RunsTable(self._runs)
        batches: list[pa.RecordBatch] = []
        start = 0
        for values in found.values.to_batches(max_chunksize=_PART_ROWS):
            rows = values.num_rows
            own = keys.take(positions[start : start + rows])
            columns = [
                pa.array(own.hashes),
                own.keys.cast(pa.binary()),
                entries.slice(start, rows).combine_chunks(),
                pa.array(np.full(rows, Operation.PUT, np.uint8)),
                found.expiry.slice(start, rows),
                *values.columns,
            ]
            if state.kind is StateKind.TIMER:
                columns.append(pa.array(np.zeros(rows, np.uint32)))  # filled in by the writer
            batches.append(pa.RecordBatch.from_arrays(columns, schema=change_schema(state)))
            start += rows
        data = encode_run([StateChanges(state, batches)], compression=None, block_rows=LOCAL_BLOCK_ROWS)
        return RunsTable([Run(pa.py_buffer(data), "rows of a table"), *self._runs])


def _matches(run: Run, state: StateDescriptor, keys: KeyBatch) -> list[tuple[RunBlock, Positions, Positions]]:
    """Rows of a run that belong to the keys, block by block: the block, positions in `keys`, rows of the block."""
    section = run.section(state)
    if section is None or not len(keys):
        return []
    found: list[tuple[RunBlock, Positions, Positions]] = []
    for block in section.blocks_between(int(keys.hashes[0]), int(keys.hashes[-1])):
        start = int(np.searchsorted(keys.hashes, np.uint64(block.first_hash), "left"))
        end = int(np.searchsorted(keys.hashes, np.uint64(block.last_hash), "right"))
        if start == end:
            continue
        part = keys if end - start == len(keys) else keys.slice(start, end)
        queries, rows = block.match(part.hashes, part.keys)
        if len(queries):
            found.append((block, queries + start, rows))
    return found


class _Gatherer:
    """Collects rows of several blocks, and brings them into the order of the keys."""

    def __init__(self, state: StateDescriptor, budget: Budget) -> None:
        self._state = state
        self._max_bytes = budget.slice_bytes
        self._rows: list[pa.RecordBatch] = []
        self._positions: list[Positions] = []
        self._ages: list[Positions] = []

    def add(self, block: RunBlock, positions: Positions, rows: Positions, age: int) -> None:
        self._rows.append(block.take(rows))
        self._positions.append(positions)
        self._ages.append(np.full(len(rows), age, np.int64))

    def add_puts(self, block: RunBlock, positions: Positions, rows: Positions) -> None:
        is_put = block.batch.column(3).to_numpy()[rows] == Operation.PUT
        if not is_put.all():
            positions, rows = positions[is_put], rows[is_put]
        self.add(block, positions, rows, 0)

    def values(self) -> ValueRows:
        """The rows by key; each key has at most one."""
        if not self._rows:
            return _nothing(self._state)
        positions = np.concatenate(self._positions)
        batches = self._rows
        if len(batches) > 1:
            order = np.argsort(positions, kind="stable")
            batches, positions = list(gather_rows(batches, order, self._max_bytes)), positions[order]
        return _found(self._state, positions, batches)

    def entries(self) -> EntryRows:
        """The newest put of every entry, by key and entry."""
        if not self._rows:
            return _nothing(self._state)
        batches, positions = self._rows, np.concatenate(self._positions)
        kept = np.concatenate([batch.column(3).to_numpy() for batch in batches]) == Operation.PUT
        if len(batches) > 1:
            order, is_newest = self._newest_first(positions)
            kept = order[is_newest & kept[order]]
            batches, positions = list(gather_rows(batches, kept, self._max_bytes)), positions[kept]
        elif not kept.all():
            batches, positions = [batches[0].filter(pa.array(kept))], positions[kept]
        return _found(self._state, positions, batches)

    def _newest_first(self, positions: Positions) -> tuple[Positions, npt.NDArray[np.bool_]]:
        """The order of the rows by key, entry and age, and which rows in that order are the newest of their entry."""
        entries = joined_column([batch.column(2) for batch in self._rows])
        columns = {"position": positions, "entry": entries, "age": np.concatenate(self._ages)}
        indices = pc.sort_indices(pa.table(columns), [(name, "ascending") for name in columns])
        order = indices.to_numpy().astype(np.int64)
        entries, positions = entries.take(indices), positions[order]
        is_newest = differs_from_previous(entries)
        is_newest[1:] |= positions[1:] != positions[:-1]
        return order, is_newest


def _found(state: StateDescriptor, positions: Positions, batches: Sequence[pa.RecordBatch]) -> EntryRows:
    """Rows of runs as the answer of a table."""
    schema, end = state.value_schema, VALUE_COLUMN + len(state.value_schema)
    values = [pa.RecordBatch.from_arrays(rows.columns[VALUE_COLUMN:end], schema=schema) for rows in batches]
    expiry = joined_column([rows.column(EXPIRY_COLUMN) for rows in batches]) if batches else pa.array([], pa.int64())
    entries = pa.chunked_array([rows.column(2) for rows in batches], pa.binary())
    return EntryRows(positions, pa.Table.from_batches(values, schema), expiry, entries)


def _nothing(state: StateDescriptor) -> EntryRows:
    return _found(state, np.zeros(0, np.int64), [])
