"""Spark's own files of a query's checkpointLocation: the contract, and the files of a store or a directory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from functools import partial
from pathlib import Path

from statelog.errors import StorageError
from statelog.storage import Store
from statelog.storage.posix import sync_directory
from statelog.storage.store import if_present


class SparkFiles(ABC):
    """The files that Spark keeps in a query's checkpointLocation: offsets, commits, metadata, and logs of sources.

    Names are relative to the location and use ``/``. Hadoop's local file system keeps a checksum of a file ``x`` beside
    it, in ``.x.crc``. Every change cares for the checksum too, so that Spark can read the file afterwards. A running
    query may add and remove files while they are read; change them only while it is stopped. A change survives a crash
    of the process when the call returns, and a crash of the machine if the file system holds what it was given. Folders
    are made as needed.

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
        """Write a whole file in the place of any other of this name; readers see all of it or none.

        Where a file system cannot replace a file in one step, a crash may leave no file of this name.
        """

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Move a file to a name that no file has; nothing happens if there is no such file.

        After a crash the file is at its old name, its new one, or both.
        """


class StoreFiles(SparkFiles):
    """Spark's files in a store, without Spark."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def list(self, folder: str) -> list[str]:
        return [info.name for info in self._store.list(f"{folder}/")]

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
