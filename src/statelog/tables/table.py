"""The contract of state tables, from which a subtask reads its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.runs.key_groups import Hashes
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor
from statelog.stopwatch import Part, Stopwatch


@dataclass(frozen=True)
class KeyBatch:
    """Distinct keys, sorted by hash and then by their bytes."""

    hashes: Hashes
    """Key hashes (uint64), of shape (n,). Different keys may share one."""
    keys: pa.Array
    """Canonical bytes of the keys (binary), of length n."""

    def __len__(self) -> int:
        return len(self.hashes)

    def slice(self, start: int, end: int) -> KeyBatch:
        """The keys from `start` up to, not including, `end`."""
        return KeyBatch(self.hashes[start:end], self.keys.slice(start, end - start))

    def take(self, positions: npt.NDArray[np.int64]) -> KeyBatch:
        """The keys at ascending positions."""
        return KeyBatch(self.hashes[positions], self.keys.take(pa.array(positions)))


@dataclass(frozen=True)
class ValueRows:
    """Values found for a batch of keys: m rows."""

    positions: npt.NDArray[np.int64]
    """Position in the batch of each value's key, ascending, of shape (m,)."""
    values: pa.Table
    """Their values, a column per field, in batches of bounded size."""
    expiry: pa.Array
    """When each value expires (int64), milliseconds of the state's time; null is never. The table returns expired
    values too.
    """


@dataclass(frozen=True)
class TimerRows:
    """Timers, by key and then by time."""

    keys: KeyBatch
    """The key of each timer, repeated for each of its timers; as large binaries if there are very many."""
    times_ms: npt.NDArray[np.int64]


@dataclass(frozen=True)
class EntryRows(ValueRows):
    """Entries found for a batch of keys; each has a row, with the position of its key."""

    entries: pa.ChunkedArray
    """Entry keys (binary), ascending within a key."""


@dataclass(frozen=True)
class EntryCounts:
    """Upper bounds of the number and size of the entries of each key in a batch."""

    entries: npt.NDArray[np.int64]
    """Number of entries, of shape (n,)."""
    size_bytes: npt.NDArray[np.int64]
    """Their size as columns, of shape (n,); 0 if the table does not know it."""

    def slice(self, start: int, end: int) -> EntryCounts:
        """The bounds for the keys from `start` up to, not including, `end`."""
        return EntryCounts(self.entries[start:end], self.size_bytes[start:end])


@dataclass(frozen=True)
class FoundEntry:
    """One entry of a key."""

    values: pa.RecordBatch | pa.Table
    """A row with a column per field."""
    expiry_ms: int | None
    """As in :class:`ValueRows`."""


@dataclass(frozen=True)
class EntryRange:
    """Entry keys from `first` up to, not including, `end`, to be read from one of these ends."""

    first: bytes
    end: bytes
    from_end: bool = False
    """Whether the last keys are read first."""

    def cut(self, entry: bytes) -> tuple[EntryRange, EntryRange]:
        """The entry keys before a given one, and the others; the part that is read first comes first."""
        before, others = replace(self, end=entry), replace(self, first=entry)
        return (others, before) if self.from_end else (before, others)


@dataclass(frozen=True)
class EntryPage:
    """The entries of a range, up to some number and size."""

    rows: EntryRows
    """In order, from whichever end they were read. There may be none even if some are left."""
    rest: EntryRange | None
    """Where the others are; None if there are none."""


class KeyEntries(ABC):
    """The entries of one key in a list or map state, however many there are."""

    @abstractmethod
    def find(self, entry: bytes) -> FoundEntry | None:
        """The entry with an entry key, found without reading others; None if there is none."""

    @abstractmethod
    def pages(self, max_entries: int, max_bytes: int) -> Iterator[EntryRows]:
        """All entries in order, in pages with at least one entry, and more only up to both limits.

        Each page is read when it is asked for, and shows the state as of the call; ProcessorError if reading needs an
        open table and it is closed by then. All positions are 0.
        """

    @abstractmethod
    def between(self, wanted: EntryRange, max_entries: int, max_bytes: int) -> EntryPage:
        """A page of the entries in a range, found without reading those outside of it.

        It has about as many entries and bytes as the limits say, but at least one entry if there is any, unless removed
        entries fill the page. All positions are 0.
        """


class StateTable(ABC):
    """The state of one subtask as of one checkpoint, read in bulk.

    A table is changed only by applying the runs of later checkpoints to it. Reading never changes it.
    """

    @abstractmethod
    def get_many(self, state: StateDescriptor, keys: KeyBatch) -> ValueRows:
        """Values of a value state for a batch of keys."""

    @abstractmethod
    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        """All entries of a list or map state for a batch of keys."""

    @abstractmethod
    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryCounts:
        """How many entries each key may have, and how large they may be, found without reading them."""

    @abstractmethod
    def entries_of(self, state: StateDescriptor, key_hash: int, key: bytes) -> KeyEntries:
        """The entries of one key, to be read one by one or in pages."""

    @abstractmethod
    def due_timers(self, state: StateDescriptor, after_ms: int, until_ms: int) -> TimerRows:
        """Timers of all keys that are due by `until_ms`; the caller knows that there are none up to `after_ms`."""

    def mean_bytes(self, state: StateDescriptor) -> int:
        """The approximate bytes of a row of a state, found without reading rows; 0 if unknown."""
        return 0

    @abstractmethod
    def branch(self, run: Run) -> StateTable:
        """A table with the changes of one more run; this one stays as it is."""

    @abstractmethod
    def apply(self, runs: Sequence[Run]) -> None:
        """Add the changes of later checkpoints, oldest first."""

    def close(self) -> None:  # noqa: B027 - most tables hold nothing
        """Release files and locks; the table is not used afterwards."""


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
