"""The Spark side of a checkpointLocation: its files, committed batches, and the offsets of the sources."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind, StateMissingError, StorageError
from statelog.reading.open import SPARK_METADATA
from statelog.reading.savepoint import Manifest, SavedFile, read_saved, store_saved
from statelog.spark.checkpoint.logs import BatchOffsets, file_log_until, is_file_log_entry
from statelog.storage import Store
from statelog.storage.local import sync_directory
from statelog.storage.store import if_present

OFFSETS: Final = "offsets"
COMMITS: Final = "commits"
_SOURCES: Final = "sources"
STATE: Final = "state"
_COPY_ATTEMPTS: Final = 3
_REWOUND: Final = "statelog-rewound"
"""Folder for the files that are set aside; Spark ignores folders whose names it does not know."""
_SAVED_FOLDER: Final = "spark"


@dataclass(frozen=True)
class SparkCheckpoint:
    """The Spark side of a query's checkpointLocation."""

    files: SparkFiles
    location: str

    @property
    def folders(self) -> list[str]:
        """The locations of Spark's own folders."""
        names = (OFFSETS, COMMITS, _SOURCES, STATE)
        return [f"{self.location}/{name}" for name in names]

    def has_query(self) -> bool:
        """Whether a query has been started with the location, or can continue from it."""
        return if_present(lambda: self.files.read(SPARK_METADATA)) is not None

    def query_id(self) -> str:
        """The id of the query; raises ConfigurationError if the location is no checkpoint."""
        try:
            metadata = json.loads(self.files.read(SPARK_METADATA))
            return str(metadata["id"])
        except (StorageError, ValueError, TypeError, KeyError) as error:
            if isinstance(error, StorageError) and error.kind is not ErrorKind.OBJECT_MISSING:
                raise
            raise ConfigurationError(
                f"{self.location} holds no checkpoint of a Spark query.", hint="Pass the query's checkpointLocation."
            ) from error

    def committed(self) -> list[int]:
        """The batches, ascending, that Spark has committed and whose input it still knows."""
        commits, offsets = self.batches(COMMITS), set(self.batches(OFFSETS))
        return [batch for batch in commits if batch in offsets and (batch == 0 or batch - 1 in offsets)]

    def batches(self, folder: str) -> list[int]:
        """The batches, ascending, that have a file in a folder."""
        names = [name.rpartition("/")[2] for name in self.files.list(folder)]
        return sorted(int(name) for name in names if re.fullmatch(r"\d+", name))

    def plans_after(self, next_batch: int) -> list[str]:
        """The offset log's entries, newest first, of batches after the next one; without a gap there are none."""
        return [f"{OFFSETS}/{batch}" for batch in reversed(self.batches(OFFSETS)) if batch > next_batch]

    def free_aside(self) -> str:
        """The folder to which :meth:`set_aside` moves files next."""
        return free_folder(self.files.list(_REWOUND), _REWOUND)

    def set_aside(self, names: Iterable[str]) -> None:
        """Move files, one after the other, to a new folder, where Spark does not look."""
        aside = self.free_aside()
        for name in names:
            self.files.move(name, f"{aside}/{name}")

    def require_no_other_state(self) -> None:
        """Refuse a query that also has stateful operators of Spark's own: a savepoint cannot hold their state."""
        if self.files.list(STATE):
            raise ConfigurationError(
                f"{self.location}: the query also has stateful operators of Spark, whose state cannot be saved.",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                hint="Copy the whole checkpointLocation while the query is stopped, or replace those operators.",
            )

    def offsets(self, batch: int) -> dict[str, str]:
        """Spark's offset log entries of a batch and the batch before, by batch id."""
        return {str(one): self._text(f"{OFFSETS}/{one}") for one in (batch - 1, batch) if one >= 0}

    def time_ms(self, batch: int) -> int | None:
        """Spark's time of a batch; None if Spark has not noted it."""
        return self.batch_offsets(batch).time_ms

    def batch_offsets(self, batch: int) -> BatchOffsets:
        """Spark's offset log entry of a batch; raises StateMissingError if it is gone."""
        name = f"{OFFSETS}/{batch}"
        return BatchOffsets.parse(self._text(name), f"{self.location}/{name}")

    def commits(self, batch: int) -> dict[str, str]:
        """Spark's commit log entry of a batch, by batch id."""
        return {str(batch): self._text(f"{COMMITS}/{batch}")}

    def _text(self, name: str) -> str:
        data = if_present(lambda: self.files.read(name))
        if data is None:
            raise StateMissingError(
                f"{self.location}/{name} is gone: Spark has deleted its record of that batch.",
                hint="Choose a newer batch.",
            )
        return data.decode()

    def copy_sources(self, target: Store, offsets: str) -> list[SavedFile]:
        """Copy the sources' files up to a batch, whose offset log entry is `offsets`, as :meth:`source_files`."""
        held = self.source_files(offsets)
        return [store_saved(target, f"{_SAVED_FOLDER}/{name}", data) for name, data in held.items()]

    def source_files(self, offsets: str) -> dict[str, bytes]:
        """The sources' files by name, up to a batch whose offset log entry is `offsets`.

        Raises StateMissingError if a source no longer has them, StorageError if files vanish at each attempt.
        """
        entry = BatchOffsets.parse(offsets, f"{self.location}/{OFFSETS}")
        for attempt in range(_COPY_ATTEMPTS):
            try:
                return dict(self._noted(entry))
            except StorageError as error:
                # A source may compact old files meanwhile, and delete them.
                if error.kind is not ErrorKind.OBJECT_MISSING or attempt + 1 == _COPY_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _noted(self, entry: BatchOffsets) -> Iterator[tuple[str, bytes]]:
        """The sources' files by name; logs of files are cut, as Spark would read their later entries as one batch."""
        logs: dict[str, list[str]] = {}
        for name in self.files.list(_SOURCES):
            source, _, base_name = name.removeprefix(f"{_SOURCES}/").partition("/")
            logs.setdefault(source, []).append(base_name)
        ends = entry.file_log_ends(logs)
        for source in logs.keys() | ends.keys():
            folder, names = f"{_SOURCES}/{source}", logs.get(source, [])
            kept = [name for name in names if not (source in ends and is_file_log_entry(name))]
            kept = [name for name in kept if not name.rpartition("/")[2].startswith(".")]
            yield from ((f"{folder}/{name}", self._read_below(folder, name)) for name in kept)
            if source in ends:
                files = file_log_until(names, ends[source], partial(self._read_below, folder), folder)
                yield from ((f"{folder}/{name}", data) for name, data in files.items())

    def _read_below(self, folder: str, name: str) -> bytes:
        return self.files.read(f"{folder}/{name}")

    def require_empty(self) -> None:
        """Refuse a location with which a query has been started."""
        if self.has_query() or any(self.files.list(folder) for folder in (OFFSETS, COMMITS, _SOURCES)):
            raise ConfigurationError(
                f"{self.location} already holds a checkpoint of a Spark query.",
                kind=ErrorKind.OTHER_OWNER,
                hint="Pass an empty directory; remove the remains of an interrupted restore or branch first.",
            )

    def restore(self, manifest: Manifest, saved: Store, saved_location: str, *, query_id: str, clock_id: str) -> None:
        """Write a checkpoint from which query `query_id` continues after a savepoint's batch, as :meth:`write`."""
        sources = {
            file.name.removeprefix(f"{_SAVED_FOLDER}/"): read_saved(saved, file, saved_location)
            for file in manifest.sources
        }
        self.write(sources, manifest.offsets, manifest.commits, query_id=query_id, clock_id=clock_id)

    def write(
        self,
        sources: Mapping[str, bytes],
        offsets: Mapping[str, str],
        commits: Mapping[str, str],
        *,
        query_id: str,
        clock_id: str,
    ) -> None:
        """Write a checkpoint from which query `query_id` continues after a batch.

        `sources`, `offsets` and `commits` are those of another checkpoint, see :meth:`source_files`, :meth:`offsets`
        and :meth:`commits`. `clock_id` becomes the id of the heartbeat's clock, which no other query may have.
        """
        for name, data in sources.items():
            self.files.write(name, data)
        for batch, text in commits.items():
            self.files.write(f"{COMMITS}/{batch}", text.encode())
        for batch, text in offsets.items():
            entry = BatchOffsets.parse(text, f"{self.location}, offsets of batch {batch}")
            self.files.write(f"{OFFSETS}/{batch}", entry.with_clock(clock_id).encode())
        # Written last: without this file Spark does not take the directory for a checkpoint.
        self.files.write(SPARK_METADATA, json.dumps({"id": query_id}).encode())


