"""Reads, writes and syncs of files; short reads and writes are continued."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from statelog.files import WRITE_BYTES, cut

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
