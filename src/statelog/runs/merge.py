"""Merges runs into one, and decides which runs to merge.

A merge goes through its inputs in slices of the hash range, bounded in rows and in bytes, so its memory is bounded by
one slice. Of a slice that is still larger, for example because of one large key, only the keys and entries are held
at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.runs.byte_slices import BUDGET, Positions, gather_rows, join_rows, joined_column, size_of
from statelog.runs.evolution import merged_schema
from statelog.runs.key_columns import differs_from_previous
from statelog.runs.key_groups import HashRange
from statelog.runs.reader import Run, RunBlock, RunSection
from statelog.runs.schema import EXPIRY_COLUMN, VALUE_COLUMN, Operation, StateDescriptor, is_deleted
from statelog.runs.times import Moment
from statelog.runs.writer import LOCAL_BLOCK_ROWS, RunWriter

_NEVER: Final = np.iinfo(np.int64).max
_SLACK: Final = 2
"""How many times larger than intended a slice may become, because hashes are not spread evenly."""


@dataclass(frozen=True)
class Garbage:
    """Describes rows that a merge may leave out."""

    moment: Moment
    """Entries expired by this time are garbage, but only a merge that starts at the empty state can leave them out."""
    generations: Mapping[str, int]
    """How often each state was deleted, if ever; all rows of earlier generations are garbage."""

    def rows_of(self, run: Run) -> int:
        """The number of rows of a run that are garbage at least, according to its footer."""
        return sum(map(self._rows_of, run.sections.values()))

    def _rows_of(self, section: RunSection) -> int:
        state = section.state
        if is_deleted(state.name, self.generations):
            return section.rows
        if state.expires_by is None:
            return 0
        now_ms = self.moment.now_ms(state.expires_by)
        return sum(block.expired_rows(now_ms) for block in section.blocks)


def choose_merge(rows: Sequence[int], fan_in: int, smallest_tier_rows: int) -> int:
    """Decide how many of the newest runs to merge, or 0: size-tiered compaction of adjacent runs.

    `rows` are those of each run, oldest first. Runs belong to tiers: the lowest has `smallest_tier_rows`, each other
    one is `fan_in` (at least 2) times larger than the one below. Once a tier has `fan_in` runs, they become one,
    together with the smaller ones among and after them. So a row is rewritten about once per tier. Small runs that
    stand before larger ones wait for these; once there are too many, all become one earlier. So a search visits at most
    `fan_in` runs per tier.
    """
    tiers = [_tier(count, fan_in, smallest_tier_rows) for count in rows]
    for tier in sorted(set(tiers)):
        newest = 0
        while newest < len(tiers) and tiers[-1 - newest] <= tier:
            newest += 1
        if tiers[len(tiers) - newest :].count(tier) >= fan_in or newest > fan_in * (tier + 1):
            return newest
    return 0


def _tier(rows: int, fan_in: int, smallest_tier_rows: int) -> int:
    tier = 0
    limit = smallest_tier_rows
    while rows > limit:
        tier += 1
        limit *= fan_in
    return tier


def merge_runs(
    runs: Sequence[Run],
    writer: RunWriter,
    *,
    is_bottom: bool,
    within: HashRange | None = None,
    garbage: Garbage | None = None,
    slice_rows: int = LOCAL_BLOCK_ROWS,
    slice_bytes: int = BUDGET.slice_bytes,
) -> int:
    """Merge runs into one, and return the number of rows written; the arguments are those of :class:`RunMerge`."""
    merge = RunMerge(
        runs, is_bottom=is_bottom, within=within, garbage=garbage, slice_rows=slice_rows, slice_bytes=slice_bytes
    )
    for _ in merge.write(writer):
        pass
    return writer.finish()


def add_runs(
    runs: Sequence[Run],
    writer: ChangeSink,
    *,
    is_bottom: bool,
    within: HashRange | None,
    garbage: Garbage | None,
    slice_rows: int,
    slice_bytes: int = BUDGET.slice_bytes,
) -> None:
    """Merge runs as :func:`merge_runs` does, without finishing the result."""
    merge = RunMerge(
        runs, is_bottom=is_bottom, within=within, garbage=garbage, slice_rows=slice_rows, slice_bytes=slice_bytes
    )
    for _ in merge.write(writer):
        pass


def clip_run(run: Run, within: HashRange) -> Run:
    """The rows of a run in a range of hashes, as a run in memory."""
    sink = pa.BufferOutputStream()
    merge_runs([run], RunWriter(sink, compression=None, block_rows=LOCAL_BLOCK_ROWS), is_bottom=False, within=within)
    return Run(sink.getvalue(), run.name)


class ChangeSink(Protocol):
    """Receives the result of a merge, as a :class:`RunWriter` does."""

    def add(self, state: StateDescriptor, batch: pa.RecordBatch) -> None:
        """Receive changes of a state, in run order."""


class MergePosition(NamedTuple):
    """Progress of a merge: earlier states are written as a whole, this one up to, not including, a hash."""

    state: int
    first_hash: int


@dataclass(frozen=True)
class RunMerge:
    """A merge that can stop after every slice and resume later, even in another process.

    The newest change of each entry stays. A damaged input raises CorruptionError.
    """

    runs: Sequence[Run]
    """Oldest first. Runs of one checkpoint, whose keys are disjoint, may stand in any order."""
    _: KW_ONLY
    is_bottom: bool
    """Whether nothing older exists, so that removals need not stay."""
    within: HashRange | None = None
    """Only keys with these hashes stay."""
    garbage: Garbage | None = None
    slice_rows: int = LOCAL_BLOCK_ROWS
    """The approximate number of input rows that are in memory at once."""
    slice_bytes: int = BUDGET.slice_bytes
    """The approximate number of bytes of input rows that are in memory at once."""
    keeps_blocks: bool = False
    """Whether the inputs' blocks stay in memory once they are read.

    This suits mapped runs, because several slices take parts of one block.
    """

    def write(self, writer: ChangeSink, start: MergePosition | None = None) -> Iterator[MergePosition]:
        """Write slice after slice from `start` on, and yield the position of the next one after each."""
        states: dict[str, StateDescriptor] = {}
        for run in self.runs:
            for name, section in run.sections.items():
                states[name] = merged_schema(states.get(name, section.state), section.state)
        first_state, first_hash = start or MergePosition(0, 0)
        for number, state in list(enumerate(states.values()))[first_state:]:
            if self.garbage is not None and is_deleted(state.name, self.garbage.generations):
                continue
            sections = [found for run in self.runs if (found := run.section(state)) is not None]
            slices = list(self._slices(sections))
            for first, last in slices:
                if number == first_state:
                    if last < first_hash:
                        continue
                    first = max(first, first_hash)  # the slices may have been cut differently before
                for batch in self._merged(state, sections, first, last):
                    writer.add(state, batch)
                    del batch  # frees its memory for the next one
                yield MergePosition(number + 1, 0) if last == slices[-1][1] else MergePosition(number, last + 1)

    def _slices(self, sections: Sequence[RunSection]) -> Iterator[tuple[int, int]]:
        """Cut the hash range into slices of about the right size, on the assumption of evenly spread hashes."""
        first, last = (self.within.first, self.within.last) if self.within else (0, (1 << 64) - 1)
        blocks = [block for section in sections for block in section.blocks_between(first, last)]
        if len(sections) == 1 and all(
            block.rows <= self.slice_rows and block.size_bytes <= _SLACK * self.slice_bytes for block in blocks
        ):
            yield from _whole_blocks(blocks, first, last, self.slice_rows, self.slice_bytes)
            return
        rows, size_bytes = sum(block.rows for block in blocks), sum(block.size_bytes for block in blocks)
        yield from _even_slices(
            blocks, first, last, max(-(-rows // self.slice_rows), -(-size_bytes // self.slice_bytes))
        )

    def _merged(
        self, state: StateDescriptor, sections: Sequence[RunSection], first: int, last: int
    ) -> Iterator[pa.RecordBatch]:
        """Merge the rows of a slice."""
        batches, ages = self._read(sections, first, last)
        if not batches:
            return
        max_bytes = _SLACK * self.slice_bytes
        is_one_run = bool(ages[0] == ages[-1])
        if is_one_run and not self.is_bottom:
            yield from join_rows(batches, max_bytes)  # sorted already, each entry once
            return
        is_small = size_of(batches) <= max_bytes
        rows = pa.concat_batches(batches) if is_small else _without_values(batches)
        kept = np.arange(rows.num_rows) if is_one_run else _surviving_rows(state, rows, ages)
        if self.is_bottom:
            kept = kept[rows.column(3).to_numpy()[kept] == Operation.PUT]
            if state.expires_by is not None and self.garbage is not None:
                now_ms = self.garbage.moment.now_ms(state.expires_by)
                kept = kept[pc.fill_null(rows.column(EXPIRY_COLUMN), _NEVER).to_numpy()[kept] > now_ms]
        if is_small:
            merged = rows if is_one_run and len(kept) == rows.num_rows else rows.take(pa.array(kept))
            del batches, rows  # before the result is written and the next slice read
            yield merged
        else:
            del rows
            yield from gather_rows(batches, kept, max_bytes)

    def _read(self, sections: Sequence[RunSection], first: int, last: int) -> tuple[list[pa.RecordBatch], Positions]:
        """The inputs' rows in a range of hashes, newest input first, and the age of each row's input (0: newest)."""
        batches: list[pa.RecordBatch] = []
        ages: list[Positions] = []
        for age, section in enumerate(reversed(sections)):
            for block in section.blocks_between(first, last):
                batch = _rows_between(block.batch if self.keeps_blocks else block.load(), first, last)
                if batch.num_rows:
                    batches.append(batch)
                    ages.append(np.full(batch.num_rows, age, np.int64))
        return batches, np.concatenate(ages) if ages else np.zeros(0, np.int64)


def _even_slices(blocks: Sequence[RunBlock], first: int, last: int, count: int) -> Iterator[tuple[int, int]]:
    low = max(first, min((block.first_hash for block in blocks), default=first))
    high = min(last, max((block.last_hash for block in blocks), default=last))
    count = max(1, count)
    width = -(-(high - low + 1) // count)
    for end in range(low + width - 1, high, width):
        yield first, end
        first = end + 1
    yield first, last


def _whole_blocks(
    blocks: Sequence[RunBlock], first: int, last: int, slice_rows: int, slice_bytes: int
) -> Iterator[tuple[int, int]]:
    """Cut the hash range of a single input between blocks, so that each block is read once."""
    rows = size_bytes = before = 0
    for block in blocks:
        is_full = rows + block.rows > slice_rows or size_bytes + block.size_bytes > slice_bytes
        # Blocks that share a hash, because its rows exceed one block, stay together.
        if rows and is_full and block.first_hash > max(first, before):
            yield first, block.first_hash - 1
            first, rows, size_bytes = block.first_hash, 0, 0
        rows += block.rows
        size_bytes += block.size_bytes
        before = block.last_hash
    yield first, last


def _without_values(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Only the columns that decide which rows stay."""
    columns = [joined_column([batch.column(index) for batch in batches]) for index in range(VALUE_COLUMN)]
    return pa.RecordBatch.from_arrays(columns, names=batches[0].schema.names[:VALUE_COLUMN])


