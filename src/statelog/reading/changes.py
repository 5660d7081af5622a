"""Reads what each batch has changed in a state, as typed columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statelog.convert.state_tables import BEFORE, EXPIRES, HASH, TIME, map_key_fields, map_keys, prefixed
from statelog.errors import ConfigurationError, ErrorKind, StatelogError, StateMissingError
from statelog.history.operator_history import History
from statelog.history.restore_plan import RestorePlan
from statelog.local.stored_reader import read_run
from statelog.log.entry import Checkpoint
from statelog.log.references import SegmentRef
from statelog.numbers import checked_batch
from statelog.progress import tracked
from statelog.reading.before import ChangedBatch, FormerValues
from statelog.reading.checkpoints import LoggedPoint
from statelog.reading.keys import Keys, encoded_keys
from statelog.reading.open import open_logged
from statelog.reading.point import At, is_settled
from statelog.reading.read import open_reader
from statelog.reading.rows import RunSearch, merged_rows, segment_parts
from statelog.reading.states import chosen_columns, chosen_state, is_same_state, shown_name
from statelog.runs.key_groups import subtasks_of
from statelog.runs.keys import KeyCodec
from statelog.runs.merge import Garbage
from statelog.runs.reader import Run
from statelog.runs.schema import (
    EXPIRY_COLUMN,
    VALUE_COLUMN,
    Operation,
    StateDescriptor,
    StateKind,
    StateSchema,
    decode_schema,
    stored_name,
)
from statelog.runs.times import Moment
from statelog.storage import Store
from statelog.tables.table import KeyBatch


def read_changes(
    location: str | Path,
    uid: str | None = None,
    state: str | None = None,
    *,
    after: int | None = None,
    up_to: At | None = None,
    keys: Keys | None = None,
    columns: Sequence[str] | None = None,
    with_before: bool = False,
) -> pa.RecordBatchReader:
    """Read what each batch has changed in a state of an operator, while its query runs or later.

    The changes are those of the log: the last change of each entry in each batch. State that expires leaves no change.

    Parameters
    ----------
    location : str or Path
        The query's checkpointLocation, or the location that its operators were given.
    uid : str, optional
        The operator; required if there are several.
    state : str, optional
        The state; required if there are several. ``"timers"`` are the operator's timers.
    after : int, optional
        Only the changes of later batches. By default, all batches whose changes are still stored; with `with_before`,
        all batches after the oldest retained checkpoint, unless the changes of all batches are stored.
    up_to : int, datetime or str, optional
        The last batch, as in :func:`read_state`; by default the newest one.
    keys : pyarrow.Table, pyarrow.RecordBatch or sequence, optional
        Only the changes of these keys, as in :func:`read_state`.
    columns : sequence of str, optional
        The columns to read, in this order; by default all but ``hash``.
    with_before : bool
        Whether the rows also have the entry's value before the batch, in the columns of :func:`read_diff`:
        ``before_<field>``, and ``before_expires_ms`` for state that expires. They are null if there was no such entry,
        or if it had expired by the batch's time; timers have no such columns. This looks up the changed keys in the
        state of checkpoint `after`, which must be retained or pinned.

    Returns
    -------
    pyarrow.RecordBatchReader
        A row per change, batch after batch, with the columns ``batch``, ``batch_time_ms``, ``operation`` and those of
        :func:`read_state`, without ``position``. ``put`` is the entry's new value, or an element that was appended;
        ``delete`` removes the entry; ``clear`` removes all entries of a list or map before the rows of its key that
        follow in the same batch. With `with_before`, the latter include a ``delete`` for each entry that existed and is
        not put again.

    Raises
    ------
    ConfigurationError
        If there is no such operator, state or column, if several match, if the keys do not fit the key's fields, or if
        the operator has no changes in its log: it has no keys, or ``Options(tuning=Tuning(changelog=False))``.
    StateMissingError
        If there is no such checkpoint, or if the changes after `after` are gone or, with `with_before`, the state at
        `after`.
    PinExpiredError
        As in :func:`read_state`.
    CorruptionError, StorageError
        If the log is damaged or cannot be read; also while rows are read.

    Examples
    --------
    >>> statelog.read_changes("/data/checkpoints/flights", state="count", after=1200).read_all()  # doctest: +SKIP
    """

    def make() -> tuple[pa.Schema, Iterator[pa.RecordBatch | None]]:
        point = open_logged(str(location), uid, up_to)
        stored, table = change_table(point, state, with_before=with_before)
        schema = chosen_columns(table.schema, columns, f"State '{shown_name(stored)}' of {point.name}")
        wanted = None if keys is None else encoded_keys(keys, table.keys, point.name)
        first = _first_batch(point, stored, checked_batch(after, "after", -1), table.with_before)
        return schema, change_rows(point, first, stored, table, wanted)

    return open_reader(make, is_fixed=is_settled(up_to) and after is not None)


def change_table(
    point: LoggedPoint, state: str | None, *, with_before: bool = False
) -> tuple[StateSchema, ChangeColumns]:
    """A state and the table of its changes; ConfigurationError if there is none, or the operator has no keys."""
    stored = chosen_state(point, state)
    if point.checkpoint.is_whole:
        raise ConfigurationError(
            f"{point.name} has no keys: every checkpoint holds all of its state, and no changes.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Read two checkpoints with read_state and compare them.",
        )
    key_schema = decode_schema(point.key_schema)
    return stored, ChangeColumns(key_schema, StateDescriptor.from_stored(stored), with_before=with_before)


def first_with_changes(history: History) -> int:
    """The first batch whose changes, and those of all later batches, are stored without a consumer's pin."""
    first = max(history.changes_from, 0)
    own = history.at(first)
    # State that was restored came with the batch, and is not a change of it.
    is_restored = own is not None and own.begins and own.base_ranges is not None and not (own.segments or own.bases)
    return first + is_restored


