"""From the tables of a savepoint to the files that a location begins with."""

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
    """A range of the keys of a saved operator, to be made a run.

    Parameters
    ----------
    location : str
        The savepoint, for messages.
    name : str
        The object that is to hold the run.
    part, parts : int
        Which of how many ranges.
    key_schema : bytes
        Arrow IPC schema message of the key columns.
    tables : list of (StateSchema, list of SavedFile)
        The states, and the files that hold the range.
    compression : {"lz4", "zstd", None}
        Of the run.
    """

    location: str
    name: str
    part: int
    parts: int
    key_schema: bytes
    tables: list[tuple[StateSchema, list[SavedFile]]]
    compression: str | None


def keyed_loads(saved: SavedOperator, location: str, folder: str, compression: str | None) -> list[KeyedLoad]:
    """What there is to do for a keyed operator.

    Parameters
    ----------
    saved : SavedOperator
        The operator.
    location : str
        The savepoint, for messages.
    folder : str
        What the names of the runs begin with.
    compression : {"lz4", "zstd", None}
        Of the runs.
    """
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
    """Make a run of a range, and store it; `slice_bytes` of it are worked on at once.

    Raises
    ------
    CorruptionError
        If a file of the savepoint is damaged.
    StorageError
        If it cannot be read, or the run cannot be stored.
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
    """Encode a run of tables.

    Parameters
    ----------
    key_schema : pyarrow.Schema
        The key's fields.
    tables : sequence of (StateSchema, pyarrow.Table)
        The states and their rows, as :class:`StateColumns` describes them.
    compression : {"lz4", "zstd", None}
        Of the run.
    slice_bytes : int
        How much is worked on at once.

    Returns
    -------
    data : bytes
        The run.
    rows : int
        Number of its rows.

    Raises
    ------
    ConfigurationError
        If the rows are not such rows.
    """
    sink = pa.BufferOutputStream()
    writer = RunWriter(sink, compression=compression, block_rows=STORED_BLOCK_ROWS)
    for stored, rows in tables:
        state = StateDescriptor.from_stored(stored)
        for changes in StateColumns(key_schema, state).to_changes(rows, slice_bytes):
            writer.add(state, changes)
    rows_written = writer.finish()
    return sink.getvalue().to_pybytes(), rows_written


def load_elements(saved: SavedOperator, source: Store, location: str) -> tuple[list[bytes], list[list[int]]]:
    """Make the snapshots of an operator without keys.

    Returns
    -------
    snapshots : list of bytes
        One per subtask.
    counts : list of list of int
        For each subtask the number of elements of each state.

    Raises
    ------
    CorruptionError, StorageError
        As :func:`load_keyed`.
    """
    tables = [
        (state.schema, pa.concat_tables([_read_table(source, file, location) for file in state.files]))
        for state in saved.states
    ]
    snapshots: list[bytes] = []
    counts: list[list[int]] = []
    for subtask in range(saved.parts):
        sections: list[StateElements] = []
        for schema, rows in tables:
            # All subtasks have the same of a broadcast state, so it is saved once.
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
