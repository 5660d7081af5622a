"""A table in dictionaries: the simplest form of the contract, and the oracle of the tests."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

from statelog.runs.byte_slices import BUDGET, Pace, in_parts, to_array
from statelog.runs.evolution import project
from statelog.runs.reader import Run
from statelog.runs.schema import VALUE_COLUMN, Operation, StateDescriptor, TimeDomain, is_deleted
from statelog.runs.times import Moment
from statelog.tables.table import (
    EntryCounts,
    EntryPage,
    EntryRange,
    EntryRows,
    FoundEntry,
    KeyBatch,
    KeyEntries,
    StateTable,
    TimerRows,
    ValueRows,
)

_FIRST_ROWS: Final = 256
"""Rows of the first page, from whose size the next one is derived."""
_GROWTH: Final = 4

_Row = tuple[Any, ...]
"""An entry: the state's description when it was written, then expiry and value, in the order of a run's columns."""


class _Key:
    """The entries of one key in one state, and the key's hash."""

    __slots__ = ("entries", "key_hash")

    def __init__(self, key_hash: int, entries: dict[bytes, _Row]) -> None:
        self.key_hash = key_hash
        self.entries = entries


class MemoryTable(StateTable):
    """State as Python dictionaries of one process: all in memory, fast to read for small states, slow to fill."""

    def __init__(self) -> None:
        self._states: dict[str, dict[bytes, _Key]] = {}
        self._descriptors: list[StateDescriptor] = []
        self._expires_by: dict[str, TimeDomain | None] = {}
        """The clock that a state's rows expire by, from its newest description."""
        self._unchecked = _mortal_rows(self._states, self._expires_by)
        """The rows that :meth:`drop_expired` checks next."""

    def apply(self, runs: Sequence[Run]) -> None:
        for run in runs:
            for name, section in run.sections.items():
                keys = self._states.setdefault(name, {})
                self._expires_by[name] = section.state.expires_by
                # One object for all equal descriptors, so that rows with equal descriptions are recognized by it.
                if section.state not in self._descriptors:
                    self._descriptors.append(section.state)
                state = self._descriptors[self._descriptors.index(section.state)]
                for block in section.blocks:
                    _apply_rows(keys, block.load(), state)

    def branch(self, run: Run) -> MemoryTable:
        branched = MemoryTable()
        branched._states.update(self._states)
        branched._expires_by.update(self._expires_by)
        branched._descriptors = self._descriptors
        for name, section in run.sections.items():
            keys = dict(self._states.get(name, {}))
            for block in section.blocks:
                for key in block.load().column(1).to_pylist():
                    if key in keys:
                        keys[key] = _Key(keys[key].key_hash, dict(keys[key].entries))
            branched._states[name] = keys
        branched.apply([run])
        return branched

    def drop_deleted(self, generations: Mapping[str, int]) -> None:
        """Remove deleted states; `generations` says how often each state was deleted."""
        for name in [name for name in self._states if is_deleted(name, generations)]:
            del self._states[name]

    def drop_expired(self, moment: Moment, rows: int) -> None:
        """Check the next `rows` rows of the states with a TTL, in turn, and remove those that have expired."""
        seen = 0
        for name, key, entry in itertools.islice(self._unchecked, rows):
            seen += 1
            keys, domain = self._states.get(name, {}), self._expires_by[name]
            held = keys.get(key)
            if held is None or domain is None or entry not in held.entries:
                continue  # it was removed since the turn began
            _, expiry_ms, *_ = held.entries[entry]
            if expiry_ms is not None and expiry_ms <= moment.now_ms(domain):
                del held.entries[entry]
                if not held.entries:
                    del keys[key]
        if seen < rows:
            self._unchecked = _mortal_rows(self._states, self._expires_by)

    def get_many(self, state: StateDescriptor, keys: KeyBatch) -> ValueRows:
        positions: list[int] = []
        rows: list[_Row] = []
        for position, entries in enumerate(self._entries_of(state, keys)):
            row = entries.get(b"")
            if row is not None:
                positions.append(position)
                rows.append(row)
        values, expiry = _to_columns(state, rows)
        return ValueRows(np.array(positions, np.int64), values, expiry)

    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryCounts:
        counts = [len(entries) for entries in self._entries_of(state, keys)]
        return EntryCounts(np.array(counts, np.int64), np.zeros(len(keys), np.int64))

    def entries_of(self, state: StateDescriptor, key_hash: int, key: bytes) -> KeyEntries:
        held = self._states.get(state.name, {}).get(key)
        return _EntriesInMemory(state, {} if held is None else held.entries)

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        positions: list[int] = []
        found: list[bytes] = []
        rows: list[_Row] = []
        for position, entries in enumerate(self._entries_of(state, keys)):
            for entry, row in sorted(entries.items()):
                positions.append(position)
                found.append(entry)
                rows.append(row)
        values, expiry = _to_columns(state, rows)
        return EntryRows(np.array(positions, np.int64), values, expiry, pa.chunked_array([found], pa.binary()))

    def due_timers(self, state: StateDescriptor, after_ms: int, until_ms: int) -> TimerRows:
        due = sorted(
            (held.key_hash, key, time_ms)
            for key, held in self._states.get(state.name, {}).items()
            for _, _, time_ms in held.entries.values()
            if after_ms < time_ms <= until_ms
        )
        hashes, keys, times = zip(*due, strict=True) if due else ((), (), ())
        batch = KeyBatch(np.array(hashes, np.uint64), pa.array(keys, pa.binary()))
        return TimerRows(batch, np.array(times, np.int64))

    def _entries_of(self, state: StateDescriptor, keys: KeyBatch) -> list[dict[bytes, _Row]]:
        held = self._states.get(state.name, {})
        return [held[key].entries if key in held else {} for key in keys.keys.to_pylist()]


