"""Reads what is stored of one key in one batch: its state before, its changes, and the batch's times and rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from statelog.checkpoint.sample import Sample, SampledOperator, decode_sample, sample_folder, sample_name
from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.log.entry import INITIAL_BATCH, Checkpoint
from statelog.log.open import SAMPLES_FOLDER
from statelog.reading.change_columns import BATCH, BATCH_TIME, ChangeColumns
from statelog.reading.changes import batch_changes, changes_of_keys
from statelog.reading.lookup import Lookup, encoded_keys
from statelog.reading.pinned import reading
from statelog.reading.source import Source, open_source
from statelog.reading.tables import HASH
from statelog.runs.evolution import recorded_schema
from statelog.runs.format import EXPIRY_COLUMN, Operation
from statelog.runs.key_groups import subtasks_of
from statelog.runs.keys import KeyCodec
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema, stored_name
from statelog.runs.times import NO_TIME_MS, Moment
from statelog.runs.writer import LOCAL_BLOCK_ROWS, StateChanges, encode_run
from statelog.storage.store import if_present
from statelog.tables.table import KeyBatch

_ENTRY: Final = 2
_OPERATION: Final = 3


@dataclass(frozen=True)
class BatchOfKey:
    """A batch, as far as it concerns one key; all of it is in memory."""

    source: Source
    """The checkpoint of the batch."""
    key: KeyBatch
    """The key alone."""
    codec: KeyCodec
    subtask: int
    """The subtask that had the key."""
    moment: Moment
    """The times of the batch."""
    before: Run
    """The state of the key before the batch, as puts."""
    entries_before: Mapping[str, frozenset[bytes]]
    """For each state that had any: the entries of the key that had not expired by the time of the batch."""
    logged: Run
    """The changes of the key in the log."""
    sample: Sample | None
    """The sample of the attempt that the checkpoint names; None if there is none."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of the batch."""
        return self.source.checkpoint

    @property
    def key_values(self) -> dict[str, Any]:
        """The fields of the key."""
        return dict(zip(self.codec.schema.names, self.codec.decode(self.key.keys[0].as_py()), strict=True))

    @property
    def name(self) -> str:
        """The key and the batch in messages."""
        return f"{self.source.name}: key {tuple(self.key_values.values())!r} in batch {self.checkpoint.batch}"

    @property
    def has_input(self) -> bool:
        """Whether the subtask has read any rows."""
        return any(segment.input_rows for segment in self.checkpoint.segments_of(self.subtask, self.subtask))

    def rows_of_key(self, rows: pa.Table, key_columns: Iterable[int]) -> pa.Table:
        """The rows of the key, in order; `key_columns` are the positions of the grouping columns."""
        places = list(key_columns)
        found: list[pa.RecordBatch] = []
        for batch in rows.to_batches():
            keys = self.codec.encode_columns([batch.column(place) for place in places])
            found.append(batch.filter(pc.equal(keys, self.key.keys[0])))
        return pa.Table.from_batches(found, rows.schema)

    def changes(self, run: Run, declared: Mapping[str, StateSchema]) -> dict[str, pa.Table]:
        """The changes of the key in a run, for each state: ``operation``, and the columns of entries and values.

        Changes without effect are left out: whether a query stores the deletion of an entry that is not there depends
        on what it has read beside it. `declared` are the states of a processor, beside those of the checkpoint.
        """
        own = {stored.name: stored for stored in self.checkpoint.states}
        found: dict[str, pa.Table] = {}
        for name in sorted(own.keys() | declared.keys()):
            stored = own.get(name) or declared[name]
            if name in declared:
                stored = recorded_schema(stored, declared[name])
            changes = changes_of_keys([run], self.checkpoint, stored, self.key)
            known = self.entries_before.get(name, frozenset())
            found[name] = self._typed(stored, (_effective(batch, known) for batch in changes))
        return found

    def _typed(self, stored: StateSchema, changes: Iterable[pa.RecordBatch]) -> pa.Table:
        columns = ChangeColumns(self.codec.schema, StateDescriptor.from_stored(stored))
        rows = pa.Table.from_batches([columns.to_rows(batch, 0, 0) for batch in changes], columns.schema)
        fixed = {HASH, BATCH, BATCH_TIME, *columns.key_names}
        return rows.select([name for name in columns.schema.names if name not in fixed])


def _effective(changes: pa.RecordBatch, known: frozenset[bytes]) -> pa.RecordBatch:
    """The changes without deletions of entries that were not there; `known` are those that were."""
    operations, entries = changes.column(_OPERATION).to_pylist(), changes.column(_ENTRY).to_pylist()
    kept = [
        bool(known) if operation == Operation.CLEAR else operation == Operation.PUT or entry in known
        for operation, entry in zip(operations, entries, strict=True)
    ]
    return changes.filter(pa.array(kept, pa.bool_()))


