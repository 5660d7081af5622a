"""The parent of a branch: another query's operator, from whose objects the branch goes on.

The branch's entries name the parent's objects by links, and a pin at the parent keeps them. The pin goes once the
branch needs none of them any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from statelog.checkpoint.history import History
from statelog.checkpoint.pins import StandingPins
from statelog.errors import CorruptionError, StatelogError
from statelog.log.open import open_location
from statelog.log_fields import get_logger
from statelog.sealed import seal, unseal
from statelog.storage import Store
from statelog.storage.links import is_link
from statelog.storage.store import if_present

_log = get_logger(__name__)

_KIND: Final = "statelog parent"
_VERSION: Final = 1


class Parent(msgspec.Struct, frozen=True):
    """The operator of another query that a branch began with."""

    location: str
    """Of the parent's operators; absolute."""
    batch: int
    """The checkpoint that the branch began with."""
    pin: str
    """The object name of the branch's pin there."""


def _name(root: str) -> str:
    return f"{root}/parent.json"


def write_parent(store: Store, root: str, parent: Parent) -> None:
    """Note the parent of a branch, in the folder of the branch's operator."""
    store.put(_name(root), seal(parent, _KIND, _VERSION))


def read_parent(store: Store, root: str) -> Parent | None:
    """The parent of a branch that needs it still; None for other operators. Raises the errors of :func:`unseal`."""
    data = if_present(lambda: store.read(_name(root)))
    return None if data is None else unseal(data, Parent, kind=_KIND, version=_VERSION, name=_name(root))


class ParentObjects:
    """The parent's objects that an operator still needs; none for an operator that is no branch."""

    def __init__(self, store: Store, root: str, name: str) -> None:
        self._store = store
        self._root = root
        self._name = name
        self._parent: Parent | None = None

    def open(self, history: History) -> None:
        """Take over the links that the log names."""
        try:
            self._parent = read_parent(self._store, self._root)
        except CorruptionError as error:
            _log.warning("%s: the pin at its parent stays for ever: %s", self._name, error)
        self._needed: set[str] = {name for name in history.object_names() if is_link(name)}

    def release(self, may_go: Callable[[str], bool], pins: StandingPins) -> None:
        """Remove the pin at the parent if no object of the parent's is needed any more; it never is again.

        `may_go` is the deletion gate, `pins` are the operator's own.
        """
        if self._parent is None:
            return
        self._needed = {name for name in self._needed if not may_go(name)}
        if self._needed or pins.need_any(is_link):
            return
        try:
            open_location(self._parent.location).delete([self._parent.pin])
            self._store.delete([_name(self._root)])
        except StatelogError as error:
            _log.warning("%s: the pin at its parent could not be removed yet: %s", self._name, error)
            return
        _log.info("%s: it needs no object of its parent %s any more", self._name, self._parent.location)
        self._parent = None
