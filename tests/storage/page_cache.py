"""A machine whose crash loses writes that are not on its disk, for tests of the code that uses stores."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from statelog.errors import ErrorKind, StorageError
from statelog.storage.store import ObjectInfo, Store

_PAGE_BYTES: Final = 64


@dataclass
class _File:
    """A file as processes see it, and as it is on the disk; dirty pages differ."""

    seen: bytearray
    disk: bytearray
    dirty: set[int] = field(default_factory=set)

    def write(self, data: bytes, at: int) -> None:
        """Write to the cache."""
        self.seen[at : at + len(data)] = data
        self.dirty.update(range(at // _PAGE_BYTES, -(-(at + len(data)) // _PAGE_BYTES)))

    def flush(self, count: int) -> None:
        """Write the first `count` dirty pages to the disk, and give up the others: no later sync writes them."""
        for page in sorted(self.dirty)[:count]:
            start, end = page * _PAGE_BYTES, min((page + 1) * _PAGE_BYTES, len(self.seen))
            self.disk.extend(bytes(max(0, end - len(self.disk))))
            self.disk[start:end] = self.seen[start:end]
        self.dirty.clear()


class Machine:
    """A machine with its files in memory; after a crash it has only the pages on its disk.

    A sync that fails has written some of the pages. Like Linux, the machine then takes the other pages for written
    too, so that a later sync succeeds without them. `rng` decides how many dirty pages reach the disk, `sync_fails` is
    asked at each sync of an append.
    """

    def __init__(self, rng: random.Random, sync_fails: Callable[[], bool] = lambda: False) -> None:
        self._rng = rng
        self._sync_fails = sync_fails
        self._files: dict[str, _File] = {}

    def crash(self) -> None:
        """Continue with the files on the disk; processes from before the crash must not run on."""
        for file in self._files.values():
            file.flush(self._rng.randint(0, len(file.dirty)))
            file.seen = bytearray(file.disk)

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
            file.flush(self._rng.randint(0, len(file.dirty)))
            raise StorageError(f"sync {name} failed: injected fault.", hint="")
        file.flush(len(file.dirty))
        del file.disk[len(file.seen) :]


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
        self._machine.files()[name] = _File(bytearray(data), bytearray(data))

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        if name in self._machine.files():
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

    def delete(self, names: list[str]) -> None:
        for name in names:
            self._machine.files().pop(name, None)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        files = sorted(self._machine.files().items())
        return [ObjectInfo(name, len(file.seen), 0.0) for name, file in files if name.startswith(prefix)]
