"""A store around another one: a base class for retries, faults, counts and delays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from statelog.storage.store import ObjectInfo, Store

_T = TypeVar("_T")


class StoreWrapper(Store):
    """Forwards every request to another store. A subclass overrides :meth:`_call`, or the methods that it changes."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    @property
    def can_append(self) -> bool:
        return self._inner.can_append

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self._call("read", name, lambda: self._inner.read(name, offset=offset, length=length))

    def read_into(self, buffer: memoryview, name: str, *, offset: int = 0) -> int:
        return self._call("read", name, lambda: self._inner.read_into(buffer, name, offset=offset))

    def size_bytes(self, name: str) -> int:
        return self._call("size_bytes", name, lambda: self._inner.size_bytes(name))

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._call("put", name, lambda: self._inner.put(name, data))

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        return self._call("put_if_absent", name, lambda: self._inner.put_if_absent(name, data))

    def append(self, name: str, parts: list[bytes | memoryview], *, at: int) -> None:
        self._call("append", name, lambda: self._inner.append(name, parts, at=at))

    def sync(self, name: str, *, start: int, end: int) -> None:
        self._call("sync", name, lambda: self._inner.sync(name, start=start, end=end))

    def delete(self, names: list[str]) -> None:
        self._call("delete", names[0] if names else "", lambda: self._inner.delete(names))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self._call("list", prefix, lambda: self._inner.list(prefix))

    def remove_unfinished(self, prefix: str, before_s: float) -> None:
        self._call("remove_unfinished", prefix, lambda: self._inner.remove_unfinished(prefix, before_s))

    def close(self) -> None:
        self._inner.close()

    def _call(self, operation: str, name: str, effect: Callable[[], _T]) -> _T:
        """Make a request by calling `effect`.

        `operation` is the method's name, for reads into a buffer too ``read``; `name` the object, the prefix, or the
        first of the deleted objects.
        """
        return effect()
