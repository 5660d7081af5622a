"""Begins the log of a new query with the tables of a savepoint, turned into runs and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from statelog.clock import Clock
from statelog.convert.state_tables import HASH, ElementColumns, encode_tables
from statelog.coordinator.views import given_base
from statelog.errors import ConfigurationError, CorruptionError, ErrorKind
from statelog.log.entry import Claim, Parent, QueryCheckpoint, Section
from statelog.log.numbered import NumberedLog
from statelog.log.open import RUNS_FOLDER, new_identity, open_location, open_log
from statelog.log.references import SegmentRef, StoredRun
from statelog.operators.unkeyed.snapshot import StateElements, encode_snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.options import Options
from statelog.reading.rows import Part, RunAll
from statelog.reading.savepoint import SavedFile, SavedOperator, read_saved, reading_parquet
from statelog.runs import digests
from statelog.runs.arrow_messages import require_valid
from statelog.runs.byte_slices import BUDGET
from statelog.runs.key_groups import subtasks_of
from statelog.runs.schema import StateSchema, decode_schema
from statelog.runs.times import NO_TIME_MS
from statelog.storage import Store


@dataclass(frozen=True)
class RestoreTarget:
    """The new location of a query, and the values of its first entries."""

    location: str
    query_id: str
    """The query that will own the state."""
    run_id: str
    """The writer that the first entries name."""
    batch: int
    """The batch of the newest checkpoint that is written there."""
    options: Options
    clock: Clock
    new_token: Callable[[], bytes]
    """Makes 16 unique bytes."""

    def entry(
        self,
        log: NumberedLog,
        batch: int,
        batch_time_ms: int,
        sections: list[Section],
        *,
        follows: bytes = b"",
        parent: Parent | None = None,
        log_start: int | None = None,
    ) -> QueryCheckpoint:
        """An entry of the new query; `follows` is the id of the one before it."""
        token = self.new_token()
        return QueryCheckpoint(
            epoch=log.epoch,
            batch=batch,
            revision=0,
            id=token,
            follows=follows,
            query_id=self.query_id,
            run_id=self.run_id,
            token=token,
            batch_time_ms=batch_time_ms,
            watermark_ms=NO_TIME_MS,  # each section has its own
            sections=sorted(sections, key=lambda section: section.uid),
            log_start=log.number if log_start is None else log_start,
            retained_from=self.batch,
            parent=parent,
        )


@contextmanager
def new_log(target: RestoreTarget, least_epoch: int = 1) -> Iterator[NumberedLog]:
    """Claim the log of a new query, with an epoch of at least `least_epoch`.

    Raises ConfigurationError if the location already holds state.
    """
    log = open_log(open_location(target.location), target.options, target.clock)
    if any(isinstance(entry, QueryCheckpoint) for entry in log.read()):
        raise ConfigurationError(
            f"{target.location} already holds state.",
            kind=ErrorKind.OTHER_OWNER,
            hint=f"{target.run_id.capitalize()} into an empty location, or remove the folder first.",
        )
    now_ms = int(target.clock.now_s() * 1000)
    log.claim(lambda epoch: Claim(max(epoch, least_epoch), target.query_id, target.run_id, target.new_token(), now_ms))
    try:
        yield log
    finally:
        log.close()


def restore_operators(saved: Sequence[SavedOperator], source: str, target: RestoreTarget, run_all: RunAll) -> None:
    """Begin a query's log with the state of all operators in the savepoint at `source`.

    Raises ConfigurationError if the location already holds state. After an error, the location has no checkpoint, so
    files that were written do not count.
    """
    with new_log(target) as log:
        sections: list[Section] = []
        payload: list[bytes] = []
        for one in saved:
            section = first_section(one, target)
            if one.key_schema:
                loads = keyed_loads(one, f"{section.identity}/{RUNS_FOLDER}/{log.epoch}")
                load = partial(load_keyed, one.key_schema, target.options.codec, source, target.location)
                stored = zip(loads, run_all(load, loads, _sizes), strict=True)
                runs = {load.part.number: [run] for load, run in stored}
                base = given_base(section.identity, section.parallelism, target.batch, runs, first=0)
                section = replace(section, base_ranges=base)
            else:
                snapshots, counts = _load_elements(one, open_location(source), source)
                segments = _segments(snapshots, counts, sum(map(len, payload)))
                section = replace(section, segments=segments, element_counts=counts)
                payload += snapshots
            sections.append(section)
        log.append(target.entry(log, target.batch, saved[0].batch_time_ms, sections), payload)


def first_section(saved: SavedOperator, target: RestoreTarget) -> Section:
    """The first section of an operator, still without state."""
    return Section(
        identity=new_identity(saved.uid, target.new_token()),
        uid=saved.uid,
        parallelism=saved.parts,
        segments=[],
        key_schema=saved.key_schema,
        states=[state.schema for state in saved.states],
        watermark_ms=saved.watermark_ms,
        max_event_ms=saved.max_event_ms,
        settings=dict(saved.settings),
        begins=True,
    )


def _segments(snapshots: list[bytes], counts: list[list[int]], offset: int) -> list[SegmentRef]:
    """The segments of snapshots that begin at an offset of the entry's payload."""
    offsets = list(accumulate(map(len, snapshots), initial=offset))
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
                f"{source}/{files[0].name}: it holds keys outside of range {part.number} of {part.count}.",
                kind=ErrorKind.FORMAT,
                hint="Another program may have written the table. Load changed tables with initialState.",
            )
        tables.append((schema, rows))
    data, rows_written = encode_tables(decode_schema(key_schema), tables, compression, slice_bytes)
    open_location(target).put(load.name, data)
    within = part.hashes
    return StoredRun(load.name, 0, len(data), digests.checksum(data), rows_written, within.first, within.last)


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
        table = pq.read_table(pa.BufferReader(read_saved(source, file, location)))
        for rows in table.to_batches():
            require_valid(rows)
        return table
