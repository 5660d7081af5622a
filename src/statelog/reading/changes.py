"""Reads what each batch has changed in a state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.local.stored_reader import StoredBytes, read_run
from statelog.log.entry import Checkpoint
from statelog.log.references import SegmentRef
from statelog.reading.change_columns import ChangeColumns
from statelog.reading.lookup import Keys, encoded_keys
from statelog.reading.pinned import open_pinned, reading
from statelog.reading.read import chosen_columns, chosen_state, shown_name
from statelog.reading.scan import merged_rows
from statelog.reading.source import At, Source, open_source
from statelog.runs.key_groups import Hashes, HashRange, subtasks_of
from statelog.runs.merge import Garbage
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema, stored_name
from statelog.runs.times import Moment
from statelog.storage import Store
from statelog.tables.table import KeyBatch

_THREADS: Final = 16


def read_changes(
    location: str | Path,
    uid: str | None = None,
    state: str | None = None,
    *,
    after: int | None = None,
    up_to: At | None = None,
    keys: Keys | None = None,
    columns: Sequence[str] | None = None,
) -> pa.RecordBatchReader:
    """Read what each batch has changed in a state of an operator, while its query runs or later.

    The changes are those of the log: of each batch the last one of each entry. State that expires leaves no change.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    uid : str, optional
        The operator; needed if there are several.
    state : str, optional
        The state; needed if there are several. ``"timers"`` are the operator's timers.
    after : int, optional
        Only the changes of later batches. By default all whose changes are still stored.
    up_to : int or datetime, optional
        The last batch, as in :func:`read_state`; by default the newest one.
    keys : pyarrow.Table, pyarrow.RecordBatch or sequence, optional
        Only the changes of these keys, as in :func:`read_state`.
    columns : sequence of str, optional
        The columns to read, in this order; by default all but ``hash``.

    Returns
    -------
    pyarrow.RecordBatchReader
        A row per change, batch after batch, with the columns ``batch``, ``batch_time_ms``, ``operation`` and those of
        :func:`read_state`, without ``position``. ``put`` is the entry's new value, or an element that was appended;
        ``delete`` removes the entry; ``clear`` removes all entries of a list or map before the rows of its key that
        follow in the same batch.

    Raises
    ------
    ConfigurationError
        If there is no such operator, state or column, if several fit, if the keys do not fit the key's fields, or if
        the operator has no changes in its log: it has no keys, or ``Options(changelog=False)``.
    StateMissingError
        If there is no such checkpoint, or changes since `after` are gone.
    PinExpiredError
        As in :func:`read_state`.
    CorruptionError, StorageError
        If the log is damaged or cannot be read; also while rows are read.

    Examples
    --------
    >>> statelog.read_changes("/data/checkpoints/flights", state="count", after=1200).read_all()  # doctest: +SKIP
    """

    def make() -> tuple[pa.Schema, Iterator[pa.RecordBatch | None]]:
        source = open_source(str(location), uid, up_to)
        stored, table = change_table(source, state)
        schema = chosen_columns(table.schema, columns, f"State '{shown_name(stored)}' of {source.name}")
        wanted = None if keys is None else encoded_keys(keys, table.keys, source.name)
        return schema, change_rows(source, _first_batch(source, after), stored, table, wanted)

    return open_pinned(make, is_fixed=isinstance(up_to, int))


def change_table(source: Source, state: str | None) -> tuple[StateSchema, ChangeColumns]:
    """A state and the table of its changes; ConfigurationError if there is none, or the operator has no keys."""
    stored = chosen_state(source, state)
    if source.checkpoint.is_whole:
        raise ConfigurationError(
            f"{source.name} has no keys: every checkpoint holds all of its state, and no changes.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Read two checkpoints with read_state, and compare them.",
        )
    key_schema = decode_schema(source.checkpoint.key_schema)
    return stored, ChangeColumns(key_schema, StateDescriptor.from_stored(stored))


def _first_batch(source: Source, after: int | None) -> int:
    """The first batch to read; StateMissingError if its changes are gone."""
    first = max(source.history.changes_from, 0)
    if after is None:
        return first
    if after + 1 < first:
        raise StateMissingError(
            f"{source.name} has the changes of batch {first} and later ones, and those since {after + 1} were asked"
            " for.",
            hint="Read the state with read_state and go on from there. A larger Options(materialization_interval_s=...)"
            " or more retained checkpoints keep more changes.",
        )
    return after + 1


def change_rows(
    source: Source, first: int, stored: StateSchema, table: ChangeColumns, wanted: KeyBatch | None
) -> Iterator[pa.RecordBatch | None]:
    """The changes of each batch; the first step pins them and yields None."""
    last = source.checkpoint.batch
    with reading(source.store, source.root, source.history, last, min(first, last)) as keep:
        yield None
        for checkpoint in source.history.between(first, last):
            if not checkpoint.segments:
                raise ConfigurationError(
                    f"{source.name} has no changes in batch {checkpoint.batch}: it ran with Options(changelog=False).",
                    kind=ErrorKind.UNSUPPORTED_FEATURE,
                    hint="Compare two checkpoints with read_state.",
                )
            keep()
            for changes in batch_changes(source.store, checkpoint, stored, wanted):
                yield table.to_rows(changes, checkpoint.batch, checkpoint.batch_time_ms)
                keep()


@dataclass(frozen=True)
class SubtaskChanges:
    """The changes of one subtask in one batch: their place in the store."""

    batch: int
    batch_time_ms: int
    watermark_ms: int
    generations: dict[str, int]
    segments: list[SegmentRef]

    @classmethod
    def of(cls, checkpoint: Checkpoint, subtask: int) -> SubtaskChanges:
        """The changes of a subtask in a checkpoint."""
        return cls(
            batch=checkpoint.batch,
            batch_time_ms=checkpoint.batch_time_ms,
            watermark_ms=checkpoint.watermark_ms,
            generations=checkpoint.generations,
            segments=[segment for segment in checkpoint.segments_of(subtask, subtask) if segment.rows],
        )

    def rows(self, store: Store, stored: StateSchema) -> Iterator[pa.RecordBatch]:
        """The changes of a state, in the engine's columns."""
        runs = [read_run(store, segment, _what(segment), states=[stored.name]) for segment in self.segments]
        declared = {stored.name: StateDescriptor.from_stored(stored)}
        garbage = Garbage(Moment(self.batch_time_ms, self.watermark_ms), self.generations)
        for _, rows in merged_rows(runs, declared, is_bottom=False, garbage=garbage):
            yield rows


