"""Sealed documents: JSON objects that end with a checksum of themselves.

::

    {
     "kind": "<kind>",
     "version": <version>,
     <fields>,
     "checksum": "<32 hexadecimal digits>"
    }

The checksum is the xxh3-128 of every byte before ``"checksum"``. The end has a fixed length, and a reader accepts a
document only if this end matches all bytes before it, so no flipped bit and no missing part passes. Any JSON parser can
read a document; bytes are base64. The encoding is specified in ``docs/format.md``.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
import xxhash

from statelog.errors import ConfigurationError, CorruptionError, ErrorKind

_Document = TypeVar("_Document", bound=msgspec.Struct)

MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises when it decodes bytes that do not have the expected form."""
_OWN: Final = ("kind", "version", "checksum")


class _Header(msgspec.Struct):
    kind: str
    version: int


def seal(document: msgspec.Struct, kind: str, version: int) -> bytes:
    """Encode a document with its kind, its version (from 1) and a checksum; no field may have one of these names.

    `kind` names the document for people, and keeps readers from mistaking it for another kind.
    """
    fields = msgspec.structs.asdict(document)
    assert not fields.keys() & set(_OWN), f"{type(document).__name__} has a field that the seal needs"
    members = msgspec.json.encode({"kind": kind, "version": version, **fields})
    body = msgspec.json.format(members, indent=1).removesuffix(b"\n}") + b",\n "
    return body + _end_of(body)


def unseal(data: bytes, document: type[_Document], *, kind: str, version: int, name: str) -> _Document:
    """Decode a document, and refuse one that differs in any byte from the sealed one.

    `version` is the newest that can be read; fields that older versions lack need defaults. Raises CorruptionError for
    a document that is damaged, cut off or of another kind, and ConfigurationError for a whole one of a later version.
    """
    if not _is_whole(data):
        raise CorruptionError(
            f"{name}: its {len(data)} bytes are not those that were written: the checksum at the end does not match.",
            hint="Restore the file from a copy.",
        )
    header = _decoded(data, _Header, kind, name)
    if header.kind != kind:
        raise CorruptionError(
            f"{name}: it is a {header.kind:.80}, not a {kind}.",
            kind=ErrorKind.FORMAT,
            hint="Check whether another file was put in its place.",
        )
    if header.version > version:
        raise ConfigurationError(
            f"{name}: the {kind} has version {header.version}, but this version of statelog reads up to {version}.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Use the version of statelog that wrote it, or a later one.",
        )
    return _decoded(data, document, kind, name)


def _decoded(data: bytes, document: type[_Document], kind: str, name: str) -> _Document:
    try:
        return msgspec.json.decode(data, type=document)
    except MALFORMED as error:
        raise CorruptionError(
            f"{name}: it is not a {kind}: {error}.",
            kind=ErrorKind.FORMAT,
            hint="Check whether another file was put in its place.",
        ) from error


def _end_of(body: bytes) -> bytes:
    return b'"checksum": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()


_END_BYTES: Final = len(_end_of(b""))


def _is_whole(data: bytes) -> bool:
    return data[-_END_BYTES:] == _end_of(data[:-_END_BYTES])
