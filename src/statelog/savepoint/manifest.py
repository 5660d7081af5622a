"""What a savepoint consists of; the layout is specified in ``docs/savepoints.md``."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from statelog.errors import ConfigurationError, CorruptionError, ErrorKind, StorageError
from statelog.runs import digests
from statelog.runs.schema import StateSchema
from statelog.sealed import seal, unseal
from statelog.storage import Store

MANIFEST: Final = "manifest.json"
_KIND: Final = "statelog savepoint"
_VERSION: Final = 2
_HINT: Final = "Take the savepoint again, or restore the file from a copy."


class SavedFile(msgspec.Struct, frozen=True):
    """A file of a savepoint.

    Parameters
    ----------
    name : str
        Its name below the savepoint.
    length : int
        Size in bytes.
    checksum : bytes
        xxh3-128 of its bytes.
    rows : int
        Number of its rows; 0 if it is no table.
    part : int
        Which range of key hashes it holds.
    """

    name: str
    length: int
    checksum: bytes
    rows: int = 0
    part: int = 0


class SavedState(msgspec.Struct, frozen=True):
    """A state of an operator.

    Parameters
    ----------
    schema : StateSchema
        Name, kind and types, as in a checkpoint.
    columns : dict of str to str
        Names and Arrow types of the table's columns, for readers of the manifest.
    files : list of SavedFile
        Its table, by range.
    """

    schema: StateSchema
    columns: dict[str, str]
    files: list[SavedFile]

    @property
    def rows(self) -> int:
        """Number of rows in all files."""
        return sum(file.rows for file in self.files)


class SavedOperator(msgspec.Struct, frozen=True):
    """An operator.

    Parameters
    ----------
    uid, folder : str
        Its name, and the name of its folder in the savepoint.
    parts : int
        How many ranges the key hashes are cut into; of an operator without keys the number of subtasks.
    key_schema : bytes
        Arrow IPC schema message of the key columns; empty if it has no keys.
    states : list of SavedState
        Its states by name, timers among them.
    batch_time_ms, watermark_ms : int
        Of the batch.
    max_event_ms : list of (int or None)
        The largest event time of each input, if the operator has a watermark of its own.
    settings : dict
        The settings that the state depends on, as in a checkpoint.
    """

    uid: str
    folder: str
    parts: int
    key_schema: bytes
    states: list[SavedState]
    batch_time_ms: int
    watermark_ms: int
    max_event_ms: list[int | None] = []
    settings: dict[str, int | str] = {}


class Manifest(msgspec.Struct, frozen=True):
    """What a savepoint consists of.

    Parameters
    ----------
    batch : int
        Spark's batch id: the state is that after the batch.
    query_id : str
        The query that it was taken of.
    taken_ms : int
        When, in milliseconds since the Unix epoch.
    offsets, commits : dict of str to str
        Spark's files for this batch, and the offsets of the one before, by batch id.
    sources : list of SavedFile
        Copies of what Spark's sources have noted, below ``spark/``.
    operators : list of SavedOperator
        The operators, by name.
    """

    batch: int
    query_id: str
    taken_ms: int
    offsets: dict[str, str]
    commits: dict[str, str]
    sources: list[SavedFile]
    operators: list[SavedOperator]

    @classmethod
    def read(cls, store: Store, location: str) -> Manifest:
        """Read the manifest of a savepoint.

        Raises
        ------
        ConfigurationError
            If there is none, or one of a later version.
        CorruptionError
            If it is damaged.
        """
        try:
            data = store.read(MANIFEST)
        except StorageError as error:
            if error.kind is not ErrorKind.OBJECT_MISSING:
                raise
            raise ConfigurationError(
                f"{location} holds no savepoint: there is no {MANIFEST}.",
                kind=ErrorKind.CHECKPOINT_MISSING,
                hint="Pass the directory that statelog.savepoint() wrote. The manifest is written last, so a savepoint"
                " that was interrupted has none: take it again into another directory.",
            ) from error
        first = _read_first_version(data)
        if first is not None:
            return first
        return unseal(data, Manifest, kind=_KIND, version=_VERSION, name=f"{location}/{MANIFEST}")

    def write(self, store: Store) -> None:
        """Write it; from then on the savepoint exists."""
        store.put(MANIFEST, seal(self, _KIND, _VERSION))

    @property
    def file_names(self) -> list[str]:
        """Every file of the savepoint but the manifest."""
        tables = [file.name for one in self.operators for state in one.states for file in state.files]
        return tables + [file.name for file in self.sources]


class _FirstManifest(Manifest, frozen=True, forbid_unknown_fields=True):
    """A manifest of version 1, which has no checksum. A damaged later one has members that this one must not have."""

    version: Literal[1]


_first_decoder: Final = msgspec.json.Decoder(_FirstManifest)


def _read_first_version(data: bytes) -> Manifest | None:
    try:
        first = _first_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return Manifest(**{name: getattr(first, name) for name in Manifest.__struct_fields__})


def store_saved(store: Store, name: str, data: bytes | memoryview, *, rows: int = 0, part: int = 0) -> SavedFile:
    """Write a file of a savepoint."""
    store.put(name, data)
    return SavedFile(name, len(data), digests.checksum(data), rows, part)


def read_saved(store: Store, file: SavedFile, location: str) -> bytes:
    """Read a file of a savepoint.

    Raises
    ------
    CorruptionError
        If it is gone, or not what was written.
    """
    try:
        data = store.read(file.name)
    except StorageError as error:
        if error.kind is not ErrorKind.OBJECT_MISSING:
            raise
        raise CorruptionError(
            f"{location}/{file.name}: the file is gone.", kind=ErrorKind.OBJECT_MISSING, hint=_HINT
        ) from error
    if len(data) != file.length or digests.checksum(data) != file.checksum:
        raise CorruptionError(
            f"{location}/{file.name}: its {len(data)} bytes are not those that were written.", hint=_HINT
        )
    return data
