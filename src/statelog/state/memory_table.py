"""A table in dictionaries: the plainest form of the contract, and the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.state.run import VALUE_COLUMN, Operation, Run
from statelog.state.schema import StateDescriptor
from statelog.state.table import EntryRows, KeyBatch, StateTable, ValueRows

__all__ = ["MemoryTable"]

_Row = tuple[Any, ...]


class MemoryTable(StateTable):
    """State as Python dictionaries of one process: fast to read for small states, slow to fill.

    Applying a changeset costs Python time per change, and the whole state stays in memory.
    """

    def __init__(self) -> None:
        self._states: dict[str, dict[bytes, dict[bytes, _Row]]] = {}

    def apply(self, runs: Sequence[Run]) -> None:
        for run in runs:
            for name, section in run.sections.items():
                keys = self._states.setdefault(name, {})
                for block in section.blocks:
                    _apply_rows(keys, block.load())

    def get_many(self, state: StateDescriptor, keys: KeyBatch) -> ValueRows:
        return self._rows_of(state, keys, b"")

    def get_entry(self, state: StateDescriptor, key: KeyBatch, entry: bytes) -> ValueRows:
        return self._rows_of(state, key, entry)

    def _rows_of(self, state: StateDescriptor, keys: KeyBatch, entry: bytes) -> ValueRows:
        held = self._states.get(state.name, {})
        positions: list[int] = []
        rows: list[_Row] = []
        for position, key in enumerate(keys.keys.to_pylist()):
            row = held.get(key, {}).get(entry)
            if row is not None:
                positions.append(position)
                rows.append(row)
        return ValueRows(np.array(positions, np.int64), _to_values(state, rows))

    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> npt.NDArray[np.int64]:
        held = self._states.get(state.name, {})
        return np.array([len(held.get(key, ())) for key in keys.keys.to_pylist()], np.int64)

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        held = self._states.get(state.name, {})
        positions: list[int] = []
        entries: list[bytes] = []
        rows: list[_Row] = []
        for position, key in enumerate(keys.keys.to_pylist()):
            for entry, row in sorted(held.get(key, {}).items()):
                positions.append(position)
                entries.append(entry)
                rows.append(row)
        return EntryRows(np.array(positions, np.int64), pa.array(entries, pa.binary()), _to_values(state, rows))


def _apply_rows(keys: dict[bytes, dict[bytes, _Row]], rows: pa.RecordBatch) -> None:
    columns = [column.to_pylist() for column in rows.columns[1:VALUE_COLUMN]]
    values = [column.to_pylist() for column in rows.columns[VALUE_COLUMN:]]
    for key, entry, operation, *value in zip(*columns, *values, strict=True):
        if operation == Operation.CLEAR:
            keys.pop(key, None)
        elif operation == Operation.PUT:
            keys.setdefault(key, {})[entry] = tuple(value)
        elif key in keys:
            keys[key].pop(entry, None)
            if not keys[key]:
                del keys[key]


def _to_values(state: StateDescriptor, rows: list[_Row]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(state.value_schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, state.value_schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=state.value_schema)
