"""A state table that counts the time of reading it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor
from statelog.stopwatch import Part, Stopwatch
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


@dataclass
class TimedTable(StateTable):
    """Counts the time of reading another table, which its owner closes."""

    table: StateTable
    stopwatch: Stopwatch

    def get_many(self, state: StateDescriptor, keys: KeyBatch) -> ValueRows:
        return self.stopwatch.call(Part.READ, self.table.get_many, state, keys)

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        return self.stopwatch.call(Part.READ, self.table.entries, state, keys)

    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryCounts:
        return self.stopwatch.call(Part.READ, self.table.count_entries, state, keys)

    def entries_of(self, state: StateDescriptor, key_hash: int, key: bytes) -> KeyEntries:
        entries = self.stopwatch.call(Part.READ, self.table.entries_of, state, key_hash, key)
        return _TimedEntries(entries, self.stopwatch)

    def due_timers(self, state: StateDescriptor, after_ms: int, until_ms: int) -> TimerRows:
        return self.stopwatch.call(Part.READ, self.table.due_timers, state, after_ms, until_ms)

    def mean_bytes(self, state: StateDescriptor) -> int:
        return self.table.mean_bytes(state)

    def branch(self, run: Run) -> StateTable:
        return TimedTable(self.table.branch(run), self.stopwatch)

    def apply(self, runs: Sequence[Run]) -> None:
        self.table.apply(runs)


@dataclass
class _TimedEntries(KeyEntries):
    entries: KeyEntries
    stopwatch: Stopwatch

    def find(self, entry: bytes) -> FoundEntry | None:
        return self.stopwatch.call(Part.READ, self.entries.find, entry)

    def pages(self, max_entries: int, max_bytes: int) -> Iterator[EntryRows]:
        return self._timed(self.entries.pages(max_entries, max_bytes))

    def _timed(self, pages: Iterator[EntryRows]) -> Iterator[EntryRows]:
        while (page := self.stopwatch.call(Part.READ, next, pages, None)) is not None:
            yield page

    def between(self, wanted: EntryRange, max_entries: int, max_bytes: int) -> EntryPage:
        return self.stopwatch.call(Part.READ, self.entries.between, wanted, max_entries, max_bytes)
