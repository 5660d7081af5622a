"""Parsing of locations as users write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind

# A scheme of one letter would be a drive, as in C:/data.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")

OBJECT_STORES: Final = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""The service behind each scheme of an object store."""

HDFS: Final = "hdfs"
"""The scheme of HDFS."""

HDFS_PORT: Final = 8020
"""The port of a NameNode whose location names none."""

AZURE_HOST: Final = ".dfs.core.windows.net"
"""End of the host name of a storage account."""

_HINT: Final = (
    "Write s3://bucket/folder, gs://bucket/folder, az://container/folder,"
    f" or abfss://container@account{AZURE_HOST}/folder."
)


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    """A folder in a bucket."""

    service: str
    """``s3``, ``gs`` or ``az``."""
    bucket: str
    """Bucket or container; for ``abfss:`` also ``container@host of the account``."""
    folder: str
    """Prefix of all object names, without leading and trailing slashes; may be empty."""

    @staticmethod
    def parse(location: str) -> ObjectLocation:
        """Parse a location such as ``s3://bucket/folder``; the folder is taken literally, without percent escapes.

        Any other form raises ConfigurationError. Where the rest may hold credentials, the message shows only the
        scheme.
        """
        scheme, separator, rest = location.partition("://")
        service = OBJECT_STORES.get(scheme.lower())
        if service is None or not separator:
            raise ConfigurationError(
                f"The location {location} is not in an object store.",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                hint=_HINT,
            )
        bucket, slash, folder = rest.rstrip("/").partition("/")
        name, _, host = bucket.partition("@")
        names_account = scheme.lower() in ("abfs", "abfss") and host.endswith(AZURE_HOST)
        if "?" in rest or "#" in rest or ":" in bucket or ("@" in bucket and not names_account):
            raise ConfigurationError(
                f"The location {scheme}:// holds more than a bucket and a folder.",
                hint="Credentials and endpoints are taken from the environment; see docs/object-stores.md.",
            )
        if not name or (slash and any(part in ("", ".", "..") for part in folder.split("/"))):
            raise ConfigurationError(f"The location {location} is malformed.", hint=_HINT)
        if service == "az" and "\\" in folder:
            raise ConfigurationError(
                f"The location {location} holds a backslash, which Azure treats as a slash.",
                hint="Choose a folder without backslashes.",
            )
        return ObjectLocation(service, bucket, folder)


_AUTHORITY: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]+)?")


@dataclass(frozen=True, slots=True)
class HdfsLocation:
    """A folder in HDFS."""

    authority: str
    """A name service, or host and port of a NameNode; the port may be left out."""
    folder: str
    """Path of the folder, without leading and trailing slashes; may be empty."""

    @staticmethod
    def parse(location: str) -> HdfsLocation:
        """Parse a location such as ``hdfs://cluster/folder``; the folder is taken literally, without percent escapes.

        Any other form raises ConfigurationError. Where the location may hold credentials, the message does not show it.
        """
        scheme, separator, rest = location.partition("://")
        authority, slash, folder = rest.rstrip("/").partition("/")
        hint = "Write hdfs://nameservice/folder, or hdfs://host:port/folder with a NameNode's host and RPC port."
        if scheme.lower() != HDFS or not separator or not authority:
            raise ConfigurationError(
                f"The location {location} is not in HDFS.", kind=ErrorKind.UNSUPPORTED_FEATURE, hint=hint
            )
        if not _AUTHORITY.fullmatch(authority):
            raise ConfigurationError(
                "The location hdfs:// names more than a host and a port before its folder.",
                hint=f"{hint} Credentials are taken from the environment; see docs/hdfs.md.",
            )
        if slash and not is_hdfs_path(folder):
            raise ConfigurationError(
                f"The location {location} is malformed.",
                hint=f"{hint} No part of the folder is empty, '.', '..' or '.snapshot', or has a colon.",
            )
        return HdfsLocation(authority, folder)


def is_hdfs_path(path: str) -> bool:
    """Whether a path, relative to the root, is valid in HDFS without changes."""
    is_reserved = path == ".reserved" or path.startswith(".reserved/")
    is_plain = not any(part in ("", ".", "..", ".snapshot") for part in path.split("/"))
    return is_plain and not is_reserved and not any(c == ":" or ord(c) < 32 or ord(c) == 127 for c in path)


def scheme_of(location: str) -> str:
    """The scheme of a location, in lower case; empty for a path."""
    scheme = _SCHEME.match(location)
    return "" if scheme is None else scheme[1].lower()
