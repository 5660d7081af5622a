"""The entries of one key in several runs, read one by one or in pages."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from statelog.runs.byte_slices import Budget, row_ends
from statelog.runs.format import EXPIRY_COLUMN, VALUE_COLUMN, Operation
from statelog.runs.key_rows import BinaryValues, KeyRows
from statelog.runs.reader import RunSection
from statelog.runs.schema import StateDescriptor
from statelog.tables.found_rows import Gatherer, as_changes
from statelog.tables.table import EntryRows, FoundEntry, KeyBatch, KeyEntries

_PUT: Final = int(Operation.PUT)


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
        # A page is finished once it is half full, and the next parts of all sources fill at most the other half.
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
                # Up to the first end of these parts no later part has an entry.
                end = min([head.last for head in heads])
                for head in heads:
                    rows = head.take(end)
                    if rows.num_rows:
                        found.add(rows, np.zeros(rows.num_rows, np.int64), head.age)
                        rows_taken += rows.num_rows
                        bytes_taken += rows.nbytes
                heads = [head for head in heads if not head.is_taken or head.advance()]
            page = found.entries()
            if len(page.positions):
                yield page

    def _older_parts(self, older: KeyEntries, max_entries: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
        keys = KeyBatch(np.array([self._key_hash], np.uint64), pa.array([self._key], pa.binary()))
        for page in older.pages(max_entries, max_bytes):
            yield from as_changes(self._state, keys, page, page.entries)


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
        """Go on to the next part; False if there is none."""
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
        """The rows up to an entry, itself included."""
        start = self._taken
        self._taken = bisect_right(self._entries, end, start)
        return self._rows.slice(start, self._taken - start)
