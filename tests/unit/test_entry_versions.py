"""Entries of versions that this statelog does not know."""

from __future__ import annotations

import struct

import pytest
import xxhash
from msgspec.structs import replace

from statelog.errors import ConfigurationError, CorruptionError
from statelog.log.entry import FRAME_HEADER_BYTES, FRAME_MAGIC, Fence, decode_header, encode_frame
from tests.contract.log_contract import make_checkpoint, make_claim

HEADER = struct.Struct("<4sIQQQ")


def header_of(magic: bytes) -> bytes:
    """A header whose checksum fits, whatever its magic is."""
    frame = b"".join(encode_frame(*make_checkpoint("a", 1, 0)))
    fields = HEADER.unpack(frame[:FRAME_HEADER_BYTES])
    head = HEADER.pack(magic, *fields[1:])[:-8]
    return head + xxhash.xxh3_64_digest(head)[::-1]


@pytest.mark.parametrize("magic", [b"SLE1", FRAME_MAGIC, b"SLE3"])
def test_known_versions_are_read(magic: bytes) -> None:
    assert decode_header(header_of(magic), name="x.log", offset=0).payload_bytes > 0


@pytest.mark.parametrize("version", [0, 4, 9])
def test_an_entry_of_another_version_is_refused_by_name(version: int) -> None:
    expected = rf"x\.log: the log entry at offset 7 is of version {version}, .* up to 3"
    with pytest.raises(ConfigurationError, match=expected):
        decode_header(header_of(b"SLE%d" % version), name="x.log", offset=7)


@pytest.mark.parametrize("data", [header_of(b"NOPE"), header_of(b"SLE4")[:-1] + b"\0"], ids=["magic", "checksum"])
def test_other_bytes_are_damage(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_header(data, name="x.log", offset=0)


def test_only_entries_that_older_versions_would_misread_are_of_the_newest_version() -> None:
    claim, (entry, _) = make_claim("a")(1), make_checkpoint("a", 1, 0)
    for one, version in (
        (claim, b"2"),
        (replace(claim, gives_up=True), b"3"),
        (entry, b"2"),
        (replace(entry, is_initial=True), b"3"),
        (Fence(1, {}), b"2"),
    ):
        assert encode_frame(one, [])[0].startswith(b"SLE" + version), one
