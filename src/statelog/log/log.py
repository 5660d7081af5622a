"""The log of one operator: its contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from statelog.log.entry import Checkpoint, Claim, Entry


class Log(ABC):
    """What an operator's checkpoints consist of, in numbered files, extended by one writer at a time.

    The order of calls of a writer is :meth:`claim`, then :meth:`append` for every checkpoint, then
    :meth:`close`. A reader only calls :meth:`read`. What no entry of the log names does not exist.
    One thread at a time calls a log.
    """

    @property
    @abstractmethod
    def number(self) -> int:
        """Number of the writer's newest file."""

    @property
    @abstractmethod
    def file_name(self) -> str:
        """The object that is the writer's newest file."""

    @property
    @abstractmethod
    def head(self) -> bytes:
        """How the writer's newest file begins, which tells it from any other."""

    @abstractmethod
    def name_of(self, number: int) -> str:
        """The object that is a file of the log."""

    @property
    @abstractmethod
    def files_made(self) -> int:
        """How many files the writer has made."""

    @abstractmethod
    def read(self) -> list[Entry]:
        """All valid entries in order, of all epochs, from the newest one's `log_start` on; empty if there is no log.

        Entries that an older epoch wrote after a newer one claimed are left out. A torn tail (an
        incomplete last frame) of a file is left out: nothing was committed by it.

        Raises
        ------
        CorruptionError
            If a complete entry is damaged, or a file is missing; names file and offset.
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
    def removable(self, start: int) -> list[str]:
        """The objects of files before a number that older writers need not find any more, oldest first."""

    @abstractmethod
    def forget(self, names: Iterable[str]) -> None:
        """Files are removed: do not return them from :meth:`removable` again."""

    @abstractmethod
    def close(self) -> None:
        """Release the writer's files. If this claim is all that the log holds, remove it."""


def base_name(number: int) -> str:
    """Name of a file of the log, in its folder."""
    return f"{number:020}.log"
