"""The stores of users, by the scheme of their locations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind
from statelog.storage.location import OBJECT_STORES, scheme_of
from statelog.storage.store import Store

StoreFactory = Callable[[str], Store]

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]+")

_factories: Final[dict[str, StoreFactory]] = {}


def register_store(scheme: str, factory: Callable[[str], Store]) -> None:
    """Make locations of a scheme known, such as ``sqlite:/data/state.db``, with a store of your own for them.

    Call it in the driver's program, before a query is built; the tasks of the query get the factory with it. Programs
    that only read, for example with :func:`statelog.savepoint`, need the call as well.

    Parameters
    ----------
    scheme : str
        The location's part before the first colon: two or more lower-case letters, digits, ``+``, ``.`` and ``-``, of
        which the first is a letter.
    factory : callable
        Makes the store of a location. It is called in the driver and in each Python worker, with the whole location as
        the user wrote it. It may raise ConfigurationError for a malformed location, and opens nothing yet. It must be
        picklable; a function or class of a module is best, which the workers then import.

    Raises
    ------
    ConfigurationError
        If the scheme is malformed, built in, or registered with another factory.

    See Also
    --------
    statelog.Store : The contract of the store.
    statelog.testing.contracts.StoreContract : Its conformance tests.

    Examples
    --------
    >>> statelog.register_store("sqlite", SqliteStore)  # doctest: +SKIP
    """
    if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme):
        raise ConfigurationError(
            f"The scheme {scheme!r} is malformed.",
            hint="Write two or more lower-case letters, digits, '+', '.' or '-', beginning with a letter.",
        )
    if scheme == "file" or scheme in OBJECT_STORES:
        raise ConfigurationError(f"The scheme {scheme!r} is built in.", hint="Choose another name.")
    if not callable(factory):
        raise ConfigurationError(f"factory is {factory!r:.80}.", hint="It must make a store from a location.")
    if _factories.setdefault(scheme, factory) != factory:
        raise ConfigurationError(
            f"The scheme {scheme!r} is registered with another factory, {_factories[scheme]!r}.",
            hint="Register a scheme once. After a change of the store's code begin a new process.",
        )


def replace_store(scheme: str, factory: StoreFactory) -> None:
    """Register a factory that came from the driver, also if there is one."""
    _factories[scheme] = factory


def registered_stores() -> dict[str, StoreFactory]:
    """All registered factories, by scheme."""
    return dict(_factories)


def is_registered(location: str) -> bool:
    """Whether the scheme of a location is one that a user has registered."""
    return scheme_of(location) in _factories


def make_registered(location: str) -> Store:
    """Make the store of a location whose scheme is registered."""
    scheme = scheme_of(location)
    store = _factories[scheme](location)
    if not isinstance(store, Store):
        raise ConfigurationError(
            f"The factory of the scheme {scheme!r} made {store!r:.80} for {location}.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="It must return a statelog.Store.",
        )
    return store
