"""The log on a store that can append: one file per epoch, each of frames one after the other.

A run opens an epoch by making its file, with the claim as its first frame. Only then does it read the
older files, and writes where they end into a fence, the second frame of its own file. The writer of an
older epoch looks for a newer file after each append and before it reports success. So an entry that was
reported stands before the fence, and one that stands behind it was never reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn, cast

from statelog.checkpoint.entry import (
    FRAME_HEADER_BYTES,
    Checkpoint,
    Claim,
    Entry,
    Fence,
    decode_header,
    decode_index,
    encode_frame,
)
from statelog.checkpoint.log import Log
from statelog.checkpoint.log_files import FrameReader, fenced_error, is_missing, numbered_objects
from statelog.errors import CorruptionError, StorageError
from statelog.storage.store import Store

__all__ = ["EPOCH_FILE", "AppendLog"]

EPOCH_FILE: Final = re.compile(r"epoch-(\d{8})\.log")


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An entry whose append was begun and not yet seen to succeed."""

    entry: Checkpoint
    frame_bytes: int


class AppendLog(Log):
    """A log in files ``<prefix>/epoch-<number>.log``.

    Parameters
    ----------
    store : Store
        A store that can append.
    prefix : str
        The log's folder.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._epoch = 0
        self._end = 0
        self._pending: _Attempt | None = None
        self._is_used = False
        self._lost = "it has not claimed it"

    @property
    def objects_per_entry(self) -> int:
        return 0

    def read(self) -> list[Entry]:
        return self._read_files(self._epochs())[0]

    def claim(self, make: Callable[[int], Claim]) -> list[Entry]:
        self._lost, self._pending, self._is_used = "its claim failed", None, False
        while True:
            self._epoch = max(self._epochs(), default=0) + 1
            frame = b"".join(encode_frame(make(self._epoch), []))
            if self._store.put_if_absent(self._name(self._epoch), frame):
                break
        self._end = len(frame)
        # Listed again: a file may have appeared below the claim since it was numbered.
        entries, open_ends = self._read_files([epoch for epoch in self._epochs() if epoch < self._epoch])
        if open_ends:
            # What was read may still be in the page cache of a writer that was killed.
            for name in open_ends:
                self._store.sync(f"{self._prefix}/{name}")
            fence: list[bytes | memoryview] = [*encode_frame(Fence(self._epoch, open_ends), [])]
            self._store.append(self._name(self._epoch), fence, at=self._end)
            self._end += sum(map(len, fence))
        # A newer epoch that claims from here on finds the fence, so both agree on what came before.
        self._check_ownership(self._end)
        self._lost = ""
        return entries

    def append(self, entry: Checkpoint, payload: list[bytes]) -> Checkpoint:
        if self._lost:
            self._lose(self._lost)
        parts: list[bytes | memoryview] = [*encode_frame(entry, payload)]
        attempt = _Attempt(entry, sum(map(len, parts)))
        try:
            if not self._is_written(attempt):
                self._pending, self._is_used = attempt, True
                self._store.append(self._name(self._epoch), parts, at=self._end)
            self._check_ownership(self._end + attempt.frame_bytes)
        except StorageError as error:
            if not is_missing(error):
                raise
            self._lose("its file is gone")
        offset, self._end, self._pending = self._end, self._end + attempt.frame_bytes, None
        return _placed(bytes(parts[0]), self._name(self._epoch), offset)

    def close(self) -> None:
        # Files of later epochs are never removed here: a stalled writer of an older epoch may look for them.
        if self._epoch == 1 and not self._is_used and not self._lost and self._epochs() == [1]:
            self._store.delete([self._name(1)])
        self._lost = "it was closed"
        self._store.close()

    def _is_written(self, attempt: _Attempt) -> bool:
        """Find out what became of a failed append, before its place is written again.

        A frame that arrived completely stays as it is: a newer epoch may have counted it already.
        """
        if self._pending is None:
            return False
        end = self._end + self._pending.frame_bytes
        if self._store.size_bytes(self._name(self._epoch)) < end:
            return False
        self._store.sync(self._name(self._epoch))
        if self._pending == attempt:
            return True
        self._end, self._pending = end, None
        return False

    def _check_ownership(self, end: int) -> None:
        """Look for a newer claim, and at the own file, which retention would delete before a newer one."""
        if self._size(self._epoch + 1) is not None:
            self._lose(f"epoch {self._epoch + 1} claimed it")
        if self._size(self._epoch) != end:
            self._lose("its file was deleted or replaced")

    def _read_files(self, epochs: list[int]) -> tuple[list[Entry], dict[str, int]]:
        """Read claims and checkpoints of files, and the ends of those that no fence covers yet.

        Newest first: a fence counts if the newer fences do not cut it off. Of several that count for a
        file the oldest does, because its writer may have acted on it.
        """
        fenced_ends: dict[str, int] = {}
        open_ends: dict[str, int] = {}
        entries: list[Entry] = []
        for epoch in reversed(epochs):
            name = _file_name(epoch)
            found, end = self._read_file(epoch, fenced_ends.get(name))
            if found and name not in fenced_ends:
                open_ends[name] = end
            for entry in found:
                if isinstance(entry, Fence):
                    fenced_ends.update(entry.ends)
            entries[:0] = [entry for entry in found if not isinstance(entry, Fence)]
        return entries, open_ends

    def _read_file(self, epoch: int, fenced_end: int | None) -> tuple[list[Entry], int]:
        """Read all entries up to the fenced end, or else to the torn tail; none if the file is gone."""
        name = self._name(epoch)
        try:
            size = self._store.size_bytes(name)
            entries, end = self._scan(name, size if fenced_end is None else min(size, fenced_end))
            size = self._store.size_bytes(name)
        except StorageError as error:
            if is_missing(error):
                return [], 0
            raise
        if fenced_end is not None and end != fenced_end:
            raise CorruptionError(
                f"{name}: the log has valid entries up to offset {end}, but had them up to {fenced_end}.",
                hint="Restore the file from a copy; a shorter log would lose checkpoints.",
            )
        if not entries or not isinstance(entries[0], Claim) or entries[0].epoch != epoch:
            raise CorruptionError(
                f"{name}: the file does not begin with the claim of epoch {epoch}.",
                hint="Restore the file from a copy.",
            )
        if size < end:
            # Its writer lives: it dropped a failed append and was about to write another in its place.
            raise StorageError(f"{name} was changed while it was read.", hint="Try again.")
        return entries, end

    def _scan(self, name: str, size_bytes: int) -> tuple[list[Entry], int]:
        reader = FrameReader(self._store, name)
        entries: list[Entry] = []
        end = 0
        while frame := reader.frame_at(end, size_bytes):
            entries.append(frame.entry)
            end = frame.end
        return entries, end

    def _epochs(self) -> list[int]:
        return list(numbered_objects(self._store, self._prefix, EPOCH_FILE))

    def _name(self, epoch: int) -> str:
        return f"{self._prefix}/{_file_name(epoch)}"

    def _size(self, epoch: int) -> int | None:
        try:
            return self._store.size_bytes(self._name(epoch))
        except StorageError as error:
            if is_missing(error):
                return None
            raise

    def _lose(self, reason: str) -> NoReturn:
        self._lost = reason
        raise fenced_error(self._store, self._prefix, self._epoch, reason)


def _file_name(epoch: int) -> str:
    return f"epoch-{epoch:08}.log"


def _placed(head: bytes, name: str, offset: int) -> Checkpoint:
    """Decode the header and index just written, which gives the segments their absolute place."""
    header = decode_header(head[:FRAME_HEADER_BYTES], name=name, offset=offset)
    return cast(Checkpoint, decode_index(header, head[FRAME_HEADER_BYTES:], name=name, offset=offset))