def first_with_before(history: History) -> int:
    """The first batch with changes and a retained checkpoint before it, or nothing before it."""
    if history.oldest is None:
        return 0
    first = first_with_changes(history)
    return first if begins_empty_with(history, first) else history.oldest.batch + 1


def begins_empty_with(history: History, batch: int) -> bool:
    """Whether the operator's state begins with a batch, and nothing is before it."""
    return history.begins_empty and history.first_batch == batch


def first_of_state(point: LoggedPoint, first: int, stored: StateSchema) -> int:
    """The first batch from `first` on without changes of another state of this name, which was deleted since."""
    others = [one.batch for one in point.history.between(first, point.batch) if _other_state(one, stored)]
    return others[-1] + 1 if others else first


def _other_state(checkpoint: Checkpoint, stored: StateSchema) -> StateSchema | None:
    """Another state that had the name of a state at a checkpoint."""
    own = next((state for state in checkpoint.states if state.name == stored.name), None)
    return None if own is None or is_same_state(own, stored) else own


def _first_batch(point: LoggedPoint, stored: StateSchema, after: int | None, with_before: bool) -> int:
    """The first batch to read; StateMissingError if its changes are gone."""
    first = first_with_changes(point.history)
    if after is None:
        return first_of_state(point, first_with_before(point.history) if with_before else first, stored)
    if begins_empty_with(point.history, first):
        return max(after + 1, first)
    if after + 1 < first:
        raise StateMissingError(
            f"{point.name} has the changes of batch {first} and later batches, but the changes since batch {after + 1}"
            " were requested.",
            hint="Read the state with read_state and continue from there. A larger"
            " Options(materialization_interval_s=...) or more retained checkpoints keep more changes.",
        )
    return after + 1


def change_rows(
    point: LoggedPoint, first: int, stored: StateSchema, table: ChangeColumns, wanted: KeyBatch | None
) -> Iterator[pa.RecordBatch | None]:
    """The changes of each batch, with former values if the table has them; the first step pins all and yields None."""
    last = point.batch
    former = _state_before(point, first) if table.with_before and first <= last else None
    with ExitStack() as pins:
        keeps = [pins.enter_context(point.held(first if first <= last else None))]
        if former is not None:
            keeps.append(pins.enter_context(former.held()))
        yield None
        for rows in _rows(point, first, stored, table, wanted, former):
            yield rows
            for keep in keeps:
                keep()


