"""Links: names of objects in another location, through which a branch of a query reads its parent's objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from statelog.storage.store import Store, StoreWrapper

_MARK: Final = "!/"
"""Separates location and name. No object name contains it, because names are escaped."""


def link(location: str, name: str) -> str:
    """The name of an object of another location; a link stays as it is."""
    return name if is_link(name) else f"{location.rstrip('/')}{_MARK}{name}"


def is_link(name: str) -> bool:
    """Whether a name is that of an object in another location."""
    return _MARK in name


def split_link(name: str) -> tuple[str, str]:
    """The location of a link, and the object's name there."""
    location, _, rest = name.rpartition(_MARK)
    return location, rest


class LinkedStore(StoreWrapper):
    """A store that also reads links, from the stores of their locations. It deletes only its own objects.

    `open_other` makes the store of a location.
    """

    def __init__(self, inner: Store, open_other: Callable[[str], Store]) -> None:
        super().__init__(inner)
        self._open_other = open_other
        self._others: dict[str, Store] = {}

    @property
    def own(self) -> Store:
        """The store without links."""
        return self._inner

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        store, own_name = self._place_of(name)
        return store.read(own_name, offset=offset, length=length)

    def read_into(self, buffer: memoryview, name: str, *, offset: int = 0) -> int:
        store, own_name = self._place_of(name)
        return store.read_into(buffer, own_name, offset=offset)

    def size_bytes(self, name: str) -> int:
        store, own_name = self._place_of(name)
        return store.size_bytes(own_name)

    def delete(self, names: list[str]) -> None:
        self._inner.delete([name for name in names if not is_link(name)])

    def close(self) -> None:
        others, self._others = self._others, {}
        for store in (self._inner, *others.values()):
            store.close()

    def _place_of(self, name: str) -> tuple[Store, str]:
        if not is_link(name):
            return self._inner, name
        location, own_name = split_link(name)
        store = self._others.get(location)
        if store is None:
            store = self._others.setdefault(location, self._open_other(location))
        return store, own_name
