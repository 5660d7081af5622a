"""From a location, as users write it, to the store behind it."""

from __future__ import annotations

import re
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind
from statelog.storage.local import LocalStore
from statelog.storage.store import Store

__all__ = ["local_path", "open_store"]

# A scheme of one letter would be a drive, as in C:/data.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


def open_store(location: str) -> Store:
    """Make the store of a location; nothing is opened or created yet.

    Raises
    ------
    ConfigurationError
        As :func:`local_path`.
    """
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
        If the location is empty, malformed, or of a scheme that is not supported.
    """
    if not location.strip():
        raise ConfigurationError("The location is empty.", hint="Pass location= with a directory.")
    scheme = _SCHEME.match(location)
    if scheme is None:
        return location
    if scheme[1].lower() != "file":
        raise ConfigurationError(
            f"The location {location} is of the scheme {scheme[1]}: object stores are not supported yet.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Pass location= with a directory that all executors share.",
        )
    path = location[scheme.end() :]
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
