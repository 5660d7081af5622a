"""A savepoint: its manifest, specified in ``docs/savepoints.md``, and its tables, which have a reader's columns."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from statelog.convert.state_tables import HASH, ElementColumns, StateColumns
from statelog.errors import (
    ConfigurationError,
    CorruptionError,
    ErrorKind,
    StatelogError,
    StateMissingError,
    StorageError,
)
from statelog.log.open import open_location
from statelog.progress import tracked
from statelog.reading.keys import Keys, encoded_keys
from statelog.reading.point import At, Point, checked_at, listed, time_limit_ms, utc_text
from statelog.reading.rows import MEMORY_BYTES
from statelog.runs import digests
from statelog.runs.arrow_messages import require_valid
from statelog.runs.key_groups import Natural, Parallelism, subtasks_of
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema
from statelog.sealed import seal, unseal
from statelog.storage import Store
from statelog.storage.names import is_plain
from statelog.storage.store import if_present
from statelog.tables.table import KeyBatch

MANIFEST: Final = "manifest.json"
SAVED_OPERATORS: Final = "operators"
SAVED_SOURCES: Final = "spark/sources"
"""The folders of a savepoint's files."""
_BATCH: Final = re.compile(r"0|[1-9][0-9]{0,17}")
_KIND: Final = "statelog savepoint"
_VERSION: Final = 1
_HINT: Final = "Take the savepoint again, or restore the file from a copy."
_COPIED_BYTES: Final = 8 << 20
_BATCH_ROWS: Final = 65_536


class SavedFile(msgspec.Struct, frozen=True):
    """A file of a savepoint."""

    name: str
    """Relative to the savepoint."""
    length: Natural
    """Size in bytes."""
    checksum: bytes
    """xxh3-128 of the file."""
    rows: Natural = 0
    """0 if the file is not a table."""
    part: Natural = 0
    """The range of key hashes that the file holds."""


class SavedState(msgspec.Struct, frozen=True):
    """A state of an operator: its schema, as in a checkpoint, and its table."""

    schema: StateSchema
    columns: dict[str, str]
    """Name and Arrow type of the table's columns, for readers of the manifest."""
    files: list[SavedFile]
    """The table, by range."""

    @property
    def rows(self) -> int:
        """Number of rows in all files."""
        return sum(file.rows for file in self.files)


class SavedOperator(msgspec.Struct, frozen=True):
    """An operator: its states, and the times of the saved batch."""

    uid: str
    folder: str
    """Name of its folder in the savepoint."""
    parts: Parallelism
    """Number of ranges that the key hashes are cut into; for an unkeyed operator, the number of subtasks."""
    key_schema: bytes
    """Arrow IPC schema message of the key columns; empty for an unkeyed operator."""
    states: list[SavedState]
    """By name; timers are one of them."""
    batch_time_ms: int
    watermark_ms: int
    max_event_ms: list[int | None] = []
    """The largest event time of each input, if the operator has a watermark of its own."""
    settings: dict[str, int | str] = {}
    """The settings that the state depends on, as in a checkpoint."""


class Manifest(msgspec.Struct, frozen=True):
    """The table of contents of a savepoint."""

    batch: Natural
    """Spark's batch id: the savepoint has the state after this batch."""
    query_id: str
    taken_ms: int
    """Time of the savepoint, milliseconds since the Unix epoch."""
    offsets: dict[str, str]
    """Spark's offsets of this batch and the batch before, by batch id."""
    commits: dict[str, str]
    """Spark's commit of this batch, by batch id."""
    sources: list[SavedFile]
    """Copies of the files of Spark's sources, below ``spark/``."""
    operators: list[SavedOperator]
    """By name."""

    @classmethod
    def read(cls, store: Store, location: str) -> Manifest:
        """Read the manifest of a savepoint.

        Raises ConfigurationError if there is none or its version is unknown, CorruptionError if it is damaged.
        """
        data = if_present(lambda: store.read(MANIFEST))
        if data is None:
            raise ConfigurationError(
                f"{location} holds no savepoint: there is no {MANIFEST}.",
                kind=ErrorKind.CHECKPOINT_MISSING,
                hint="Pass the directory that statelog.savepoint() wrote. The manifest is written last, so a savepoint"
                " that was interrupted has none: take it again into another directory.",
            )
        manifest = unseal(data, Manifest, kind=_KIND, version=_VERSION, name=f"{location}/{MANIFEST}")
        manifest.require_inside(location)
        manifest.require_distinct(location)
        return manifest

    def require_inside(self, location: str) -> None:
        """Raise CorruptionError if a name points outside the savepoint at a location, or outside a new checkpoint."""
        tables = [file.name for one in self.operators for state in one.states for file in state.files]
        names = [(name, SAVED_OPERATORS) for name in tables] + [(file.name, SAVED_SOURCES) for file in self.sources]
        wrong = [name for name, folder in names if not (is_plain(name) and name.startswith(f"{folder}/"))]
        wrong += [batch for batch in (*self.offsets, *self.commits) if not _BATCH.fullmatch(batch)]
        wrong += [one.folder for one in self.operators if not is_plain(one.folder) or "/" in one.folder]
        if wrong:
            raise CorruptionError(
                f"{location}/{MANIFEST}: {wrong[0]!r:.200} is not a name of a file in a savepoint.",
                kind=ErrorKind.FORMAT,
                hint="Only another program can have written it: do not restore it. Check who may write there.",
            )

    def require_distinct(self, location: str) -> None:
        """Raise CorruptionError if two operators, or two states of one, have the same name."""
        for names in (
            [one.uid for one in self.operators],
            *([s.schema.name for s in o.states] for o in self.operators),
        ):
            if len(set(names)) < len(names):
                raise CorruptionError(
                    f"{location}/{MANIFEST}: a name occurs twice: {listed(names)}.", kind=ErrorKind.FORMAT, hint=_HINT
                )

    def write(self, store: Store) -> None:
        """Write the manifest; from then on the savepoint exists."""
        store.put(MANIFEST, seal(self, _KIND, _VERSION))

    @property
    def file_names(self) -> list[str]:
        """All files of the savepoint except the manifest."""
        tables = [file.name for one in self.operators for state in one.states for file in state.files]
        return tables + [file.name for file in self.sources]