def _state_before(point: LoggedPoint, first: int) -> LoggedPoint | None:
    """The state before a batch; None if it is empty. StateMissingError if it is neither retained nor pinned."""
    return None if begins_empty_with(point.history, first) else point.before(first - 1)


def _rows(
    point: LoggedPoint,
    first: int,
    stored: StateSchema,
    table: ChangeColumns,
    wanted: KeyBatch | None,
    former: LoggedPoint | None,
) -> Iterator[pa.RecordBatch]:
    batches = (
        (checkpoint, batch_changes(point.store, _logged(point, checkpoint, stored), stored, wanted))
        for checkpoint in tracked([*point.history.between(first, point.batch)], change_sizes)
    )
    before = None
    if table.with_before:
        before = [] if former is None else plans_of(former)
    return changed_rows(point.store, stored, table, batches, before)


def plans_of(point: LoggedPoint) -> list[RestorePlan]:
    """What the state of each subtask is read from."""
    return [part.plan for part in point.cut(point.parallelism)]


def changed_rows(
    store: Store,
    stored: StateSchema,
    table: ChangeColumns,
    batches: Iterable[tuple[ChangedBatch, Iterator[pa.RecordBatch]]],
    before: Sequence[RestorePlan] | None,
) -> Iterator[pa.RecordBatch]:
    """The changes of successive batches as rows; those of a batch come in slices, in run order.

    `before` is that of :class:`FormerValues` if the table has former values.
    """
    if before is not None:
        for paired in FormerValues(store, stored, before).pair(batches):
            yield table.to_rows(paired.rows, paired.of.batch, paired.of.batch_time_ms, former=paired.former)
        return
    for batch, slices in batches:
        for rows in slices:
            yield table.to_rows(rows, batch.batch, batch.batch_time_ms)


def _logged(point: LoggedPoint, checkpoint: Checkpoint, stored: StateSchema) -> Checkpoint:
    """A checkpoint that has changes of the state; ConfigurationError if it has none, or those of another state."""
    if not checkpoint.segments:
        raise ConfigurationError(
            f"{point.name} has no changes in batch {checkpoint.batch}: the batch ran with Tuning(changelog=False).",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Compare two checkpoints with read_diff.",
        )
    if other := _other_state(checkpoint, stored):
        raise other_state(point.name, other, checkpoint.batch, stored, point.batch)
    return checkpoint


def other_state(name: str, former: StateSchema, former_batch: int, stored: StateSchema, batch: int) -> StatelogError:
    """The error for a state that has been deleted and declared as another one between two batches."""
    now, then = StateDescriptor.from_stored(stored), StateDescriptor.from_stored(former)
    return ConfigurationError(
        f"{name}: state '{shown_name(stored)}' is another one at batch {batch} than at batch {former_batch}: {now} was"
        f" {then}.",
        kind=ErrorKind.OTHER_SCHEMA,
        hint="Read each with read_state(at=...), or only the changes of later batches.",
    )


def change_sizes(checkpoints: Sequence[Checkpoint]) -> list[int]:
    """The stored bytes of the changes of each batch."""
    return [sum(segment.length for segment in checkpoint.segments) for checkpoint in checkpoints]


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
        runs = [read_run(store, segment, changeset_name(segment), states=[stored.name]) for segment in self.segments]
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
    declared = {stored.name: StateDescriptor.from_stored(stored)}
    garbage = Garbage(Moment(checkpoint.batch_time_ms, checkpoint.watermark_ms), checkpoint.generations)
    runs = _searched(store, checkpoint, name, wanted)
    for _, rows in merged_rows(runs, declared, is_bottom=False, garbage=garbage):
        found = _of_keys(rows, wanted)
        if found.num_rows:
            yield found


