"""Saves an operator: turns its state at a checkpoint into the tables of a savepoint."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

from statelog.checkpoint.history import History
from statelog.local.restore import read_segment, restore_runs
from statelog.local.restore_plan import RestorePlan
from statelog.local.runs import LocalRuns
from statelog.log.entry import Checkpoint
from statelog.log.open import open_location
from statelog.operators.unkeyed.snapshot import Snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.runs import digests
from statelog.runs.byte_slices import BUDGET
from statelog.runs.evolution import project
from statelog.runs.format import VALUE_COLUMN, change_schema
from statelog.runs.merge import Garbage, add_runs
from statelog.runs.schema import StateDescriptor, StateKind, StateSchema, decode_schema, plain_name
from statelog.runs.times import Moment
from statelog.savepoints.manifest import SavedFile, SavedOperator, SavedState
from statelog.savepoints.parquet import TableFile, file_schema
from statelog.savepoints.parts import Part, RunAll
from statelog.savepoints.tables import ElementColumns, Positions, StateColumns
from statelog.storage import Store
from statelog.storage.names import distinct_parts

OPERATORS_FOLDER: Final = "operators"
PART_BYTES: Final = 64 << 20
"""Stored state of a part: it bounds the memory of a task."""
_MOST_PARTS: Final = 4096
_SLICE_ROWS: Final = 65_536


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
    exports = _keyed_exports(history, checkpoint, part_bytes)
    found = run_all(partial(_export_keyed, checkpoint, path, location, target, slice_bytes), exports)
    return _saved_operator(checkpoint, folder, len(exports), found)


# ---- Keyed operators ----


@dataclass(frozen=True)
class _KeyedExport:
    """The work to write one part of a keyed operator; picklable."""

    part: Part
    genesis: bytes
    """Digest of the part's empty state."""
    head: bytes
    """Digest of the part's state."""
    plan: RestorePlan
    """The stored files that the part is read from."""


def _keyed_exports(history: History, checkpoint: Checkpoint, part_bytes: int) -> list[_KeyedExport]:
    """Cut an operator into parts of about `part_bytes`."""

    def export(part: Part) -> _KeyedExport:
        genesis = digests.genesis(checkpoint.query_id, checkpoint.uid, part.number, part.count)
        known = (genesis, part.number, part.count, checkpoint.batch)
        return _KeyedExport(part, genesis, history.digest(*known), history.missing_segments(*known, set()))

    whole = export(Part(0, 1))
    count = min(max(1, -(-whole.plan.length // part_bytes)), _MOST_PARTS)
    return [whole] if count == 1 else [export(Part(number, count)) for number in range(count)]


def _export_keyed(
    checkpoint: Checkpoint, folder: str, location: str, target: str, slice_bytes: int, export: _KeyedExport
) -> dict[str, SavedFile]:
    """Write a part of a checkpoint below `folder`, one file per state; returns the files by state.

    A state without rows in a part has no file there, except in the first part, so that every table can be opened.
    """
    tables = _Tables(checkpoint)
    # Rows that do not count any more, such as expired ones.
    garbage = Garbage(Moment(checkpoint.batch_time_ms, checkpoint.watermark_ms), checkpoint.generations)
    with tempfile.TemporaryDirectory(prefix="statelog-savepoint-") as scratch:
        runs = restore_runs(
            LocalRuns(Path(scratch) / "runs"),
            genesis=export.genesis,
            head=export.head,
            last_batch=checkpoint.batch,
            within=export.part.hashes,
            garbage=garbage,
            fetch=lambda known: export.plan,
            open_store=lambda: open_location(location),
            token="savepoint",
        )
        add_runs(
            [run for _, run in runs],
            tables,
            is_bottom=True,
            within=export.part.hashes,
            garbage=garbage,
            slice_rows=_SLICE_ROWS,
            slice_bytes=slice_bytes,
        )
    return tables.store(open_location(target), _state_folders(folder, checkpoint.states), export.part)


class _Tables:
    """Sorts merged changes into a table per state."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        key_schema = decode_schema(checkpoint.key_schema)
        self._states = {stored.name: StateDescriptor.from_stored(stored) for stored in checkpoint.states}
        self._columns = {name: StateColumns(key_schema, state) for name, state in self._states.items()}
        self._positions = {name: Positions() for name in self._states}
        self._files = {name: TableFile(columns.schema) for name, columns in self._columns.items()}

    def add(self, state: StateDescriptor, batch: pa.RecordBatch) -> None:
        name = plain_name(state.name)
        declared = self._states.get(name)
        if not batch.num_rows or declared is None:
            return
        rows = self._columns[name].to_rows(_projected(batch, state, declared), self._positions[name])
        self._files[name].write(rows)

    def store(self, target: Store, folders: Mapping[str, str], part: Part) -> dict[str, SavedFile]:
        kept = {name: file for name, file in self._files.items() if file.rows or part.number == 0}
        return {name: file.store(target, folders[name], part.number) for name, file in kept.items()}


def _projected(batch: pa.RecordBatch, stored: StateDescriptor, declared: StateDescriptor) -> pa.RecordBatch:
    """Changes with the fields of the state in the checkpoint, as rows may be older than its schema."""
    if stored.kind is StateKind.TIMER or stored.value_schema == declared.value_schema:
        return batch
    values = project(batch.columns[VALUE_COLUMN:], stored, declared)
    return pa.RecordBatch.from_arrays([*batch.columns[:VALUE_COLUMN], *values], schema=change_schema(declared))


# ---- Unkeyed operators ----


def _export_elements(checkpoint: Checkpoint, folder: str, source: Store, target: Store) -> dict[str, SavedFile]:
    """Write the states of an unkeyed operator, one file per state; returns the files by state."""
    snapshots = [Snapshot(read_segment(source, segment), segment.name) for segment in checkpoint.segments]
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
