"""Reads the frames of a log file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from statelog.errors import StorageError
from statelog.log.entry import FRAME_HEADER_BYTES, Entry, decode_header, decode_index
from statelog.storage.store import Store

_READ_AHEAD_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """An entry and the offset at which its frame ends."""

    entry: Entry
    end: int


class FrameReader:
    """Reads the entries of one object with few range reads, without their payloads.

    The entries get `number` as the number of their log file; 0 if nobody asks for it.
    """

    def __init__(self, store: Store, name: str, number: int = 0) -> None:
        self._store = store
        self._name = name
        self._number = number
        self._start = 0
        self._buffer = b""

    def frame_at(self, offset: int, size_bytes: int) -> Frame | None:
        """Read the frame at `offset`; None if there is no complete frame before byte `size_bytes`.

        It is incomplete if it is cut short, or if only zero bytes follow, which a crash of the machine may leave of a
        write. Raises CorruptionError if the frame's header or index is damaged.
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
        return Frame(decode_index(header, index, name=self._name, offset=offset, number=self._number), end)

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
