"""Checks of a store, made once before anything depends on it."""

from __future__ import annotations

import secrets

from statelog.errors import ConfigurationError, ErrorKind
from statelog.storage.store import Store, if_present


def check_put_if_absent(store: Store, folder: str = "probe") -> None:
    """Raise ConfigurationError (kind ``store-unsafe``) unless the store creates an object exactly once.

    Some servers that speak the protocol of S3 accept the condition of such a request and ignore it. The check creates
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
    """Raise ConfigurationError (kind ``location-not-shared``) unless this host sees the object that the driver wrote.

    `head` is the beginning of the object. The message names `host` and `who` asks.
    """
    found = if_present(lambda: store.read(name, length=len(head)))
    if found == head:
        return
    seen = "does not see" if found is None else "sees another object in the place of"
    raise ConfigurationError(
        f"{who}: host {host} {seen} {name} in {store!r}, which the driver has written: it is not the driver's place.",
        kind=ErrorKind.LOCATION_NOT_SHARED,
        hint="Put the checkpointLocation, or the operator's location, into an object store or into a directory that the"
        " driver and all executors mount under one path. Nothing of this batch was kept.",
    )
