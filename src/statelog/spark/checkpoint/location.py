"""Opens a query's checkpointLocation: Spark's files in it, directly or through Hadoop, and the place of its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.log.open import STATE_FOLDER, open_location
from statelog.spark.checkpoint.checkpoint import DirectoryFiles, SparkCheckpoint, SparkFiles, StoreFiles
from statelog.spark.driver import internals
from statelog.storage.location import HDFS, OBJECT_STORES, scheme_of
from statelog.storage.names import is_plain
from statelog.storage.open import REGISTERED, local_path
from statelog.storage.store import if_present

_LOCAL: Final = ("", "file")


def open_checkpoint(location: str, session: SparkSession | None) -> SparkCheckpoint:
    """Open the Spark side of a checkpointLocation.

    A directory is read and written here, which syncs its files. Any other place is reached as Spark reaches it, through
    the session's Hadoop; a bucket or HDFS also without one, as a location of statelog. Raises ConfigurationError if the
    place can be reached in neither way.
    """
    given = scheme_of(location)
    scheme = given if session is None or given == "file" else internals.file_system_scheme(session, location)
    if session is not None and scheme not in _LOCAL:
        files = HadoopFiles(session, location)
        return SparkCheckpoint(files, files.location)
    if given in OBJECT_STORES or given == HDFS:
        return SparkCheckpoint(StoreFiles(open_location(location)), location.rstrip("/"))
    if given not in _LOCAL:
        reason = "no Spark session is active" if session is None else "the session's Hadoop does not know it"
        raise ConfigurationError(
            f"The checkpointLocation {location} has the scheme {given}, but {reason}.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint=f"Call statelog in an application whose Spark session reads and writes {given}:// itself.",
        )
    path = Path(local_path(location))
    return SparkCheckpoint(DirectoryFiles(open_location(str(path)), path), str(path))


def state_location(checkpoint: SparkCheckpoint, location: str | None) -> str:
    """The place for state below a checkpointLocation, or `location` if no store of statelog's can be there.

    Raises ConfigurationError if that is None.
    """
    if location is not None and not _has_store(checkpoint.location):
        return location
    return state_home(checkpoint.location)


def state_home(checkpoint_location: str) -> str:
    """The place for state below a checkpointLocation; ConfigurationError if no store of statelog's can be there."""
    if not _has_store(checkpoint_location):
        scheme = scheme_of(checkpoint_location)
        raise ConfigurationError(
            f"{checkpoint_location}: statelog keeps no state in locations with the scheme {scheme}.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Pass location=, the directory or bucket of the operators' state.",
        )
    return f"{checkpoint_location.rstrip('/')}/{STATE_FOLDER}"


def _has_store(location: str) -> bool:
    scheme = scheme_of(location)
    return scheme in _LOCAL or scheme in OBJECT_STORES or scheme == HDFS or scheme in REGISTERED


# ---- Through the file manager that Spark itself uses for the place ----


_MISSING: Final = "java.io.FileNotFoundException"


class HadoopFiles(SparkFiles):
    """Spark's files at a location of any file system that a session's Hadoop knows.

    Files are written as Spark writes them: by default under a temporary name and then renamed, which is atomic where a
    rename is. File systems with checksums keep these themselves.
    """

    def __init__(self, session: SparkSession, location: str) -> None:
        self.location = location
        """With its scheme, also if a path was given."""
        with self._reported("open"):
            self._manager, self._path_of, qualified = internals.checkpoint_files(session, location)
        self.location = qualified.rstrip("/")

    def _path(self, name: str) -> Any:
        if not is_plain(name):  # Hadoop would follow it out of the location
            raise ConfigurationError(
                f"{name!r:.200} is not a name of a file in {self.location}.",
                hint="Names are relative, with '/' between their parts, and have no empty, '.' or '..' part.",
            )
        return self._path_of(name)

    def list(self, folder: str) -> list[str]:
        return sorted(self._below(folder))

    def _below(self, folder: str) -> Iterator[str]:
        try:
            with self._reported("list", folder):
                statuses = self._manager.list(self._path(folder))
                children = [(str(status.getPath().getName()), bool(status.isDirectory())) for status in statuses]
        except StorageError as error:
            if error.kind is not ErrorKind.OBJECT_MISSING:
                raise
            return
        for name, is_folder in children:
            if is_folder:
                yield from self._below(f"{folder}/{name}")
            else:
                yield f"{folder}/{name}"

    def read(self, name: str) -> bytes:
        with self._reported("read", name):
            stream = self._manager.open(self._path(name))
            try:
                return bytes(stream.readAllBytes())
            finally:
                stream.close()

    def write(self, name: str, data: bytes) -> None:
        with self._reported("write", name):
            path = self._path(name)
            self._manager.mkdirs(path.getParent())
            replaces = self._manager.exists(path)
            self._create(path, data)
            if replaces and self.read(name) != data:
                # The file system's rename replaces no file, and Spark's file manager takes that for success.
                self._manager.delete(path)
                self._create(path, data)

    def create(self, name: str, data: bytes) -> None:
        """Write a file as Spark writes one that must not be there yet; StorageError if it is there."""
        with self._reported("create", name):
            path = self._path(name)
            self._manager.mkdirs(path.getParent())
            self._create(path, data, replaces=False)

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing happens if there is none."""
        with self._reported("delete", name):
            self._manager.delete(self._path(name))

    @property
    def manager(self) -> str:
        """The name of the class by which Spark manages its files there."""
        return str(self._manager.getClass().getSimpleName())

    def _create(self, path: Any, data: bytes, *, replaces: bool = True) -> None:
        stream = self._manager.createAtomic(path, replaces)
        try:
            stream.write(data)
        except Py4JJavaError:
            stream.cancel()
            raise
        stream.close()

    def move(self, source: str, target: str) -> None:
        # A copy: Spark's file manager has no rename, and in an object store none is atomic. The files are small.
        data = if_present(lambda: self.read(source))
        if data is None:
            return
        self.write(target, data)
        self.delete(source)

    @contextmanager
    def _reported(self, operation: str, name: str = "") -> Iterator[None]:
        """Turn an exception of Java's into a StorageError."""
        try:
            yield
        except Py4JJavaError as error:
            causes = [error.java_exception]
            while (cause := causes[-1].getCause()) is not None:
                causes.append(cause)
            # HDFS reports it in an exception whose cause is the exception of the call to the NameNode.
            is_missing = any(str(one.getClass().getName()) == _MISSING for one in causes)
            cause = causes[-1]
            raise StorageError(
                f"{operation} {self.location}/{name} failed: {cause.toString()}.",
                kind=ErrorKind.OBJECT_MISSING if is_missing else ErrorKind.STORE_FAILED,
                hint="Check that Spark itself can reach the place. Its Hadoop configuration applies (spark.hadoop.*).",
            ) from error