def free_folder(names: Iterable[str], folder: str) -> str:
    """The next numbered folder in a folder with these files, so that nothing in them is ever replaced."""
    numbers = (name.removeprefix(f"{folder}/").split("/")[0] for name in names)
    return f"{folder}/{max((int(number) for number in numbers if number.isdecimal()), default=0) + 1}"


class SparkFiles(ABC):
    """The files that Spark keeps in a query's checkpointLocation: offsets, commits, metadata, and logs of sources.

    Names are relative to the location and use ``/``. Hadoop's local file system keeps a checksum of a file ``x`` beside
    it, in ``.x.crc``. Every change also updates the checksum, so that Spark can read the file afterwards. A running
    query may add and remove files while they are read; change them only while it is stopped. A change survives a crash
    of the process when the call returns, and a crash of the machine if the file system keeps what it was given. Folders
    are created as needed.

    Raises
    ------
    StorageError
        By every method, for a failed operation, or a missing file (kind ``object-missing``).
    """

    @abstractmethod
    def list(self, folder: str) -> list[str]:
        """List the files in and below a folder, sorted; none if there is no such folder.

        Files whose last part begins with a dot, such as checksums, may be left out.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read a whole file."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a whole file, in place of any other of this name; readers see all of it or none.

        Where a file system cannot replace a file in one step, a crash may leave no file of this name.
        """

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Move a file to an unused name; nothing happens if there is no such file.

        After a crash the file is at its old name, its new one, or both.
        """


class StoreFiles(SparkFiles):
    """Spark's files in a store, without Spark."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def list(self, folder: str) -> list[str]:
        listed = self._store.list(f"{folder}/")
        # In a bucket, Hadoop marks a folder with an empty object, whose name the client gives without its last slash.
        return [info.name for info in listed if info.size_bytes or self._store.can_append]

    def read(self, name: str) -> bytes:
        return self._store.read(name)

    def write(self, name: str, data: bytes) -> None:
        self._store.delete([_checksum_of(name)])
        self._store.put(name, data)

    def move(self, source: str, target: str) -> None:
        # The checksum goes first: Spark can read a file without one, but not a later file beside an old checksum.
        for old, new in ((_checksum_of(source), _checksum_of(target)), (source, target)):
            data = if_present(partial(self._store.read, old))
            if data is not None:
                self._store.put(new, data)
                self._store.delete([old])


class DirectoryFiles(StoreFiles):
    """Spark's files in a directory, whose store is `store`; files are renamed."""

    def __init__(self, store: Store, root: Path) -> None:
        super().__init__(store)
        self._root = root

    def move(self, source: str, target: str) -> None:
        old, new = self._root / source, self._root / target
        try:
            self._make_folder(new.parent)
            for one, other in ((_checksum_of(source), _checksum_of(target)), (source, target)):
                with suppress(FileNotFoundError):
                    (self._root / one).rename(self._root / other)
                for folder in (new.parent, old.parent):
                    with suppress(FileNotFoundError):
                        sync_directory(str(folder))
        except OSError as error:
            raise StorageError(
                f"move {old} to {new} failed: {error.strerror or error}.",
                hint="Check that the directory is mounted and writable on this host.",
            ) from error

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        while folder != self._root:
            folder = folder.parent
            sync_directory(str(folder))


def _checksum_of(name: str) -> str:
    folder, slash, base_name = name.rpartition("/")
    return f"{folder}{slash}.{base_name}.crc"
