"""Whether a store can be trusted with a log: questions that are asked once, before anything depends on them."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.storage.store import Store


def check_put_if_absent(store: Store, *, new_token: Callable[[], str] = secrets.token_hex) -> None:
    """Make sure that a store refuses to create an object that exists.

    Some servers that speak the protocol of S3 take the condition of such a request and ignore it. An object below
    ``probe/`` is created twice, and removed.

    Parameters
    ----------
    store : Store
        Where.
    new_token : callable
        Makes the unique part of the object's name.

    Raises
    ------
    ConfigurationError
        If it does not (kind ``store-unsafe``).
    StorageError
        If the store failed.
    """
    name = f"probe/{new_token()}"
    try:
        # Other bytes each time, as whoever calls put_if_absent must: a store may find out by them who has won.
        created = store.put_if_absent(name, b"first")
        created_again = store.put_if_absent(name, b"second")
    finally:
        store.delete([name])
    if created_again:
        raise ConfigurationError(
            f"{store!r} is not safe: it created an object that existed.",
            kind=ErrorKind.STORE_UNSAFE,
            hint="Two drivers could both commit there, and state would be lost without an error. Use a store that"
            " honours If-None-Match: * when an object is written; docs/object-stores.md names some.",
        )
    if not created:
        raise ConfigurationError(
            f"{store!r} cannot be used: it did not create {name}, as if it existed.",
            kind=ErrorKind.STORE_UNSAFE,
            hint="Use a store that creates an object if, and only if, it is absent; docs/object-stores.md names some.",
        )


def require_shared(store: Store, name: str, head: bytes, *, host: str, who: str) -> None:
    """Make sure that a host sees the same place as the driver, which has written an object there.

    Parameters
    ----------
    store : Store
        The place, as this host sees it.
    name, head : str, bytes
        The object, and how it begins.
    host, who : str
        This host and who asks, for messages.

    Raises
    ------
    ConfigurationError
        If it sees no such object, or another one (kind ``location-not-shared``).
    StorageError
        If the store failed.
    """
    try:
        found = store.read(name, length=len(head))
    except StorageError as error:
        if error.kind is not ErrorKind.OBJECT_MISSING:
            raise
        seen = "does not see"
    else:
        if found == head:
            return
        seen = "sees another object in the place of"
    raise ConfigurationError(
        f"{who}: host {host} {seen} {name} in {store!r}, which the driver has written: it is not the driver's place.",
        kind=ErrorKind.LOCATION_NOT_SHARED,
        hint="Put the checkpointLocation, or the operator's location, into an object store or into a directory that the"
        " driver and all executors mount under one path. Nothing of this batch was kept.",
    )
