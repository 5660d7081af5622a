"""Stores around others, for tests of several kinds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from statelog.storage import LocalStore, Store
from statelog.storage.wrapper import StoreWrapper

_T = TypeVar("_T")


class WholeObjects(StoreWrapper):
    """A store that cannot append, as object stores cannot."""

    @property
    def can_append(self) -> bool:
        return False


class KeptStore(WholeObjects):
    """The store of a location such as ``kept:/some/directory``, whose scheme only those know who have registered it."""

    def __init__(self, location: str) -> None:
        super().__init__(LocalStore(location.removeprefix("kept:")))


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
