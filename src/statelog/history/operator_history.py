"""The checkpoints of an operator that can be restored: its sections on the query's line, read as a stack."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from statelog.history.bases import BaseMap, BaseView
from statelog.history.restore_plan import SHARED_BYTES, ClippedSegment, Extent, RestorePlan
from statelog.log.entry import INITIAL_BATCH, Checkpoint
from statelog.log.references import BaseRange, Level, SegmentRef, StoredRun
from statelog.runs import digests
from statelog.runs.key_groups import KEY_GROUPS

_ENTRY_BYTES: Final = 256
"""The approximate size of an entry, without its references to segments."""
_REFERENCE_BYTES: Final = 100


@dataclass(frozen=True)
class Record:
    """A checkpoint with its base map."""

    checkpoint: Checkpoint
    base_map: BaseMap | None
    """The base map; None if the entries with the bases are gone: the checkpoint then cannot be restored."""
    base_map_since: int
    """The log has the bases from this batch's entry on."""
    added: list[BaseRange]
    """Base ranges that the entry added."""
    removed: list[BaseRange]
    """Base ranges that the entry removed."""
    changes_before: int
    """Bytes of the changes of all earlier batches that were known when the entry was added."""

    @property
    def batch(self) -> int:
        """The checkpoint's batch."""
        return self.checkpoint.batch

    @property
    def needed_from(self) -> int:
        """The first batch whose entry the checkpoint builds on."""
        if self.checkpoint.is_whole or self.base_map is None:
            return self.batch
        return min(self.base_map.through + 1, self.base_map_since, self.batch)

    @property
    def changes_through(self) -> int:
        """The approximate bytes of the same changes and of its own, including their entries."""
        references = sum([segment.length + _REFERENCE_BYTES for segment in self.checkpoint.segments])
        return self.changes_before + _ENTRY_BYTES + references

    @property
    def added_runs(self) -> list[StoredRun]:
        """The runs of the base ranges that it added."""
        return [run for base_range in self.added for run in base_range.runs]

    @property
    def removed_runs(self) -> list[StoredRun]:
        """The runs of the base ranges that it removed; older checkpoints need them."""
        return [run for base_range in self.removed for run in base_range.runs]

    def extent_of(self, segment: SegmentRef, is_shared: bool) -> Extent | None:
        """The bytes to read once for all subtasks of a host, if several need the segment or its neighbours."""
        if (group := self._group) is not None and segment.name == group.name:
            return group
        if is_shared and segment.length <= SHARED_BYTES:
            return Extent(segment.name, segment.offset, segment.length)
        return None

    @cached_property
    def _group(self) -> Extent | None:
        """The bytes that hold the changesets of several subtasks side by side; None if they are too many.

        Inside the log entry, these are the changes of all operators: a host reads them once.
        """
        segments, (start, end) = self.checkpoint.segments, self.checkpoint.inside
        inside = self.checkpoint.place.inside(segments)
        if inside and inside[0].length < end - start <= SHARED_BYTES:
            return Extent(inside[0].name, start, end - start)
        names = [segment.name for segment in segments]
        [(name, count)] = Counter(names).most_common(1)
        if count < 2:
            return None
        first, last = segments[names.index(name)], segments[-1 - names[::-1].index(name)]
        length = last.offset + last.length - first.offset
        return Extent(name, first.offset, length) if length <= SHARED_BYTES else None


