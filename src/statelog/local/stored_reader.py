"""Reads stored runs, several at a time: whole, or only the blocks that hold some key hashes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import pyarrow as pa

from statelog.errors import CorruptionError, ErrorKind, StorageError
from statelog.history.restore_plan import SHARED_BYTES
from statelog.log.references import SegmentRef, StoredRun
from statelog.runs import digests
from statelog.runs.key_groups import HashRange
from statelog.runs.reader import Run
from statelog.runs.schema import MAGIC, TAIL
from statelog.storage import Store

TAIL_BYTES: Final = 64 << 10
"""The bytes that are read at once from the end of a large run: its footer, unless that is larger."""
_RESTORE_HINT: Final = "Restore the file from a copy; the state cannot be rebuilt without it."
_READ_THREADS: Final = 4
"""Concurrent reads from an object store. One is enough for a directory, which answers at once."""
_SMALL_READ_THREADS: Final = 32
_SMALL_BYTES: Final = 32 << 20
"""Small objects that are read concurrently, and the most bytes of them."""
_GAP_BYTES: Final = 64 << 10
"""Blocks that are no farther apart than this are read together, with the bytes between them."""


class RunMemory:
    """Memory that one run after another uses: getting new memory can take longer than reading a cached file."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of(self, length: int, require_there: Callable[[], None] = lambda: None) -> memoryview:
        """`length` bytes; those of the previous call are no longer valid.

        `require_there` is called before more memory is taken, and raises unless there are that many bytes to read.
        """
        if len(self._memory) < length:
            require_there()
            self._memory = np.empty(length, np.uint8)
        return self._memory[:length].data


class StoredBytes:
    """The bytes of a stored run, read as they are needed: of a small run all at once, of a large one first the end.

    A small run is checked as a whole; the blocks and the footer of a large one have their own checksums. A run of more
    than `small_bytes`, which is at least 64 KiB, is large. Raises the errors of :func:`read_stored`.
    """

    def __init__(
        self, store: Store, stored: SegmentRef | StoredRun, what: str, small_bytes: int = SHARED_BYTES
    ) -> None:
        self.size = stored.length
        self._store = store
        self._stored = stored
        self._what = what
        self._tail_at = 0 if stored.length <= small_bytes else stored.length - TAIL_BYTES
        self._tail = pa.py_buffer(read_stored(store, stored, what)) if not self._tail_at else self._read(self._tail_at)

    def slice(self, offset: int = 0, length: int | None = None) -> pa.Buffer:
        end = self.size if length is None else offset + length
        if offset >= self._tail_at:
            return self._tail.slice(offset - self._tail_at, end - offset)
        return self._read(offset, end)

    def _read(self, start: int, end: int | None = None) -> pa.Buffer:
        stored, wanted = self._stored, (self.size if end is None else end) - start
        with _named(stored, self._what):
            data = self._store.read(stored.name, offset=stored.offset + start, length=wanted)
        if len(data) != wanted:
            raise _damaged(stored, self._what)
        return pa.py_buffer(data)


def read_stored(store: Store, stored: SegmentRef | StoredRun, what: str) -> bytes:
    """Read a stored run or snapshot as a whole; messages refer to it as `what`.

    Raises CorruptionError with object and offset if it is damaged, missing or shorter than recorded, StorageError if it
    cannot be read.
    """
    with _named(stored, what):
        data = store.read(stored.name, offset=stored.offset, length=stored.length)
    if digests.checksum(data) != stored.checksum:
        raise _damaged(stored, what)
    return data


def read_run(
    store: Store,
    stored: SegmentRef | StoredRun,
    what: str,
    within: HashRange | None = None,
    memory: RunMemory | None = None,
    states: Collection[str] | None = None,
) -> Run:
    """Read a stored run; messages refer to it as `what`. Raises the errors of :func:`read_stored`.

    Of a large run, only the blocks with the hashes `within` are read, and only those of `states`, if they are given.
    They are checked by their own checksums; the other blocks must not be used. A large run uses `memory`, or memory of
    its own.
    """
    if stored.length <= SHARED_BYTES:
        run = Run(pa.py_buffer(read_stored(store, stored, what)), stored.name, stored.offset, is_stored=True)
        return run.of_states(states)

    def require_there() -> None:
        with _named(stored, what):
            size_bytes = store.size_bytes(stored.name)
        if size_bytes < stored.offset + stored.length:
            raise _damaged(stored, what)

    held = (memory or RunMemory()).of(stored.length, require_there)

    def fill(start: int, end: int) -> None:
        with _named(stored, what):
            length = store.read_into(held[start:end], stored.name, offset=stored.offset + start)
        if length != end - start:
            raise _damaged(stored, what)

    if within is None and states is None:
        fill(0, stored.length)
        if digests.checksum(held) != stored.checksum:
            raise _damaged(stored, what)
        return Run(pa.py_buffer(held), stored.name, stored.offset, is_stored=True)
    tail_at = stored.length - TAIL_BYTES
    fill(0, len(MAGIC))
    fill(tail_at, stored.length)
    footer_bytes = TAIL.unpack(held[-TAIL.size :])[0] + TAIL.size
    if TAIL_BYTES < footer_bytes <= stored.length:
        tail_at = stored.length - footer_bytes
        fill(tail_at, stored.length - TAIL_BYTES)
    run = Run(pa.py_buffer(held), stored.name, stored.offset, is_stored=True).of_states(states)
    for start, end in _joined(run.byte_ranges(within)):
        if start < tail_at:
            fill(start, min(end, tail_at))
    return run


def read_threads(store: Store, largest_bytes: int | None = None) -> int:
    """How many concurrent reads from a store are worthwhile; no read has more than `largest_bytes`, if known."""
    if store.can_append:
        return 1
    if largest_bytes is None:
        return _READ_THREADS
    return max(_READ_THREADS, min(_SMALL_READ_THREADS, _SMALL_BYTES // max(largest_bytes, 1)))


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


@contextmanager
def _named(stored: SegmentRef | StoredRun, what: str) -> Iterator[None]:
    """Report a missing object as damage, and name its content."""
    try:
        yield
    except StorageError as error:
        if error.kind is not ErrorKind.OBJECT_MISSING:
            raise
        raise CorruptionError(
            f"{error.message} It holds {what} at offset {stored.offset}.",
            kind=ErrorKind.OBJECT_MISSING,
            hint=_RESTORE_HINT,
        ) from error


def _damaged(stored: SegmentRef | StoredRun, what: str) -> CorruptionError:
    return CorruptionError(
        f"{stored.name}: {what} at offset {stored.offset}, {stored.length} bytes, is damaged or truncated.",
        hint=_RESTORE_HINT,
    )
