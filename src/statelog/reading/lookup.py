"""Looks up some keys of a state at a checkpoint: reads blocks, not files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from statelog.errors import ConfigurationError, ErrorKind
from statelog.local.restore_plan import RestorePlan
from statelog.local.stored_reader import StoredBytes
from statelog.log.references import SegmentRef, StoredRun
from statelog.reading.source import Source
from statelog.runs import digests
from statelog.runs.format import EXPIRY_COLUMN
from statelog.runs.key_groups import Hashes, HashRange, subtasks_of
from statelog.runs.key_hashes import row_hashes
from statelog.runs.keys import KeyCodec
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema, stored_name
from statelog.runs.times import Moment
from statelog.tables.found_rows import as_changes
from statelog.tables.runs import RunsTable
from statelog.tables.table import KeyBatch

_THREADS: Final = 16
_NEVER: Final = np.iinfo(np.int64).max

Keys: TypeAlias = pa.Table | pa.RecordBatch | Sequence[Any]
"""Keys: columns named as the key's fields; or a sequence with a tuple, a dict or, for one field, a value per key."""


class _Stored(NamedTuple):
    """A stored run, and the wanted hashes that count in it."""

    ref: StoredRun | SegmentRef
    what: str
    """Its content, for messages."""
    hashes: Hashes


class Lookup:
    """Finds the rows of keys in one state; footers of stored files and small files stay in memory."""

    def __init__(self, source: Source, stored: StateSchema) -> None:
        checkpoint = source.checkpoint
        self._source = source
        in_runs = stored_name(stored.name, checkpoint.generations.get(stored.name, 0))
        self._state = replace(StateDescriptor.from_stored(stored), name=in_runs)
        self._codec = KeyCodec(decode_schema(checkpoint.key_schema))
        self._plans: dict[int, RestorePlan] = {}
        self._runs: dict[tuple[str, int], Run] = {}

    def find(self, keys: Keys) -> Iterator[pa.RecordBatch]:
        """The rows of some keys, as puts in run order; ConfigurationError if the keys do not fit the key's fields."""
        return self.find_encoded(encoded_keys(keys, self._codec, self._source.name))

    def find_encoded(self, wanted: KeyBatch) -> Iterator[pa.RecordBatch]:
        """The rows of some keys, which are in order."""
        parallelism = self._source.checkpoint.parallelism
        subtasks = subtasks_of(wanted.hashes, parallelism)
        for subtask in np.unique(subtasks).tolist():
            yield from self._of_subtask(subtask, wanted.take(np.flatnonzero(subtasks == subtask)))

    def _of_subtask(self, subtask: int, keys: KeyBatch) -> Iterator[pa.RecordBatch]:
        state = self._state
        table = RunsTable(self._opened(subtask, keys.hashes))
        if state.kind.has_entries:
            entries = table.entries(state, keys)
            found = as_changes(state, keys, entries, entries.entries)
        else:
            values = table.get_many(state, keys)
            found = as_changes(state, keys, values, pa.chunked_array([[b""] * len(values.positions)], pa.binary()))
        for changes in found:
            yield self._unexpired(changes)

    def _unexpired(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        if self._state.expires_by is None:
            return changes
        checkpoint = self._source.checkpoint
        now_ms = Moment(checkpoint.batch_time_ms, checkpoint.watermark_ms).now_ms(self._state.expires_by)
        expiry = changes.column(EXPIRY_COLUMN).fill_null(_NEVER).to_numpy()
        return changes if (expiry > now_ms).all() else changes.filter(pa.array(expiry > now_ms))

    def _opened(self, subtask: int, hashes: Hashes) -> list[Run]:
        """The runs that may hold some of these hashes, oldest first; the blocks with them are in memory."""
        plan = self._plans.get(subtask)
        if plan is None:
            plan = self._plans[subtask] = self._plan_of(subtask)
        found: list[_Stored] = []
        for level in plan.levels:
            for run in level.runs:
                first, last = max(run.first_hash, level.first_hash), min(run.last_hash, level.last_hash)
                found.append(_Stored(run, "a materialized run", hashes[(hashes >= first) & (hashes <= last)]))
        for clip in plan.segments:
            what = f"the changeset of subtask {clip.segment.subtask}"
            own = hashes[(hashes >= clip.first_hash) & (hashes <= clip.last_hash)]
            found.append(_Stored(clip.segment, what, own))
        wanted = [stored for stored in found if stored.ref.rows and len(stored.hashes)]
        if self._source.store.can_append:
            return list(map(self._open, wanted))
        with ThreadPoolExecutor(_THREADS, "statelog-read") as pool:
            return list(pool.map(self._open, wanted))

    def _plan_of(self, subtask: int) -> RestorePlan:
        checkpoint = self._source.checkpoint
        genesis = digests.genesis(checkpoint.query_id, checkpoint.uid, subtask, checkpoint.parallelism)
        return self._source.history.missing_segments(genesis, subtask, checkpoint.parallelism, checkpoint.batch, set())

    def _open(self, stored: _Stored) -> Run:
        """The part of a run that may hold the wanted hashes."""
        ref, hashes = stored.ref, stored.hashes
        place = ref.name, ref.offset
        run = self._runs.get(place)
        if run is None:
            data = StoredBytes(self._source.store, ref, stored.what)
            run = self._runs[place] = Run(data, ref.name, ref.offset, is_stored=True)
        return run.searched(self._state.name, hashes, HashRange(int(hashes[0]), int(hashes[-1])))


def encoded_keys(keys: Keys, codec: KeyCodec, name: str) -> KeyBatch:
    """Some keys as hashes and bytes, each once, in order; ConfigurationError if they do not fit the key's fields."""
    columns = _key_columns(keys, codec.schema, name)
    return _distinct(row_hashes(columns), codec.encode_columns(columns))


def _distinct(hashes: Hashes, keys: pa.Array) -> KeyBatch:
    """Each key once, by hash and bytes."""
    table = pa.table({"hash": hashes, "key": keys}).group_by(["hash", "key"]).aggregate([])
    table = table.sort_by([("hash", "ascending"), ("key", "ascending")]).combine_chunks()
    return KeyBatch(table["hash"].to_numpy(), table["key"].combine_chunks())


def _key_columns(keys: Keys, schema: pa.Schema, name: str) -> list[pa.Array]:
    """Keys as a column per field of the key."""
    fields = ", ".join(f"{field.name} {field.type}" for field in schema)
    try:
        if isinstance(keys, pa.RecordBatch):
            keys = pa.Table.from_batches([keys])
        if isinstance(keys, pa.Table):
            return [keys[field.name].cast(field.type).combine_chunks() for field in schema]
        rows = [_row(key, schema) for key in keys]
        return [pa.array([row[place] for row in rows], field.type) for place, field in enumerate(schema)]
    except (pa.ArrowException, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{name} has the key ({fields}), and the given keys do not fit: {error}.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Pass a table with these columns, or a sequence with a tuple or dict of these fields for each key.",
        ) from error


def _row(key: Any, schema: pa.Schema) -> tuple[Any, ...]:
    if isinstance(key, Mapping):
        return tuple(key[field.name] for field in schema)
    values = tuple(key) if isinstance(key, (tuple, list)) else (key,)
    if len(values) != len(schema):
        raise ValueError(f"{key!r} has {len(values)} values")
    return values
