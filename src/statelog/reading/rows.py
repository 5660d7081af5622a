"""The rows of a state at a checkpoint: its stored runs, merged part by part, or searched for some keys."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from statelog.history.operator_history import History
from statelog.history.restore_plan import RestorePlan
from statelog.local.restore import read_segments, restore_runs
from statelog.local.runs import LocalRuns
from statelog.local.stored_reader import StoredBytes, read_run, read_threads
from statelog.log.entry import Checkpoint
from statelog.log.references import Level, SegmentRef, StoredRun
from statelog.progress import tracked
from statelog.reading.keys import Keys, encoded_keys
from statelog.runs import digests
from statelog.runs.byte_slices import BUDGET
from statelog.runs.evolution import project
from statelog.runs.key_groups import Hashes, HashRange, hash_range, subtasks_of
from statelog.runs.keys import KeyCodec
from statelog.runs.merge import Garbage, RunMerge, clip_run, merge_runs
from statelog.runs.reader import Run
from statelog.runs.schema import (
    EXPIRY_COLUMN,
    VALUE_COLUMN,
    StateDescriptor,
    StateKind,
    StateSchema,
    change_schema,
    decode_schema,
    plain_name,
    stored_name,
)
from statelog.runs.times import Moment
from statelog.runs.writer import LOCAL_BLOCK_ROWS, RunWriter
from statelog.storage import Store
from statelog.storage.store import read_ahead
from statelog.tables.run_entries import as_changes
from statelog.tables.runs import RunsTable
from statelog.tables.table import KeyBatch

PART_BYTES: Final = 64 << 20
"""Stored state of a part: it bounds the memory of a reader."""
MEMORY_BYTES: Final = 2 * PART_BYTES
"""Stored files of a part that are merged in memory; more go through a temporary directory."""
_MOST_PARTS: Final = 4096
SLICE_ROWS: Final = 65_536
"""Rows that are merged at once."""
_NEVER: Final = np.iinfo(np.int64).max


class Rows:
    """The rows of a keyed state at a checkpoint, as puts in run order.

    `name` is the operator in messages. When files are searched for keys, footers and small files stay in memory.
    """

    def __init__(self, store: Store, history: History, checkpoint: Checkpoint, stored: StateSchema, name: str) -> None:
        self._store = store
        self._history = history
        self._checkpoint = checkpoint
        self._stored = stored
        self._name = name
        in_runs = stored_name(stored.name, checkpoint.generations.get(stored.name, 0))
        self._state = replace(StateDescriptor.from_stored(stored), name=in_runs)
        self._codec = KeyCodec(decode_schema(checkpoint.key_schema))
        self._parts: dict[int, list[SearchedPart]] = {}
        self._search = RunSearch(store)

    def within(self, parts: Sequence[ReadPart] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows, or those of some parts; raises the errors of :func:`scan_part`."""
        for part in tracked(cut_parts(self._history, self._checkpoint) if parts is None else parts, part_sizes):
            for _, changes in scan_part(self._store, part, self._checkpoint, [self._stored.name]):
                yield changes

    def of(self, keys: Keys) -> Iterator[pa.RecordBatch]:
        """The rows of some keys; ConfigurationError if the keys do not fit the key's fields."""
        return self._found(encoded_keys(keys, self._codec, self._name))

    def _found(self, wanted: KeyBatch) -> Iterator[pa.RecordBatch]:
        subtasks = subtasks_of(wanted.hashes, self._checkpoint.parallelism)
        for subtask in np.unique(subtasks).tolist():
            keys = wanted.take(np.flatnonzero(subtasks == subtask))
            runs = self._search.find(self._parts_of(subtask), self._state.name, keys.hashes)
            yield from map(self._unexpired, rows_of(self._state, keys, runs))

    def _parts_of(self, subtask: int) -> list[SearchedPart]:
        if subtask not in self._parts:
            checkpoint, count = self._checkpoint, self._checkpoint.parallelism
            genesis = digests.genesis(checkpoint.identity, subtask, count)
            plan = self._history.missing_segments(genesis, subtask, count, checkpoint.batch, set())
            self._parts[subtask] = parts_of(plan)
        return self._parts[subtask]

    def _unexpired(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        if self._state.expires_by is None:
            return changes
        checkpoint = self._checkpoint
        now_ms = Moment(checkpoint.batch_time_ms, checkpoint.watermark_ms).now_ms(self._state.expires_by)
        expiry = changes.column(EXPIRY_COLUMN).fill_null(_NEVER).to_numpy()
        return changes if (expiry > now_ms).all() else changes.filter(pa.array(expiry > now_ms))


def rows_of(state: StateDescriptor, keys: KeyBatch, runs: Sequence[Run]) -> Iterator[pa.RecordBatch]:
    """The rows of some keys in runs, oldest first, as puts in run order."""
    table = RunsTable(runs)
    if state.kind.has_entries:
        entries = table.entries(state, keys)
        return as_changes(state, keys, entries, entries.entries)
    values = table.get_many(state, keys)
    return as_changes(state, keys, values, pa.chunked_array([[b""] * len(values.positions)], pa.binary()))


@dataclass(frozen=True)
class ReadPart:
    """A part of a keyed operator and the stored files that it is read from; picklable."""

    part: Part
    genesis: bytes
    """Digest of the part's empty state."""
    head: bytes
    """Digest of the part's state."""
    plan: RestorePlan


def cut_parts(
    history: History, checkpoint: Checkpoint, part_bytes: int | None = None, count: int | None = None
) -> list[ReadPart]:
    """Cut an operator's state at a checkpoint into `count` parts, or parts of `part_bytes`, by default PART_BYTES."""

    def cut(part: Part) -> ReadPart:
        genesis = digests.genesis(checkpoint.identity, part.number, part.count)
        known = (genesis, part.number, part.count, checkpoint.batch)
        return ReadPart(part, genesis, history.digest(*known), history.missing_segments(*known, set()))

    if count is None:
        whole = cut(Part(0, 1))
        count = min(max(1, -(-whole.plan.length // (part_bytes or PART_BYTES))), _MOST_PARTS)
        if count == 1:
            return [whole]
    return [cut(Part(number, count)) for number in range(count)]


def part_sizes(parts: Sequence[ReadPart]) -> list[int]:
    """The stored bytes of all parts, as equal shares: files of several parts count once."""
    found: dict[tuple[str, int], int] = {}
    for part in parts:
        found |= {(run.name, run.offset): run.length for level in part.plan.levels for run in level.runs}
        found |= {(clip.segment.name, clip.segment.offset): clip.segment.length for clip in part.plan.segments}
    whole, count = sum(found.values()), len(parts)
    return [whole * (number + 1) // count - whole * number // count for number in range(count)]


def scan_part(
    store: Store,
    read: ReadPart,
    checkpoint: Checkpoint,
    states: Collection[str],
    slice_bytes: int = BUDGET.slice_bytes,
) -> Iterator[tuple[StateDescriptor, pa.RecordBatch]]:
    """The entries of some states in a part at a checkpoint, as puts in run order.

    Expired entries are left out, by the checkpoint's times. Each state is as the checkpoint describes it. Raises
    CorruptionError or StorageError if a stored run is damaged or cannot be read.
    """
    # Rows that no longer count, such as expired ones.
    garbage = Garbage(Moment(checkpoint.batch_time_ms, checkpoint.watermark_ms), checkpoint.generations)
    if read.plan.length <= MEMORY_BYTES:
        runs = list(_runs_of(store, read, states))
        yield from _merged(runs, read, checkpoint, garbage, slice_bytes)
        return
    with tempfile.TemporaryDirectory(prefix="statelog-read-") as scratch:
        restored = restore_runs(
            LocalRuns(Path(scratch) / "runs"),
            genesis=read.genesis,
            head=read.head,
            last_batch=checkpoint.batch,
            within=read.part.hashes,
            garbage=garbage,
            fetch=lambda known: read.plan,
            open_store=lambda: store,
            token="read",
        )
        yield from _merged([run.of_states(states) for _, run in restored], read, checkpoint, garbage, slice_bytes)


def _merged(
    runs: list[Run], read: ReadPart, checkpoint: Checkpoint, garbage: Garbage, slice_bytes: int
) -> Iterator[tuple[StateDescriptor, pa.RecordBatch]]:
    """The entries of runs, slice by slice."""
    declared = {stored.name: StateDescriptor.from_stored(stored) for stored in checkpoint.states}
    yield from merged_rows(
        runs, declared, is_bottom=True, within=read.part.hashes, garbage=garbage, slice_bytes=slice_bytes
    )


def merged_rows(
    runs: list[Run],
    declared: Mapping[str, StateDescriptor],
    *,
    is_bottom: bool,
    within: HashRange | None = None,
    garbage: Garbage | None = None,
    slice_bytes: int = BUDGET.slice_bytes,
) -> Iterator[tuple[StateDescriptor, pa.RecordBatch]]:
    """The rows of merged runs, slice by slice, with the fields of the declared states; other states are left out."""
    merged = _Rows()
    merge = RunMerge(
        runs,
        is_bottom=is_bottom,
        within=within,
        garbage=garbage,
        slice_rows=SLICE_ROWS,
        slice_bytes=slice_bytes,
    )
    for _ in merge.write(merged):
        for stored, batch in merged.take():
            state = declared.get(plain_name(stored.name))
            if state is not None and batch.num_rows:
                yield state, _projected(batch, stored, state)


class _Rows:
    """Holds the rows of a slice."""

    def __init__(self) -> None:
        self._batches: list[tuple[StateDescriptor, pa.RecordBatch]] = []

    def add(self, state: StateDescriptor, batch: pa.RecordBatch) -> None:
        self._batches.append((state, batch))

    def take(self) -> list[tuple[StateDescriptor, pa.RecordBatch]]:
        batches, self._batches = self._batches, []
        return batches


def _runs_of(store: Store, read: ReadPart, states: Collection[str]) -> Iterator[Run]:
    """The stored runs of a part, oldest first, with these states only."""
    within = read.part.hashes

    def read_one(item: tuple[Level, StoredRun]) -> Run:
        level, stored = item
        run = read_run(store, stored, "a materialized run", within, states=states)
        is_cut = within.first < level.first_hash or level.last_hash < within.last
        return clip_run(run, level.within) if is_cut else run

    levels = [(level, stored) for level in read.plan.levels for stored in level.runs]
    yield from read_ahead(levels, read_one, read_threads(store))
    for run in read_segments(store, read.plan.segments, within):
        yield run.of_states(states)


def _projected(batch: pa.RecordBatch, stored: StateDescriptor, declared: StateDescriptor) -> pa.RecordBatch:
    """Changes with the fields of the state in the checkpoint, as rows may be older than its schema."""
    if stored.kind is StateKind.TIMER or stored.value_schema == declared.value_schema:
        return batch
    values = project(batch.columns[VALUE_COLUMN:], stored, declared)
    return pa.RecordBatch.from_arrays([*batch.columns[:VALUE_COLUMN], *values], schema=change_schema(declared))


# ---- Parts: ranges of key hashes, each the work of one call, here or in a task of a cluster ----


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Part:
    """One of `count` equal ranges of key hashes; `number` begins at 0."""

    number: int
    count: int

    @property
    def hashes(self) -> HashRange:
        """The range of key hashes."""
        return hash_range(self.number, self.count)


class RunAll(Protocol):
    """Applies a function to each of several items, here or elsewhere; both must be picklable."""

    def __call__(
        self,
        work: Callable[[_Item], _Result],
        items: Sequence[_Item],
        sizes: Callable[[Sequence[_Item]], Sequence[int]],
    ) -> list[_Result]:
        """Return the results in the order of the items; `sizes` are their bytes, for the progress."""
        ...


def one_by_one(
    work: Callable[[_Item], _Result], items: Sequence[_Item], sizes: Callable[[Sequence[_Item]], Sequence[int]]
) -> list[_Result]:
    """Apply the function here, to one item after the other."""
    return [work(item) for item in tracked(items, sizes)]


_THREADS: Final = 16

Keep = Callable[[pa.RecordBatch], pa.Array]
"""Returns a mask of the wanted rows."""


class FoundTooMuch(Exception):
    """The rows that were found take more bytes than allowed."""


class SearchedPart(NamedTuple):
    """A stored run, and the hashes that count in it."""

    ref: StoredRun | SegmentRef
    within: HashRange

    @property
    def what(self) -> str:
        """Its content, for messages."""
        ref = self.ref
        return f"the changeset of subtask {ref.subtask}" if isinstance(ref, SegmentRef) else "a materialized run"


def parts_of(plan: RestorePlan) -> list[SearchedPart]:
    """The stored runs that a state is made of, oldest first."""
    parts = [
        SearchedPart(run, HashRange(max(run.first_hash, level.first_hash), min(run.last_hash, level.last_hash)))
        for level in plan.levels
        for run in level.runs
    ]
    return parts + [SearchedPart(clip.segment, clip.within) for clip in plan.segments]


def segment_parts(segments: Iterable[SegmentRef]) -> list[SearchedPart]:
    """Changesets that count for all hashes."""
    return [SearchedPart(segment, hash_range(0, 1)) for segment in segments]


class RunSearch:
    """Searches the stored runs of a store; footers and small files stay in memory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: dict[tuple[str, int], Run] = {}

    def find(
        self,
        parts: Sequence[SearchedPart],
        name: str,
        hashes: Hashes,
        keep: Keep | None = None,
        max_bytes: int | None = None,
    ) -> list[Run]:
        """The rows of a state with some hashes, which ascend, as runs in memory, oldest first.

        Several stored runs may become one; then only the newest row of each entry is in it. Raises FoundTooMuch if the
        rows take more than `max_bytes`, and the errors of :func:`read_stored`.
        """

        def read(item: tuple[SearchedPart, Hashes]) -> Run:
            part, own = item
            return self._opened(part).searched(name, own, keep)

        wanted = [(part, own) for part in parts if part.ref.rows and len(own := _between(hashes, part.within))]
        found: list[Run] = []
        found_bytes = 0
        limit = BUDGET.slice_bytes if max_bytes is None else max_bytes
        for run in read_ahead(wanted, read, 1 if self._store.can_append else _THREADS):
            if not run.rows:
                continue
            found.append(run)
            found_bytes += _held_bytes(run)
            if found_bytes > limit:
                found = [_joined(found)]
                found_bytes = _held_bytes(found[0])
                if max_bytes is not None and found_bytes > max_bytes:
                    raise FoundTooMuch
                limit = max(limit, 2 * found_bytes)
        return found

    def _opened(self, part: SearchedPart) -> Run:
        ref = part.ref
        place = ref.name, ref.offset
        run = self._runs.get(place)
        if run is None:
            data = StoredBytes(self._store, ref, part.what)
            run = self._runs[place] = Run(data, ref.name, ref.offset, is_stored=True)
        return run


def _between(hashes: Hashes, within: HashRange) -> Hashes:
    """The hashes, of some ascending ones, that are in a range."""
    first = hashes.searchsorted(np.uint64(within.first), "left")
    return hashes[first : hashes.searchsorted(np.uint64(within.last), "right")]


def _held_bytes(run: Run) -> int:
    return sum([section.size_bytes for section in run.sections.values()])


def _joined(runs: Sequence[Run]) -> Run:
    """Some runs, oldest first, joined to one."""
    if len(runs) == 1:
        return runs[0]
    sink = pa.BufferOutputStream()
    merge_runs(runs, RunWriter(sink, compression=None, block_rows=LOCAL_BLOCK_ROWS), is_bottom=False)
    return Run(sink.getvalue(), "rows that were found")