class History:
    """The checkpoints of one operator that can be restored, by batch.

    A later checkpoint of a batch replaces the earlier one and all of later batches: a newer start repeated the batch,
    or a later attempt of the same start had another result. A checkpoint that begins the operator's state needs no
    earlier ones, nor do checkpoints that hold the whole state. Other checkpoints need those after their bases.
    """

    def __init__(self, checkpoints: Iterable[Checkpoint] = ()) -> None:
        self._records: list[Record] = []
        self._base_map_before: BaseMap | None = None
        self._settled = -1
        for checkpoint in checkpoints:
            self.add(checkpoint)

    def add(self, checkpoint: Checkpoint) -> list[Record]:
        """Add a later checkpoint; return the records that it replaces, newest first."""
        replaced = self.cut(checkpoint.batch - 1)
        self._records.append(self._recorded(checkpoint))
        return replaced

    def cut(self, batch: int) -> list[Record]:
        """Drop the checkpoints of all batches after one; return them, newest first."""
        dropped: list[Record] = []
        while self._records and self._records[-1].batch > batch:
            dropped.append(self._records.pop())
        self._settled = min(self._settled, batch)
        return dropped

    @classmethod
    def on_base(cls, base_ranges: Iterable[BaseRange], checkpoints: Sequence[Checkpoint]) -> History:
        """Successive checkpoints as changes of a materialized state, whatever was materialized in between."""
        ranges = list(base_ranges)
        return cls(
            replace(checkpoint, bases=[], base_ranges=None if number else ranges)
            for number, checkpoint in enumerate(checkpoints)
        )

    def copy(self) -> History:
        """The history as it is now."""
        copied = History()
        copied._records = list(self._records)
        copied._base_map_before, copied._settled = self._base_map_before, self._settled
        return copied

    def _recorded(self, checkpoint: Checkpoint) -> Record:
        before = self._records[-1] if self._records else None
        base_map = before.base_map if before else self._base_map_before
        since = before.base_map_since if before else 0
        added: list[BaseRange] = []
        removed: list[BaseRange] = []
        if checkpoint.base_ranges is not None:
            if base_map is None:
                added += checkpoint.base_ranges
            begins_at = checkpoint.batch if checkpoint.begins else base_map.begins_at if base_map else 0
            base_map, since = BaseMap(tuple(checkpoint.base_ranges), begins_at), checkpoint.batch
        elif checkpoint.begins:
            base_map, since = BaseMap(begins_at=checkpoint.batch), checkpoint.batch
        if base_map is not None:
            for base in checkpoint.bases:
                replacement = base_map.replace(base)
                base_map = replacement.base_map
                added += replacement.added
                removed += replacement.removed
        return Record(checkpoint, base_map, since, added, removed, before.changes_through if before else 0)

    @property
    def first_batch(self) -> int | None:
        """The batch of the oldest known checkpoint."""
        return self._records[0].batch if self._records else None

    @property
    def latest(self) -> Checkpoint | None:
        """The newest checkpoint."""
        return self._records[-1].checkpoint if self._records else None

    @property
    def oldest(self) -> Checkpoint | None:
        """The oldest checkpoint that can be restored."""
        return next((record.checkpoint for record in self._records if self._is_restorable(record)), None)

    @property
    def retained_from(self) -> int:
        """The oldest batch that can be restored, by the newest entry; files that only older ones need may be gone."""
        return INITIAL_BATCH if self.latest is None else self.latest.retained_from

    @property
    def begins_empty(self) -> bool:
        """Whether the changes of all batches are present, and there was no state before the first one."""
        first = self._records[0] if self._records else None
        return first is not None and first.checkpoint.begins and first.base_map == BaseMap(begins_at=first.batch)

    @property
    def latest_record(self) -> Record | None:
        """The newest checkpoint with its base map."""
        return self._records[-1] if self._records else None

    @property
    def first_missing(self) -> int | None:
        """The oldest batch whose checkpoint is lost although a later one exists; None if none is lost."""
        if not self._records:
            return None
        first, newest = self._records[0], self._records[-1]
        if not self._is_restorable(newest):
            return 0 if newest.base_map is None else newest.needed_from
        for expected, record in enumerate(self._records, first.batch):
            if record.batch != expected:
                return expected
        return None

    def has_batch(self, batch: int) -> bool:
        """Whether the checkpoint of a batch exists and can be restored."""
        record = self.record(batch)
        return self.first_missing is None and record is not None and self._is_restorable(record)

    def _is_restorable(self, record: Record) -> bool:
        if record.batch < self.retained_from:
            return False
        if record.checkpoint.is_whole:
            return True
        return record.base_map is not None and record.needed_from >= self._records[0].batch

    def record(self, batch: int) -> Record | None:
        """The checkpoint of a batch with its base map; None if there is none."""
        place = self._place(batch)
        found = self._records[place] if place < len(self._records) else None
        return found if found is not None and found.batch == batch else None

    def at(self, batch: int) -> Checkpoint | None:
        """The checkpoint of a batch; None if there is none."""
        record = self.record(batch)
        return None if record is None else record.checkpoint

    def between(self, first: int, last: int) -> Iterator[Checkpoint]:
        """Checkpoints from one batch to another, both included, oldest first."""
        return (record.checkpoint for record in self._between(first, last))

    def _between(self, first: int, last: int) -> Iterator[Record]:
        places = range(self._place(first), self._place(last + 1))
        return (self._records[place] for place in places)

    def _place(self, batch: int) -> int:
        """Index of the first checkpoint that is not before a batch."""
        return bisect.bisect_left(self._records, batch, key=_batch)

    def settle(self, oldest: int) -> list[Record]:
        """The records up to the oldest that a rewind can reach, each returned once.

        The base ranges that they removed are no longer needed.
        """
        settled = self._records[self._place(self._settled + 1) : self._place(oldest + 1)]
        self._settled = max(self._settled, oldest)
        return settled

    def retain(self, oldest: int, changes_from: int | None = None) -> list[Record]:
        """Drop checkpoints before a batch, unless later ones build on them; return them.

        Checkpoints from `changes_from` on also stay.
        """
        count = self._place(self._kept_from(oldest, changes_from))
        given_up = self._records[:count]
        if given_up:
            self._base_map_before = given_up[-1].base_map
            del self._records[:count]
        return given_up

    def _kept_from(self, oldest: int, changes_from: int | None) -> int:
        needed = self.needed_from(oldest)
        return needed if changes_from is None else min(needed, changes_from)

    def needed_from(self, oldest: int) -> int:
        """The first batch whose entry is needed to restore a batch, or the oldest one after it.

        It is after the newest checkpoint if that is before `oldest`: the operator has left the query.
        """
        if self._records and self._records[-1].batch < oldest:
            return self._records[-1].batch + 1
        for place in range(self._place(oldest), len(self._records)):
            if self._is_restorable(self._records[place]):
                return self._records[place].needed_from
        return self._records[0].batch if self._records else oldest

    @property
    def changes_from(self) -> int:
        """The first batch whose changes are stored without a pin, with those of all later ones."""
        return self.needed_from(self.retained_from)

    def changes_bytes(self, first: int) -> int:
        """Bytes of the changes of a batch and of all later ones, including their entries."""
        place = self._place(first)
        if place == len(self._records):
            return 0
        return self._records[-1].changes_through - self._records[place].changes_before

    def log_start(self, oldest: int, batch: int, changes_from: int | None = None) -> int | None:
        """The first log file with a needed entry, once the checkpoint of a batch is written.

        `oldest` is the oldest batch that a rewind can reach; entries from `changes_from` on are needed too. None if
        only the file of the new entry is needed.
        """
        needed = self._place(min(self._kept_from(oldest, changes_from), batch))
        return self._records[needed].checkpoint.number if needed < self._place(batch) else None

    @property
    def checkpoints(self) -> Iterator[Checkpoint]:
        """All checkpoints, oldest first."""
        return (record.checkpoint for record in self._records)

    @property
    def records(self) -> Iterator[Record]:
        """All checkpoints with their base maps, oldest first."""
        return iter(self._records)

    def object_names(self) -> set[str]:
        """All objects that hold a segment or a run."""
        names = {segment.name for record in self._records for segment in record.checkpoint.segments}
        names |= {run.name for record in self._records for run in record.added_runs + record.removed_runs}
        if self._base_map_before is not None:
            names |= {run.name for base_range in self._base_map_before.ranges for run in base_range.runs}
        return names

    def digest(self, genesis: bytes, subtask: int, parallelism: int, batch: int) -> bytes:
        """Digest of a subtask's state after a batch, in any parallelism.

        `genesis` is the digest of its empty state, that is, the state after batch -1.
        """
        view = self._view(genesis, subtask, parallelism, batch)
        digest = view.digest
        for checkpoint in self.between(view.first_batch, batch):
            digest = _extended(digest, checkpoint, overlapping(checkpoint, subtask, parallelism))
        return digest

    def _view(self, genesis: bytes, subtask: int, parallelism: int, batch: int) -> BaseView:
        record = self.record(batch)
        base_map = record.base_map if record else None
        return (base_map or BaseMap()).view_of(genesis, subtask, parallelism)

    def levels(self, genesis: bytes, subtask: int, parallelism: int, batch: int) -> list[Level]:
        """The materialized part of a subtask's state after a batch; the parameters are those of :meth:`digest`."""
        return self._view(genesis, subtask, parallelism, batch).levels

    def missing_segments(
        self, genesis: bytes, subtask: int, parallelism: int, batch: int, known: set[bytes]
    ) -> RestorePlan:
        """The levels and segments that lead from a state that a subtask has to the state after a batch.

        `known` are the digests of the states that it has; the other parameters are those of :meth:`digest`.
        """
        view = self._view(genesis, subtask, parallelism, batch)
        levels = view.levels
        for count, level in enumerate(view.levels, 1):
            if level.after in known:
                levels = view.levels[count:]
        since = digest = view.digest
        first_batch = view.first_batch
        segments: list[ClippedSegment] = []
        for record in self._between(view.first_batch, batch):
            checkpoint = record.checkpoint
            found = overlapping(checkpoint, subtask, parallelism)
            ranges = view.ranges_of(checkpoint.batch)
            is_shared = checkpoint.parallelism != parallelism
            segments += [
                ClippedSegment(segment, clip.first, clip.last, is_shared, record.extent_of(segment, is_shared))
                for segment in found
                if segment.rows  # others need not be read
                for clip in ranges
            ]
            digest = _extended(digest, checkpoint, found)
            if digest in known:
                levels, since, first_batch, segments = [], digest, checkpoint.batch + 1, []
        return RestorePlan(since, first_batch, segments, levels)


def overlapping(checkpoint: Checkpoint, subtask: int, parallelism: int) -> list[SegmentRef]:
    """The segments of a checkpoint that may hold keys of a subtask, in any parallelism."""
    if parallelism == checkpoint.parallelism:
        return checkpoint.segments_of(subtask, subtask)
    first_group = -(-subtask * KEY_GROUPS // parallelism)
    last_group = -(-(subtask + 1) * KEY_GROUPS // parallelism) - 1
    first = first_group * checkpoint.parallelism // KEY_GROUPS
    last = last_group * checkpoint.parallelism // KEY_GROUPS
    return checkpoint.segments_of(first, last)


def _extended(digest: bytes, checkpoint: Checkpoint, segments: list[SegmentRef]) -> bytes:
    return digests.extend(digest, checkpoint.batch, [segment.checksum for segment in segments])


_batch: Final = attrgetter("checkpoint.batch")
