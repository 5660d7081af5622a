"""A store in a directory: on a local disk, or on a file system that all hosts mount."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.files import WRITE_BYTES, cut, removed_on_failure
from statelog.storage.location import scheme_of
from statelog.storage.store import ObjectInfo, Store

_DIRECTORY_RACES: Final = 100


class LocalStore(Store):
    """Objects as files below a root directory, which the first write creates.

    A relative root is resolved at once, so that other processes see the same directory. A whole object is written to a
    temporary file and synced; the file is then linked or renamed to its name, and the directory is synced. Temporary
    files of crashed writers stay until :meth:`remove_unfinished`: :meth:`list` hides them, and they cost only their
    space. `new_token` makes the unique part of their names. Files and directories are private to their owner.
    """

    def __init__(self, root: str | Path, *, new_token: Callable[[], str] = secrets.token_hex) -> None:
        if not str(root):
            raise ConfigurationError(
                "LocalStore was given an empty root, which would be the working directory.",
                hint="Pass the path of a directory; Path.cwd() for the working directory.",
            )
        if scheme := scheme_of(str(root)):
            raise ConfigurationError(
                f"LocalStore was given {root}, which begins with the scheme {scheme} and is not a path.",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                hint="Remove the scheme first: otherwise the objects would go to a folder of that name in the working"
                " directory.",
            )
        self._root = os.path.abspath(root)
        self._new_token = new_token
        self._appended: dict[str, AppendFile] = {}
        self._durable_directories: set[str] = set()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    def __str__(self) -> str:
        return str(self._root)

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(LocalStore, new_token=self._new_token), (self._root,))

    @property
    def can_append(self) -> bool:
        return True

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        with self._opened(name, "read") as fd:
            available = max(os.fstat(fd).st_size - offset, 0)
            return read_all(fd, available if length is None else min(length, available), offset)

    def read_into(self, buffer: memoryview, name: str, *, offset: int = 0) -> int:
        with self._opened(name, "read") as fd:
            return read_into(fd, buffer, offset)

    def size_bytes(self, name: str) -> int:
        path = self._path(name)
        with _reported("size", path, missing=True):
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a file")
            return status.st_size

    def put(self, name: str, data: bytes | memoryview) -> None:
        path = self._path(name)
        with _reported("put", path):
            temporary = self._write_temporary(os.path.dirname(path), data)
            with removed_on_failure(Path(temporary)):
                os.replace(temporary, path)
            sync_directory(os.path.dirname(path))

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        path = self._path(name)
        with _reported("put_if_absent", path):
            temporary = self._write_temporary(os.path.dirname(path), data)
            try:
                os.link(temporary, path)
                won = True
            except FileExistsError:
                # NFS repeats a link whose answer was lost, and then reports its own file as a conflict.
                won = os.stat(temporary).st_nlink > 1
            finally:
                with suppress(FileNotFoundError):  # removed as unfinished by a process whose clock is ahead
                    os.unlink(temporary)
            # After a conflict too: the caller acts on the winner's file.
            sync_directory(os.path.dirname(path))
            return won

    def append(self, name: str, parts: list[bytes | memoryview], *, at: int) -> None:
        path = self._path(name)
        with _reported("append", path, missing=True):
            self._append_files().setdefault(name, AppendFile(path)).append(parts, at)

    def sync(self, name: str, *, start: int, end: int) -> None:
        with self._opened(name, "sync", os.O_RDWR) as fd:
            rewrite(fd, start, end)
            sync_data(fd)
            sync_directory(os.path.dirname(self._path(name)))

    def delete(self, names: list[str]) -> None:
        directories = set()
        for name in names:
            path = self._path(name)
            with _reported("delete", path):
                try:
                    os.unlink(path)
                except (FileNotFoundError, NotADirectoryError):
                    continue
            directories.add(os.path.dirname(path))
            if file := self._append_files().pop(name, None):
                file.close()
        for directory in sorted(directories):
            with _reported("delete from", directory):
                self._settle_deletion(directory)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        folder, slash, start = prefix.rpartition("/")
        if start == ".." or (slash and not folder):
            raise _bad_name(prefix)
        top = self._path(folder) if folder else self._root
        with _reported("list", top):
            found = _walk(top, folder + slash, start)
            return sorted(found, key=lambda info: info.name)

    def remove_unfinished(self, prefix: str, before_s: float) -> None:
        top = self._path(prefix.rstrip("/")) if prefix else self._root
        with _reported("remove unfinished files of", top):
            for directory, _, names in os.walk(top):
                for name in filter(_is_temporary, names):
                    path = f"{directory}/{name}"
                    with suppress(FileNotFoundError):
                        if os.stat(path).st_mtime < before_s:
                            os.unlink(path)

    def close(self) -> None:
        for file in tuple(self._append_files().values()):
            file.close()

    def _append_files(self) -> dict[str, AppendFile]:
        if self._pid != os.getpid():
            # After a fork the open files are copies of the parent's; do not use them.
            self._appended, self._pid = {}, os.getpid()
        return self._appended

    @contextmanager
    def _opened(self, name: str, operation: str, mode: int = os.O_RDONLY) -> Iterator[int]:
        path = self._path(name)
        with _reported(operation, path, missing=True):
            fd = os.open(path, mode)
            try:
                yield fd
            finally:
                os.close(fd)

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in name or _is_temporary(parts[-1]):
            raise _bad_name(name)
        return f"{self._root}/{name}"

    def _write_temporary(self, directory: str, data: bytes | memoryview) -> str:
        path = f"{directory}/.{os.getpid()}.{self._new_token()}.tmp"
        for attempt in range(_DIRECTORY_RACES):
            try:
                self._make_directory(directory)
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                break
            except FileNotFoundError:
                # Another process removed the directory while it was empty.
                self._durable_directories.clear()
                if attempt + 1 == _DIRECTORY_RACES:
                    raise
        try:
            with removed_on_failure(Path(path)):
                write_all(fd, [data], 0)
                os.fsync(fd)
        finally:
            os.close(fd)
        return path

    def _make_directory(self, directory: str) -> None:
        """Make a directory and its parents, durably.

        Below the root every parent is synced once, even if the directory exists: the process that made it may not have
        synced it yet.
        """
        if directory in self._durable_directories:
            return
        for path in (*reversed(Path(directory).parents), Path(directory)):
            try:
                path.mkdir(0o700)
                made = True
            except OSError as error:
                try:
                    mode = os.lstat(path).st_mode  # one look: others may remove and remake it meanwhile
                except FileNotFoundError:
                    if isinstance(error, FileExistsError):
                        raise FileNotFoundError(errno.ENOENT, "another process removed it just now") from error
                    raise error from None
                if not stat.S_ISDIR(mode) and not path.is_dir():  # nor a link to a directory
                    raise
                made = False
            if made or str(path).startswith(f"{self._root}/"):
                sync_directory(str(path.parent))
        self._durable_directories.add(directory)

    def _settle_deletion(self, directory: str) -> None:
        """Remove a directory and its parents while they are empty, and sync the first one that remains."""
        while directory != self._root:
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                break
            self._durable_directories.discard(directory)
            directory = os.path.dirname(directory)
        with suppress(FileNotFoundError):
            sync_directory(directory)


def _is_temporary(base_name: str) -> bool:
    return base_name.startswith(".") and base_name.endswith(".tmp")


def _walk(directory: str, prefix: str, start: str) -> Iterator[ObjectInfo]:
    """Objects in and below a directory whose path from there begins with `start`.

    A file that vanishes may have been replaced by one that was not there before, so the directory is then read again.
    """
    folders: list[os.DirEntry[str]] = []
    files: list[ObjectInfo] = []
    for _ in range(_DIRECTORY_RACES):
        try:
            with os.scandir(directory) as entries:
                children = [entry for entry in entries if entry.name.startswith(start)]
        except (FileNotFoundError, NotADirectoryError):
            return
        folders, files, has_vanished = [], [], False
        for child in children:
            if child.is_dir():
                folders.append(child)
            elif not _is_temporary(child.name):
                try:
                    status = child.stat()
                except FileNotFoundError:
                    has_vanished = True
                else:
                    files.append(ObjectInfo(prefix + child.name, status.st_size, status.st_mtime))
        if not has_vanished:
            break
    yield from files
    for folder in folders:
        yield from _walk(folder.path, f"{prefix}{folder.name}/", "")


@contextmanager
def _reported(operation: str, path: str, *, missing: bool = False) -> Iterator[None]:
    """Turn an OSError into a StorageError; with `missing`, a missing file is of kind ``object-missing``."""
    try:
        yield
    except OSError as error:
        text = f"{operation} {path} failed: {error.strerror or error}."
        if missing and isinstance(error, FileNotFoundError | NotADirectoryError):
            raise StorageError(
                text, kind=ErrorKind.OBJECT_MISSING, hint="Check the location: it is wrong, or the object was deleted."
            ) from error
        raise StorageError(
            text, hint="Check that the directory is mounted and writable on this host and has free space."
        ) from error


def _bad_name(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name!r} is not a valid object name.",
        hint="Use a relative name with '/' between its parts, of which none is empty, '.' or '..'.",
    )


_IOV_MAX: Final = 1024
# macOS has no fdatasync.
sync_data: Final[Callable[[int], None]] = getattr(os, "fdatasync", os.fsync)


class AppendFile:
    """A file kept open for appending; threads take turns. The garbage collector closes it at the latest."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._closer: weakref.finalize[..., AppendFile] | None = None

    def append(self, parts: list[bytes | memoryview], at: int) -> None:
        """Drop everything beyond `at`, write the parts there, and make them durable.

        Raises FileNotFoundError if the file was deleted while it was open, another OSError if it ends before `at`.
        """
        with self._lock:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY)
                self._closer = weakref.finalize(self, os.close, self._fd)
            status = os.fstat(self._fd)
            if status.st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "it was deleted while it was open")
            if status.st_size < at:
                raise OSError(errno.EINVAL, f"its {status.st_size} bytes end before offset {at}")
            if status.st_size > at:
                os.ftruncate(self._fd, at)
            try:
                write_all(self._fd, parts, at)
            except OSError:
                # The frame is incomplete, so no reader counts it: free its space.
                with suppress(OSError):
                    os.ftruncate(self._fd, at)
                raise
            sync_data(self._fd)

    def close(self) -> None:
        """Close the file; the next append opens it again."""
        with self._lock:
            if self._closer is not None:
                self._closer()
            self._fd = self._closer = None


