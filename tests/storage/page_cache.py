"""A machine whose crash loses writes that are not on its disk, for tests of the code that uses stores."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from statelog.errors import ErrorKind, StorageError
from statelog.log.entry import FrameReader
from statelog.storage import LocalStore
from statelog.storage.store import ObjectInfo, Store

_PAGES_BYTES: Final = (512, 4096)


@dataclass
class _File:
    """A file as processes see it, and as it is on the disk; dirty pages differ."""

    seen: bytearray
    disk: bytearray
    page_bytes: int
    dirty: set[int] = field(default_factory=set)

    def write(self, data: bytes, at: int) -> None:
        """Write to the cache."""
        self.seen[at : at + len(data)] = data
        self.dirty.update(range(at // self.page_bytes, -(-(at + len(data)) // self.page_bytes)))

    def flush(self, pages: Collection[int]) -> None:
        """Write some dirty pages to the disk, and give up the others: no later sync writes them."""
        for page in pages:
            start, end = page * self.page_bytes, min((page + 1) * self.page_bytes, len(self.seen))
            self.disk.extend(bytes(max(0, end - len(self.disk))))
            self.disk[start:end] = self.seen[start:end]
        self.dirty.clear()

    def flush_some(self, rng: random.Random) -> None:
        """Write any dirty pages, in any order; the file on the disk may be longer than that, with zeros."""
        share = rng.choice((0.0, 0.5, 0.9, 0.9, 1.0))
        self.flush([page for page in sorted(self.dirty) if rng.random() < share])
        self.disk.extend(bytes(rng.choice((0, rng.randint(0, max(0, len(self.seen) - len(self.disk)))))))


class Machine:
    """A machine with its files in memory; after a crash it has only the pages and the names on its disk.

    A sync that fails has written some of the pages. Like Linux, the machine then takes the other pages for written
    too, so that a later sync succeeds without them. A name that a process has made or removed is on the disk for
    certain once a sync of its folder has succeeded. `rng` decides which dirty pages and names reach the disk,
    `sync_fails` is asked at each sync of an append, `names_fail` at each sync of a folder.
    """

    def __init__(
        self,
        rng: random.Random,
        sync_fails: Callable[[], bool] = lambda: False,
        names_fail: Callable[[], bool] = lambda: False,
        page_bytes: int | None = None,
    ) -> None:
        self._rng = rng
        self._sync_fails = sync_fails
        self._names_fail = names_fail
        self._files: dict[str, _File] = {}
        self._names: dict[str, _File] = {}
        self._page_bytes = page_bytes or rng.choice(_PAGES_BYTES)

    def crash(self) -> None:
        """Continue with the files on the disk; processes from before the crash must not run on."""
        for name in sorted(self._files.keys() | self._names.keys()):
            left = self._rng.choice((self._files, self._names)).get(name)
            if left is None:
                self._files.pop(name, None)
            else:
                self._files[name] = left
        self._names = dict(self._files)
        for file in self._files.values():
            file.flush_some(self._rng)
            file.seen = bytearray(file.disk)

    def make(self, name: str, data: bytes) -> None:
        """Give a new file, which is on the disk, its name."""
        self._files[name] = _File(bytearray(data), bytearray(data), self._page_bytes)
        self.sync_names()

    def remove(self, name: str) -> None:
        """Take a file's name away."""
        self._files.pop(name, None)

    def sync_names(self) -> None:
        """Make all names durable."""
        if self._names_fail():
            raise StorageError("sync of a folder failed: injected fault.", hint="")
        self._names = dict(self._files)

    def open_store(self) -> Store:
        """Open the files as a process sees them."""
        return _MachineStore(self)

    def file(self, name: str) -> _File:
        """A file by its name; raises StorageError if there is none."""
        if name not in self._files:
            raise StorageError(f"{name} does not exist.", kind=ErrorKind.OBJECT_MISSING, hint="")
        return self._files[name]

    def files(self) -> dict[str, _File]:
        """All files, by name."""
        return self._files

    def sync(self, name: str) -> None:
        """Write the dirty pages of a file."""
        file = self.file(name)
        if self._sync_fails():
            file.flush_some(self._rng)
            raise StorageError(f"sync {name} failed: injected fault.", hint="")
        file.flush(sorted(file.dirty))
        del file.disk[len(file.seen) :]


def tear_last_frame(path: Path, rng: random.Random) -> bool:
    """Leave of the last frame in a log file what a crash of the machine may leave of its append.

    False if it is the file's first one, with which the file was made.
    """
    data, starts, end = bytearray(path.read_bytes()), list[int](), 0
    reader = FrameReader(LocalStore(path.parent), path.name)
    while frame := reader.frame_at(end, len(data)):
        starts.append(end)
        end = frame.end
    if len(starts) < 2:
        return False
    page_bytes, start = rng.choice(_PAGES_BYTES), starts[-1]
    pages = range(start // page_bytes, -(-end // page_bytes))
    for page in rng.sample(pages, rng.randint(1, len(pages))):
        first, last = max(start, page * page_bytes), min((page + 1) * page_bytes, end)
        data[first:last] = bytes(last - first)
    path.write_bytes(data[: rng.choice((end, rng.randint(start, end)))])
    return True


class _MachineStore(Store):
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @property
    def can_append(self) -> bool:
        return True

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return bytes(self._machine.file(name).seen[offset : None if length is None else offset + length])

    def size_bytes(self, name: str) -> int:
        return len(self._machine.file(name).seen)

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._machine.make(name, bytes(data))

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        if name in self._machine.files():
            self._machine.sync_names()
            return False
        self.put(name, data)
        return True

    def append(self, name: str, parts: list[bytes | memoryview], *, at: int) -> None:
        file = self._machine.file(name)
        if len(file.seen) < at:
            raise StorageError(f"append {name} failed: its {len(file.seen)} bytes end before offset {at}.", hint="")
        del file.seen[at:]
        file.write(b"".join(parts), at)
        self._machine.sync(name)

    def sync(self, name: str, *, start: int, end: int) -> None:
        file = self._machine.file(name)
        file.write(bytes(file.seen[start:end]), start)
        self._machine.sync(name)
        self._machine.sync_names()

    def delete(self, names: list[str]) -> None:
        for name in names:
            self._machine.remove(name)
        self._machine.sync_names()

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        files = sorted(self._machine.files().items())
        return [ObjectInfo(name, len(file.seen), 0.0) for name, file in files if name.startswith(prefix)]
