"""The entries of one key in several runs, read one by one or in pages, and the rows that searches find."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.runs.byte_slices import Budget, Positions, gather_rows, joined_column, row_ends
from statelog.runs.key_columns import differs_from_previous
from statelog.runs.key_rows import BinaryValues, KeyRows
from statelog.runs.reader import RunSection
from statelog.runs.schema import (
    ENTRY_COLUMN,
    EXPIRY_COLUMN,
    VALUE_COLUMN,
    Operation,
    StateDescriptor,
    StateKind,
    change_schema,
)
from statelog.tables.table import EntryPage, EntryRange, EntryRows, FoundEntry, KeyBatch, KeyEntries, ValueRows

_PUT: Final = int(Operation.PUT)
_ENTRY, _OPERATION = 0, 1
_EXPIRY, _VALUE = EXPIRY_COLUMN - ENTRY_COLUMN, VALUE_COLUMN - ENTRY_COLUMN
"""The columns of rows without hashes and keys."""


class EntriesInRuns(KeyEntries):
    """The entries of a key in sections of its state, newest first; `older` has the entries before these runs."""

    def __init__(
        self,
        state: StateDescriptor,
        sections: Sequence[RunSection],
        key_hash: int,
        key: bytes,
        budget: Budget,
        older: KeyEntries | None = None,
    ) -> None:
        self._state = state
        self._key_hash = key_hash
        self._key = key
        self._budget = budget
        self._older = older
        self._opened: list[KeyRows] = []
        self._unopened = self._open(sections)
        self._value_columns = range(VALUE_COLUMN, VALUE_COLUMN + len(state.value_schema))

    def _open(self, sections: Sequence[RunSection]) -> Iterator[KeyRows]:
        """The key's rows in each run that still counts, newest first; they are opened when they are asked for."""
        for number, section in enumerate(sections, 1):
            rows = KeyRows(section, self._key_hash, self._key)
            if rows.may_exist:
                self._opened.append(rows)
                yield rows
                has_older = number < len(sections) or self._older is not None
                if has_older and rows.is_cleared:
                    self._older = None
                    return

    def find(self, entry: bytes) -> FoundEntry | None:
        for rows in itertools.chain(self._opened, self._unopened):
            found = rows.find(entry)
            if found is not None:
                block, row = found
                if block.operations[row] != _PUT:
                    return None
                changes = block.take(np.array([row]))
                return FoundEntry(changes.select(self._value_columns), changes.column(EXPIRY_COLUMN)[0].as_py())
        return None if self._older is None else self._older.find(entry)

    def pages(self, max_entries: int, max_bytes: int) -> Iterator[EntryRows]:
        sources = [*self._opened, *self._unopened]
        # A page is complete once it is half full, and the next parts of all sources fill at most the other half.
        count = 2 * (len(sources) + (self._older is not None))
        entries, size_bytes = max(1, max_entries // max(1, count)), max_bytes // max(1, count)
        parts = [_parts_of(rows, entries, size_bytes) for rows in sources]
        if self._older is not None:
            parts.append(self._older_parts(self._older, entries, size_bytes))
        heads = [head for head in map(_Head, range(len(parts)), parts) if head.advance()]
        while heads:
            found = Gatherer(self._state, self._budget)
            rows_taken = bytes_taken = 0
            while heads and rows_taken <= max_entries // 2 and bytes_taken <= max_bytes // 2:
                # Up to the first end of these parts, no later part has an entry.
                end = min([head.last for head in heads])
                for head in heads:
                    rows = head.take(end)
                    if rows.num_rows:
                        found.add(_without_keys(rows), np.zeros(rows.num_rows, np.int64), head.age)
                        rows_taken += rows.num_rows
                        bytes_taken += rows.nbytes
                heads = [head for head in heads if not head.is_taken or head.advance()]
            page = found.entries()
            if len(page.positions):
                yield page

    def between(self, wanted: EntryRange, max_entries: int, max_bytes: int) -> EntryPage:
        sources = [*self._opened, *self._unopened]
        max_bytes //= max(1, len(sources) + (self._older is not None))
        parts = [_part_between(rows, wanted, max_entries, max_bytes) for rows in sources]
        if self._older is not None:
            parts.append(self._older_between(self._older, wanted, max_entries, max_bytes))
        unread = [part.unread for part in parts if part.unread is not None]
        page, rest = wanted, None
        if unread:  # on this side of all of these, no part lacks rows
            page, rest = wanted.cut(max(unread) if wanted.from_end else min(unread))
        found = Gatherer(self._state, self._budget)
        for age, part in enumerate(parts):
            for rows in part.within(page):
                found.add(_without_keys(rows), np.zeros(rows.num_rows, np.int64), age)
        return EntryPage(found.entries(), rest)

    def _older_between(self, older: KeyEntries, wanted: EntryRange, max_entries: int, max_bytes: int) -> _Part:
        page = older.between(wanted, max_entries, max_bytes)
        unread = None if page.rest is None else page.rest.end if wanted.from_end else page.rest.first
        keys = KeyBatch(np.array([self._key_hash], np.uint64), pa.array([self._key], pa.binary()))
        return _Part(list(as_changes(self._state, keys, page.rows, page.rows.entries)), unread)

    def _older_parts(self, older: KeyEntries, max_entries: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
        keys = KeyBatch(np.array([self._key_hash], np.uint64), pa.array([self._key], pa.binary()))
        for page in older.pages(max_entries, max_bytes):
            yield from as_changes(self._state, keys, page, page.entries)


@dataclass(frozen=True)
class _Part:
    """The rows of a range in one run, as far as they were read."""

    rows: list[pa.RecordBatch]
    unread: bytes | None
    """The entry key before which the range was read, or from which on if it is read from its end; None if it was read
    completely."""

    def within(self, page: EntryRange) -> Iterator[pa.RecordBatch]:
        """The rows in a part of the range."""
        for rows in self.rows:
            entries = BinaryValues(rows.column(2))
            low = bisect_left(entries, page.first)
            high = bisect_left(entries, page.end, low)
            if low < high:
                yield rows.slice(low, high - low)


def _part_between(rows: KeyRows, wanted: EntryRange, max_entries: int, max_bytes: int) -> _Part:
    """Read rows of one run from one end of a range, at least one if there is any."""
    found: list[pa.RecordBatch] = []
    from_end = wanted.from_end
    for stretch in rows.between(wanted.first, wanted.end, from_end=from_end):
        low, high = stretch.low, stretch.high
        count = min(high - low, max(max_entries, 1))
        part = stretch.block.take(np.arange(high - count, high) if from_end else np.arange(low, low + count))
        fitting = _fitting(part, max_entries, max_bytes, from_end=from_end)
        if not found:
            fitting = max(1, fitting)
        if fitting:
            part = part.slice(count - fitting if from_end else 0, fitting)
            found.append(part)
            max_entries -= fitting
            max_bytes -= part.nbytes
        if fitting < high - low:
            if from_end:
                return _Part(found, stretch.entries[high - fitting - 1] + b"\0")
            return _Part(found, stretch.entries[low + fitting])
    return _Part(found, None)


def _fitting(rows: pa.RecordBatch, max_entries: int, max_bytes: int, *, from_end: bool) -> int:
    """How many rows fit, counted from one end."""
    if rows.num_rows <= max_entries and rows.nbytes <= max_bytes:
        return int(rows.num_rows)
    ends = row_ends(rows)
    sizes = (ends[-1] - ends[:-1])[::-1] if from_end else ends[1:]
    return max(0, min(max_entries, int(np.searchsorted(sizes, max_bytes, "right"))))


def _parts_of(rows: KeyRows, max_entries: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """The rows of a key in order, in parts with at least one row, and more only up to both limits."""
    for block, low, high in rows.stretches():
        while low < high:
            ends = row_ends(block.batch.slice(low, min(high - low, max_entries)))
            fitting = int(np.searchsorted(ends, max_bytes, "right")) - 1
            end = low + max(1, fitting)
            yield block.take(np.arange(low, end))
            low = end


class _Head:
    """The next rows of one source: what is left of a part, with its age (0: the newest source)."""

    def __init__(self, age: int, parts: Iterator[pa.RecordBatch]) -> None:
        self.age = age
        self._parts = parts

    def advance(self) -> bool:
        """Move to the next part; False if there is none."""
        rows = next(self._parts, None)
        if rows is None:
            return False
        self._rows, self._taken = rows, 0
        self._entries = BinaryValues(rows.column(2))
        self.last = self._entries[len(self._entries) - 1]
        return True

    @property
    def is_taken(self) -> bool:
        """Whether no row of the part is left."""
        return self._taken == len(self._entries)

    def take(self, end: bytes) -> pa.RecordBatch:
        """The rows up to and including an entry."""
        start = self._taken
        self._taken = bisect_right(self._entries, end, start)
        return self._rows.slice(start, self._taken - start)


_PART_ROWS: Final = 16_384


class Gatherer:
    """Collects rows of several blocks, without their hashes and keys, and brings them into the order of the keys."""

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
        kept = np.concatenate([batch.column(_OPERATION).to_numpy() for batch in batches]) == Operation.PUT
        if len(batches) > 1:
            order, is_newest = self._newest_first(positions)
            kept = order[is_newest & kept[order]]
            batches, positions = list(gather_rows(batches, kept, self._max_bytes)), positions[kept]
        elif not kept.all():
            batches, positions = [batches[0].filter(pa.array(kept))], positions[kept]
        return _found(self._state, positions, batches)

    def _newest_first(self, positions: Positions) -> tuple[Positions, npt.NDArray[np.bool_]]:
        """The order of the rows by key, entry and age, and which rows in that order are the newest of their entry."""
        order, is_newest = np.argsort(positions, kind="stable"), np.ones(len(positions), bool)
        # The only row of a key is in its place already, and sorting by entries is what takes the time.
        has_same = np.zeros(len(positions) + 1, bool)
        has_same[1:-1] = np.diff(positions[order]) == 0
        places = np.flatnonzero(has_same[1:] | has_same[:-1])
        if len(places):
            rows = order[places]
            entries = joined_column([batch.column(_ENTRY) for batch in self._rows]).take(pa.array(rows))
            columns = {"position": positions[rows], "entry": entries, "age": np.concatenate(self._ages)[rows]}
            indices = pc.sort_indices(pa.table(columns), [(name, "ascending") for name in columns])
            order[places] = rows = rows[indices.to_numpy().astype(np.int64)]
            is_newest[places] = differs_from_previous(entries.take(indices))
            is_newest[places[1:]] |= np.diff(positions[rows]) != 0
        return order, is_newest


def _without_keys(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.select(range(ENTRY_COLUMN, rows.num_columns))


def _found(state: StateDescriptor, positions: Positions, batches: Sequence[pa.RecordBatch]) -> EntryRows:
    """Rows of runs, without their hashes and keys, as the answer of a table."""
    schema, end = state.value_schema, _VALUE + len(state.value_schema)
    values = [pa.RecordBatch.from_arrays(rows.columns[_VALUE:end], schema=schema) for rows in batches]
    expiry = joined_column([rows.column(_EXPIRY) for rows in batches]) if batches else pa.array([], pa.int64())
    entries = pa.chunked_array([rows.column(_ENTRY) for rows in batches], pa.binary())
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
