"""Spark's own files of a checkpointLocation, through the file manager that Spark itself uses for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.savepoints.spark_files import SparkFiles
from statelog.spark import internals
from statelog.storage.names import is_plain
from statelog.storage.store import if_present

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

    def _create(self, path: Any, data: bytes) -> None:
        stream = self._manager.createAtomic(path, True)
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
        with self._reported("delete", source):
            self._manager.delete(self._path(source))

    @contextmanager
    def _reported(self, operation: str, name: str = "") -> Iterator[None]:
        """Turn an exception of Java's into a StorageError."""
        try:
            yield
        except Py4JJavaError as error:
            cause = error.java_exception
            while cause.getCause() is not None:
                cause = cause.getCause()
            is_missing = str(cause.getClass().getName()) == _MISSING
            raise StorageError(
                f"{operation} {self.location}/{name} failed: {cause.toString()}.",
                kind=ErrorKind.OBJECT_MISSING if is_missing else ErrorKind.STORE_FAILED,
                hint="Can Spark itself reach the place? Its Hadoop configuration counts here (spark.hadoop.*).",
            ) from error
