"""Entries of versions that this statelog does not know."""

from __future__ import annotations

import struct

import pytest
import xxhash
from msgspec.structs import replace

from statelog.errors import ConfigurationError, CorruptionError
from statelog.log.entry import FRAME_HEADER_BYTES, Fence, decode_header, encode_frame
from tests.contract.log_contract import make_checkpoint, make_claim

HEADER = struct.Struct("<4sIQQQ")


def header_of(magic: bytes) -> bytes:
    """A header whose checksum fits, whatever its magic is."""
    frame = b"".join(encode_frame(*make_checkpoint("a", 1, 0)))
    fields = HEADER.unpack(frame[:FRAME_HEADER_BYTES])
    head = HEADER.pack(magic, *fields[1:])[:-8]
    return head + xxhash.xxh3_64_digest(head)[::-1]


def test_the_own_version_is_read_and_written() -> None:
    assert decode_header(header_of(b"SLE1"), name="x.log", offset=0).payload_bytes > 0
    claim, (entry, _) = make_claim("a")(1), make_checkpoint("a", 1, 0)
    for one in (claim, replace(claim, follows=b"id"), entry, replace(entry, ended=["a-1"]), Fence(1, {})):
        assert encode_frame(one, [])[0].startswith(b"SLE1")


@pytest.mark.parametrize("version", [0, 2, 9])
def test_an_entry_of_another_version_is_refused_by_name(version: int) -> None:
    expected = rf"x\.log: the log entry at offset 7 has version {version}, but this version of statelog reads version 1"
    with pytest.raises(ConfigurationError, match=expected):
        decode_header(header_of(b"SLE%d" % version), name="x.log", offset=7)


@pytest.mark.parametrize("data", [header_of(b"NOPE"), header_of(b"SLE2")[:-1] + b"\0"], ids=["magic", "checksum"])
def test_other_bytes_are_damage(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_header(data, name="x.log", offset=0)
