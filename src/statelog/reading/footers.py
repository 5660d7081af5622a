"""Measures a checkpoint: its stored files by their footers alone, and the keys of a state by its rows."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.errors import StorageError
from statelog.history.restore_plan import SHARED_BYTES
from statelog.local.stored_reader import TAIL_BYTES, StoredBytes, read_threads
from statelog.log.entry import Checkpoint
from statelog.log.references import SegmentRef, StoredRun
from statelog.operators.unkeyed.snapshot import section_sizes
from statelog.reading.rows import ReadPart
from statelog.runs import digests
from statelog.runs.byte_slices import Positions, bytes_before
from statelog.runs.key_groups import GROUP_SHIFT, KEY_GROUPS, HashRange
from statelog.runs.reader import Run
from statelog.runs.schema import VALUE_COLUMN, plain_name
from statelog.storage import Store
from statelog.storage.store import read_ahead


@dataclass
class SectionSizes:
    """The rows of a state in stored files, and their bytes."""

    rows: int = 0
    stored_bytes: int = 0
    uncompressed_bytes: int = 0


@dataclass
class StoredSizes:
    """The stored files of a checkpoint by kind, by state and by key group."""

    base_bytes: int = 0
    log_bytes: int = 0
    snapshot_bytes: int = 0
    runs: int = 0
    changesets: int = 0
    states: dict[str, SectionSizes] = field(default_factory=lambda: defaultdict(SectionSizes))
    group_bytes: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(KEY_GROUPS))
    """Bytes by key group; those of a block are spread evenly over its key hashes."""
    subtask_bytes: list[int] = field(default_factory=list)
    """Of the snapshots of an unkeyed operator."""


@dataclass
class _File:
    """A stored run or changeset, and the key hashes for which it counts."""

    stored: SegmentRef | StoredRun
    within: list[HashRange] = field(default_factory=list)


def measure_keyed(store: Store, parts: list[ReadPart], keep: Callable[[], None]) -> StoredSizes:
    """The sizes of a keyed operator's files, from the parts of a checkpoint; `keep` is called between two reads.

    Only the footer of each file is read, or the whole file if it has up to TAIL_BYTES. Raises CorruptionError or
    StorageError if that fails.
    """
    sizes = StoredSizes()
    groups = read_ahead(_groups(_files_of(parts)), partial(_opened, store), read_threads(store))
    for file, run in itertools.chain.from_iterable(groups):
        if isinstance(file.stored, StoredRun):
            sizes.runs += 1
            sizes.base_bytes += file.stored.length
        else:
            sizes.changesets += 1
            sizes.log_bytes += file.stored.length
        for name, section in run.sections.items():
            state = sizes.states[plain_name(name)]
            state.rows += section.rows
            state.uncompressed_bytes += section.size_bytes
            for block in section.blocks:
                start, end = block.byte_range
                state.stored_bytes += end - start
                for within in file.within:
                    _spread(sizes.group_bytes, end - start, HashRange(block.first_hash, block.last_hash), within)
        keep()
    return sizes


def measure_unkeyed(store: Store, checkpoint: Checkpoint, keep: Callable[[], None]) -> StoredSizes:
    """The sizes of an unkeyed operator's snapshots, from their indexes; otherwise as :func:`measure_keyed`."""
    sizes = StoredSizes(subtask_bytes=[0] * checkpoint.parallelism)
    for segment in checkpoint.segments:
        sizes.snapshot_bytes += segment.length
        sizes.subtask_bytes[segment.subtask] += segment.length
        # Without states it may be a part of a query's stored output.
        sections = section_sizes(partial(_head, store, segment), segment.name) if checkpoint.states else {}
        for name, (count, length) in sections.items():
            state = sizes.states[name]
            state.rows += count
            state.stored_bytes += length
            state.uncompressed_bytes += length
        keep()
    return sizes


def _files_of(parts: list[ReadPart]) -> list[_File]:
    """All files of some parts, each once."""
    found: dict[tuple[str, int], _File] = {}
    for part in parts:
        for level in part.plan.levels:
            for run in level.runs:
                found.setdefault((run.name, run.offset), _File(run)).within.append(level.within)
        for clip in part.plan.segments:
            if (segment := clip.segment).rows:
                found.setdefault((segment.name, segment.offset), _File(segment)).within.append(clip.within)
    return [found[place] for place in sorted(found)]


def _groups(files: list[_File]) -> Iterator[list[_File]]:
    """Files that are read together: small ones side by side in an object, such as those of one log entry."""
    group: list[_File] = []
    for file in files:
        if group and not _are_near(group[0].stored, group[-1].stored, file.stored):
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _are_near(first: SegmentRef | StoredRun, last: SegmentRef | StoredRun, added: SegmentRef | StoredRun) -> bool:
    end = added.offset + added.length
    return (
        first.name == added.name
        and max(last.length, added.length, added.offset - last.offset - last.length) <= TAIL_BYTES
        and end - first.offset <= SHARED_BYTES
    )


