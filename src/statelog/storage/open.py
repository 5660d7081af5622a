"""From a location, as users write it, to the store behind it."""

from __future__ import annotations

from typing import Final

from statelog.errors import ConfigurationError, ErrorKind
from statelog.storage.local import LocalStore
from statelog.storage.location import OBJECT_STORES, scheme_of
from statelog.storage.store import Store

_SUPPORTED: Final = f"a directory (a path, or file:/path), {', '.join(f'{scheme}://' for scheme in OBJECT_STORES)}"


def open_store(location: str) -> Store:
    """Make the store of a location; nothing is opened or created yet.

    Parameters
    ----------
    location : str
        As for :func:`local_path`, or one in an object store, such as ``s3://bucket/folder``.

    Raises
    ------
    ConfigurationError
        If the location is empty, malformed, or of a scheme that is not supported.
    """
    if scheme_of(location) in OBJECT_STORES:
        # Not at the top: a location in a directory does without the client of object stores.
        from statelog.storage.objects import ObjectStore

        return ObjectStore(location)
    return LocalStore(local_path(location))


def local_path(location: str) -> str:
    """The path of a location on a local or mounted file system.

    Parameters
    ----------
    location : str
        A path, or a ``file:`` URI as Hadoop writes it: what follows the scheme is the path as it is,
        without percent escapes.

    Raises
    ------
    ConfigurationError
        If the location is empty, malformed, or not on a file system.
    """
    if not location.strip():
        raise ConfigurationError("The location is empty.", hint=f"Supported are: {_SUPPORTED}.")
    scheme = scheme_of(location)
    if not scheme:
        return location
    if scheme in OBJECT_STORES:
        raise ConfigurationError(
            f"The location {location} is in an object store, and a directory is needed here.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Pass a path, or file:/path.",
        )
    if scheme != "file":
        raise ConfigurationError(
            f"The location {location} is of the scheme {scheme}, which is not supported.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint=f"Supported are: {_SUPPORTED}.",
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
