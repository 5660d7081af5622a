"""Turns an operator's state at a checkpoint into the tables of a savepoint."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from statelog.checkpoint.history import History
from statelog.local.restore import read_segment, restore_runs
from statelog.local.restore_plan import RestorePlan
from statelog.local.runs import LocalRuns
from statelog.log.entry import Checkpoint
from statelog.log.references import SegmentRef
from statelog.operators.unkeyed.snapshot import Snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.runs import digests
from statelog.runs.byte_slices import BUDGET
from statelog.runs.evolution import project
from statelog.runs.format import VALUE_COLUMN, change_schema
from statelog.runs.key_groups import HashRange, hash_range
from statelog.runs.merge import Garbage, RunMerge
from statelog.runs.schema import StateDescriptor, StateKind, StateSchema, decode_schema, plain_name
from statelog.runs.times import Moment
from statelog.savepoint.columns import Positions, StateColumns
from statelog.savepoint.element_columns import ElementColumns
from statelog.savepoint.manifest import SavedFile, SavedOperator, SavedState
from statelog.savepoint.parquet import TableFile, file_schema
from statelog.storage import Store
from statelog.storage.names import distinct_parts

_PART_BYTES: Final = 64 << 20
_MOST_PARTS: Final = 4096
_SLICE_ROWS: Final = 65_536


@dataclass(frozen=True)
class KeyedExport:
    """The work to write one range of an operator's key hashes; picklable."""

    folder: str
    """The operator's folder in the savepoint."""
    part: int
    """The range, of `parts` ranges."""
    parts: int
    genesis: bytes
    """Digest of the range's empty state."""
    head: bytes
    """Digest of the range's state."""
    batch: int
    key_schema: bytes
    """Arrow IPC schema message of the key columns."""
    states: list[StateSchema]
    garbage: Garbage
    """Rows that do not count any more, such as expired ones."""
    missing: RestorePlan
    """The stored files that the range is read from."""

    @property
    def within(self) -> HashRange:
        """The range of key hashes."""
        return hash_range(self.part, self.parts)


def export_plan(history: History, checkpoint: Checkpoint, folder: str) -> list[KeyedExport]:
    """Cut an operator's key hashes into ranges of about equal size; the checkpoint must be one that can be restored."""

    def plan(part: int, parts: int) -> tuple[bytes, RestorePlan]:
        genesis = digests.genesis(checkpoint.query_id, checkpoint.uid, part, parts)
        return genesis, history.missing_segments(genesis, part, parts, checkpoint.batch, set())

    whole = plan(0, 1)
    parts = min(max(1, -(-whole[1].length // _PART_BYTES)), _MOST_PARTS)
    garbage = Garbage(Moment(checkpoint.batch_time_ms, checkpoint.watermark_ms), checkpoint.generations)
    exports: list[KeyedExport] = []
    for part in range(parts):
        genesis, missing = whole if parts == 1 else plan(part, parts)
        head = history.digest(genesis, part, parts, checkpoint.batch)
        exports.append(
            KeyedExport(
                folder,
                part,
                parts,
                genesis,
                head,
                checkpoint.batch,
                checkpoint.key_schema,
                checkpoint.states,
                garbage,
                missing,
            )
        )
    return exports


def export_keyed(
    export: KeyedExport, source: Store, target: Store, slice_bytes: int = BUDGET.slice_bytes
) -> dict[str, SavedFile]:
    """Write a range, one file per state; returns the files by state.

    Besides the files, about `slice_bytes` are in memory at once.

    A state without rows in a range has no file there, except in the first range, so that every table can be opened.
    """
    tables = _Tables(export)
    with tempfile.TemporaryDirectory(prefix="statelog-savepoint-") as scratch:
        runs = restore_runs(
            LocalRuns(Path(scratch) / "runs"),
            genesis=export.genesis,
            head=export.head,
            last_batch=export.batch,
            within=export.within,
            garbage=export.garbage,
            fetch=lambda known: export.missing,
            open_store=lambda: source,
            token="savepoint",
        )
        merge = RunMerge(
            [run for _, run in runs],
            is_bottom=True,
            within=export.within,
            garbage=export.garbage,
            slice_rows=_SLICE_ROWS,
            slice_bytes=slice_bytes,
        )
        for _ in merge.write(tables):
            pass
    return tables.store(target)


class _Tables:
    """Sorts merged changes into a table per state."""

    def __init__(self, export: KeyedExport) -> None:
        self._export = export
        key_schema = decode_schema(export.key_schema)
        self._states = {stored.name: StateDescriptor.from_stored(stored) for stored in export.states}
        self._columns = {name: StateColumns(key_schema, state) for name, state in self._states.items()}
        self._positions = {name: Positions() for name in self._states}
        self._open: dict[str, TableFile] = {}

    def add(self, state: StateDescriptor, batch: pa.RecordBatch) -> None:
        name = plain_name(state.name)
        declared = self._states.get(name)
        if not batch.num_rows or declared is None:
            return
        if name not in self._open:
            self._open[name] = TableFile(self._columns[name].schema)
        rows = self._columns[name].to_rows(_projected(batch, state, declared), self._positions[name])
        self._open[name].write(rows)

    def store(self, target: Store) -> dict[str, SavedFile]:
        export = self._export
        if export.part == 0:
            for name in self._states.keys() - self._open.keys():
                self._open[name] = TableFile(self._columns[name].schema)
        folders = _state_folders(export.folder, export.states)
        return {name: table.store(target, folders[name], export.part) for name, table in sorted(self._open.items())}


def _projected(batch: pa.RecordBatch, stored: StateDescriptor, declared: StateDescriptor) -> pa.RecordBatch:
    """Changes with the fields of the state in the checkpoint, as rows may be older than its schema."""
    if stored.kind is StateKind.TIMER or stored.value_schema == declared.value_schema:
        return batch
    values = project(batch.columns[VALUE_COLUMN:], stored, declared)
    return pa.RecordBatch.from_arrays([*batch.columns[:VALUE_COLUMN], *values], schema=change_schema(declared))


def export_elements(checkpoint: Checkpoint, folder: str, source: Store, target: Store) -> dict[str, SavedFile]:
    """Write the states of an unkeyed operator, one file per state; returns the files by state."""
    segments: list[SegmentRef] = checkpoint.segments
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


def saved_operator(
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
