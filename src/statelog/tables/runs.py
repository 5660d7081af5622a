"""The default table: it searches the runs, newest first. Also a branch of any table: later runs on top of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statelog.runs.byte_slices import BUDGET, Budget, Positions, joined_column
from statelog.runs.key_columns import differs_from_previous
from statelog.runs.reader import Run, RunBlock, RunSection
from statelog.runs.schema import ENTRY_COLUMN, VALUE_COLUMN, Operation, StateDescriptor
from statelog.runs.writer import LOCAL_BLOCK_ROWS, StateChanges, encode_run
from statelog.tables.run_entries import EntriesInRuns, Gatherer, as_changes
from statelog.tables.table import (
    EntryCounts,
    EntryRows,
    KeyBatch,
    KeyEntries,
    StateTable,
    TimerRows,
    ValueRows,
)


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

    def get_many(self, state: StateDescriptor, keys: KeyBatch) -> ValueRows:
        found = Gatherer(state, self._budget)
        open_keys = np.arange(len(keys))
        for section in self._sections(state):
            if not len(keys):
                break
            decided = np.zeros(len(keys), bool)
            for block, queries, rows in _matches(section, keys):
                decided[queries] = True
                is_put = block.operations[rows] == Operation.PUT
                if not is_put.all():
                    queries, rows = queries[is_put], rows[is_put]
                found.add(block.take(rows, ENTRY_COLUMN), open_keys[queries])
            if decided.any():
                left = np.flatnonzero(~decided)
                open_keys, keys = open_keys[left], keys.take(left)
        return found.values()

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        found = Gatherer(state, self._budget)
        open_keys = np.arange(len(keys))
        for age, section in enumerate(self._sections(state)):
            if not len(keys):
                break
            cleared = np.zeros(len(keys), bool)
            for block, queries, rows in _matches(section, keys):
                found.add(block.take(rows, ENTRY_COLUMN), open_keys[queries], age)
                is_clear = block.operations[rows] == Operation.CLEAR
                cleared[queries[is_clear]] = True
            if cleared.any():
                left = np.flatnonzero(~cleared)
                open_keys, keys = open_keys[left], keys.take(left)
        return found.entries()

    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryCounts:
        counts, size_bytes = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
        for section in self._sections(state):
            for block, start, end in section.blocks_of(keys.hashes):
                if block.first_hash == block.last_hash:  # rows of a large key, whose blocks are not opened for this
                    counts[start:end] += block.rows
                    size_bytes[start:end] += block.size_bytes
                    continue
                low, high = block.spans(keys.hashes[start:end])
                found = np.flatnonzero(high > low)
                low, high = low[found], high[found]
                counts[start + found] += high - low
                size_bytes[start + found] += block.sizes(low, high)
        return EntryCounts(counts, size_bytes)

    def entries_of(self, state: StateDescriptor, key_hash: int, key: bytes) -> KeyEntries:
        return EntriesInRuns(state, self._sections(state), key_hash, key, self._budget)

    def _sections(self, state: StateDescriptor) -> list[RunSection]:
        """The sections of a state, newest first."""
        return [section for run in reversed(self._runs) if (section := run.section(state)) is not None]

    def due_timers(self, state: StateDescriptor, after_ms: int, until_ms: int) -> TimerRows:
        due: list[pa.RecordBatch] = []
        ages: list[Positions] = []
        for age, section in enumerate(self._sections(state)):
            for block in section.blocks:
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

    A read uses the table's rows of the requested keys as one more run, older than the others.
    """

    def __init__(self, table: StateTable, runs: Sequence[Run]) -> None:
        super().__init__(runs)
        self._table = table

    def branch(self, run: Run) -> BranchedTable:
        return BranchedTable(self._table, [*self._runs, run])

    def mean_bytes(self, state: StateDescriptor) -> int:
        return max(self._table.mean_bytes(state), super().mean_bytes(state))

    def get_many(self, state: StateDescriptor, keys: KeyBatch) -> ValueRows:
        found = self._table.get_many(state, keys)
        entries = pa.chunked_array([[b""] * len(found.positions)], pa.binary())
        return self._over(state, keys, found, entries).get_many(state, keys)

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        found = self._table.entries(state, keys)
        return self._over(state, keys, found, found.entries).entries(state, keys)

    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryCounts:
        below, own = self._table.count_entries(state, keys), super().count_entries(state, keys)
        return EntryCounts(below.entries + own.entries, below.size_bytes + own.size_bytes)

    def entries_of(self, state: StateDescriptor, key_hash: int, key: bytes) -> KeyEntries:
        below = self._table.entries_of(state, key_hash, key)
        return EntriesInRuns(state, self._sections(state), key_hash, key, self._budget, below)

    def due_timers(self, state: StateDescriptor, after_ms: int, until_ms: int) -> TimerRows:
        due = self._table.due_timers(state, after_ms, until_ms)
        times = pa.Table.from_arrays([pa.array(due.times_ms, pa.int64())], schema=state.value_schema)
        big_endian = (due.times_ms.astype(np.uint64) + np.uint64(1 << 63)).astype(">u8").tobytes()
        entries = pa.Array.from_buffers(pa.binary(8), len(times), [None, pa.py_buffer(big_endian)]).cast(pa.binary())
        found = ValueRows(np.arange(len(times)), times, pa.nulls(len(times), pa.int64()))
        return self._over(state, due.keys, found, pa.chunked_array([entries])).due_timers(state, after_ms, until_ms)

    def _over(self, state: StateDescriptor, keys: KeyBatch, found: ValueRows, entries: pa.ChunkedArray) -> RunsTable:
        """The runs over the rows that the table has found; `found.positions` are positions in `keys`."""
        if not len(found.positions):
            return RunsTable(self._runs)
        batches = list(as_changes(state, keys, found, entries))
        data = encode_run([StateChanges(state, batches)], compression=None, block_rows=LOCAL_BLOCK_ROWS)
        return RunsTable([Run(pa.py_buffer(data), "rows of a table"), *self._runs])


def _matches(section: RunSection, keys: KeyBatch) -> Iterator[tuple[RunBlock, Positions, Positions]]:
    """Rows of a section that belong to the keys, block by block: the block, positions in `keys`, rows of the block."""
    for block, start, end in section.blocks_of(keys.hashes):
        part = keys if end - start == len(keys) else keys.slice(start, end)
        queries, rows = block.match(part.hashes, part.keys)
        if len(queries):
            yield block, queries + start, rows
