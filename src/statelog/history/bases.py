"""Which base counts for which key hashes.

Subtasks materialize one by one, and their number may change between starts. So the bases of one operator may come from
different batches and from subtasks with other ranges of key hashes.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from statelog.log.references import Base, BaseRange, Level
from statelog.runs import digests
from statelog.runs.key_groups import HashRange, hash_range

_LAST_HASH = (1 << 64) - 1


class Gap(NamedTuple):
    """A range of key hashes, and the first batch whose changes its base lacks."""

    first_hash: int
    last_hash: int
    first_batch: int


@dataclass(frozen=True)
class BaseView:
    """The materialized state that a subtask starts from, and the changes to add to it."""

    levels: list[Level]
    """Levels of the materialized state, oldest first; empty for the empty state."""
    digest: bytes
    """Digest of the state in the levels."""
    gaps: list[Gap]
    """Gaps for all key hashes of the subtask, in order."""

    @property
    def first_batch(self) -> int:
        """The first batch whose changes have to be added."""
        return min(gap.first_batch for gap in self.gaps)

    def ranges_of(self, batch: int) -> list[HashRange]:
        """The key hashes for which a batch's changes have to be added, in as few ranges as possible."""
        ranges: list[HashRange] = []
        for gap in self.gaps:
            if batch < gap.first_batch:
                continue
            if ranges and ranges[-1].last + 1 == gap.first_hash:
                ranges[-1] = HashRange(ranges[-1].first, gap.last_hash)
            else:
                ranges.append(HashRange(gap.first_hash, gap.last_hash))
        return ranges


class Replacement(NamedTuple):
    """A base map with a new base, and the base ranges that this adds and removes."""

    base_map: BaseMap
    added: list[BaseRange]
    removed: list[BaseRange]


@dataclass(frozen=True)
class BaseMap:
    """The bases of all key hashes."""

    ranges: tuple[BaseRange, ...] = ()
    """Disjoint, in order of hashes. Hashes outside of them have no base."""
    begins_at: int = 0
    """The batch with which the operator's state begins: the first whose changes count for hashes without a base."""

    def replace(self, base: Base) -> Replacement:
        """Let a base count for all key hashes of its subtask."""
        own = base.within
        kept: list[BaseRange] = []
        removed: list[BaseRange] = []
        added = [BaseRange(own.first, own.last, base)]
        for base_range in self.ranges:
            if base_range.last_hash < own.first or own.last < base_range.first_hash:
                kept.append(base_range)
                continue
            removed.append(base_range)
            if base_range.first_hash < own.first:
                added.append(BaseRange(base_range.first_hash, own.first - 1, base_range.base))
            if own.last < base_range.last_hash:
                added.append(BaseRange(own.last + 1, base_range.last_hash, base_range.base))
        return Replacement(
            BaseMap(tuple(sorted([*kept, *added], key=lambda base_range: base_range.first_hash)), self.begins_at),
            added,
            removed,
        )

    def within(self, hashes: HashRange) -> list[BaseRange]:
        """The base ranges within some hashes, cut at their bounds, in order."""
        first = bisect.bisect_left(self._last_hashes, hashes.first)
        found: list[BaseRange] = []
        for place in range(first, len(self.ranges)):
            base_range = self.ranges[place]
            if base_range.first_hash > hashes.last:
                break
            bounds = max(base_range.first_hash, hashes.first), min(base_range.last_hash, hashes.last)
            is_whole = bounds == (base_range.first_hash, base_range.last_hash)
            found.append(base_range if is_whole else BaseRange(*bounds, base_range.base))
        return found

    @cached_property
    def _last_hashes(self) -> list[int]:
        return [base_range.last_hash for base_range in self.ranges]

    @cached_property
    def through(self) -> int:
        """The last batch that every key's base includes; the one before the state begins if some keys have none."""
        return min(gap.first_batch for gap in self._gaps(self.ranges, HashRange(0, _LAST_HASH))) - 1

    def base_of(self, subtask: int, parallelism: int) -> Base | None:
        """The base that a subtask has made itself, if it counts for all its keys."""
        own = hash_range(subtask, parallelism)
        ranges = self.within(own)
        if len(ranges) != 1:
            return None
        base = ranges[0].base
        is_whole = (ranges[0].first_hash, ranges[0].last_hash) == (own.first, own.last)
        return base if is_whole and (base.subtask, base.parallelism) == (subtask, parallelism) else None

    def view_of(self, genesis: bytes, subtask: int, parallelism: int) -> BaseView:
        """The materialized state of a subtask.

        With another parallelism than the bases', the view consists of parts of their levels; its digests are derived
        from theirs and the bounds of the parts. `genesis` is the digest of the subtask's empty state.
        """
        base = self.base_of(subtask, parallelism)
        hashes = hash_range(subtask, parallelism)
        if base is not None:
            return BaseView(base.levels, base.digest, [Gap(hashes.first, hashes.last, base.through + 1)])
        ranges = self.within(hashes)
        levels: list[Level] = []
        digest = genesis
        for base_range in ranges:
            for level in base_range.base.levels:
                first, last = max(base_range.first_hash, level.first_hash), min(base_range.last_hash, level.last_hash)
                if first > last:
                    continue
                bounds = first.to_bytes(8, "big") + last.to_bytes(8, "big")
                after = digests.extend(digest, level.last, [level.after, bounds])
                runs = [run for run in level.runs if run.first_hash <= last and first <= run.last_hash]
                levels.append(Level(level.first, level.last, digest, after, first, last, runs))
                digest = after
        return BaseView(levels, digest, self._gaps(ranges, hashes))

    def _gaps(self, ranges: Sequence[BaseRange], hashes: HashRange) -> list[Gap]:
        """The gaps of some base ranges, for all of a range of hashes."""
        gaps: list[Gap] = []
        next_hash = hashes.first
        for base_range in ranges:
            if next_hash < base_range.first_hash:
                gaps.append(Gap(next_hash, base_range.first_hash - 1, self.begins_at))
            gaps.append(Gap(base_range.first_hash, base_range.last_hash, base_range.base.through + 1))
            next_hash = base_range.last_hash + 1
        if next_hash <= hashes.last:
            gaps.append(Gap(next_hash, hashes.last, self.begins_at))
        return gaps
