"""Saves an operator: its state at a checkpoint becomes the tables of a savepoint, Parquet files that all tools read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from statelog.convert.state_tables import ElementColumns, Positions, StateColumns
from statelog.errors import ConfigurationError
from statelog.history.operator_history import History
from statelog.local.restore import read_segment
from statelog.log.entry import Checkpoint
from statelog.log.open import open_location
from statelog.operators.keyed.timers import TIMERS
from statelog.operators.unkeyed.snapshot import Snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.reading.rows import PART_BYTES, Part, ReadPart, RunAll, cut_parts, part_sizes, scan_part
from statelog.reading.savepoint import SAVED_OPERATORS, SavedFile, SavedOperator, SavedState, store_saved
from statelog.runs.byte_slices import BUDGET
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema
from statelog.storage import Store
from statelog.storage.names import distinct_parts
from statelog.storage.open import is_within

OPERATORS_FOLDER: Final = SAVED_OPERATORS


def save_operator(
    history: History,
    batch: int,
    folder: str,
    *,
    location: str,
    target: str,
    run_all: RunAll,
    part_bytes: int = PART_BYTES,
    slice_bytes: int = BUDGET.slice_bytes,
) -> SavedOperator:
    """Write the tables of an operator from `location` to the savepoint `target`, in parts of about `part_bytes`.

    `history` must be able to restore the batch until this returns. `folder` names the operator's folder in the
    savepoint. Besides a part's files, about `slice_bytes` of it are in memory at once.
    """
    checkpoint = history.at(batch)
    assert checkpoint is not None, f"checkpoint {batch} is not there"
    path = f"{OPERATORS_FOLDER}/{folder}"
    if not checkpoint.key_schema:
        files = _export_elements(checkpoint, path, open_location(location), open_location(target))
        return _saved_operator(checkpoint, folder, checkpoint.parallelism, [files])
    parts = cut_parts(history, checkpoint, part_bytes)
    found = run_all(partial(_export_keyed, checkpoint, path, location, target, slice_bytes), parts, part_sizes)
    return _saved_operator(checkpoint, folder, len(parts), found)


# ---- Keyed operators ----


def _export_keyed(
    checkpoint: Checkpoint, folder: str, location: str, target: str, slice_bytes: int, read: ReadPart
) -> dict[str, SavedFile]:
    """Write a part of a checkpoint below `folder`, one file per state; returns the files by state.

    A state without rows in a part has no file there, except in the first part, so that every table can be opened.
    """
    tables = _Tables(checkpoint)
    states = [state.name for state in checkpoint.states]
    for state, batch in scan_part(open_location(location), read, checkpoint, states, slice_bytes):
        tables.add(state, batch)
    return tables.store(open_location(target), _state_folders(folder, checkpoint.states), read.part)


class _Tables:
    """Sorts merged changes into a table per state."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        key_schema = decode_schema(checkpoint.key_schema)
        self._states = {stored.name: StateDescriptor.from_stored(stored) for stored in checkpoint.states}
        self._columns = {name: StateColumns(key_schema, state) for name, state in self._states.items()}
        self._positions = {name: Positions() for name in self._states}
        self._files = {name: TableFile(columns.schema) for name, columns in self._columns.items()}

    def add(self, state: StateDescriptor, batch: pa.RecordBatch) -> None:
        self._files[state.name].write(self._columns[state.name].to_rows(batch, self._positions[state.name]))

    def store(self, target: Store, folders: Mapping[str, str], part: Part) -> dict[str, SavedFile]:
        kept = {name: file for name, file in self._files.items() if file.rows or part.number == 0}
        return {name: file.store(target, folders[name], part.number) for name, file in kept.items()}


# ---- Unkeyed operators ----


def _export_elements(checkpoint: Checkpoint, folder: str, source: Store, target: Store) -> dict[str, SavedFile]:
    """Write the states of an unkeyed operator, one file per state; returns the files by state."""
    segments = checkpoint.segments if checkpoint.states else []  # without states, they may be a query's stored output
    snapshots = [Snapshot(read_segment(source, segment), segment.name) for segment in segments]
    folders = _state_folders(folder, checkpoint.states)
    files: dict[str, SavedFile] = {}
    for stored in checkpoint.states:
        columns = ElementColumns(stored)
        table = TableFile(columns.schema)
        is_copied = stored.kind == OperatorStateMode.BROADCAST
        for subtask, snapshot in enumerate(snapshots[:1] if is_copied else snapshots):
            section = snapshot.sections.get(stored.name)
            if section is not None and section.count:
                table.write(columns.to_rows(section.rows, subtask))
        files[stored.name] = table.store(target, folders[stored.name], 0)
    return files


# ---- Both ----


