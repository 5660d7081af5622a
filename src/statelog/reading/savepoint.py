"""Reads a state from a savepoint, whose tables have the columns that a reader returns."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from statelog.convert.state_tables import HASH
from statelog.errors import ConfigurationError, CorruptionError, ErrorKind, StateMissingError
from statelog.log.entry import Settings
from statelog.log.open import open_location
from statelog.progress import tracked
from statelog.reading.lookup import Keys, encoded_keys
from statelog.reading.manifest import (
    Manifest,
    SavedFile,
    SavedOperator,
    copy_saved,
    read_saved,
    reading_parquet,
)
from statelog.reading.scan import MEMORY_BYTES
from statelog.reading.source import (
    At,
    StoredOperator,
    checked_at,
    is_savepoint,
    open_source,
    time_limit_ms,
    utc_text,
)
from statelog.runs.arrow_messages import require_valid
from statelog.runs.key_groups import subtasks_of
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateSchema, decode_schema
from statelog.storage import Store
from statelog.tables.table import KeyBatch

_BATCH_ROWS: Final = 65_536


@dataclass(frozen=True)
class SavedSource:
    """An operator of a savepoint that is being read."""

    store: Store
    location: str
    operator: SavedOperator

    @property
    def name(self) -> str:
        """The operator in messages."""
        return f"operator '{self.operator.uid}' in the savepoint {self.location}"

    @property
    def uid(self) -> str:
        """The operator's name."""
        return self.operator.uid

    @property
    def key_schema(self) -> bytes:
        """The key's fields, encoded; empty for an operator without keys."""
        return self.operator.key_schema

    @property
    def states(self) -> Sequence[StateSchema]:
        """The operator's states."""
        return [state.schema for state in self.operator.states]

    @property
    def batch_time_ms(self) -> int:
        """Spark's time of the batch, milliseconds since the Unix epoch."""
        return self.operator.batch_time_ms

    @property
    def watermark_ms(self) -> int:
        """The watermark in the batch, milliseconds since the Unix epoch."""
        return self.operator.watermark_ms

    @property
    def settings(self) -> Settings:
        """The settings that the state depends on."""
        return self.operator.settings


def open_operator(location: str, uid: str | None, at: At | None) -> StoredOperator:
    """Open an operator of a savepoint, or of a checkpoint as :func:`open_source` does; raises its errors."""
    return open_saved(location, uid, at) if is_savepoint(location) else open_source(location, uid, at)


def open_saved(location: str, uid: str | None, at: At | None) -> SavedSource:
    """Open an operator of a savepoint; `uid` and `at` may be None if there is only one.

    Raises ConfigurationError if there is no such operator, StateMissingError if `at` is another batch or an earlier
    time, CorruptionError if the manifest is damaged.
    """
    store, manifest = read_manifest(location)
    found = [operator for operator in manifest.operators if uid in (None, operator.uid)]
    if len(found) != 1:
        names = ", ".join(f"'{operator.uid}'" for operator in manifest.operators)
        problem = f"has several operators: {names}" if uid is None else f"has no operator '{uid}'; it has {names}"
        raise ConfigurationError(f"The savepoint {location} {problem}.", hint="Pass one of them as uid.")
    _require_batch(manifest.batch, found[0].batch_time_ms, at, location)
    return SavedSource(store, location, found[0])


def read_manifest(location: str) -> tuple[Store, Manifest]:
    """The store and the manifest of a savepoint; raises the errors of :meth:`Manifest.read`."""
    store = open_location(location)
    return store, Manifest.read(store, location)


def _require_batch(batch: int, time_ms: int, at: At | None, location: str) -> None:
    """Refuse a batch or a time that a savepoint does not have."""
    at = checked_at(at)
    if isinstance(at, datetime):
        is_there, asked = time_ms <= time_limit_ms(at), f"of {at.isoformat()} or before"
    else:
        is_there, asked = at in (None, batch), f"of {'the pin' if isinstance(at, str) else 'batch'} {at}"
    if not is_there:
        raise StateMissingError(
            f"The savepoint {location} has the state of batch {batch}, {utc_text(time_ms)}, and none {asked}.",
            hint="Leave out at, or read another savepoint.",
        )


