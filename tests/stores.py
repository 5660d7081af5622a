"""Stores around others, for tests of several kinds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from statelog.clock import Clock
from statelog.errors import ErrorKind, StorageError
from statelog.storage import LocalStore, ObjectInfo, Store
from statelog.storage.location import scheme_of
from statelog.storage.store import StoreWrapper

_T = TypeVar("_T")


class WholeObjects(StoreWrapper):
    """A store that cannot append, as object stores cannot."""

    @property
    def can_append(self) -> bool:
        return False


class KeptStore(WholeObjects):
    """The store of a path, or of a location such as ``kept:/some/directory`` whose scheme a test has registered."""

    def __init__(self, location: str) -> None:
        scheme = scheme_of(location)
        super().__init__(LocalStore(location[len(f"{scheme}:") :] if scheme else location))


class MemoryStore(Store):
    """Objects in memory, which can be appended to. `requests` notes the operations and the names."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.objects: dict[str, tuple[bytes, float]] = {}
        """Content, and when it was written."""
        self.requests: list[tuple[str, str]] = []

    @property
    def can_append(self) -> bool:
        return True

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self.requests.append(("read", name))
        return self._content(name)[offset : None if length is None else offset + length]

    def size_bytes(self, name: str) -> int:
        self.requests.append(("size_bytes", name))
        return len(self._content(name))

    def put(self, name: str, data: bytes | memoryview) -> None:
        self.requests.append(("put", name))
        self.objects[name] = (bytes(data), self._clock.now_s())

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        self.requests.append(("put_if_absent", name))
        is_absent = name not in self.objects
        if is_absent:
            self.objects[name] = (bytes(data), self._clock.now_s())
        return is_absent

    def append(self, name: str, parts: list[bytes | memoryview], *, at: int) -> None:
        self.requests.append(("append", name))
        self.objects[name] = (b"".join([self._content(name)[:at], *parts]), self._clock.now_s())

    def delete(self, names: list[str]) -> None:
        self.requests += [("delete", name) for name in names]
        for name in names:
            self.objects.pop(name, None)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self.requests.append(("list", prefix))
        found = sorted(item for item in self.objects.items() if item[0].startswith(prefix))
        return [ObjectInfo(name, len(data), modified_s) for name, (data, modified_s) in found]

    def _content(self, name: str) -> bytes:
        if name not in self.objects:
            raise StorageError(f"{name} is missing.", kind=ErrorKind.OBJECT_MISSING)
        return self.objects[name][0]


@dataclass(frozen=True)
class Requests:
    """Requests of a store."""

    calls: tuple[tuple[str, str, int], ...]
    """Operation, object and read bytes of each, in the order in which they were made."""

    @property
    def reads(self) -> int:
        """How many of them have read an object."""
        return sum(operation == "read" for operation, _, _ in self.calls)

    def read_bytes(self, folder: str = "") -> int:
        """The bytes that were read of a folder's objects."""
        return sum(count for _, name, count in self.calls if name.startswith(folder))


class CountedStore(StoreWrapper):
    """A store that notes its requests and the bytes that were read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._calls: list[tuple[str, str, int]] = []

    def take(self) -> Requests:
        """The requests since the last call."""
        with self._lock:
            taken = Requests(tuple(self._calls))
            self._calls = []
        return taken

    def _call(self, operation: str, name: str, effect: Callable[[], _T]) -> _T:
        result = effect()
        count = 0
        if operation == "read":
            count = len(result) if isinstance(result, bytes) else int(str(result))
        with self._lock:
            self._calls.append((operation, name, count))
        return result