def batch_changes(
    store: Store, checkpoint: Checkpoint, stored: StateSchema, wanted: KeyBatch | None
) -> Iterator[pa.RecordBatch]:
    """The changes of a state in one batch, of some keys or of all."""
    if wanted is None:
        for subtask in range(checkpoint.parallelism):
            yield from SubtaskChanges.of(checkpoint, subtask).rows(store, stored)
        return
    name = stored_name(stored.name, checkpoint.generations.get(stored.name, 0))
    yield from changes_of_keys(_searched(store, checkpoint, name, wanted), checkpoint, stored, wanted)


def changes_of_keys(
    runs: list[Run], checkpoint: Checkpoint, stored: StateSchema, wanted: KeyBatch
) -> Iterator[pa.RecordBatch]:
    """The changes of a state for some keys, in runs of one batch."""
    declared = {stored.name: StateDescriptor.from_stored(stored)}
    garbage = Garbage(Moment(checkpoint.batch_time_ms, checkpoint.watermark_ms), checkpoint.generations)
    for _, rows in merged_rows(runs, declared, is_bottom=False, garbage=garbage):
        found = _of_keys(rows, wanted)
        if found.num_rows:
            yield found


def _searched(store: Store, checkpoint: Checkpoint, name: str, wanted: KeyBatch) -> list[Run]:
    """The parts of a batch's changesets that may hold some keys."""
    subtasks = subtasks_of(wanted.hashes, checkpoint.parallelism)
    segments = [
        (segment, wanted.hashes[subtasks == segment.subtask])
        for segment in checkpoint.segments
        if segment.rows and (subtasks == segment.subtask).any()
    ]

    def read(segment: SegmentRef, hashes: Hashes) -> Run:
        run = Run(StoredBytes(store, segment, _what(segment)), segment.name, segment.offset, is_stored=True)
        return run.searched(name, hashes, HashRange(int(hashes[0]), int(hashes[-1])))

    if store.can_append:
        return [read(*one) for one in segments]
    with ThreadPoolExecutor(_THREADS, "statelog-read") as pool:
        return list(pool.map(lambda one: read(*one), segments))


def _of_keys(rows: pa.RecordBatch, wanted: KeyBatch) -> pa.RecordBatch:
    """The rows of some keys."""
    return rows.filter(
        pc.and_(
            pc.is_in(rows.column(0), value_set=pa.array(wanted.hashes)), pc.is_in(rows.column(1), value_set=wanted.keys)
        )
    )


def _what(segment: SegmentRef) -> str:
    return f"the changeset of subtask {segment.subtask}"