class _EntriesInMemory(KeyEntries):
    def __init__(self, state: StateDescriptor, entries: dict[bytes, _Row]) -> None:
        self._state = state
        self._entries = entries
        self._in_order: tuple[list[bytes], dict[bytes, _Row]] | None = None

    def find(self, entry: bytes) -> FoundEntry | None:
        row = self._entries.get(entry)
        if row is None:
            return None
        values, expiry = _to_columns(self._state, [row])
        return FoundEntry(values, expiry[0].as_py())

    def pages(self, max_entries: int, max_bytes: int) -> Iterator[EntryRows]:
        # The references are copied now, as the table changes its dictionary.
        return self._pages_of(sorted(self._entries), dict(self._entries), max_entries, max_bytes)

    def between(self, wanted: EntryRange, max_entries: int, max_bytes: int) -> EntryPage:
        if self._in_order is None:
            # The references are copied now, as the table changes its dictionary.
            self._in_order = sorted(self._entries), dict(self._entries)
        names, entries = self._in_order
        low = bisect_left(names, wanted.first)
        high = bisect_left(names, wanted.end, low)
        count, most = _FIRST_ROWS, min(high - low, max_entries)
        while True:
            count = min(count, most)
            found = names[high - count : high] if wanted.from_end else names[low : low + count]
            values, expiry = _to_columns(self._state, [entries[name] for name in found])
            if count == most or values.nbytes * _GROWTH > max_bytes:
                break
            count *= _GROWTH
        rest = None
        if count < high - low:
            _, rest = wanted.cut(names[high - count] if wanted.from_end else names[low + count])
        rows = EntryRows(np.zeros(count, np.int64), values, expiry, pa.chunked_array([found], pa.binary()))
        return EntryPage(rows, rest)

    def _pages_of(
        self, names: list[bytes], entries: dict[bytes, _Row], max_entries: int, max_bytes: int
    ) -> Iterator[EntryRows]:
        pace = Pace(max_bytes, _FIRST_ROWS, max_entries)
        start = 0
        while start < len(names):
            rows = [entries[name] for name in names[start : start + pace.rows]]
            values, expiry = _to_columns(self._state, rows, max_bytes)
            first = 0
            for batch in values.to_batches():
                end = first + batch.num_rows
                page = pa.chunked_array([names[start + first : start + end]], pa.binary())
                positions = np.zeros(end - first, np.int64)
                yield EntryRows(positions, pa.Table.from_batches([batch]), expiry.slice(first, end - first), page)
                first = end
            start += len(rows)
            pace.learn(len(rows), values.nbytes)


def _apply_rows(keys: dict[bytes, _Key], rows: pa.RecordBatch, state: StateDescriptor) -> None:
    columns = [column.to_pylist() for column in rows.columns[: VALUE_COLUMN + len(state.value_schema)]]
    for key_hash, key, entry, operation, *row in zip(*columns, strict=True):
        if operation == Operation.CLEAR:
            keys.pop(key, None)
        elif operation == Operation.PUT:
            keys.setdefault(key, _Key(key_hash, {})).entries[entry] = (state, *row)
        elif key in keys:
            keys[key].entries.pop(entry, None)
            if not keys[key].entries:
                del keys[key]


def _mortal_rows(
    states: Mapping[str, Mapping[bytes, _Key]], expires_by: Mapping[str, TimeDomain | None]
) -> Iterator[tuple[str, bytes, bytes]]:
    """State, key and entry of the rows that can expire.

    The table changes meanwhile, so the keys of a state, and the rows of a key, are listed when it is their turn. The
    table itself is no argument: in a circle of references, it would outlive its last use.
    """
    for name in [name for name, domain in expires_by.items() if domain is not None]:
        for key in list(states.get(name, {})):
            held = states.get(name, {}).get(key)
            for entry in [] if held is None else list(held.entries):
                yield name, key, entry


def _to_columns(
    state: StateDescriptor, rows: list[_Row], max_bytes: int = BUDGET.slice_bytes
) -> tuple[pa.Table, pa.Array]:
    batches: list[pa.RecordBatch] = []
    for _, group in itertools.groupby(rows, key=lambda row: id(row[0])):
        alike = list(group)
        batches += in_parts(len(alike), partial(_to_values, state, alike), max_bytes)
    return pa.Table.from_batches(batches, state.value_schema), pa.array([row[1] for row in rows], pa.int64())


def _to_values(state: StateDescriptor, rows: list[_Row], start: int, end: int) -> pa.RecordBatch:
    """Values of some rows that were written with one description, as columns of another."""
    stored: StateDescriptor = rows[0][0]
    columns = zip(*(row[2:] for row in rows[start:end]), strict=True)
    arrays = [to_array(column, field.type) for column, field in zip(columns, stored.value_schema, strict=True)]
    if stored != state:
        arrays = project(arrays, stored, state)
    return pa.RecordBatch.from_arrays(arrays, schema=state.value_schema)
