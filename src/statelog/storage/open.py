"""The store and the place that a location names, and the checks made before anything depends on a store."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind
from statelog.storage.local import LocalStore
from statelog.storage.location import HDFS, HDFS_PORT, OBJECT_STORES, HdfsLocation, ObjectLocation, scheme_of
from statelog.storage.store import Store, if_present

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]+")
_SUPPORTED: Final = (
    f"a directory (a path, or file:/path), {', '.join(f'{scheme}://' for scheme in (*OBJECT_STORES, HDFS))}"
)

REGISTERED: Final[dict[str, Callable[[str], Store]]] = {}
"""The factories of users, by the scheme of their locations."""


def open_store(location: str) -> Store:
    """Make the store of a path, a ``file:`` URI, or a location such as ``s3://bucket/folder``; nothing is created yet.

    Raises ConfigurationError if the location is empty, malformed, or has a scheme that is not registered.
    """
    scheme = scheme_of(location)
    if scheme in OBJECT_STORES:
        # Not at the top: a directory needs no client of object stores.
        from statelog.storage.objects import ObjectStore

        return ObjectStore(location)
    if scheme == HDFS:
        from statelog.storage.hdfs import HdfsStore  # likewise

        return HdfsStore(location)
    if scheme not in REGISTERED:
        return LocalStore(local_path(location))
    store = REGISTERED[scheme](location)
    if not isinstance(store, Store):
        raise ConfigurationError(
            f"The factory of the scheme {scheme!r} returned {store!r:.80} for {location}.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="It must return a statelog.Store.",
        )
    return store


def local_path(location: str) -> str:
    """The path of a location on a file system: a path, or a ``file:`` URI as Hadoop writes it, without percent escapes.

    Raises ConfigurationError if the location is empty, malformed, or not on a file system.
    """
    if not location.strip():
        raise ConfigurationError("The location is empty.", hint=f"Supported locations: {_SUPPORTED}.")
    scheme = scheme_of(location)
    if not scheme:
        return location
    if scheme in OBJECT_STORES or scheme == HDFS or scheme in REGISTERED:
        raise ConfigurationError(
            f"The location {location} is not in a file system of this host, but a directory is required here.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Pass a path, or file:/path.",
        )
    if scheme != "file":
        raise ConfigurationError(
            f"The location {location} has the scheme {scheme}, which is not supported.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint=f"Supported locations: {', '.join([_SUPPORTED, *REGISTERED])}. To add others, call"
            " statelog.register_store before the query is built.",
        )
    path = location[len("file:") :]
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        if host not in ("", "localhost"):
            raise ConfigurationError(
                f"The location {location} names the host {host!r}; a path on a file system has none.",
                hint="Write file:/path or file:///path; every host looks the path up itself.",
            )
        path = slash + rest
    if not path.startswith("/"):
        raise ConfigurationError(
            f"The location {location} is not an absolute path.", hint="Write file:/path or file:///path."
        )
    return path


def absolute(location: str) -> str:
    """A location that does not depend on this process's working directory."""
    return location if scheme_of(location) else os.path.abspath(location)


def is_same_place(one: str, other: str) -> bool:
    """Whether two locations name one place."""
    return _parts(one) == _parts(other)


def is_within(location: str, folder: str) -> bool:
    """Whether a location is a folder or lies below it; in directories, links are followed."""
    parts = _parts(folder)
    return _parts(location)[: len(parts)] == parts


def _parts(location: str) -> tuple[str, ...]:
    scheme = scheme_of(location)
    if scheme in OBJECT_STORES:
        found = ObjectLocation.parse(location)
        return (found.service, found.bucket, *filter(None, found.folder.split("/")))
    if scheme == HDFS:
        place = HdfsLocation.parse(location)
        return (HDFS, place.authority.removesuffix(f":{HDFS_PORT}"), *filter(None, place.folder.split("/")))
    if scheme in REGISTERED:
        authority, path = "", location[len(scheme) + 1 :]
        if path.startswith("//"):
            authority, _, path = path[2:].partition("/")
        return (scheme, authority, *filter(None, path.split("/")))
    if scheme not in ("", "file"):
        return tuple(filter(None, location.split("/")))  # of another system, in which statelog stores nothing
    return ("file", *Path(local_path(location)).resolve().parts)


def register_store(scheme: str, factory: Callable[[str], Store]) -> None:
    """Register a store of your own for the locations of a scheme, such as ``sqlite:/data/state.db``.

    Call it in the driver program before a query is built; the query passes the factory on to its tasks. Programs that
    only read, for example with :func:`statelog.savepoint`, must make the call as well.

    Parameters
    ----------
    scheme : str
        The part of the location before the first colon: two or more lower-case letters, digits, ``+``, ``.`` and ``-``,
        beginning with a letter.
    factory : callable
        Makes the store of a location. It is called in the driver and in each Python worker, with the whole location as
        the user wrote it. It may raise ConfigurationError for a malformed location, and must not open anything yet. It
        must be picklable; a function or class of a module that the workers can import is best.

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
    if scheme in ("file", HDFS) or scheme in OBJECT_STORES:
        raise ConfigurationError(f"The scheme {scheme!r} is built in.", hint="Choose another scheme.")
    if not callable(factory):
        raise ConfigurationError(
            f"factory is {factory!r:.80}, which cannot be called.", hint="Pass a callable that makes a store."
        )
    if REGISTERED.setdefault(scheme, factory) != factory:
        raise ConfigurationError(
            f"The scheme {scheme!r} is registered with another factory, {REGISTERED[scheme]!r}.",
            hint="Register a scheme only once. After changing the store's code, start a new process.",
        )


def check_put_if_absent(store: Store, folder: str = "probe") -> None:
    """Raise ConfigurationError (kind ``store-unsafe``) unless the store creates an object exactly once.

    Some servers that speak the protocol of S3 accept the condition of such a request but ignore it. The check creates
    an object below `folder` twice, and removes it.
    """
    name = f"{folder}/{secrets.token_hex()}"
    try:
        # Different bytes each time, as put_if_absent demands: a store may recognize the winner by them.
        created = store.put_if_absent(name, b"first")
        created_again = store.put_if_absent(name, b"second")
    finally:
        store.delete([name])
    if created_again:
        raise ConfigurationError(
            f"{store} is not safe: it created an object that already existed.",
            kind=ErrorKind.STORE_UNSAFE,
            hint="Two drivers could both commit there, and state would be lost without an error. Use a store that"
            " honours If-None-Match: * when an object is written; docs/object-stores.md names some.",
        )
    if not created:
        raise ConfigurationError(
            f"{store} cannot be used: it did not create {name}, which did not exist.",
            kind=ErrorKind.STORE_UNSAFE,
            hint="Use a store that creates an object if, and only if, it is absent; docs/object-stores.md names some.",
        )


def require_shared(store: Store, name: str, head: bytes, *, host: str, who: str) -> None:
    """Raise ConfigurationError (kind ``location-not-shared``) unless this host sees the object that the driver wrote.

    `head` is the beginning of the object. The message names `host` and `who` asks.
    """
    found = if_present(lambda: store.read(name, length=len(head)))
    if found == head:
        return
    seen = "does not see" if found is None else "sees a different object in place of"
    raise ConfigurationError(
        f"{who}: host {host} {seen} {name} in {store}, which the driver has written: the location is not shared.",
        kind=ErrorKind.LOCATION_NOT_SHARED,
        hint="Put the checkpointLocation, or the operator's location, in an object store or in a directory that the"
        " driver and all executors mount under one path. Nothing from this batch was kept.",
    )
