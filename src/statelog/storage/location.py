"""Locations as users write them, taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind

# A scheme of one letter would be a drive, as in C:/data.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")

OBJECT_STORES: Final = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""The service behind each scheme of an object store."""

AZURE_HOST: Final = ".dfs.core.windows.net"
"""What the host of a storage account ends with."""

_HINT: Final = (
    "Write s3://bucket/folder, gs://bucket/folder, az://container/folder,"
    f" or abfss://container@account{AZURE_HOST}/folder."
)


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    """A folder in a bucket.

    Parameters
    ----------
    service : str
        ``s3``, ``gs`` or ``az``.
    bucket : str
        The bucket or container; for ``abfss:`` also ``container@host of the account``.
    folder : str
        What the names of all objects begin with, without slashes at the ends; may be empty.
    """

    service: str
    bucket: str
    folder: str

    @staticmethod
    def parse(location: str) -> ObjectLocation:
        """Take a location apart; what follows the bucket is the folder as it is, without percent escapes.

        Raises
        ------
        ConfigurationError
            If it is not of a form like ``s3://bucket/folder``. The message shows no more than the scheme where
            the rest may hold credentials.
        """
        scheme, separator, rest = location.partition("://")
        service = OBJECT_STORES.get(scheme.lower())
        if service is None or not separator:
            raise ConfigurationError(
                f"The location {location} is not one in an object store.",
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
        return ObjectLocation(service, bucket, folder)


def scheme_of(location: str) -> str:
    """The scheme of a location in lower case; empty for a path."""
    scheme = _SCHEME.match(location)
    return "" if scheme is None else scheme[1].lower()
