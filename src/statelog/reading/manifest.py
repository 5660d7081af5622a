"""The manifest of a savepoint; its layout is specified in ``docs/savepoints.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

import msgspec
import pyarrow as pa

from statelog.errors import ConfigurationError, CorruptionError, ErrorKind, StatelogError, StorageError
from statelog.runs import digests
from statelog.runs.key_groups import Natural, Parallelism
from statelog.runs.schema import StateSchema
from statelog.sealed import seal, unseal
from statelog.storage import Store
from statelog.storage.names import is_plain
from statelog.storage.store import if_present

MANIFEST: Final = "manifest.json"
SAVED_OPERATORS: Final = "operators"
SAVED_SOURCES: Final = "spark/sources"
"""The folders of a savepoint's files."""
_BATCH: Final = re.compile(r"0|[1-9][0-9]{0,17}")
_KIND: Final = "statelog savepoint"
_VERSION: Final = 1
_HINT: Final = "Take the savepoint again, or restore the file from a copy."
_COPIED_BYTES: Final = 8 << 20


class SavedFile(msgspec.Struct, frozen=True):
    """A file of a savepoint."""

    name: str
    """Relative to the savepoint."""
    length: Natural
    """Size in bytes."""
    checksum: bytes
    """xxh3-128 of the file."""
    rows: Natural = 0
    """0 if the file is no table."""
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
    """Number of ranges that the key hashes are cut into; of an unkeyed operator the number of subtasks."""
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
        return manifest

    def require_inside(self, location: str) -> None:
        """Raise CorruptionError if a name leads out of the savepoint at a location, or out of a new checkpoint."""
        tables = [file.name for one in self.operators for state in one.states for file in state.files]
        names = [(name, SAVED_OPERATORS) for name in tables] + [(file.name, SAVED_SOURCES) for file in self.sources]
        wrong = [name for name, folder in names if not (is_plain(name) and name.startswith(f"{folder}/"))]
        wrong += [batch for batch in (*self.offsets, *self.commits) if not _BATCH.fullmatch(batch)]
        wrong += [one.folder for one in self.operators if not is_plain(one.folder) or "/" in one.folder]
        if wrong:
            raise CorruptionError(
                f"{location}/{MANIFEST}: {wrong[0]!r:.200} is no name of a file in a savepoint.",
                kind=ErrorKind.FORMAT,
                hint="Only another program can have written it; do not restore it. See who may write there.",
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
    """Report a file of a savepoint that is no Parquet file as damage."""
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
    """Report a missing file as damage."""
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
