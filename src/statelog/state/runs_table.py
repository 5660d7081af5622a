"""The default table: the changesets themselves, searched newest first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.state.run import Positions, Run, RunBlock
from statelog.state.run_format import EXPIRY_COLUMN, VALUE_COLUMN, Operation
from statelog.state.schema import StateDescriptor
from statelog.state.table import EntryRows, KeyBatch, StateTable, TimerRows, ValueRows

__all__ = ["RunsTable"]


class RunsTable(StateTable):
    """A view over sorted runs. Applying a run is remembering it; nothing is copied.

    Parameters
    ----------
    runs : sequence of Run
        The runs of a checkpoint, oldest first.
    """

    def __init__(self, runs: Sequence[Run] = ()) -> None:
        self._runs = list(runs)

    def apply(self, runs: Sequence[Run]) -> None:
        self._runs.extend(runs)

    def branch(self, run: Run) -> RunsTable:
        return RunsTable([*self._runs, run])

    def get_many(self, state: StateDescriptor, keys: KeyBatch) -> ValueRows:
        found = _Gatherer(state)
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

    def get_entry(self, state: StateDescriptor, key: KeyBatch, entry: bytes) -> ValueRows:
        key_hash, key_bytes = int(key.hashes[0]), key.keys[0].as_py()
        for run in reversed(self._runs):
            section = run.section(state)
            for block in section.blocks_between(key_hash, key_hash) if section else ():
                row = block.find(key_hash, key_bytes, entry)
                if row is not None:
                    found = _Gatherer(state)
                    found.add_puts(block, np.zeros(1, np.int64), np.array([row]))
                    return found.values()
                if block.find(key_hash, key_bytes, b"") is not None:
                    return _no_value(state)
        return _no_value(state)

    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> Positions:
        counts = np.zeros(len(keys), np.int64)
        for run in self._runs:
            section = run.section(state)
            for block in section.blocks if section else ():
                low, high = block.spans(keys.hashes)
                counts += high - low
        return counts

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        found = _Gatherer(state)
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
        joined = pa.concat_batches(due)
        columns = {
            "hash": joined.column(0),
            "key": joined.column(1),
            "time": joined.column(VALUE_COLUMN),
            "age": pa.array(np.concatenate(ages)),
        }
        order = pc.sort_indices(pa.table(columns), [(name, "ascending") for name in columns])
        rows = joined.take(order)
        kept = np.ones(len(rows), bool)
        kept[1:] = ~(_equals_previous(rows.column(1)) & _equals_previous(rows.column(VALUE_COLUMN)))
        kept &= rows.column(3).to_numpy() == Operation.PUT
        rows = rows.filter(pa.array(kept))
        return TimerRows(KeyBatch(rows.column(0).to_numpy(), rows.column(1)), rows.column(VALUE_COLUMN).to_numpy())


def _equals_previous(values: pa.Array) -> npt.NDArray[np.bool_]:
    equal: npt.NDArray[np.bool_] = pc.equal(values.slice(1), values.slice(0, len(values) - 1)).to_numpy(
        zero_copy_only=False
    )
    return equal


def _matches(run: Run, state: StateDescriptor, keys: KeyBatch) -> list[tuple[RunBlock, Positions, Positions]]:
    """Rows of a run that belong to the keys: block, positions of keys and rows, block by block."""
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
    """Collects rows of several blocks and brings them into the order of the keys."""

    def __init__(self, state: StateDescriptor) -> None:
        self._state = state
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
            return _no_value(self._state)
        rows, positions, _ = self._joined()
        if len(self._rows) > 1:
            order = np.argsort(positions, kind="stable")
            rows, positions = rows.take(pa.array(order)), positions[order]
        return ValueRows(positions, _values_of(rows, self._state), rows.column(EXPIRY_COLUMN))

    def entries(self) -> EntryRows:
        """The newest put of every entry, by key and entry."""
        if not self._rows:
            none = _no_value(self._state)
            return EntryRows(none.positions, pa.array([], pa.binary()), none.values, none.expiry)
        rows, positions, ages = self._joined()
        if len(self._rows) > 1:
            sort_table = pa.table({"position": positions, "entry": rows.column(2), "age": ages})
            by_entry = [("position", "ascending"), ("entry", "ascending"), ("age", "ascending")]
            order = pc.sort_indices(sort_table, by_entry)
            rows, positions = rows.take(order), positions[order.to_numpy()]
        entries = rows.column(2)
        kept = np.ones(len(positions), bool)
        if len(self._rows) > 1:
            kept[1:] = ~((positions[1:] == positions[:-1]) & _equals_previous(entries))
        kept &= rows.column(3).to_numpy() == Operation.PUT
        if not kept.all():
            rows, positions = rows.filter(pa.array(kept)), positions[kept]
        return EntryRows(positions, rows.column(2), _values_of(rows, self._state), rows.column(EXPIRY_COLUMN))

    def _joined(self) -> tuple[pa.RecordBatch, Positions, Positions]:
        if len(self._rows) == 1:
            return self._rows[0], self._positions[0], self._ages[0]
        joined = pa.concat_batches(self._rows)
        return joined, np.concatenate(self._positions), np.concatenate(self._ages)


def _values_of(rows: pa.RecordBatch, state: StateDescriptor) -> pa.RecordBatch:
    end = VALUE_COLUMN + len(state.value_schema)
    return pa.RecordBatch.from_arrays(rows.columns[VALUE_COLUMN:end], schema=state.value_schema)


def _no_value(state: StateDescriptor) -> ValueRows:
    values = pa.RecordBatch.from_pylist([], schema=state.value_schema)
    return ValueRows(np.zeros(0, np.int64), values, pa.array([], pa.int64()))