def _rows_between(batch: pa.RecordBatch, first: int, last: int) -> pa.RecordBatch:
    hashes = batch.column(0).to_numpy()
    start = int(np.searchsorted(hashes, np.uint64(first), "left"))
    end = int(np.searchsorted(hashes, np.uint64(last), "right"))
    return batch if end - start == batch.num_rows else batch.slice(start, end - start)


def _surviving_rows(state: StateDescriptor, rows: pa.RecordBatch, ages: Positions) -> Positions:
    """Positions of the rows that survive a merge, in run order.

    `rows` holds the inputs one after the other, newest first; `ages` counts the inputs from the newest.
    """
    hashes = rows.column(0).to_numpy()
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    is_first = np.ones(len(ordered), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    if not state.kind.has_entries and not _has_collisions(rows.column(1), order, is_first):
        return order[is_first]
    is_alone = is_first.copy()
    is_alone[:-1] &= is_first[1:]
    groups = np.cumsum(is_first)[~is_alone]
    shared = order[~is_alone]
    if not len(shared):
        return order
    shared, groups = _newest_of_each(rows, shared, groups, ages)
    kept = np.concatenate((order[is_alone], shared))
    kept_groups = np.concatenate((np.cumsum(is_first)[is_alone], groups))
    return kept[np.argsort(kept_groups, kind="stable")]


def _has_collisions(keys: pa.Array, order: Positions, is_first: npt.NDArray[np.bool_]) -> bool:
    """Whether two rows with one hash belong to different keys."""
    followers = np.flatnonzero(~is_first)
    if not len(followers):
        return False
    same = pc.equal(keys.take(pa.array(order[followers])), keys.take(pa.array(order[followers - 1])))
    return bool(same.false_count)


def _newest_of_each(
    rows: pa.RecordBatch, shared: Positions, groups: Positions, ages: Positions
) -> tuple[Positions, Positions]:
    """Find among rows that share hashes those that are the newest of their entry and not cleared by a newer run.

    They are sorted by group, key and entry; their groups are returned, too.
    """
    picked = pa.array(shared)
    table = pa.table(
        {"group": groups, "key": rows.column(1).take(picked), "entry": rows.column(2).take(picked), "age": ages[shared]}
    )
    order = pc.sort_indices(table, [(name, "ascending") for name in table.column_names]).to_numpy()
    del table
    shared, groups = shared[order], groups[order]
    picked, row_ages = pa.array(shared), ages[shared]
    is_new_key = differs_from_previous(rows.column(1).take(picked))
    is_new_key[1:] |= groups[1:] != groups[:-1]
    is_new_entry = is_new_key | differs_from_previous(rows.column(2).take(picked))
    clears = rows.column(3).to_numpy()[shared] == Operation.CLEAR
    key_starts = np.flatnonzero(is_new_key)
    cleared_at = np.minimum.reduceat(np.where(clears, row_ages, _NEVER), key_starts)
    newest = is_new_entry & (row_ages <= np.repeat(cleared_at, np.diff(np.append(key_starts, len(shared)))))
    return shared[newest], groups[newest]
