"""The contract of an operator's log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from statelog.log.entry import Checkpoint, Claim, Entry


class Log(ABC):
    """An operator's checkpoints, as entries in numbered files that one writer at a time extends.

    The order of calls of a writer is :meth:`claim`, then :meth:`append` for every checkpoint, then
    :meth:`close`. A reader only calls :meth:`read`. An object that no entry names does not exist.
    One thread at a time calls a log.
    """

    @property
    @abstractmethod
    def number(self) -> int:
        """Number of the writer's newest file."""

    @property
    @abstractmethod
    def file_name(self) -> str:
        """Object name of the writer's newest file."""

    @property
    @abstractmethod
    def head(self) -> bytes:
        """The first bytes of the writer's newest file, which tell it from any other."""

    @abstractmethod
    def name_of(self, number: int) -> str:
        """Object name of a file of the log."""

    @property
    @abstractmethod
    def files_made(self) -> int:
        """Number of files that the writer has made."""

    @abstractmethod
    def read(self) -> list[Entry]:
        """All valid entries of all epochs, in order, from the newest checkpoint's `log_start` on; empty without a log.

        Entries that an older epoch wrote after a newer one claimed are left out. So is a torn tail (an
        incomplete last frame) of a file: it has committed nothing.

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
            Makes the claim of an epoch from its number; called again if another start takes the number.

        Raises
        ------
        CorruptionError
            As :meth:`read`.
        FencedError
            If a still newer start claimed the log meanwhile.
        StorageError
            If the store fails; the claim may exist or not, and claiming again is safe.
        """

    @abstractmethod
    def append(self, entry: Checkpoint, payload: list[bytes]) -> Checkpoint:
        """Make an entry durable, and return it with absolute offsets of its segments.

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
        """Objects of the files before `start` that no older writer needs to find any more, oldest first."""

    @abstractmethod
    def forget(self, names: Iterable[str]) -> None:
        """Note that files are removed: :meth:`removable` does not return them again."""

    @abstractmethod
    def close(self) -> None:
        """Release the writer's files. If this claim is all that the log holds, remove it."""


def base_name(number: int) -> str:
    """Name of a log file within the log's folder."""
    return f"{number:020}.log"
