"""What the tests of :mod:`tests.history.test_operator_history` and others share."""

from __future__ import annotations

from statelog.log.entry import Checkpoint
from statelog.log.references import Base, Level, SegmentRef, StoredRun
from statelog.runs import digests
from statelog.runs.key_groups import hash_range
from tests.entries import checkpoint_of


def segment(subtask: int, name: str = "log/1", offset: int = 0, length: int = 10) -> SegmentRef:
    return SegmentRef(subtask, subtask, b"%d %d" % (subtask, offset), offset, length, 1, 1, name)


def checkpoint(batch: int, *segments: SegmentRef, parallelism: int = 1, number: int = 0) -> Checkpoint:
    """A checkpoint of an operator whose state begins with batch 0."""
    return checkpoint_of(batch, segments, parallelism=parallelism, number=number, begins=batch == 0)


def base(through: int, subtask: int = 0, parallelism: int = 1) -> Base:
    own = hash_range(subtask, parallelism)
    name = f"op/runs/1/{subtask}/{through}"
    run = StoredRun(name, 0, 10, name.encode(), 1, own.first, own.last)
    digest = f"{subtask} of {parallelism} after {through}".encode()
    return Base(subtask, parallelism, [Level(0, through, b"", digest, own.first, own.last, [run])])


def digest(genesis: bytes, *parts: tuple[int, list[SegmentRef]]) -> bytes:
    for batch, segments in parts:
        genesis = digests.extend(genesis, batch, [one.checksum for one in segments])
    return genesis