def _saved_operator(
    checkpoint: Checkpoint, folder: str, parts: int, files: Sequence[Mapping[str, SavedFile]]
) -> SavedOperator:
    """The manifest's record of an operator; `files` has each range's files by state."""
    states: list[SavedState] = []
    for stored in checkpoint.states:
        own = [found[stored.name] for found in files if stored.name in found]
        if checkpoint.key_schema:
            schema = StateColumns(decode_schema(checkpoint.key_schema), StateDescriptor.from_stored(stored)).schema
        else:
            schema = ElementColumns(stored).schema
        states.append(SavedState(stored, {field.name: str(field.type) for field in file_schema(schema)}, own))
    return SavedOperator(
        uid=checkpoint.uid,
        folder=folder,
        parts=parts,
        key_schema=checkpoint.key_schema,
        states=states,
        batch_time_ms=checkpoint.batch_time_ms,
        watermark_ms=checkpoint.watermark_ms,
        max_event_ms=checkpoint.max_event_ms,
        settings=checkpoint.settings,
    )


def _state_folders(folder: str, states: Sequence[StateSchema]) -> dict[str, str]:
    """The folder of each state's table."""
    names = distinct_parts([stored.name for stored in states if stored.name != TIMERS])
    return {
        stored.name: f"{folder}/timers" if stored.name == TIMERS else f"{folder}/states/{names[stored.name]}"
        for stored in states
    }


# ---- Parquet files: types that all tools read, with Spark's names of the types in the metadata ----


_COMPRESSION: Final = "zstd"
_SPARK_SCHEMA: Final = "org.apache.spark.sql.parquet.row.metadata"
"""Spark looks here for the types of a file's columns, because Parquet has no intervals and no void."""
_TIME: Final = pa.time64("us")
"""Spark's own unit in Parquet; times have no more digits."""

_SPARK_NAMES: Final[dict[pa.DataType, str]] = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us", tz="UTC"): "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
    pa.duration("us"): "interval day to second",
    _TIME: "time(6)",
    pa.null(): "void",
}


def file_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of a table in its files; all are nullable."""
    fields = [_file_field(field) for field in schema]
    return pa.schema(fields, {_SPARK_SCHEMA: json.dumps(_spark_struct(fields))})


class TableFile:
    """A Parquet file in memory; `schema` has the table's columns in the state's types."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = file_schema(schema)
        self._sink = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(self._sink, self._schema, compression=_COMPRESSION)
        self.rows = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows."""
        self._writer.write_batch(rows.cast(self._schema))
        self.rows += rows.num_rows

    def store(self, target: Store, folder: str, part: int) -> SavedFile:
        """Close the file and store it."""
        self._writer.close()
        data = memoryview(self._sink.getvalue())
        return store_saved(target, f"{folder}/part-{part:05}.parquet", data, rows=self.rows, part=part)


def _file_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _file_type(field.type))


def _file_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_time64(kind):
        return _TIME
    if pa.types.is_list(kind):
        return pa.list_(_file_field(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(_file_type(kind.key_type), _file_field(kind.item_field))
    return pa.struct([_file_field(field) for field in kind.fields]) if pa.types.is_struct(kind) else kind


def _spark_struct(fields: list[pa.Field]) -> dict[str, Any]:
    members = [
        {"name": field.name, "type": _spark_type(field.type), "nullable": True, "metadata": {}} for field in fields
    ]
    return {"type": "struct", "fields": members}


def _spark_type(kind: pa.DataType) -> str | dict[str, Any]:
    """A type in Spark's JSON."""
    if pa.types.is_list(kind):
        return {"type": "array", "elementType": _spark_type(kind.value_type), "containsNull": True}
    if pa.types.is_map(kind):
        key, value = _spark_type(kind.key_type), _spark_type(kind.item_type)
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    if pa.types.is_struct(kind):
        return _spark_struct(kind.fields)
    return f"decimal({kind.precision},{kind.scale})" if pa.types.is_decimal(kind) else _SPARK_NAMES[kind]


UNFINISHED: Final = "unfinished"
"""This object marks a savepoint that is being written; only one writer can create it."""


def require_new(store: Store, target: str) -> None:
    """Refuse a place that is not empty; :func:`begin_target` looks again."""
    if store.list():
        raise _not_empty(target)


def begin_target(store: Store, target: str, token: bytes) -> None:
    """Reserve an empty place for one writer; raises ConfigurationError if it is not empty or has another writer."""
    require_new(store, target)
    if not store.put_if_absent(UNFINISHED, token):
        raise _not_empty(target)
    # Another writer may have come and finished since the first look.
    if [info.name for info in store.list()] != [UNFINISHED]:
        store.delete([UNFINISHED])
        raise _not_empty(target)


def finish_target(store: Store) -> None:
    """Mark the savepoint as complete."""
    store.delete([UNFINISHED])


def _not_empty(target: str) -> ConfigurationError:
    return ConfigurationError(
        f"{target} is not empty, or another savepoint is being written there.",
        hint="Use a separate directory for each savepoint, and remove what an interrupted one has left.",
    )


def require_apart(location: str, folders: Iterable[str], what: str) -> None:
    """Refuse a location within one of the folders; `what` names the location's purpose in messages."""
    for folder in folders:
        if is_within(location, folder):
            raise ConfigurationError(
                f"{what} {location} is within {folder}, whose files must not be mixed with others.",
                hint="Choose a location outside of it.",
            )