def read_all(fd: int, length: int, offset: int) -> bytes:
    """Read `length` bytes from `offset`; fewer only at the end of the file."""
    data = os.pread(fd, length, offset)
    while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
        data += more
    return data


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from `offset` and return the number of bytes read; fewer only at the end of the file."""
    done = 0
    while done < len(buffer) and (read := os.preadv(fd, [buffer[done:]], offset + done)):
        done += read
    return done


def write_all(fd: int, parts: list[bytes | memoryview], at: int) -> None:
    """Write parts one after the other from offset `at`."""
    pending = [view for part in parts for view in cut(part)]
    first = 0
    while first < len(pending):
        last, size_bytes = first + 1, len(pending[first])
        while last < min(len(pending), first + _IOV_MAX) and size_bytes + len(pending[last]) <= WRITE_BYTES:
            size_bytes += len(pending[last])
            last += 1
        written = os.pwritev(fd, pending[first:last], at)
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        at += written
        while first < len(pending) and written >= len(pending[first]):
            written -= len(pending[first])
            first += 1
        if written:
            pending[first] = pending[first][written:]


def rewrite(fd: int, start: int, end: int) -> None:
    """Write the bytes from `start` to `end` again, unchanged; the file must reach `end`."""
    while start < end:
        data = read_all(fd, min(end - start, WRITE_BYTES), start)
        if not data:
            raise OSError(errno.EINVAL, f"it ends at offset {start}, before {end}")
        write_all(fd, [data], start)
        start += len(data)


def sync_directory(directory: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
