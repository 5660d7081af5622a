"""The numbered log of one operator: its contract, shared by the append form and the object form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from statelog.checkpoint.entry import Checkpoint, Claim, Entry

__all__ = ["Log"]


class Log(ABC):
    """What an operator's checkpoints consist of, extended by one writer at a time.

    The order of calls of a writer is :meth:`claim`, then :meth:`append` for every checkpoint, then
    :meth:`close`. A reader only calls :meth:`read`. What no entry of the log names does not exist.
    One thread at a time calls a log.
    """

    @property
    @abstractmethod
    def objects_per_entry(self) -> int:
        """Objects written for an entry: 0 where entries are appended to one file."""

    @abstractmethod
    def read(self) -> list[Entry]:
        """All valid entries in order, of all epochs; empty if there is no log yet.

        Entries that an older epoch wrote after a newer one claimed are left out. A torn tail (an
        incomplete last frame) of a file is left out: nothing was committed by it.

        Raises
        ------
        CorruptionError
            If a complete entry is damaged; names file and offset.
        """

    @abstractmethod
    def claim(self, make: Callable[[int], Claim]) -> list[Entry]:
        """Open the next epoch and return all valid entries before it.

        Parameters
        ----------
        make : callable
            Makes the claim of an epoch from its number; called again if another run takes the number.

        Raises
        ------
        CorruptionError
            As :meth:`read`.
        FencedError
            If a still newer run claimed the log meanwhile.
        StorageError
            If the store fails; the claim may exist or not, and claiming again is safe.
        """

    @abstractmethod
    def append(self, entry: Checkpoint, payload: list[bytes]) -> Checkpoint:
        """Make an entry durable and return it with the absolute place of its segments.

        Raises
        ------
        FencedError
            If a newer epoch has claimed the log; the entry has no effect or was taken over by the newer
            epoch, and the caller must stop.
        StorageError
            If the store fails; nothing is durable yet for the caller, and appending the same entry again
            is safe.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the writer's files. If this claim is all that the log holds, remove it."""