def saved_rows(
    source: SavedSource, stored: StateSchema, columns: pa.Schema, chosen: Sequence[str], keys: Keys | None = None
) -> Iterator[pa.RecordBatch]:
    """The `chosen` columns of a state's rows, or of those of some keys; `columns` are all that its table has.

    One file, and one row group of it, is in memory at a time. ConfigurationError if the keys do not fit the key's
    fields; CorruptionError or StorageError, as rows are read, if a file is damaged or cannot be read.
    """
    [files] = [state.files for state in source.operator.states if state.schema == stored]
    wanted = None if keys is None else _WantedKeys.of(source, keys)
    if wanted is not None:
        files = [file for file in files if file.part in wanted.parts]
    return _rows_of(source, files, columns, chosen, wanted)


class _WantedKeys:
    """Finds the rows of some keys."""

    def __init__(self, codec: KeyCodec, keys: KeyBatch, parts: Collection[int]) -> None:
        self._codec = codec
        self._keys = keys.keys
        self._hashes = keys.hashes.view(np.int64)
        self.columns = [HASH, *(f"key_{field.name}" for field in codec.schema)]
        """The columns that decide."""
        self.parts = parts
        """The parts of the operator that may have the keys."""

    @classmethod
    def of(cls, source: SavedSource, keys: Keys) -> _WantedKeys:
        codec = KeyCodec(decode_schema(source.key_schema))
        batch = encoded_keys(keys, codec, source.name)
        return cls(codec, batch, set(subtasks_of(batch.hashes, source.operator.parts).tolist()))

    def are_in(self, hashes: pq.Statistics | None) -> bool:
        """Whether a key may be in a row group with these statistics of its hashes, which are signed numbers there."""
        wanted = self._hashes
        return hashes is None or bool(((wanted >= hashes.min) & (wanted <= hashes.max)).any())

    def of_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of the keys."""
        rows = rows.filter(pc.is_in(rows.column(HASH), value_set=pa.array(self._hashes)))
        keys = self._codec.encode_columns([rows.column(name) for name in self.columns[1:]])
        return rows.filter(pc.is_in(keys, value_set=self._keys))


def _rows_of(
    source: SavedSource,
    files: Sequence[SavedFile],
    columns: pa.Schema,
    chosen: Sequence[str],
    wanted: _WantedKeys | None,
) -> Iterator[pa.RecordBatch]:
    names = [*(wanted.columns if wanted else ()), *chosen] or columns.names[:1]  # batches of no columns have no length
    read = pa.schema([columns.field(name) for name in dict.fromkeys(names)])
    for file in tracked(files, lambda found: [one.length for one in found]):
        with reading_parquet(file, source.location), _opened(source, file) as table:
            if table.schema_arrow.names != columns.names:
                raise CorruptionError(
                    f"{source.location}/{file.name}: its columns are {', '.join(table.schema_arrow.names)}, and not"
                    f" {', '.join(columns.names)}.",
                    kind=ErrorKind.FORMAT,
                    hint="Was the table written by another program? Take the savepoint again.",
                )
            for rows in _row_groups(table, read, wanted):
                yield rows.select(chosen)


def _row_groups(table: pq.ParquetFile, read: pa.Schema, wanted: _WantedKeys | None) -> Iterator[pa.RecordBatch]:
    """Some columns of a file, of the row groups that may have the wanted keys."""
    for group in range(table.num_row_groups):
        if wanted is not None and not wanted.are_in(table.metadata.row_group(group).column(0).statistics):
            continue
        # A batch of several row groups might have more bytes than the writer's bound.
        for rows in table.iter_batches(_BATCH_ROWS, row_groups=[group], columns=read.names):
            require_valid(rows)
            typed = rows.select(read.names).cast(read)
            yield typed if wanted is None else wanted.of_rows(typed)


@contextmanager
def _opened(source: SavedSource, file: SavedFile) -> Iterator[pq.ParquetFile]:
    """A file that has been checked: in memory, or in the temporary directory if it is large."""
    if file.length <= MEMORY_BYTES:
        yield pq.ParquetFile(pa.BufferReader(read_saved(source.store, file, source.location)))
        return
    with tempfile.TemporaryDirectory(prefix="statelog-read-") as scratch:
        path = Path(scratch) / "table.parquet"
        with path.open("wb") as copy:
            copy_saved(source.store, file, source.location, copy)
        with pq.ParquetFile(path) as table:
            yield table
