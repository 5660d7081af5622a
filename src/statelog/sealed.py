"""Sealed documents: JSON objects that end with a checksum of themselves.

::

    {
     "kind": "<kind>",
     "version": <version>,
     <fields>,
     "checksum": "<32 hexadecimal digits>"
    }

The checksum is the xxh3-128 of every byte before ``"checksum"``. The end has a fixed length, so a reader takes the
document for whole only if its last bytes are exactly those that its first bytes ask for: no flipped bit and no missing
piece passes. Any reader of JSON can read a document; bytes are base64. The encoding is specified in ``docs/format.md``.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
import xxhash

from statelog.errors import ConfigurationError, CorruptionError, ErrorKind

_Document = TypeVar("_Document", bound=msgspec.Struct)

_OWN: Final = ("kind", "version", "checksum")


class _Header(msgspec.Struct):
    kind: str
    version: int


def seal(document: msgspec.Struct, kind: str, version: int) -> bytes:
    """Encode a document.

    Parameters
    ----------
    document : Struct
        What it says; none of its fields is named kind, version or checksum.
    kind : str
        What it is, for people and so that no document is taken for one of another kind.
    version : int
        Version of its fields, from 1.
    """
    fields = msgspec.structs.asdict(document)
    assert not fields.keys() & set(_OWN), f"{type(document).__name__} has a field that the seal needs"
    members = msgspec.json.encode({"kind": kind, "version": version, **fields})
    body = msgspec.json.format(members, indent=1).removesuffix(b"\n}") + b",\n "
    return body + _end_of(body)


def unseal(data: bytes, document: type[_Document], *, kind: str, version: int, name: str) -> _Document:
    """Decode a document, and refuse one that is not byte for byte what was sealed.

    Parameters
    ----------
    data : bytes
        The sealed document.
    document : type
        What it is decoded to; fields that older versions do not have need defaults.
    kind : str
        What it must be.
    version : int
        The newest version that can be read.
    name : str
        The object, for messages.

    Raises
    ------
    CorruptionError
        If it is damaged, cut off or of another kind.
    ConfigurationError
        If it is whole, and of a later version.
    """
    if not _is_whole(data):
        raise CorruptionError(
            f"{name}: its {len(data)} bytes are not those that were written: the checksum at its end is another.",
            hint="Restore the file from a copy.",
        )
    try:
        header = _header_decoder.decode(data)
        if header.kind == kind and header.version > version:
            raise ConfigurationError(
                f"{name}: the {kind} is of version {header.version}, and this statelog reads up to {version}.",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                hint="Use the version of statelog that wrote it, or a later one.",
            )
        if header.kind == kind:
            return msgspec.json.decode(data, type=document)
    except msgspec.MsgspecError as error:
        raise CorruptionError(
            f"{name}: it is no {kind}: {error}.", kind=ErrorKind.FORMAT, hint="Was another file put in its place?"
        ) from error
    raise CorruptionError(
        f"{name}: it is a {header.kind}, and no {kind}.",
        kind=ErrorKind.FORMAT,
        hint="Was another file put in its place?",
    )


def _end_of(body: bytes) -> bytes:
    return b'"checksum": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()


_END_BYTES: Final = len(_end_of(b""))
_header_decoder: Final = msgspec.json.Decoder(_Header)


def _is_whole(data: bytes) -> bool:
    return data[-_END_BYTES:] == _end_of(data[:-_END_BYTES])
