"""Saves an operator: turns its state at a checkpoint into the tables of a savepoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import pyarrow as pa

from statelog.checkpoint.history import History
from statelog.local.restore import read_segment
from statelog.log.entry import Checkpoint
from statelog.log.open import open_location
from statelog.operators.unkeyed.snapshot import Snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.reading.manifest import SAVED_OPERATORS, SavedFile, SavedOperator, SavedState
from statelog.reading.parts import Part, RunAll
from statelog.reading.scan import PART_BYTES, ReadPart, cut_parts, part_sizes, scan_part
from statelog.reading.tables import ElementColumns, Positions, StateColumns
from statelog.runs.byte_slices import BUDGET
from statelog.runs.schema import StateDescriptor, StateKind, StateSchema, decode_schema
from statelog.savepoints.parquet import TableFile, file_schema
from statelog.storage import Store
from statelog.storage.names import distinct_parts

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
    segments = checkpoint.segments if checkpoint.states else []  # else they may be a query's stored output
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
    names = distinct_parts([stored.name for stored in states if stored.kind != StateKind.TIMER])
    return {
        stored.name: f"{folder}/timers" if stored.kind == StateKind.TIMER else f"{folder}/states/{names[stored.name]}"
        for stored in states
    }