def _searched(store: Store, checkpoint: Checkpoint, name: str, wanted: KeyBatch) -> list[Run]:
    """The rows of a batch's changesets that may be of some keys."""
    subtasks = set(subtasks_of(wanted.hashes, checkpoint.parallelism).tolist())
    segments = [segment for segment in checkpoint.segments if segment.subtask in subtasks]
    return RunSearch(store).find(segment_parts(segments), name, wanted.hashes)


def _of_keys(rows: pa.RecordBatch, wanted: KeyBatch) -> pa.RecordBatch:
    """The rows of some keys."""
    return rows.filter(
        pc.and_(
            pc.is_in(rows.column(0), value_set=pa.array(wanted.hashes)), pc.is_in(rows.column(1), value_set=wanted.keys)
        )
    )


def changeset_name(segment: SegmentRef) -> str:
    """A changeset, for messages."""
    return f"the changeset of subtask {segment.subtask}"


BATCH: Final = "batch"
BATCH_TIME: Final = "batch_time_ms"
OPERATION: Final = "operation"

_NAMES: Final = pa.array(["put", "delete", "clear"])
"""The operations as users read them, in order of :class:`Operation`."""


class ChangeColumns:
    """Converts the changes of one keyed state, of any operation, to a table with the columns `schema`.

    With `with_before` there are columns of the former values; timers have none.
    """

    def __init__(self, key_schema: pa.Schema, state: StateDescriptor, *, with_before: bool = False) -> None:
        self._state = state
        self.keys = KeyCodec(key_schema)
        self._map_keys = map_keys(state)
        entry_fields = map_key_fields(state)
        value_fields = prefixed("value", state.value_schema)
        if state.kind is StateKind.TIMER:
            entry_fields, value_fields = [pa.field(TIME, pa.int64())], []
        self._has_values = bool(value_fields)
        times = [pa.field(BATCH, pa.int64()), pa.field(BATCH_TIME, pa.int64()), pa.field(OPERATION, pa.string())]
        expiry = [pa.field(EXPIRES, pa.int64())] if state.expires_by is not None else []
        self.with_before = with_before and self._has_values
        if self.with_before:
            value_fields = [*prefixed(BEFORE, state.value_schema), *value_fields]
            expiry = [*(pa.field(f"{BEFORE}_{field.name}", field.type) for field in expiry), *expiry]
        keys = prefixed("key", key_schema)
        self.schema = pa.schema([pa.field(HASH, pa.int64()), *times, *keys, *entry_fields, *value_fields, *expiry])

    def to_rows(
        self,
        changes: pa.RecordBatch,
        batch: int,
        batch_time_ms: int,
        operation: str | None = None,
        former: pa.RecordBatch | None = None,
    ) -> pa.RecordBatch:
        """Make rows from changes in run order, and from the former values if there are columns for them.

        `operation` replaces the operations of the changes.
        """
        sides = [changes] if former is None else [former, changes]
        count = changes.num_rows
        columns = [
            changes.column(0).view(pa.int64()),
            pa.array(np.full(count, batch)),
            pa.array(np.full(count, batch_time_ms)),
            _NAMES.take(changes.column(3)) if operation is None else pa.array([operation] * count, pa.string()),
            *self.keys.decode_columns(changes.column(1)),
        ]
        if self._map_keys is not None:
            columns += self._decoded_map_keys(changes)
        elif self._state.kind is StateKind.TIMER:
            columns.append(changes.column(VALUE_COLUMN))
        if self._has_values:
            columns += [column for side in sides for column in side.columns[VALUE_COLUMN:]]
        if self._state.expires_by is not None:
            columns += [side.column(EXPIRY_COLUMN) for side in sides]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _decoded_map_keys(self, changes: pa.RecordBatch) -> list[pa.Array]:
        """The map keys; null where the whole map was cleared."""
        assert self._map_keys is not None
        has_entry = changes.column(3).to_numpy() != Operation.CLEAR
        places = pa.array(np.cumsum(has_entry) - 1, mask=~has_entry)
        return [
            column.take(places)
            for column in self._map_keys.decode_columns(changes.column(2).filter(pa.array(has_entry)))
        ]
