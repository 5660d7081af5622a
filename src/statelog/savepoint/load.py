"""Turns the tables of a savepoint into the runs and snapshots that a new location begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from statelog.errors import CorruptionError, ErrorKind
from statelog.log.references import StoredRun
from statelog.operators.unkeyed.snapshot import StateElements, encode_snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.runs import digests
from statelog.runs.byte_slices import BUDGET
from statelog.runs.key_groups import hash_range, subtasks_of
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema
from statelog.runs.writer import STORED_BLOCK_ROWS, RunWriter
from statelog.savepoint.columns import HASH, StateColumns
from statelog.savepoint.element_columns import ElementColumns
from statelog.savepoint.manifest import SavedFile, SavedOperator, read_saved
from statelog.storage import Store


@dataclass(frozen=True)
class KeyedLoad:
    """The work to turn one range of a saved operator's key hashes into a run; picklable."""

    location: str
    """The savepoint, for messages."""
    name: str
    """The object that will hold the run."""
    part: int
    """The range, of `parts` ranges."""
    parts: int
    key_schema: bytes
    """Arrow IPC schema message of the key columns."""
    tables: list[tuple[StateSchema, list[SavedFile]]]
    """The states, each with its files of the range."""
    compression: str | None
    """Of the run: lz4, zstd or None."""


def keyed_loads(saved: SavedOperator, location: str, folder: str, compression: str | None) -> list[KeyedLoad]:
    """The work for a keyed operator, range by range; the runs' names begin with `folder`."""
    loads: list[KeyedLoad] = []
    for part in range(saved.parts):
        tables = [
            (state.schema, own)
            for state in saved.states
            if (own := [file for file in state.files if file.part == part and file.rows])
        ]
        if tables:
            name = f"{folder}/{part}/savepoint.run"
            loads.append(KeyedLoad(location, name, part, saved.parts, saved.key_schema, tables, compression))
    return loads


def load_keyed(load: KeyedLoad, source: Store, target: Store, slice_bytes: int = BUDGET.slice_bytes) -> StoredRun:
    """Store a range of the savepoint as a run, working on `slice_bytes` at once.

    Raises CorruptionError if a file of the savepoint is damaged or holds keys of another range.
    """
    tables: list[tuple[StateSchema, pa.Table]] = []
    for schema, files in load.tables:
        parts = [_read_table(source, file, load.location) for file in files]
        rows = pa.concat_tables(parts)
        hashes = rows.column(HASH).to_numpy().view("uint64")
        if (subtasks_of(hashes, load.parts) != load.part).any():
            raise CorruptionError(
                f"{load.location}/{files[0].name}: it holds keys of another range than {load.part} of {load.parts}.",
                kind=ErrorKind.FORMAT,
                hint="Was the table written by another program? Load changed tables with initialTables.",
            )
        tables.append((schema, rows))
    data, rows_written = encode_tables(decode_schema(load.key_schema), tables, load.compression, slice_bytes)
    target.put(load.name, data)
    within = hash_range(load.part, load.parts)
    return StoredRun(load.name, 0, len(data), digests.checksum(data), rows_written, within.first, within.last)


def encode_tables(
    key_schema: pa.Schema,
    tables: Sequence[tuple[StateSchema, pa.Table]],
    compression: str | None,
    slice_bytes: int = BUDGET.slice_bytes,
) -> tuple[bytes, int]:
    """Encode tables with the columns of :class:`StateColumns` as one run; returns its bytes and number of rows."""
    sink = pa.BufferOutputStream()
    writer = RunWriter(sink, compression=compression, block_rows=STORED_BLOCK_ROWS)
    for stored, rows in tables:
        state = StateDescriptor.from_stored(stored)
        for changes in StateColumns(key_schema, state).to_changes(rows, slice_bytes):
            writer.add(state, changes)
    rows_written = writer.finish()
    return sink.getvalue().to_pybytes(), rows_written


def load_elements(saved: SavedOperator, source: Store, location: str) -> tuple[list[bytes], list[list[int]]]:
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
    try:
        return pq.read_table(pa.BufferReader(read_saved(source, file, location)))
    except pa.ArrowException as error:
        raise CorruptionError(
            f"{location}/{file.name}: it cannot be read as Parquet: {error}.",
            kind=ErrorKind.FORMAT,
            hint="Take the savepoint again, or restore the file from a copy.",
        ) from error
