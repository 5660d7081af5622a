"""A place for a savepoint: new, written by one only, and apart from what is saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from statelog.errors import ConfigurationError
from statelog.storage import Store
from statelog.storage.places import is_within

UNFINISHED: Final = "unfinished"
"""A savepoint that is being written has this object, which only one writer can make."""


def require_new(store: Store, target: str) -> None:
    """Refuse a place with something in it; :func:`begin_target` looks again.

    Raises
    ------
    ConfigurationError
        If there is something.
    """
    if store.list():
        raise _not_empty(target)


def begin_target(store: Store, target: str, token: bytes) -> None:
    """Take a place for a savepoint.

    Parameters
    ----------
    store : Store
        The place.
    target : str
        Its location, for messages.
    token : bytes
        Unique.

    Raises
    ------
    ConfigurationError
        If there is something, or another savepoint is being written.
    """
    require_new(store, target)
    if not store.put_if_absent(UNFINISHED, token):
        raise _not_empty(target)
    # Another writer may have come and finished since the first look.
    if [info.name for info in store.list()] != [UNFINISHED]:
        store.delete([UNFINISHED])
        raise _not_empty(target)


def finish_target(store: Store) -> None:
    """The savepoint is complete."""
    store.delete([UNFINISHED])


def _not_empty(target: str) -> ConfigurationError:
    return ConfigurationError(
        f"{target} is not empty, or another savepoint is being written there.",
        hint="Give each savepoint a directory of its own; remove what an interrupted one has left.",
    )


def require_apart(location: str, folders: Iterable[str], what: str) -> None:
    """Refuse a location within one of some folders; `what` says what it is for.

    Raises
    ------
    ConfigurationError
        If it is within one.
    """
    for folder in folders:
        if is_within(location, folder):
            raise ConfigurationError(
                f"{what} {location} is within {folder}, whose files are not to be mixed with others.",
                hint="Choose a place outside of it.",
            )
