"""Reading a file of the log frame by frame: with few reads, and where it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from statelog.errors import CorruptionError, StorageError
from statelog.log.entry import FRAME_HEADER_BYTES, Entry, FrameReader, encode_frame
from statelog.storage import LocalStore
from statelog.storage.store import StoreWrapper
from tests.contract.log_contract import make_checkpoint, make_claim

NAME = "log/1.log"
AHEAD_BYTES = 64 * 1024


class Noted(StoreWrapper):
    """Notes which bytes are read."""

    def __init__(self, root: Path, data: bytes) -> None:
        super().__init__(LocalStore(root))
        self.put(NAME, data)
        self.reads: list[tuple[int, int]] = []

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        assert length is not None, "a file may be large"
        self.reads.append((offset, length))
        return super().read(name, offset=offset, length=length)


def frame(batch: int, payload_bytes: int = 0) -> bytes:
    entry, _ = make_checkpoint("a", 1, batch)
    return b"".join(encode_frame(entry, [bytes(payload_bytes)]))


def entries(store: Noted, size_bytes: int, offset: int = 0) -> list[Entry]:
    reader, found = FrameReader(store, NAME), []
    while held := reader.frame_at(offset, size_bytes):
        found.append(held.entry)
        offset = held.end
    return found


def test_many_small_entries_are_read_at_once(tmp_path: Path) -> None:
    data = b"".join(frame(batch) for batch in range(85))
    store = Noted(tmp_path, data)
    assert AHEAD_BYTES // 2 < len(data) < AHEAD_BYTES
    assert len(entries(store, len(data))) == 85
    assert store.reads == [(0, AHEAD_BYTES)]


def test_large_payloads_are_left_out(tmp_path: Path) -> None:
    frames = [frame(0, 10), frame(1, 3 * AHEAD_BYTES), frame(2, 5 * AHEAD_BYTES), frame(3)]
    store = Noted(tmp_path, b"".join(frames))
    assert len(entries(store, sum(map(len, frames)))) == 4
    starts = [0, sum(map(len, frames[:2])), sum(map(len, frames[:3]))]
    assert store.reads == [(start, AHEAD_BYTES) for start in starts]


@pytest.mark.parametrize("spare_bytes", [-1, 0, FRAME_HEADER_BYTES, FRAME_HEADER_BYTES + 1])
def test_what_was_read_ahead_is_used_as_far_as_it_goes(tmp_path: Path, spare_bytes: int) -> None:
    """A frame ends where the bytes end that were read, or a little before."""
    first = frame(0, AHEAD_BYTES - len(frame(0)) - len(frame(1)) - spare_bytes)
    data = first + frame(1) + frame(2)
    store = Noted(tmp_path, data)
    assert len(entries(store, len(data))) == 3
    second = len(first) if spare_bytes < 0 else len(first + frame(1))
    again = [len(first) + FRAME_HEADER_BYTES] if spare_bytes < 0 else []
    if spare_bytes >= FRAME_HEADER_BYTES:
        again = [second + FRAME_HEADER_BYTES]
    elif spare_bytes >= 0:
        again = [second]
    assert [offset for offset, _ in store.reads] == [0, *again]


def test_zeros_up_to_the_end_are_what_a_crash_leaves_of_a_write(tmp_path: Path) -> None:
    """Whatever stands behind the end, if a newer run has ended the file there."""
    for zeros in (FRAME_HEADER_BYTES, AHEAD_BYTES, AHEAD_BYTES + 1, 3 * AHEAD_BYTES):
        data = frame(0) + bytes(zeros)
        store = Noted(tmp_path, data + b"x")
        assert len(entries(store, len(data))) == 1
        with pytest.raises(CorruptionError, match=f"no log entry at offset {len(frame(0))}"):
            entries(store, len(data) + 1)


def test_a_whole_header_that_is_damaged_is_damage_also_at_the_end(tmp_path: Path) -> None:
    """A write that was cut off leaves a header that is good, or not all of it."""
    head = frame(1)[:FRAME_HEADER_BYTES]
    data = frame(0) + head
    assert len(entries(Noted(tmp_path, data), len(data))) == 1
    data = frame(0) + head[:-1]
    assert len(entries(Noted(tmp_path, data), len(data))) == 1
    data = frame(0) + head[:-1] + bytes([head[-1] ^ 1])
    with pytest.raises(CorruptionError, match=f"log entry at offset {len(frame(0))} is damaged"):
        entries(Noted(tmp_path, data), len(data))


def test_zeros_to_the_end_of_a_file_are_no_entry_for_a_reader_that_does_not_know_its_size(tmp_path: Path) -> None:
    zeros = bytes(FRAME_HEADER_BYTES)
    assert FrameReader(Noted(tmp_path, zeros), NAME).frame_at(0, 1 << 62) is None
    assert FrameReader(Noted(tmp_path, zeros + bytes(1 << 16)), NAME).frame_at(0, 1 << 62) is None


def test_a_file_that_becomes_shorter_can_be_read_again(tmp_path: Path) -> None:
    store = Noted(tmp_path, frame(0))
    with pytest.raises(
        StorageError, match=r"became shorter while it was read: 10 of \d+ bytes are there at offset \d+"
    ):
        entries(store, 2 * len(frame(0)), offset=len(frame(0)) - 10)
    store = Noted(tmp_path, b"".join(encode_frame(make_claim("a")(1), [])))
    reader = FrameReader(store, NAME)
    store.put(NAME, frame(0)[: FRAME_HEADER_BYTES + 1])
    with pytest.raises(StorageError, match=rf"{tmp_path}: {NAME} became shorter while it was read: \d+ of"):
        reader.frame_at(0, len(frame(0)))