def store_saved(store: Store, name: str, data: bytes | memoryview, *, rows: int = 0, part: int = 0) -> SavedFile:
    """Write a file of a savepoint, and describe it for the manifest."""
    store.put(name, data)
    return SavedFile(name, len(data), digests.checksum(data), rows, part)


def read_saved(store: Store, file: SavedFile, location: str) -> bytes:
    """Read a file of a savepoint; raises CorruptionError if it is gone or not as written."""
    with _named(file, location):
        data = store.read(file.name)
    _require_written(file, location, len(data), digests.checksum(data))
    return data


def copy_saved(store: Store, file: SavedFile, location: str, target: BinaryIO) -> None:
    """Copy a large file of a savepoint, a few MB at a time; raises the errors of :func:`read_saved`."""
    length, checksum = 0, digests.Checksum()
    with _named(file, location):
        while data := store.read(file.name, offset=length, length=_COPIED_BYTES):
            target.write(data)
            checksum.add(data)
            length += len(data)
    _require_written(file, location, length, checksum.value)


@contextmanager
def reading_parquet(file: SavedFile, location: str) -> Iterator[None]:
    """Report a file of a savepoint as damaged if it is not a Parquet file."""
    try:
        yield
    except StatelogError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise CorruptionError(
            f"{location}/{file.name}: it cannot be read as Parquet: {error}.", kind=ErrorKind.FORMAT, hint=_HINT
        ) from error


@contextmanager
def _named(file: SavedFile, location: str) -> Iterator[None]:
    """Report a missing file as damaged."""
    try:
        yield
    except StorageError as error:
        if error.kind is not ErrorKind.OBJECT_MISSING:
            raise
        raise CorruptionError(
            f"{location}/{file.name}: the file is gone.", kind=ErrorKind.OBJECT_MISSING, hint=_HINT
        ) from error


def _require_written(file: SavedFile, location: str, length: int, checksum: bytes) -> None:
    if length != file.length or checksum != file.checksum:
        raise CorruptionError(
            f"{location}/{file.name}: its {length} bytes are not those that were written.", hint=_HINT
        )


@dataclass(frozen=True)
class SavedQuery:
    """A savepoint that is being read."""

    store: Store
    location: str
    manifest: Manifest

    @classmethod
    def open(cls, location: str) -> SavedQuery:
        """Read the manifest; raises the errors of :meth:`Manifest.read`."""
        store = open_location(location)
        return cls(store, location, Manifest.read(store, location))

    def point(self, uid: str | None, at: At | None) -> SavedPoint:
        """An operator; `uid` and `at` may be None if there is only one.

        Raises ConfigurationError if there is no such operator, StateMissingError if `at` is another batch or an earlier
        time.
        """
        found = [point for point in self.points() if uid in (None, point.uid)]
        if len(found) != 1:
            names = listed([operator.uid for operator in self.manifest.operators])
            problem = f"has several operators: {names}" if uid is None else f"has no operator '{uid}'; it has {names}"
            raise ConfigurationError(f"The savepoint {self.location} {problem}.", hint="Pass one of them as uid.")
        self._require_batch(found[0].batch_time_ms, at)
        return found[0]

    def points(self) -> list[SavedPoint]:
        """All operators."""
        return [
            SavedPoint(
                store=self.store,
                location=self.location,
                name=f"operator '{operator.uid}' in the savepoint {self.location}",
                uid=operator.uid,
                query_id=self.manifest.query_id,
                parallelism=operator.parts,
                batch=self.manifest.batch,
                batch_time_ms=operator.batch_time_ms,
                watermark_ms=operator.watermark_ms,
                key_schema=operator.key_schema,
                states=[state.schema for state in operator.states],
                settings=operator.settings,
                tables=operator.states,
            )
            for operator in self.manifest.operators
        ]

    def _require_batch(self, time_ms: int, at: At | None) -> None:
        """Refuse a batch or a time that the savepoint does not have."""
        at, batch = checked_at(at), self.manifest.batch
        if isinstance(at, datetime):
            is_there, asked = time_ms <= time_limit_ms(at), f"of {at.isoformat()} or before"
        else:
            is_there, asked = at in (None, batch), f"of {'the pin' if isinstance(at, str) else 'batch'} {at}"
        if not is_there:
            raise StateMissingError(
                f"The savepoint {self.location} has the state of batch {batch} at {utc_text(time_ms)}, not {asked}.",
                hint="Omit at, or read another savepoint.",
            )