def open_batch(location: str, batch: int, key: Any, uid: str | None) -> BatchOfKey:
    """Read what is stored of a key in a batch; the files are pinned meanwhile.

    Raises ConfigurationError if the operator has no keys or no changes in its log, or the key does not fit;
    StateMissingError if the batch, its changes or the checkpoint before it are not there any more.
    """
    source = open_source(location, uid, batch)
    checkpoint = source.checkpoint
    _require_keyed_batch(source)
    codec = KeyCodec(decode_schema(checkpoint.key_schema))
    wanted = encoded_keys([key], codec, source.name)
    [subtask] = subtasks_of(wanted.hashes, checkpoint.parallelism).tolist()
    _require_changes(source, subtask)
    before = None if _begins(source) else _open_before(source, location)
    late_ms = NO_TIME_MS if before is None else before.checkpoint.watermark_ms
    if not checkpoint.max_event_ms:
        late_ms = max(late_ms, 0)  # Spark's watermark begins there
    moment = Moment(checkpoint.batch_time_ms, checkpoint.watermark_ms, late_ms)
    with ExitStack() as pins:
        pins.enter_context(reading(source.store, source.root, source.history, batch, batch))
        if before is not None:
            pins.enter_context(reading(before.store, before.root, before.history, batch - 1))
        sample = _read_sample(source, subtask)
        logged = [
            (StateDescriptor.from_stored(stored), list(batch_changes(source.store, checkpoint, stored, wanted)))
            for stored in checkpoint.states
        ]
        state = [] if before is None else _entries(before, wanted)
    return BatchOfKey(
        source=source,
        key=wanted,
        codec=codec,
        subtask=subtask,
        moment=moment,
        before=_as_run(state, {} if before is None else before.checkpoint.generations),
        entries_before={descriptor.name: _unexpired(descriptor, rows, moment) for descriptor, rows in state},
        logged=_as_run(logged, checkpoint.generations),
        sample=sample,
    )


def _begins(source: Source) -> bool:
    """Whether nothing is before the batch: it is the first one, and no state was loaded before it."""
    first = source.checkpoint
    return first.batch == 0 and first.base_ranges is None and source.history.at(INITIAL_BATCH) is None


def _require_keyed_batch(source: Source) -> None:
    checkpoint = source.checkpoint
    if checkpoint.is_whole:
        raise ConfigurationError(
            f"{source.name} has no keys, so no batch of it can be replayed for a key.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Run its processor with statelog.testing.Harness.",
        )
    if checkpoint.batch == INITIAL_BATCH:
        raise StateMissingError(
            f"{source.name}: checkpoint {INITIAL_BATCH} is state that was loaded, and no batch.",
            hint="Replay a later batch.",
        )


def _require_changes(source: Source, subtask: int) -> None:
    checkpoint = source.checkpoint
    if not checkpoint.segments_of(subtask, subtask):
        raise ConfigurationError(
            f"{source.name} has no changes of batch {checkpoint.batch}: it ran with Options(changelog=False), or the"
            " state was restored from a savepoint.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Replay a batch whose changes are in the log.",
        )
    if checkpoint.batch < source.history.changes_from:
        raise StateMissingError(
            f"{source.name} has the changes of batch {source.history.changes_from} and later ones, and not those of"
            f" {checkpoint.batch}.",
            hint="Replay a later batch; more retained checkpoints keep more changes.",
        )


def _open_before(source: Source, location: str) -> Source:
    batch = source.checkpoint.batch
    try:
        return open_source(location, source.uid, batch - 1)
    except StateMissingError as error:
        raise StateMissingError(
            f"Batch {batch} cannot be replayed without the checkpoint before it. {error.message}", hint=error.hint
        ) from error


def _read_sample(source: Source, subtask: int) -> Sample | None:
    """The sample of the attempt of a subtask that the checkpoint names."""
    checkpoint = source.checkpoint
    attempt = checkpoint.segments_of(subtask, subtask)[-1].attempt
    folder = sample_folder(source.root, checkpoint.epoch, subtask)
    name = sample_name(folder, checkpoint.batch, attempt)
    data = if_present(lambda: source.store.read(name))
    return None if data is None else decode_sample(data, name)


def _entries(before: Source, wanted: KeyBatch) -> list[tuple[StateDescriptor, list[pa.RecordBatch]]]:
    """For each state the entries of a key at the checkpoint before the batch."""
    return [
        (StateDescriptor.from_stored(stored), list(Lookup(before, stored).find_encoded(wanted)))
        for stored in before.checkpoint.states
    ]


def _unexpired(state: StateDescriptor, rows: list[pa.RecordBatch], moment: Moment) -> frozenset[bytes]:
    """The entries that have not expired by the time of the batch."""
    now_ms = NO_TIME_MS if state.expires_by is None else moment.now_ms(state.expires_by)
    return frozenset(
        entry
        for batch in rows
        for entry, expires_ms in zip(
            batch.column(_ENTRY).to_pylist(), batch.column(EXPIRY_COLUMN).to_pylist(), strict=True
        )
        if expires_ms is None or expires_ms > now_ms
    )


def _as_run(states: Iterable[tuple[StateDescriptor, list[pa.RecordBatch]]], generations: Mapping[str, int]) -> Run:
    """Changes as a run in memory; states have the names of their generations, as in stored runs."""
    sections = [
        StateChanges(replace(state, name=stored_name(state.name, generations.get(state.name, 0))), rows)
        for state, rows in states
        if rows
    ]
    sections.sort(key=lambda section: section.state.name)
    return Run(pa.py_buffer(encode_run(sections, compression=None, block_rows=LOCAL_BLOCK_ROWS)), "rows of a key")


def sampled_operator(found: BatchOfKey) -> SampledOperator | None:
    """The operator as the samples of the batch's start describe it; None if there are none."""
    if found.sample is not None:
        return found.sample.header.operator
    source = found.source
    for info in source.store.list(f"{source.root}/{SAMPLES_FOLDER}/{source.checkpoint.epoch}/"):
        data = if_present(partial(source.store.read, info.name))
        if data is not None:
            return decode_sample(data, info.name).header.operator
    return None
