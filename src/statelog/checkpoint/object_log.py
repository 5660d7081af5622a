"""The log on any store: one object per entry, each made under the next number unless that exists.

The numbers decide every race: a claim takes the next number, so the writer of an older epoch finds it
there when it tries to append, and knows that it is fenced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NoReturn, cast

from statelog.checkpoint.entry import (
    FRAME_HEADER_BYTES,
    Checkpoint,
    Claim,
    Entry,
    decode_header,
    decode_index,
    encode_frame,
)
from statelog.checkpoint.log import Log
from statelog.checkpoint.log_files import FrameReader, fenced_error, is_missing, numbered_objects
from statelog.errors import CorruptionError, StorageError
from statelog.storage.store import Store

__all__ = ["ENTRY_OBJECT", "ObjectLog"]

ENTRY_OBJECT: Final = re.compile(r"(\d{20})\.entry")


class ObjectLog(Log):
    """A log of objects ``<prefix>/<number>.entry``.

    Parameters
    ----------
    store : Store
        Any store.
    prefix : str
        The log's folder.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._claim: Claim | None = None
        self._next = 1
        self._is_used = False
        self._is_in_doubt = False
        self._lost = "it has not claimed it"

    @property
    def objects_per_entry(self) -> int:
        return 1

    def read(self) -> list[Entry]:
        return _valid(self._read_all())

    def claim(self, make: Callable[[int], Claim]) -> list[Entry]:
        self._lost, self._is_used, self._is_in_doubt = "its claim failed", False, False
        entries = self._read_all()
        while True:
            number = max(entries, default=0) + 1
            claim = make(1 + max((entry.epoch for entry in entries.values()), default=0))
            if self._put(number, b"".join(encode_frame(claim, []))):
                break
            entries[number] = self._read_entry(number, self._store.size_bytes(self._name(number)))
        self._claim, self._next, self._lost = claim, number + 1, ""
        return _valid(entries)

    def append(self, entry: Checkpoint, payload: list[bytes]) -> Checkpoint:
        if self._lost:
            self._lose(self._lost)
        parts = encode_frame(entry, payload)
        data = b"".join(parts)
        was_in_doubt, self._is_used, self._is_in_doubt = self._is_in_doubt, True, True
        while not self._put(self._next, data):
            found = self._read_entry(self._next, self._store.size_bytes(self._name(self._next)))
            if not (was_in_doubt and self._is_own(found)):
                self._lose(f"epoch {found.epoch} wrote entry {self._next}")
            # An earlier append of ours whose answer was lost; the new entry comes after it.
            self._next += 1
        name = self._name(self._next)
        self._next += 1
        self._is_in_doubt = False
        header = decode_header(parts[0][:FRAME_HEADER_BYTES], name=name, offset=0)
        return cast(Checkpoint, decode_index(header, parts[0][FRAME_HEADER_BYTES:], name=name, offset=0))

    def close(self) -> None:
        # Later numbers are never removed here: an older writer must find them taken.
        is_alone = not self._lost and not self._is_used and self._next == 2
        if is_alone and list(numbered_objects(self._store, self._prefix, ENTRY_OBJECT)) == [1]:
            self._store.delete([self._name(1)])
        self._lost = "it was closed"
        self._store.close()

    def _put(self, number: int, data: bytes) -> bool:
        """Write an entry unless its number is taken; True also if it is this very entry that stands there."""
        name = self._name(number)
        return self._store.put_if_absent(name, data) or self._store.read(name) == data

    def _is_own(self, entry: Entry) -> bool:
        claim = self._claim
        return (
            claim is not None
            and isinstance(entry, Checkpoint)
            and (entry.epoch, entry.run_id) == (claim.epoch, claim.run_id)
        )

    def _read_all(self) -> dict[int, Entry]:
        entries: dict[int, Entry] = {}
        for number, info in numbered_objects(self._store, self._prefix, ENTRY_OBJECT).items():
            try:
                entries[number] = self._read_entry(number, info.size_bytes)
            except StorageError as error:
                # Only the oldest entries are removed while others read.
                if entries or not is_missing(error):
                    raise
        return entries

    def _read_entry(self, number: int, size_bytes: int) -> Entry:
        name = self._name(number)
        frame = FrameReader(self._store, name).frame_at(0, size_bytes)
        if frame is None or frame.end != size_bytes:
            raise CorruptionError(
                f"{name}: its {size_bytes} bytes are not one complete log entry.",
                hint="Restore the object from a copy; a shorter log would lose checkpoints.",
            )
        return frame.entry

    def _name(self, number: int) -> str:
        return f"{self._prefix}/{number:020}.entry"

    def _lose(self, reason: str) -> NoReturn:
        self._lost = reason
        raise fenced_error(self._store, self._prefix, self._claim.epoch if self._claim else 0, reason)


def _valid(entries: dict[int, Entry]) -> list[Entry]:
    """Leave out what an epoch wrote after a newer one claimed."""
    valid: list[Entry] = []
    newest = 0
    for _, entry in sorted(entries.items()):
        if entry.epoch >= newest:
            newest = entry.epoch
            valid.append(entry)
    return valid
