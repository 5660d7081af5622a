"""The state table contract: what a subtask reads its state from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.runs.key_groups import Hashes
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor


@dataclass(frozen=True)
class KeyBatch:
    """Distinct keys, sorted by hash and then by their bytes.

    Parameters
    ----------
    hashes : numpy.ndarray of uint64, shape (n,)
        Key hashes. Different keys may share one.
    keys : pyarrow.Array of binary, length n
        Canonical bytes of the keys.
    """

    hashes: Hashes
    keys: pa.Array

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
    """Values found for a batch of keys.

    Parameters
    ----------
    positions : numpy.ndarray of int64, shape (m,)
        Which keys of the batch have a value, ascending.
    values : pyarrow.Table, m rows
        Their values, a column per field, in batches of bounded size.
    expiry : pyarrow.Array of int64, length m
        From when on they no longer count, in milliseconds of the state's time; null is never. The table
        returns them all the same.
    """

    positions: npt.NDArray[np.int64]
    values: pa.Table
    expiry: pa.Array


@dataclass(frozen=True)
class TimerRows:
    """Timers, by key and then by time.

    Parameters
    ----------
    keys : KeyBatch
        Key of each timer, repeated for each of its timers; as large binaries if there are very many.
    times_ms : numpy.ndarray of int64
        Their times.
    """

    keys: KeyBatch
    times_ms: npt.NDArray[np.int64]


@dataclass(frozen=True)
class EntryRows:
    """Entries found for a batch of keys.

    Parameters
    ----------
    positions : numpy.ndarray of int64, shape (m,)
        The key of the batch that each entry belongs to, ascending.
    entries : pyarrow.ChunkedArray of binary, length m
        Entry keys, ascending within a key.
    values : pyarrow.Table, m rows
        The entries' values, a column per field, in batches of bounded size.
    expiry : pyarrow.Array of int64, length m
        As in :class:`ValueRows`.
    """

    positions: npt.NDArray[np.int64]
    entries: pa.ChunkedArray
    values: pa.Table
    expiry: pa.Array


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
    def get_entry(self, state: StateDescriptor, key: KeyBatch, entry: bytes) -> ValueRows:
        """One entry of a map state, found without reading the key's other entries.

        Parameters
        ----------
        state : StateDescriptor
            A map state.
        key : KeyBatch
            One key.
        entry : bytes
            Canonical bytes of the map key.
        """

    @abstractmethod
    def count_entries(self, state: StateDescriptor, keys: KeyBatch) -> npt.NDArray[np.int64]:
        """An upper bound of the number of entries of each key, found without reading them."""

    @abstractmethod
    def due_timers(self, state: StateDescriptor, after_ms: int, until_ms: int) -> TimerRows:
        """Timers of all keys that are due after one time and up to another.

        Parameters
        ----------
        state : StateDescriptor
            The operator's timers.
        after_ms : int
            The caller knows that no timer up to this time exists.
        until_ms : int
            The last time that is asked for.
        """

    def mean_bytes(self, state: StateDescriptor) -> int:
        """About how many bytes a row of a state takes, found without reading rows; 0 if that is not known."""
        return 0

    @abstractmethod
    def branch(self, run: Run) -> StateTable:
        """A table with the changes of one more run; this one stays as it is."""

    @abstractmethod
    def apply(self, runs: Sequence[Run]) -> None:
        """Add the changes of later checkpoints, oldest first."""

    def close(self) -> None:  # noqa: B027 - most tables hold nothing
        """Let go of files and locks that it holds; it is not used afterwards."""
