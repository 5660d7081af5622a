"""Rows that searches find: gathered from runs into the answer of a table, and made changes of a run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.runs.byte_slices import Budget, Positions, gather_rows, joined_column
from statelog.runs.format import EXPIRY_COLUMN, VALUE_COLUMN, Operation, change_schema
from statelog.runs.key_columns import differs_from_previous
from statelog.runs.schema import StateDescriptor, StateKind
from statelog.tables.table import EntryRows, KeyBatch, ValueRows

_PART_ROWS: Final = 16_384


class Gatherer:
    """Collects rows of several blocks, and brings them into the order of the keys."""

    def __init__(self, state: StateDescriptor, budget: Budget) -> None:
        self._state = state
        self._max_bytes = budget.slice_bytes
        self._rows: list[pa.RecordBatch] = []
        self._positions: list[Positions] = []
        self._ages: list[Positions] = []

    def add(self, rows: pa.RecordBatch, positions: Positions, age: int = 0) -> None:
        """Add rows of a run, with the positions of their keys; `age` counts runs from the newest."""
        self._rows.append(rows)
        self._positions.append(positions)
        self._ages.append(np.full(len(positions), age, np.int64))

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


def as_changes(
    state: StateDescriptor, keys: KeyBatch, found: ValueRows, entries: pa.ChunkedArray
) -> Iterator[pa.RecordBatch]:
    """The answer of a table as changes that put its rows; `found.positions` are positions in `keys`."""
    start = 0
    for values in found.values.to_batches(max_chunksize=_PART_ROWS):
        rows = values.num_rows
        own = keys.take(found.positions[start : start + rows])
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
        yield pa.RecordBatch.from_arrays(columns, schema=change_schema(state))
        start += rows
