"""Restores an operator: turns the tables of a savepoint into the runs and snapshots that a new location begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from statelog.checkpoint.views import initial_checkpoint
from statelog.clock import Clock
from statelog.errors import ConfigurationError, CorruptionError, ErrorKind
from statelog.log.entry import Checkpoint, Claim, QueryOperators
from statelog.log.numbered import NumberedLog
from statelog.log.open import RUNS_FOLDER, open_location, open_log
from statelog.log.references import SegmentRef, StoredRun
from statelog.operators.unkeyed.snapshot import StateElements, encode_snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.options import Options
from statelog.reading.manifest import SavedFile, SavedOperator, read_saved, reading_parquet
from statelog.reading.parts import Part, RunAll
from statelog.reading.tables import HASH, ElementColumns, StateColumns
from statelog.runs import digests
from statelog.runs.byte_slices import BUDGET
from statelog.runs.key_groups import subtasks_of
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema
from statelog.runs.writer import STORED_BLOCK_BYTES, STORED_BLOCK_ROWS, RunWriter
from statelog.storage import Store
from statelog.storage.names import name_part


@dataclass(frozen=True)
class RestoreTarget:
    """The new location of restored operators, and the values of its first entries."""

    location: str
    query_id: str
    """The query that will own the state."""
    run_id: str
    """The writer that the first entries name."""
    batch: int
    """The batch of the first checkpoint."""
    options: Options
    clock: Clock
    new_token: Callable[[], bytes]
    """Makes 16 unique bytes."""
    operators: QueryOperators | None = None
    """The query's operators, as the first entries note them."""


def restore_operator(saved: SavedOperator, source: str, target: RestoreTarget, run_all: RunAll) -> None:
    """Begin an operator's log with the state in the savepoint at `source`.

    Raises ConfigurationError if the location holds state of the operator already. After an error the location has no
    checkpoint, so files that were written do not count.
    """
    with claimed_log(saved.uid, target) as log:
        entry = first_entry(saved, target, log)
        if saved.key_schema:
            loads = keyed_loads(saved, f"{name_part(saved.uid)}/{RUNS_FOLDER}/{entry.epoch}")
            load = partial(load_keyed, saved.key_schema, target.options.codec, source, target.location)
            runs = {one.part.number: [run] for one, run in zip(loads, run_all(load, loads, _sizes), strict=True)}
            log.append(initial_checkpoint(entry, runs), [])
        else:
            snapshots, counts = _load_elements(saved, open_location(source), source)
            log.append(replace(entry, segments=_segments(snapshots, counts), element_counts=counts), snapshots)


@contextmanager
def claimed_log(uid: str, target: RestoreTarget) -> Iterator[NumberedLog]:
    """Claim the log of an operator, for its first checkpoint.

    Raises ConfigurationError if the location holds state of the operator already.
    """
    root = name_part(uid)
    log = open_log(open_location(target.location), root, target.options, target.clock)
    if any(isinstance(entry, Checkpoint) for entry in log.read()):
        raise ConfigurationError(
            f"{target.location}/{root} holds state already.",
            kind=ErrorKind.OTHER_OWNER,
            hint=f"{target.run_id.capitalize()} into an empty location, or remove the folder first.",
        )
    now_ms = int(target.clock.now_s() * 1000)
    log.claim(lambda epoch: Claim(epoch, target.query_id, target.run_id, uid, target.new_token(), now_ms))
    try:
        yield log
    finally:
        log.close()


def first_entry(saved: SavedOperator, target: RestoreTarget, log: NumberedLog) -> Checkpoint:
    """The operator's first checkpoint, still without state."""
    return Checkpoint(
        epoch=log.epoch,
        batch=target.batch,
        revision=0,
        query_id=target.query_id,
        run_id=target.run_id,
        uid=saved.uid,
        parallelism=saved.parts,
        segments=[],
        key_schema=saved.key_schema,
        states=[state.schema for state in saved.states],
        batch_time_ms=saved.batch_time_ms,
        watermark_ms=saved.watermark_ms,
        token=target.new_token(),
        max_event_ms=saved.max_event_ms,
        settings=saved.settings,
        log_start=log.number,
        retained_from=target.batch,
        operators=target.operators,
        is_initial=saved.is_initial,
    )


def _segments(snapshots: list[bytes], counts: list[list[int]]) -> list[SegmentRef]:
    """The segments of the snapshots in the entry's payload."""
    offsets = [0, *accumulate(map(len, snapshots))]
    return [
        SegmentRef(subtask, 0, digests.checksum(data), offset, len(data), sum(counts[subtask]), 0)
        for subtask, (data, offset) in enumerate(zip(snapshots, offsets, strict=False))
    ]


