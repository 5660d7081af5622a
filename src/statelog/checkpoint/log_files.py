"""What both forms of the log share: numbered names, reading of frames, the error of a writer that lost."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from statelog.checkpoint.entry import FRAME_HEADER_BYTES, Entry, decode_header, decode_index
from statelog.errors import CorruptionError, ErrorKind, FencedError, StorageError
from statelog.storage.store import ObjectInfo, Store

__all__ = ["Frame", "FrameReader", "fenced_error", "is_missing", "numbered_objects"]

_READ_AHEAD_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """An entry and the offset at which its frame ends."""

    entry: Entry
    end: int


class FrameReader:
    """Reads the entries of one object by few range reads, without their payload.

    Parameters
    ----------
    store : Store
        Where the object is.
    name : str
        The object.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._start = 0
        self._buffer = b""

    def frame_at(self, offset: int, size_bytes: int) -> Frame | None:
        """Read the frame at `offset` of the object's first `size_bytes` bytes.

        Returns
        -------
        Frame or None
            None if no complete frame stands there: it is cut short, or only zero bytes follow, which
            is what a crash of the machine leaves of a write.

        Raises
        ------
        CorruptionError
            If the frame's header or index is damaged.
        """
        if offset + FRAME_HEADER_BYTES > size_bytes:
            return None
        head = self._bytes(offset, FRAME_HEADER_BYTES)
        if not any(head) and self._is_zero(offset, size_bytes):
            return None
        header = decode_header(head, name=self._name, offset=offset)
        end = offset + header.frame_bytes
        if end > size_bytes:
            return None
        index = self._bytes(offset + FRAME_HEADER_BYTES, header.index_bytes)
        return Frame(decode_index(header, index, name=self._name, offset=offset), end)

    def _bytes(self, offset: int, length: int) -> bytes:
        if not self._start <= offset <= offset + length <= self._start + len(self._buffer):
            self._start = offset
            self._buffer = self._store.read(self._name, offset=offset, length=max(length, _READ_AHEAD_BYTES))
            if len(self._buffer) < length:
                raise StorageError(f"{self._name} became shorter while it was read.", hint="Try again.")
        return self._buffer[offset - self._start : offset - self._start + length]

    def _is_zero(self, offset: int, size_bytes: int) -> bool:
        for start in range(offset, size_bytes, _READ_AHEAD_BYTES):
            length = min(_READ_AHEAD_BYTES, size_bytes - start)
            if any(self._store.read(self._name, offset=start, length=length)):
                return False
        return True


def numbered_objects(store: Store, prefix: str, name: re.Pattern[str]) -> dict[int, ObjectInfo]:
    """List the objects of a log by number, in order.

    Parameters
    ----------
    store : Store
        Where the log is.
    prefix : str
        The log's folder.
    name : re.Pattern
        Matches an object's name below the folder; its first group is the number.

    Raises
    ------
    CorruptionError
        If a number between others is missing: objects are made in order and removed oldest first.
    """
    # A directory that is changed while it is listed may show the later of two new names alone.
    for _ in range(2):
        found = {
            int(match[1]): info
            for info in store.list(f"{prefix}/")
            if (match := name.fullmatch(info.name[len(prefix) + 1 :]))
        }
        if not found or len(found) == max(found) - min(found) + 1:
            return dict(sorted(found.items()))
    missing = min(set(range(min(found), max(found))) - set(found))
    raise CorruptionError(
        f"{store!r}: the log {prefix} has objects {min(found)} to {max(found)}, but not {missing}.",
        hint="Restore the missing object from a copy; without it the log would lose checkpoints.",
    )


def is_missing(error: StorageError) -> bool:
    """Whether a store failed because the object does not exist."""
    return error.kind == ErrorKind.OBJECT_MISSING


def fenced_error(store: Store, prefix: str, epoch: int, reason: str) -> FencedError:
    """Make the error of a writer that does not own the log (any more)."""
    return FencedError(
        f"{store!r}: epoch {epoch} does not own the log {prefix}: {reason}.",
        hint="Stop this driver: only one run of a query can write to a location, and the newest claim wins.",
    )
