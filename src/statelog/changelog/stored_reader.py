"""Reading stored runs: whole, or only the blocks that hold some key hashes; several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

import pyarrow as pa

from statelog.changelog import chain
from statelog.changelog.base import StoredRun
from statelog.changelog.segment import SHARED_BYTES, SegmentRef
from statelog.errors import CorruptionError, ErrorKind, StorageError
from statelog.state.key_groups import HashRange
from statelog.state.run import Run
from statelog.state.run_format import MAGIC, TAIL

__all__ = ["Readable", "read_ahead", "read_run", "read_stored"]

_TAIL_BYTES: Final = 64 << 10
_GAP_BYTES: Final = 64 << 10
"""Blocks that are not farther apart are read with what is between them."""


class Readable(Protocol):
    """What a restore needs of a store."""

    @property
    def can_append(self) -> bool:
        """Whether it is a directory, which answers at once."""
        ...

    def read(self, name: str, *, offset: int, length: int) -> bytes:
        """Read as :meth:`Store.read` does."""
        ...


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def read_stored(store: Readable, stored: SegmentRef | StoredRun, what: str) -> bytes:
    """Read a stored run or snapshot as a whole; `what` says what it is, for messages.

    Raises
    ------
    CorruptionError
        If it is damaged, gone or shorter than recorded; names the object and the offset.
    StorageError
        If it cannot be read.
    """
    data = _read(store, stored, 0, stored.length, what)
    if len(data) != stored.length or chain.checksum(data) != stored.checksum:
        raise CorruptionError(
            f"{stored.name}: {what} at offset {stored.offset}, {stored.length} bytes, is damaged or cut short.",
            hint="Restore the file from a copy; the state cannot be rebuilt without it.",
        )
    return data


def read_run(store: Readable, stored: SegmentRef | StoredRun, what: str, within: HashRange | None = None) -> Run:
    """Read a stored run.

    Parameters
    ----------
    store : Readable
        Holds it.
    stored : SegmentRef or StoredRun
        Where it is.
    what : str
        What it is, for messages.
    within : HashRange, optional
        Of a large run read only the blocks with these hashes. They are checked by their own checksums; the
        others must not be looked at.

    Raises
    ------
    CorruptionError, StorageError
        As :func:`read_stored`.
    """
    if within is None or stored.length <= SHARED_BYTES:
        return Run(pa.py_buffer(read_stored(store, stored, what)), stored.name, stored.offset, is_stored=True)
    parts = _Parts(stored.length)

    def fill(start: int, end: int) -> bytes:
        data = _read(store, stored, start, end - start, what)
        if len(data) != end - start:
            raise CorruptionError(
                f"{stored.name}: {what} at offset {stored.offset}, {stored.length} bytes, is cut short.",
                hint="Restore the file from a copy; the state cannot be rebuilt without it.",
            )
        parts.add(start, data)
        return data

    tail_at = stored.length - _TAIL_BYTES
    fill(0, len(MAGIC))
    tail = fill(tail_at, stored.length)
    footer_bytes = TAIL.unpack(tail[-TAIL.size :])[0] + TAIL.size
    if _TAIL_BYTES < footer_bytes <= stored.length:
        fill(stored.length - footer_bytes, stored.length)
    run = Run(parts, stored.name, stored.offset, is_stored=True)
    for start, end in _joined(run.byte_ranges(within)):
        fill(start, end)
    return run


def read_ahead(items: Iterable[_Item], read: Callable[[_Item], _Result], threads: int) -> Iterator[_Result]:
    """Read items by several threads, and yield the results in order; as many are kept as there are threads."""
    if threads == 1:
        yield from map(read, items)
        return
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads, "statelog-read") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(read, item))
                if len(waiting) >= threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class _Parts:
    """Parts of a run; none of the rest is looked at."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: list[tuple[int, pa.Buffer]] = []

    def add(self, start: int, data: bytes) -> None:
        """Take a part."""
        self._parts.append((start, pa.py_buffer(data)))

    def slice(self, offset: int, length: int) -> pa.Buffer:
        """Bytes of one part."""
        for start, part in reversed(self._parts):
            if start <= offset and offset + length <= start + part.size:
                return part.slice(offset - start, length)
        raise AssertionError(f"{length} bytes at {offset} were not read")


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _read(store: Readable, stored: SegmentRef | StoredRun, start: int, length: int, what: str) -> bytes:
    try:
        return store.read(stored.name, offset=stored.offset + start, length=length)
    except StorageError as error:
        if error.kind is not ErrorKind.OBJECT_MISSING:
            raise
        raise CorruptionError(
            f"{error.message} It holds {what} at offset {stored.offset}.",
            kind=ErrorKind.OBJECT_MISSING,
            hint="Restore the file from a copy; the state cannot be rebuilt without it.",
        ) from error
