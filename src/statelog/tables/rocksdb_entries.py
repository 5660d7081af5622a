"""The entries of one key in a RocksDB table, read one by one or in pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from statelog.runs.schema import StateDescriptor
from statelog.tables.table import EntryPage, EntryRange, EntryRows, FoundEntry, KeyEntries

_Row = tuple[bytes, bytes]


class RocksRows(Protocol):
    """The rows of a database: row keys and encoded values."""

    def value_at(self, key: bytes) -> bytes | None:
        """The value of a row key; None if there is none."""

    def scan(self, prefix: bytes, start: bytes) -> Iterator[_Row]:
        """Row keys that begin with a prefix, from `start` on, with their values."""

    def scan_between(self, prefix: bytes, wanted: EntryRange) -> Iterator[_Row]:
        """Entries in a range with their values, from the end that is read first."""

    def entry_rows(self, state: StateDescriptor, rows: Sequence[_Row]) -> EntryRows:
        """Entries and their values as the answer of a table."""


class EntriesInRocks(KeyEntries):
    """The entries of a key: the rows whose row keys begin with a prefix; None has none."""

    def __init__(self, table: RocksRows, state: StateDescriptor, prefix: bytes | None) -> None:
        self._table = table
        self._state = state
        self._prefix = prefix

    def find(self, entry: bytes) -> FoundEntry | None:
        value = None if self._prefix is None else self._table.value_at(self._prefix + entry)
        if value is None:
            return None
        rows = self._table.entry_rows(self._state, [(entry, value)])
        return FoundEntry(rows.values, rows.expiry[0].as_py())

    def pages(self, max_entries: int, max_bytes: int) -> Iterator[EntryRows]:
        prefix = start = self._prefix
        while prefix is not None and start is not None:
            # No iterator of RocksDB stays open between two pages: the processor may never ask for the next.
            rows, start = self._read(prefix, start, max_entries, max_bytes)
            if rows:
                yield self._table.entry_rows(self._state, rows)

    def between(self, wanted: EntryRange, max_entries: int, max_bytes: int) -> EntryPage:
        found: list[_Row] = []
        rest = None
        for entry, value in () if self._prefix is None else self._table.scan_between(self._prefix, wanted):
            max_bytes -= len(entry) + len(value)
            if found and (len(found) >= max_entries or max_bytes < 0):
                _, rest = wanted.cut(found[-1][0] if wanted.from_end else entry)
                break
            found.append((entry, value))
        if wanted.from_end:
            found.reverse()
        return EntryPage(self._table.entry_rows(self._state, found), rest)

    def _read(self, prefix: bytes, start: bytes, max_entries: int, max_bytes: int) -> tuple[list[_Row], bytes | None]:
        """The entries of a page, with their values, and the row key of the next page."""
        rows: list[_Row] = []
        read_bytes = 0
        for key, value in self._table.scan(prefix, start):
            entry = key[len(prefix) :]
            read_bytes += len(entry) + len(value)
            if rows and (len(rows) == max_entries or read_bytes > max_bytes):
                return rows, key
            rows.append((entry, value))
        return rows, None
