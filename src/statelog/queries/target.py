"""The place of a new savepoint: empty, with a single writer, and apart from the saved files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from statelog.errors import ConfigurationError
from statelog.storage import Store
from statelog.storage.open import is_within

UNFINISHED: Final = "unfinished"
"""This object marks a savepoint that is being written; only one writer can create it."""


def require_new(store: Store, target: str) -> None:
    """Refuse a place that is not empty; :func:`begin_target` looks again."""
    if store.list():
        raise _not_empty(target)


def begin_target(store: Store, target: str, token: bytes) -> None:
    """Reserve an empty place for one writer; raises ConfigurationError if it is not empty or has another writer."""
    require_new(store, target)
    if not store.put_if_absent(UNFINISHED, token):
        raise _not_empty(target)
    # Another writer may have come and finished since the first look.
    if [info.name for info in store.list()] != [UNFINISHED]:
        store.delete([UNFINISHED])
        raise _not_empty(target)


def finish_target(store: Store) -> None:
    """Mark the savepoint as complete."""
    store.delete([UNFINISHED])


def _not_empty(target: str) -> ConfigurationError:
    return ConfigurationError(
        f"{target} is not empty, or another savepoint is being written there.",
        hint="Give each savepoint a directory of its own; remove what an interrupted one has left.",
    )


def require_apart(location: str, folders: Iterable[str], what: str) -> None:
    """Refuse a location within one of the folders; `what` names the location's purpose in messages."""
    for folder in folders:
        if is_within(location, folder):
            raise ConfigurationError(
                f"{what} {location} is within {folder}, whose files must not be mixed with others.",
                hint="Choose a place outside of it.",
            )