# ---- Keyed operators ----


@dataclass(frozen=True)
class KeyedLoad:
    """The work to turn one part of a saved operator into a run; picklable."""

    part: Part
    name: str
    """The object that will hold the run."""
    tables: list[tuple[StateSchema, list[SavedFile]]]
    """The states, each with its files of the part."""


def keyed_loads(saved: SavedOperator, folder: str) -> list[KeyedLoad]:
    """The work for a keyed operator, part by part; the runs' names begin with `folder`."""
    loads: list[KeyedLoad] = []
    for number in range(saved.parts):
        tables = [
            (state.schema, own)
            for state in saved.states
            if (own := [file for file in state.files if file.part == number and file.rows])
        ]
        if tables:
            loads.append(KeyedLoad(Part(number, saved.parts), f"{folder}/{number}/savepoint.run", tables))
    return loads


def _sizes(loads: Sequence[KeyedLoad]) -> list[int]:
    return [sum(file.length for _, files in load.tables for file in files) for load in loads]


def load_keyed(
    key_schema: bytes,
    compression: str | None,
    source: str,
    target: str,
    load: KeyedLoad,
    slice_bytes: int = BUDGET.slice_bytes,
) -> StoredRun:
    """Store a part of the savepoint at `source` as a run at `target`, working on `slice_bytes` at once.

    `compression` of the run is lz4, zstd or None. Raises CorruptionError if a file of the savepoint is damaged or holds
    keys of another range.
    """
    part, saved = load.part, open_location(source)
    tables: list[tuple[StateSchema, pa.Table]] = []
    for schema, files in load.tables:
        rows = pa.concat_tables([_read_table(saved, file, source) for file in files])
        hashes = rows.column(HASH).to_numpy().view("uint64")
        if (subtasks_of(hashes, part.count) != part.number).any():
            raise CorruptionError(
                f"{source}/{files[0].name}: it holds keys of another range than {part.number} of {part.count}.",
                kind=ErrorKind.FORMAT,
                hint="Was the table written by another program? Load changed tables with initialTables.",
            )
        tables.append((schema, rows))
    data, rows_written = encode_tables(decode_schema(key_schema), tables, compression, slice_bytes)
    open_location(target).put(load.name, data)
    within = part.hashes
    return StoredRun(load.name, 0, len(data), digests.checksum(data), rows_written, within.first, within.last)


def encode_tables(
    key_schema: pa.Schema,
    tables: Sequence[tuple[StateSchema, pa.Table]],
    compression: str | None,
    slice_bytes: int = BUDGET.slice_bytes,
) -> tuple[bytes, int]:
    """Encode tables with the columns of :class:`StateColumns` as one run; returns its bytes and number of rows."""
    sink = pa.BufferOutputStream()
    writer = RunWriter(sink, compression=compression, block_rows=STORED_BLOCK_ROWS, whole_bytes=STORED_BLOCK_BYTES)
    for stored, rows in tables:
        state = StateDescriptor.from_stored(stored)
        for changes in StateColumns(key_schema, state).to_changes(rows, slice_bytes):
            writer.add(state, changes)
    rows_written = writer.finish()
    return sink.getvalue().to_pybytes(), rows_written


# ---- Unkeyed operators ----


def _load_elements(saved: SavedOperator, source: Store, location: str) -> tuple[list[bytes], list[list[int]]]:
    """Make the snapshots of an unkeyed operator, one per subtask, and count each subtask's elements by state."""
    tables = [
        (state.schema, pa.concat_tables([_read_table(source, file, location) for file in state.files]))
        for state in saved.states
    ]
    snapshots: list[bytes] = []
    counts: list[list[int]] = []
    for subtask in range(saved.parts):
        sections: list[StateElements] = []
        for schema, rows in tables:
            # A broadcast state is the same in all subtasks, so it is saved once.
            whose = 0 if schema.kind == OperatorStateMode.BROADCAST else subtask
            sections.append(StateElements.of(schema, [ElementColumns(schema).to_elements(rows, whose)]))
        snapshots.append(encode_snapshot(sections))
        counts.append([section.count for section in sections])
    return snapshots, counts


def _read_table(source: Store, file: SavedFile, location: str) -> pa.Table:
    with reading_parquet(file, location):
        return pq.read_table(pa.BufferReader(read_saved(source, file, location)))
