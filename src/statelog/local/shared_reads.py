"""Reads bytes that several subtasks of a host need once for all of them, into files that they share."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import xxhash

from statelog.files import removed_on_failure, write_file
from statelog.history.restore_plan import Extent, RestorePlan
from statelog.storage import Store
from statelog.storage.wrapper import StoreWrapper

SHARED_FOLDER: Final = "shared"
"""Name of the folder, beside those of the operators."""
_CHECKSUM_BYTES: Final = 8


class SharedReads:
    """Reads from an object store that the subtasks of a query, restored on this host, share.

    The first subtask that needs an extent reads it into a file, while the others wait. An extent whose file is missing
    or damaged is read again. The files are of one batch of one start: objects never change, but in another start the
    store may have other objects of the same names. `token` is unique among all attempts.
    """

    def __init__(self, folder: Path, run_id: str, batch: int, token: str) -> None:
        self._folder = folder
        self._run_id = run_id
        self._batch = batch
        self._token = token

    def of(self, store: Store, missing: RestorePlan) -> Store:
        """The store, with the shared extents of a restore plan read once for this host.

        A directory is read as it is: the operating system caches its files.
        """
        return store if store.can_append else _SharedObjects(store, missing.extents, self)

    def discard(self) -> None:
        """Remove the batch's files, as something in them is wrong; the next attempt reads them again."""
        for path in self._folder.glob(f"{self._batch}-*"):
            if not path.suffix:  # others may be writing theirs
                path.unlink(missing_ok=True)

    def read(self, store: Store, extent: Extent) -> bytes:
        """The bytes of an extent; raises the errors of :meth:`Store.read`."""
        wanted = f"{self._run_id} {extent.name} {extent.offset} {extent.length}"
        path = self._folder / f"{self._batch}-{xxhash.xxh3_128_hexdigest(wanted.encode())}"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(f"{path}.lock", "wb") as lock:
            # A process that dies releases the lock.
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = _checked(path)
            if found is not None:
                return found
            for left in self._folder.glob(f"{path.name}.*.tmp"):
                left.unlink(missing_ok=True)  # of a process that was killed: it held the lock
            data = store.read(extent.name, offset=extent.offset, length=extent.length)
            temporary = Path(f"{path}.{self._token}.tmp")
            write_file(temporary, data + xxhash.xxh3_64_digest(data))
            with removed_on_failure(temporary):
                temporary.rename(path)
            return data


class _SharedObjects(StoreWrapper):
    """A store whose shared extents are read once per host."""

    def __init__(self, store: Store, extents: Iterable[Extent], shared: SharedReads) -> None:
        super().__init__(store)
        self._shared = shared
        self._extents: dict[str, list[Extent]] = {}
        for extent in extents:
            self._extents.setdefault(extent.name, []).append(extent)

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        for extent in self._extents.get(name, ()):
            start = offset - extent.offset
            if length is not None and start >= 0 and start + length <= extent.length:
                return self._shared.read(self._inner, extent)[start : start + length]
        return super().read(name, offset=offset, length=length)

    def read_into(self, buffer: memoryview, name: str, *, offset: int = 0) -> int:
        return Store.read_into(self, buffer, name, offset=offset)  # by `read`, which knows the extents


def remove_shared(folder: Path, certain: int) -> None:
    """Remove the files of batches up to `certain`, a batch that is certain: all its subtasks have their state."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        prefix = name.partition("-")[0]
        if not prefix.isdecimal() or int(prefix) <= certain:
            (folder / name).unlink(missing_ok=True)


def _checked(path: Path) -> bytes | None:
    """The bytes of a file; None if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    content = data[:-_CHECKSUM_BYTES]
    return content if xxhash.xxh3_64_digest(content) == data[-_CHECKSUM_BYTES:] else None
