"""Where changesets are stored."""

from __future__ import annotations

from typing import Final

import msgspec

from statelog.log.references import Level, SegmentRef
from statelog.runs.key_groups import HashRange

SHARED_BYTES: Final = 1 << 20
"""Of what several subtasks need as much is read at once: then it is the request that takes the time, not the bytes."""


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A byte range of an object that several subtasks need, or parts of it."""

    name: str
    offset: int
    length: int


class ClippedSegment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A segment, and the key hashes for which it counts.

    Parameters
    ----------
    segment : SegmentRef
        The segment.
    first_hash, last_hash : int
        Key hashes for which it counts.
    is_shared : bool
        Whether it may hold other keys, because the checkpoint has another parallelism.
    extent : Extent, optional
        What is worth reading once for all subtasks of a host; it holds the segment.
    """

    segment: SegmentRef
    first_hash: int
    last_hash: int
    is_shared: bool
    extent: Extent | None = None

    @property
    def within(self) -> HashRange:
        """The hashes that count."""
        return HashRange(self.first_hash, self.last_hash)


class RestorePlan(msgspec.Struct, frozen=True):
    """What a subtask lacks of a state.

    Parameters
    ----------
    since : bytes
        Chain digest of the newest state that the subtask has, or has with the levels; of the empty state if it has
        none.
    first_batch : int
        The first batch whose changes it lacks beside the levels.
    segments : list of ClippedSegment
        What leads from there to the wanted state, oldest first. They may hold other subtasks' keys too.
    levels : list of Level
        Materialized state that it lacks, oldest first.
    """

    since: bytes
    first_batch: int
    segments: list[ClippedSegment]
    levels: list[Level] = []

    @property
    def extents(self) -> set[Extent]:
        """What is worth reading once for all subtasks of a host."""
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
        """Size of all of it in bytes."""
        segments = {(part.segment.name, part.segment.offset): part.segment.length for part in self.segments}
        return sum([level.length for level in self.levels]) + sum(segments.values())
