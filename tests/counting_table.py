"""A table of runs that counts what is read."""

from __future__ import annotations

from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor
from statelog.tables.runs import RunsTable
from statelog.tables.table import EntryPage, EntryRange, EntryRows, KeyBatch, KeyEntries


class Counting(RunsTable):
    """Counts the entries that are read, also through a branch."""

    def __init__(self, runs: list[Run], counts: dict[str, int]) -> None:
        super().__init__(runs)
        self.own_runs, self.counts = runs, counts

    def branch(self, run: Run) -> Counting:
        return Counting([*self.own_runs, run], self.counts)

    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        found = super().entries(state, keys)
        self.counts[state.name] = self.counts.get(state.name, 0) + len(found.positions)
        return found

    def entries_of(self, state: StateDescriptor, key_hash: int, key: bytes) -> KeyEntries:
        entries = super().entries_of(state, key_hash, key)
        read = entries.between

        def between(wanted: EntryRange, max_entries: int, max_bytes: int) -> EntryPage:
            page = read(wanted, max_entries, max_bytes)
            self.counts[state.name] = self.counts.get(state.name, 0) + len(page.rows.positions)
            return page

        entries.between = between  # type: ignore[method-assign]  # it counts
        return entries
