"""Looks up some keys of a state at a checkpoint: reads blocks, not files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from statelog.convert.local_times import to_utc
from statelog.errors import ConfigurationError, ErrorKind
from statelog.history.restore_plan import RestorePlan
from statelog.reading.run_search import RunSearch, SearchedPart, parts_of
from statelog.reading.source import Source
from statelog.runs import digests
from statelog.runs.format import EXPIRY_COLUMN
from statelog.runs.key_groups import Hashes, subtasks_of
from statelog.runs.key_hashes import row_hashes
from statelog.runs.keys import KeyCodec
from statelog.runs.reader import Run
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema, stored_name
from statelog.runs.times import Moment
from statelog.tables.found_rows import as_changes
from statelog.tables.runs import RunsTable
from statelog.tables.table import KeyBatch

_NEVER: Final = np.iinfo(np.int64).max

Keys: TypeAlias = pa.Table | pa.RecordBatch | Sequence[Any]
"""Keys: columns named as the key's fields; or a sequence with a tuple, a dict or, for one field, a value per key.

A datetime without a zone is what Spark's ``collect()`` returns: for a timestamp the local time of this process, for a
``timestamp_ntz`` the time itself.
"""


class Lookup:
    """Finds the rows of keys in one state; footers of stored files and small files stay in memory."""

    def __init__(self, source: Source, stored: StateSchema) -> None:
        checkpoint = source.checkpoint
        self._source = source
        in_runs = stored_name(stored.name, checkpoint.generations.get(stored.name, 0))
        self._state = replace(StateDescriptor.from_stored(stored), name=in_runs)
        self._codec = KeyCodec(decode_schema(checkpoint.key_schema))
        self._parts: dict[int, list[SearchedPart]] = {}
        self._search = RunSearch(source.store)

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
        if subtask not in self._parts:
            self._parts[subtask] = parts_of(self._plan_of(subtask))
        for changes in rows_of(state, keys, self._search.find(self._parts[subtask], state.name, keys.hashes)):
            yield self._unexpired(changes)

    def _unexpired(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        if self._state.expires_by is None:
            return changes
        checkpoint = self._source.checkpoint
        now_ms = Moment(checkpoint.batch_time_ms, checkpoint.watermark_ms).now_ms(self._state.expires_by)
        expiry = changes.column(EXPIRY_COLUMN).fill_null(_NEVER).to_numpy()
        return changes if (expiry > now_ms).all() else changes.filter(pa.array(expiry > now_ms))

    def _plan_of(self, subtask: int) -> RestorePlan:
        checkpoint = self._source.checkpoint
        genesis = digests.genesis(checkpoint.identity, subtask, checkpoint.parallelism)
        return self._source.history.missing_segments(genesis, subtask, checkpoint.parallelism, checkpoint.batch, set())


def rows_of(state: StateDescriptor, keys: KeyBatch, runs: Sequence[Run]) -> Iterator[pa.RecordBatch]:
    """The rows of some keys in runs, oldest first, as puts in run order."""
    table = RunsTable(runs)
    if state.kind.has_entries:
        entries = table.entries(state, keys)
        return as_changes(state, keys, entries, entries.entries)
    values = table.get_many(state, keys)
    return as_changes(state, keys, values, pa.chunked_array([[b""] * len(values.positions)], pa.binary()))


def encoded_keys(keys: Keys, codec: KeyCodec, name: str) -> KeyBatch:
    """Some keys as hashes and bytes, each once, in order; ConfigurationError if they do not fit the key's fields."""
    columns = _key_columns(keys, codec.schema, name)
    return distinct_keys(row_hashes(columns), codec.encode_columns(columns))


def distinct_keys(hashes: Hashes, keys: pa.Array | pa.ChunkedArray) -> KeyBatch:
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
        return [
            pa.array([_instant(row[place], field.type) for row in rows], field.type)
            for place, field in enumerate(schema)
        ]
    except (pa.ArrowException, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{name} has the key ({fields}), and the given keys do not fit: {error}.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Pass a table with these columns, or a sequence with a tuple or dict of these fields for each key.",
        ) from error


def _instant(value: Any, kind: pa.DataType) -> Any:
    """A value whose datetimes without a zone, as Spark returns them for timestamps, have become instants."""
    if isinstance(value, datetime) and pa.types.is_timestamp(kind) and kind.tz is not None:
        return to_utc(value)
    if isinstance(value, Mapping) and pa.types.is_struct(kind):
        names = {field.name: field.type for field in kind}
        return {name: _instant(one, names[name]) if name in names else one for name, one in value.items()}
    if isinstance(value, (list, tuple)) and pa.types.is_list(kind):
        return [_instant(one, kind.value_type) for one in value]
    return value


def _row(key: Any, schema: pa.Schema) -> tuple[Any, ...]:
    if isinstance(key, Mapping):
        return tuple(key[field.name] for field in schema)
    values = tuple(key) if isinstance(key, (tuple, list)) else (key,)
    if len(values) != len(schema):
        raise ValueError(f"{key!r} has {len(values)} values")
    return values