@dataclass(frozen=True)
class SavedPoint(Point):
    """An operator of a savepoint."""

    tables: Sequence[SavedState]

    @property
    def state_bytes(self) -> int:
        """The bytes of the tables."""
        return sum(file.length for state in self.tables for file in state.files)

    def held(self, since: int | None = None) -> AbstractContextManager[Callable[[], None]]:
        """Do nothing: a savepoint does not change."""
        return nullcontext(lambda: None)

    def changes(self, stored: StateSchema, keys: Keys | None = None) -> Iterator[pa.RecordBatch]:
        """The entries of a keyed state, or of some keys, in the order of the files, which is run order."""
        columns = StateColumns(decode_schema(self.key_schema), StateDescriptor.from_stored(stored))
        for rows in self.rows(stored, columns, columns.schema.names, keys):
            yield from columns.to_changes(pa.Table.from_batches([rows]))

    def rows(
        self,
        stored: StateSchema,
        columns: StateColumns | ElementColumns,
        chosen: Sequence[str],
        keys: Keys | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The `chosen` columns of a state's rows; one file, and one row group of it, is in memory at a time."""
        [files] = [state.files for state in self.tables if state.schema == stored]
        wanted = None if keys is None else _WantedKeys.of(self, keys)
        if wanted is not None:
            files = [file for file in files if file.part in wanted.parts]
        return _rows_of(self, files, columns.schema, chosen, wanted)


class _WantedKeys:
    """Finds the rows of some keys."""

    def __init__(self, codec: KeyCodec, keys: KeyBatch, parts: Collection[int]) -> None:
        self._codec = codec
        self._keys = keys.keys
        self._hashes = keys.hashes.view(np.int64)
        self.columns = [HASH, *(f"key_{field.name}" for field in codec.schema)]
        """The columns that identify a key."""
        self.parts = parts
        """The parts of the operator that may have the keys."""

    @classmethod
    def of(cls, point: SavedPoint, keys: Keys) -> _WantedKeys:
        codec = KeyCodec(decode_schema(point.key_schema))
        batch = encoded_keys(keys, codec, point.name)
        return cls(codec, batch, set(subtasks_of(batch.hashes, point.parallelism).tolist()))

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
    point: SavedPoint,
    files: Sequence[SavedFile],
    columns: pa.Schema,
    chosen: Sequence[str],
    wanted: _WantedKeys | None,
) -> Iterator[pa.RecordBatch]:
    names = [*(wanted.columns if wanted else ()), *chosen] or columns.names[:1]  # batches of no columns have no length
    read = pa.schema([columns.field(name) for name in dict.fromkeys(names)])
    for file in tracked(files, lambda found: [one.length for one in found]):
        with reading_parquet(file, point.location), _opened(point, file) as table:
            if table.schema_arrow.names != columns.names:
                raise CorruptionError(
                    f"{point.location}/{file.name}: its columns are {', '.join(table.schema_arrow.names)}, not"
                    f" {', '.join(columns.names)}.",
                    kind=ErrorKind.FORMAT,
                    hint="Another program may have written the table. Take the savepoint again.",
                )
            for rows in _row_groups(table, read, wanted):
                yield rows.select(list(dict.fromkeys(chosen)))  # a user may name a column twice


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
def _opened(point: SavedPoint, file: SavedFile) -> Iterator[pq.ParquetFile]:
    """A file that has been checked: in memory, or in the temporary directory if it is large."""
    if file.length <= MEMORY_BYTES:
        yield pq.ParquetFile(pa.BufferReader(read_saved(point.store, file, point.location)))
        return
    with tempfile.TemporaryDirectory(prefix="statelog-read-") as scratch:
        path = Path(scratch) / "table.parquet"
        with path.open("wb") as copy:
            copy_saved(point.store, file, point.location, copy)
        with pq.ParquetFile(path) as table:
            yield table
