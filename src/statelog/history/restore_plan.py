"""The plan of a restore: the stored levels and changesets that a subtask lacks."""

from __future__ import annotations

from typing import Final

import msgspec

from statelog.log.references import Level, SegmentRef
from statelog.runs.key_groups import HashRange

SHARED_BYTES: Final = 1 << 20
"""Up to this size, bytes that several subtasks need are read at once: the request takes the time, not the bytes."""


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A byte range of an object; several subtasks of a host need it or parts of it, so it is worth reading once."""

    name: str
    offset: int
    length: int


class ClippedSegment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A segment, and the key hashes for which it counts."""

    segment: SegmentRef
    first_hash: int
    last_hash: int
    """The last hash, included."""
    is_shared: bool
    """Whether the segment may also hold other keys, because its checkpoint has another parallelism."""
    extent: Extent | None = None
    """Holds the segment, if it is worth reading once for all subtasks of a host."""

    @property
    def within(self) -> HashRange:
        """The hashes that count."""
        return HashRange(self.first_hash, self.last_hash)


class RestorePlan(msgspec.Struct, frozen=True):
    """The stored levels and changesets of a state that a subtask lacks."""

    since: bytes
    """Chain digest of the newest state that the subtask has, or has with the levels; genesis if none."""
    first_batch: int
    """The first batch whose changes are read as segments."""
    segments: list[ClippedSegment]
    """The changes from `since` to the wanted state, oldest first. They may also hold other subtasks' keys."""
    levels: list[Level] = []
    """Missing materialized state, oldest first."""

    @property
    def extents(self) -> set[Extent]:
        """The extents worth reading once for all subtasks of a host."""
        segments = {clip.extent for clip in self.segments if clip.extent is not None}
        runs = {
            Extent(run.name, run.offset, run.length)
            for level in self.levels
            for run in level.runs
            if level.has_part_of(run) and run.length <= SHARED_BYTES
        }
        return segments | runs

    @property
    def length(self) -> int:
        """Bytes of all levels and segments."""
        segments = {(part.segment.name, part.segment.offset): part.segment.length for part in self.segments}
        return sum([level.length for level in self.levels]) + sum(segments.values())
