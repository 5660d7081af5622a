"""From a location to its store."""

from __future__ import annotations

from typing import Final

from statelog.errors import ConfigurationError, ErrorKind
from statelog.storage.local import LocalStore
from statelog.storage.location import OBJECT_STORES, scheme_of
from statelog.storage.registry import is_registered, make_registered, registered_stores
from statelog.storage.store import Store

_SUPPORTED: Final = f"a directory (a path, or file:/path), {', '.join(f'{scheme}://' for scheme in OBJECT_STORES)}"


def open_store(location: str) -> Store:
    """Make the store of a path, a ``file:`` URI, or a location such as ``s3://bucket/folder``; nothing is created yet.

    Locations of other schemes have the stores that users have registered for them.

    Raises ConfigurationError if the location is empty, malformed, or of an unsupported scheme.
    """
    if scheme_of(location) in OBJECT_STORES:
        # Not at the top: a directory needs no client of object stores.
        from statelog.storage.objects import ObjectStore

        return ObjectStore(location)
    if is_registered(location):
        return make_registered(location)
    return LocalStore(local_path(location))


def local_path(location: str) -> str:
    """The path of a location on a file system: a path, or a ``file:`` URI as Hadoop writes it, without percent escapes.

    Raises ConfigurationError if the location is empty, malformed, or not on a file system.
    """
    if not location.strip():
        raise ConfigurationError("The location is empty.", hint=f"Supported are: {_SUPPORTED}.")
    scheme = scheme_of(location)
    if not scheme:
        return location
    if scheme in OBJECT_STORES or is_registered(location):
        raise ConfigurationError(
            f"The location {location} is not in a file system, and a directory is needed here.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Pass a path, or file:/path.",
        )
    if scheme != "file":
        raise ConfigurationError(
            f"The location {location} is of the scheme {scheme}, which is not supported.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint=f"Supported are: {', '.join([_SUPPORTED, *registered_stores()])}. statelog.register_store adds others,"
            " before the query is built.",
        )
    path = location[len("file:") :]
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        if host not in ("", "localhost"):
            raise ConfigurationError(
                f"The location {location} names the host {host!r}.",
                hint="Write file:/path or file:///path; the path is looked up on every host by itself.",
            )
        path = slash + rest
    if not path.startswith("/"):
        raise ConfigurationError(
            f"The location {location} is not an absolute path.", hint="Write file:/path or file:///path."
        )
    return path
