"""The contract of state tables, from which a subtask reads its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.runs.key_groups import Hashes
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor


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
class EntryRange:
    """Entry keys from `first` up to, not including, `end`, to be read page by page."""

    first: bytes
    end: bytes
    most: int
    """Rows of a page; a page whose rows are large has fewer."""
    from_end: bool = False
    """Whether the last entries are read first."""

    def cut(self, entry: bytes) -> tuple[EntryRange, EntryRange]:
        """The two parts before and from an entry key on; first the one that is read first."""
        before, behind = replace(self, end=entry), replace(self, first=entry)
        return (behind, before) if self.from_end else (before, behind)


@dataclass(frozen=True)
class EntryPage:
    """A part of a range of one key's entries, from one of its ends."""

    rows: EntryRows
    """In order, whichever end they come from. There may be none although there are more pages."""
    rest: EntryRange | None
    """The entries of the other pages; None if there are no more."""


class StateTable(ABC):
    """The state of one subtask as of one checkpoint, read in bulk.

    A table is changed only by applying the runs of later checkpoints to it. Reading never changes it.
    """

    @abstractmethod
    def get_many(self, state: StateDescriptor, keys: KeyBatch, entry: bytes = b"") -> ValueRows:
        """Values of a value state for a batch of keys.

        With `entry`, the canonical bytes of a map key: this entry of a map state for a single key, found without
        reading the key's other entries.
        """

    @abstractmethod
    def entries(self, state: StateDescriptor, keys: KeyBatch) -> EntryRows:
        """All entries of a list or map state for a batch of keys."""

    @abstractmethod
    def entries_between(self, state: StateDescriptor, key: KeyBatch, wanted: EntryRange) -> EntryPage:
        """A page of a single key's entries in a range, found without reading those outside of it."""

    @abstractmethod
    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> npt.NDArray[np.int64]:
        """An upper bound of the number of entries of each key, found without reading them."""

    @abstractmethod
    def due_timers(self, state: StateDescriptor, after_ms: int, until_ms: int) -> TimerRows:
        """Timers of all keys that are due up to `until_ms`; the caller knows that there are none up to `after_ms`."""

    def mean_bytes(self, state: StateDescriptor) -> int:
        """About how many bytes a row of a state takes, found without reading rows; 0 if unknown."""
        return 0

    @abstractmethod
    def branch(self, run: Run) -> StateTable:
        """A table with the changes of one more run; this one stays as it is."""

    @abstractmethod
    def apply(self, runs: Sequence[Run]) -> None:
        """Add the changes of later checkpoints, oldest first."""

    def close(self) -> None:  # noqa: B027 - most tables hold nothing
        """Release files and locks; the table is not used afterwards."""
