"""The store contract: the operations that a place for checkpoints must support."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from statelog.errors import ErrorKind, StorageError

_T = TypeVar("_T")
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object in a listing."""

    name: str
    """Relative to the store's root, with ``/`` between its parts."""
    size_bytes: int
    modified_s: float
    """Time of the last change, seconds since the Unix epoch, by the store's own clock."""


class Store(ABC):
    """Named immutable objects under one root.

    Subclass it for a place of your own, and register the class with :func:`statelog.register_store`; docs/stores.md has
    an example, and :class:`statelog.testing.contracts.StoreContract` the tests.

    Names are relative, use ``/`` and contain no empty, ``.`` or ``..`` part. Every write is durable when the call
    returns: it survives a crash of the process and of the machine, and every read and list that begins afterwards, in
    any process, sees it. A whole object is there completely or not at all. Methods are called by several threads at
    once. A store holds no open connection or file before its first call, and may be pickled and sent to another
    process.

    Raises
    ------
    ConfigurationError
        By every method that takes a name or prefix, if that is malformed.
    StorageError
        By every method, for a failed operation (kind ``store-failed``, or ``store-busy`` or ``store-unavailable`` if
        the failure may pass) or a missing object (kind ``object-missing``). After a failed write the object may or
        may not exist.
    """

    @property
    def can_append(self) -> bool:
        """Whether :meth:`append` is supported; most stores can only write whole objects."""
        return False

    @abstractmethod
    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Read `length` bytes from `offset`, or all up to the end; fewer where the object ends."""

    def read_into(self, buffer: memoryview, name: str, *, offset: int = 0) -> int:
        """Fill a buffer from `offset` and return the number of bytes read; fewer where the object ends."""
        data = self.read(name, offset=offset, length=len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @abstractmethod
    def size_bytes(self, name: str) -> int:
        """Size of an object."""

    @abstractmethod
    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write a whole object under a name that is used once."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        """Write a whole object unless the name exists; of several callers exactly one gets True.

        The bytes must differ from those of every other call for this name, for example by a random token. So a caller
        that did not get the answer can read the object and see whether it wrote the object itself.
        """

    def append(self, name: str, parts: list[bytes | memoryview], *, at: int) -> None:
        """Write `parts` one after the other at offset `at` of an existing object.

        Anything beyond `at` is dropped first, so a failed append can be repeated.
        """
        raise StorageError(
            f"append {name} failed: {self!r} cannot append.", hint="Write whole objects where can_append is False."
        )

    def sync(self, name: str, *, start: int, end: int) -> None:  # noqa: B027 - most stores have nothing to do
        """Make an object of another process durable, and the bytes that were appended to it from `start` to `end`.

        The bytes are written again: after a failed sync in that process the operating system may have given up writing
        them, and then a sync alone does nothing. Once the object is durable, so is everything before `start`.

        Only stores that can append need it: elsewhere an object is durable as soon as it exists.
        """

    @abstractmethod
    def delete(self, names: list[str]) -> None:
        """Delete objects; names that do not exist are skipped."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """All objects whose name starts with `prefix`, sorted by name."""

    def remove_unfinished(self, prefix: str, before_s: float) -> None:  # noqa: B027 - most stores leave nothing
        """Remove the remains of objects that killed writers did not finish.

        Parameters
        ----------
        prefix : str
            A folder: only objects whose names begin with it; empty for all.
        before_s : float
            Only remains last written to before this time, in seconds since the Unix epoch.
        """

    def close(self) -> None:  # noqa: B027 - most stores have nothing to do
        """Release files and connections; the next call opens them again."""


def if_present(request: Callable[[], _T]) -> _T | None:
    """The result of a request for an object; None if the object is missing."""
    try:
        return request()
    except StorageError as error:
        if error.kind is not ErrorKind.OBJECT_MISSING:
            raise
        return None


def read_ahead(items: Iterable[_Item], read: Callable[[_Item], _T], threads: int) -> Iterator[_T]:
    """Read items by several threads, and yield the results in order; at most `threads` results wait."""
    if threads == 1:
        yield from map(read, items)
        return
    waiting: deque[Future[_T]] = deque()
    with ThreadPoolExecutor(threads, "statelog-read") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(read, item))
                if len(waiting) >= threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class StoreWrapper(Store):
    """Forwards every request to another store. A subclass overrides :meth:`_call`, or the methods that it changes."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def __str__(self) -> str:
        return str(self._inner)

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

        `operation` is the method's name, also ``read`` for reads into a buffer; `name` is the object, the prefix, or
        the first of the deleted objects.
        """
        return effect()
