"""A table below some later runs, for tables that cannot be copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.runs.format import VALUE_COLUMN, Operation, change_schema
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor, StateKind
from statelog.runs.writer import LOCAL_BLOCK_ROWS, StateChanges, encode_run
from statelog.tables.runs import RunsTable
from statelog.tables.table import EntryRows, KeyBatch, StateTable, TimerRows, ValueRows

_PART_ROWS: Final = 16_384


class BranchedTable(StateTable):
    """Runs, oldest first, over a table, which stays as it is.

    A read takes the table's rows of the keys in question as one more run, older than the others.
    """

    def __init__(self, table: StateTable, runs: Sequence[Run]) -> None:
        self._table = table
        self._runs = list(runs)

    def apply(self, runs: Sequence[Run]) -> None:
        self._runs.extend(runs)

    def branch(self, run: Run) -> BranchedTable:
        return BranchedTable(self._table, [*self._runs, run])

    def mean_bytes(self, state: StateDescriptor) -> int:
        return max(self._table.mean_bytes(state), RunsTable(self._runs).mean_bytes(state))

    def get_many(self, state: StateDescriptor, keys: KeyBatch) -> ValueRows:
        found = self._table.get_many(state, keys)
        return self._over(state, keys, found, None).get_many(state, keys)

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        found = self._table.entries(state, keys)
        return self._over(state, keys, found, found.entries).entries(state, keys)

    def get_entry(self, state: StateDescriptor, key: KeyBatch, entry: bytes) -> ValueRows:
        found = self._table.get_entry(state, key, entry)
        entries = pa.chunked_array([[entry] * len(found.positions)], pa.binary())
        return self._over(state, key, found, entries).get_entry(state, key, entry)

    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> npt.NDArray[np.int64]:
        return self._table.count_entries(state, keys) + RunsTable(self._runs).count_entries(state, keys)

    def due_timers(self, state: StateDescriptor, after_ms: int, until_ms: int) -> TimerRows:
        due = self._table.due_timers(state, after_ms, until_ms)
        times = pa.Table.from_arrays([pa.array(due.times_ms, pa.int64())], schema=state.value_schema)
        big_endian = (due.times_ms.astype(np.uint64) + np.uint64(1 << 63)).astype(">u8").tobytes()
        entries = pa.Array.from_buffers(pa.binary(8), len(times), [None, pa.py_buffer(big_endian)]).cast(pa.binary())
        found = ValueRows(np.arange(len(times)), times, pa.nulls(len(times), pa.int64()))
        return self._over(state, due.keys, found, pa.chunked_array([entries])).due_timers(state, after_ms, until_ms)

    def _over(
        self, state: StateDescriptor, keys: KeyBatch, found: ValueRows | EntryRows, entries: pa.ChunkedArray | None
    ) -> RunsTable:
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
                pa.array([b""] * rows, pa.binary()) if entries is None else entries.slice(start, rows).combine_chunks(),
                pa.array(np.full(rows, Operation.PUT, np.uint8)),
                found.expiry.slice(start, rows),
                *values.columns,
            ]
            if state.kind is StateKind.TIMER:
                columns.append(pa.array(np.zeros(rows, np.uint32)))  # filled in by the writer
            assert len(columns) >= VALUE_COLUMN
            batches.append(pa.RecordBatch.from_arrays(columns, schema=change_schema(state)))
            start += rows
        data = encode_run([StateChanges(state, batches)], compression=None, block_rows=LOCAL_BLOCK_ROWS)
        return RunsTable([Run(pa.py_buffer(data), "rows of a table"), *self._runs])
