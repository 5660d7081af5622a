"""Readers of stored bytes that are given anything: they read what was written, or say where the damage is."""

from __future__ import annotations

import contextlib
import struct
import tempfile
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from statelog.errors import CorruptionError, StorageError
from statelog.log.entry import FRAME_MAGIC, encode_frame
from statelog.log.numbered import NumberedLog
from statelog.operators.unkeyed.snapshot import Snapshot, StateElements, encode_snapshot, section_sizes
from statelog.runs.schema import StateSchema
from statelog.storage import LocalStore
from statelog.testing.query import ManualClock
from tests.contract.log_contract import PREFIX, make_checkpoint, make_claim

FRAMES = [
    b"".join(encode_frame(make_claim("a")(1), [])),
    *(b"".join(encode_frame(*make_checkpoint("a", 1, batch))) for batch in range(3)),
]

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=9) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=9,
)


def read_log(*files: bytes) -> None:
    """Read a log of some files; nothing but a clear error may come out beside entries."""
    with tempfile.TemporaryDirectory() as directory:
        for number, data in enumerate(files, 1):
            path = Path(directory, PREFIX, f"{number:020}.log")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        log = NumberedLog(LocalStore(directory), PREFIX, ManualClock(), appends=True)
        with contextlib.suppress(CorruptionError, StorageError):
            log.read()


def frame_of(index: bytes, payload: bytes = b"") -> bytes:
    """A frame whose checksums fit whatever its index is."""
    checksum = xxhash.xxh3_64_intdigest(index)
    head = struct.pack("<4sIQQ", FRAME_MAGIC, len(index), len(payload), checksum)
    return head + xxhash.xxh3_64_digest(head)[::-1] + index + payload


@settings(max_examples=300)
@given(st.data())
def test_a_log_with_pieces_cut_out_and_put_in(data: st.DataObject) -> None:
    whole = bytearray(b"".join(FRAMES))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole)))
        whole[at : at + data.draw(st.integers(0, 60))] = data.draw(st.binary(max_size=60))
    read_log(bytes(whole), FRAMES[0])


@settings(max_examples=300)
@given(anything, st.binary(max_size=40))
def test_an_index_of_any_content(content: object, payload: bytes) -> None:
    index = msgspec.msgpack.encode(content)
    read_log(FRAMES[0] + frame_of(index, payload) + FRAMES[1])
    read_log(frame_of(index, payload))


def test_a_last_entry_that_is_as_it_was_written_is_not_taken_for_torn(tmp_path: Path) -> None:
    """Its form is unknown, and it contains sectors of zeros. Its checksums are correct, so a crash is not the cause."""
    name = f"{PREFIX}/{1:020}.log"
    LocalStore(tmp_path).put(name, FRAMES[0] + frame_of(bytes(2000)))
    log = NumberedLog(LocalStore(tmp_path), PREFIX, ManualClock(), appends=True)
    with pytest.raises(
        CorruptionError, match=f"{name}: the log entry at offset {len(FRAMES[0])} is of an unknown form"
    ):
        log.read()


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(["type", "epoch", "batch", "segments", "ends", "log_start"]), anything))
def test_an_index_that_is_nearly_right(fields: dict[str, object]) -> None:
    for tag in ("claim", "fence", "checkpoint"):
        entry, _ = make_checkpoint("a", 1, 1)
        right = {name: getattr(entry, name) for name in entry.__struct_fields__}
        read_log(FRAMES[0] + frame_of(msgspec.msgpack.encode({**right, "type": tag, **fields})), FRAMES[1])


@given(st.binary(max_size=200), st.integers(0, 500))
def test_a_snapshot_of_any_bytes(noise: bytes, at: int) -> None:
    state = StateSchema("units", "operator-list", b"", b"")
    data = bytearray(encode_snapshot([StateElements(state, b"x" * 70, 1, xxhash.xxh3_128_digest(b"x" * 70))]))
    data[at : at + len(noise)] = noise
    with contextlib.suppress(CorruptionError):
        for section in Snapshot(bytes(data), "x").sections.values():
            assert bytes(section.data) == b"x" * 70 or xxhash.xxh3_128_digest(section.data) != section.checksum
    with contextlib.suppress(CorruptionError):
        assert section_sizes(lambda count: bytes(data[:count]), "x") == {"units": (1, 70)}