def _opened(store: Store, group: list[_File]) -> list[tuple[_File, Run]]:
    """Open the files of a group."""
    first, last = group[0].stored, group[-1].stored
    data = b""
    if len(group) > 1:
        # Whatever fails is read again by itself, to raise its error.
        with suppress(StorageError):
            data = store.read(first.name, offset=first.offset, length=last.offset + last.length - first.offset)
    return [(file, _opened_file(store, file.stored, data, file.stored.offset - first.offset)) for file in group]


def _opened_file(store: Store, stored: SegmentRef | StoredRun, data: bytes, start: int) -> Run:
    """Open a file that should be in `data` from `start` on."""
    own = data[start : start + stored.length]
    if own and digests.checksum(own) == stored.checksum:
        return Run(pa.py_buffer(own), stored.name, stored.offset, is_stored=True)
    what = "a materialized run" if isinstance(stored, StoredRun) else f"the changeset of subtask {stored.subtask}"
    return Run(StoredBytes(store, stored, what, TAIL_BYTES), stored.name, stored.offset, is_stored=True)


def _head(store: Store, segment: SegmentRef, count: int) -> bytes:
    return store.read(segment.name, offset=segment.offset, length=min(count, segment.length))


def _spread(group_bytes: npt.NDArray[np.float64], size_bytes: int, block: HashRange, within: HashRange) -> None:
    """Spread a block's bytes evenly over its hashes, and add those `within` a range to their key groups."""
    first, last = max(block.first, within.first), min(block.last, within.last)
    if first > last:
        return
    density = size_bytes / (block.last - block.first + 1)
    first_group, last_group = first >> GROUP_SHIFT, last >> GROUP_SHIFT
    if first_group == last_group:
        group_bytes[first_group] += density * (last - first + 1)
        return
    group_bytes[first_group] += density * ((first_group + 1 << GROUP_SHIFT) - first)
    group_bytes[first_group + 1 : last_group] += density * (1 << GROUP_SHIFT)
    group_bytes[last_group] += density * (last - (last_group << GROUP_SHIFT) + 1)


_KEY = 1
_ENTRY = 2
"""Columns of a batch of changes."""


class KeySize(NamedTuple):
    """The size of a key; of two, the larger one compares greater."""

    size_bytes: int
    """Of its rows: the encoded key and map key, and the value as Arrow columns."""
    key: bytes
    """Encoded."""
    rows: int


class KeySizes:
    """The rows, keys and bytes of a state, from puts in run order, and its largest keys.

    `value_fields` is the number of the value's fields, `most` the number of keys to find.
    """

    def __init__(self, value_fields: int, most: int) -> None:
        self._values = slice(VALUE_COLUMN, VALUE_COLUMN + value_fields)
        self._most = most
        self.rows = 0
        self.keys = 0
        self.key_bytes = 0
        self.value_bytes = 0
        self.most_rows = 0
        """The largest number of rows of a key."""
        self._heap: list[KeySize] = []
        self._last: KeySize | None = None
        """The last key, for which more rows may follow."""

    def add(self, changes: pa.RecordBatch) -> None:
        """Add the next rows, at least one."""
        keys = changes.column(_KEY)
        is_new = pc.not_equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
        bounds = np.concatenate(([0], np.flatnonzero(is_new) + 1, [len(keys)]))
        key_bytes = _sizes([keys, changes.column(_ENTRY)], bounds)
        value_bytes = _sizes(changes.columns[self._values], bounds)
        self.rows += len(keys)
        self.key_bytes += int(key_bytes.sum())
        self.value_bytes += int(value_bytes.sum())
        sizes, rows = key_bytes + value_bytes, np.diff(bounds)

        def at(place: int) -> KeySize:
            return KeySize(int(sizes[place]), keys[int(bounds[place])].as_py(), int(rows[place]))

        first, last = at(0), len(sizes) - 1
        if self._last is not None and self._last.key == first.key:
            first = KeySize(self._last.size_bytes + first.size_bytes, first.key, self._last.rows + first.rows)
        else:
            self._close()
        self._last = first
        if last == 0:
            return
        self._close()
        if last > 1:
            self.keys += last - 1
            self.most_rows = max(self.most_rows, int(rows[1:last].max()))
            for place in 1 + np.argsort(sizes[1:last], kind="stable")[-self._most :]:
                self._offer(at(place))
        self._last = at(last)

    def largest(self) -> list[KeySize]:
        """The largest keys, the largest first, after all rows were added."""
        self._close()
        return sorted(self._heap, reverse=True)

    def _close(self) -> None:
        """Count the last key."""
        if self._last is None:
            return
        self.keys += 1
        self.most_rows = max(self.most_rows, self._last.rows)
        self._offer(self._last)
        self._last = None

    def _offer(self, key: KeySize) -> None:
        heapq.heappush(self._heap, key)
        if len(self._heap) > self._most:
            heapq.heappop(self._heap)


def _sizes(columns: list[pa.Array], bounds: Positions) -> Positions:
    """The bytes of the rows between each two of `bounds`."""
    before = sum([bytes_before(column, bounds) for column in columns], np.zeros(len(bounds), np.int64))
    return np.diff(before)
