"""Entry keys that begin with a time, and pages of the entries of one key in their order."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.runs.byte_slices import Budget, Positions
from statelog.tables.table import EntryCounts, EntryPage, EntryRange, EntryRows, KeyEntries

FIRST_MS: Final = -(1 << 63)
"""No entry is earlier, and none is at `AFTER_MS` or later."""
AFTER_MS: Final = 1 << 63

_SIGN: Final = 1 << 63
_BEFORE_ALL: Final = b"\x01"
_AFTER_ALL: Final = b"\x02"
_TIME: Final = struct.Struct(">BQ")
_TIME_BYTES: Final = 9
"""A time in an entry key: the byte that says that it is not null, and the number."""
_FEW_OF_FETCH: Final = 50
"""A key has few entries if they are at most this part of those that are fetched at once: 2,000 by default. To read them
with those of other keys takes about as long as to read a page of one key."""
_PAGES_OF_FETCH: Final = 5
_PARTS_OF_SLICE: Final = 4
_FIRST_PAGE: Final = 64
_GROWTH: Final = 4


class Loaded(Protocol):
    """Entries in the form in which a state holds them."""

    @property
    def times(self) -> list[int]:
        """The time of each entry; ascending; for the entries of several keys, only within each key."""


_L = TypeVar("_L", bound=Loaded)
Part = tuple[_L, int, int]
"""Successive entries: those from the second up to, not including, the third."""


def time_entry(time_ms: int) -> bytes:
    """The bytes with which the entry keys of a time begin; entry keys of other times sort before or after them."""
    if FIRST_MS <= time_ms < AFTER_MS:
        return _TIME.pack(1, time_ms + _SIGN)
    return _BEFORE_ALL if time_ms < FIRST_MS else _AFTER_ALL


def entry_numbers(entries: pa.ChunkedArray, fields: int) -> list[Positions]:
    """The fields of entry keys that consist of so many whole numbers, a column per field."""
    width = fields * _TIME_BYTES
    parts: list[bytes] = []
    for chunk in entries.chunks:
        if len(chunk):
            _, offsets, data = chunk.buffers()
            start = int(np.frombuffer(offsets, np.int32, 1, chunk.offset * 4)[0])
            parts.append(memoryview(data)[start : start + width * len(chunk)].tobytes())
    matrix = np.frombuffer(b"".join(parts), np.uint8).reshape(-1, width)
    columns = [matrix[:, at + 1 : at + _TIME_BYTES].copy().view(">u8") for at in range(0, width, _TIME_BYTES)]
    return [(column.ravel().astype(np.uint64) ^ np.uint64(_SIGN)).view(np.int64) for column in columns]


def entry_keys(numbers: list[Positions]) -> pa.Array:
    """Entry keys of whole numbers, given as a column per field: the reverse of :func:`entry_numbers`."""
    count, width = len(numbers[0]), len(numbers) * _TIME_BYTES
    matrix = np.ones((count, width), np.uint8)
    for at, column in zip(range(0, width, _TIME_BYTES), numbers, strict=True):
        flipped = (column.view(np.uint64) ^ np.uint64(_SIGN)).astype(">u8")
        matrix[:, at + 1 : at + _TIME_BYTES] = flipped.view(np.uint8).reshape(count, _TIME_BYTES - 1)
    offsets = np.arange(0, width * count + 1, width, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(matrix)])


def have_few(counts: EntryCounts, budget: Budget) -> npt.NDArray[np.bool_]:
    """Which keys have so few entries that they are read together with those of other keys."""
    most, max_bytes = budget.prefetch_entries // _FEW_OF_FETCH, budget.slice_bytes // _PARTS_OF_SLICE
    return (counts.entries <= most) & (counts.size_bytes <= max_bytes)


@dataclass(frozen=True)
class _Page(Generic[_L]):
    """All entries of a key from `first` up to, not including, `end`."""

    first: bytes
    end: bytes
    loaded: _L
    size_bytes: int

    def between(self, first_ms: int, end_ms: int) -> Part[_L]:
        times = self.loaded.times
        first = bisect_left(times, first_ms)
        return self.loaded, first, bisect_left(times, end_ms, first)


class LargeKey(Generic[_L]):
    """The entries of one key, of which successive pages are held, up to a number of bytes."""

    def __init__(self, entries: KeyEntries, decode: Callable[[EntryRows], _L], budget: Budget) -> None:
        self._entries = entries
        self._decode = decode
        self._max_bytes = budget.slice_bytes
        self._largest = max(1, budget.prefetch_entries // _PAGES_OF_FETCH)
        self._first = self._most = min(_FIRST_PAGE, self._largest)
        self._pages: list[_Page[_L]] = []

    def parts(self, first_ms: int, end_ms: int) -> Iterator[Part[_L]]:
        at, end = time_entry(first_ms), time_entry(end_ms)
        self._pages = [page for page in self._pages if page.end > at and page.loaded.times]
        held = self._pages if self._pages and self._pages[0].first <= at else []
        for page in held:
            yield page.between(first_ms, end_ms)
            at = page.end
            if at >= end:
                return
        # The first page may reach beyond the range, as later reads are likely to go on there. The others do not: there
        # may be long stretches of removed entries before the end, and pages grow.
        bound = _AFTER_ALL
        while at < end:
            page = self._next_page(at, bound)
            yield page.between(first_ms, end_ms)
            at, bound = page.end, end

    def _next_page(self, at: bytes, bound: bytes) -> _Page[_L]:
        """Read the page that begins at an entry key, up to a bound; pages that follow each other grow."""
        follows = bool(self._pages) and self._pages[-1].end == at
        self._most = min(self._most * _GROWTH, self._largest) if follows else self._first
        found = self._read(EntryRange(at, bound), self._most)
        page = self._page(at, bound if found.rest is None else found.rest.first, found.rows)
        self._pages = [*self._pages, page] if follows else [page]
        while len(self._pages) > 1 and sum([held.size_bytes for held in self._pages]) > self._max_bytes:
            self._pages = self._pages[1:]
        return page

    def _read(self, wanted: EntryRange, most: int) -> EntryPage:
        return self._entries.between(wanted, most, self._max_bytes // _PARTS_OF_SLICE)

    def _page(self, first: bytes, end: bytes, rows: EntryRows) -> _Page[_L]:
        return _Page(first, end, self._decode(rows), rows.entries.nbytes + rows.values.nbytes)

    def last_until(self, time_ms: int) -> tuple[_L, int] | None:
        after = time_entry(time_ms + 1)
        for page in self._pages:
            if page.first < after <= page.end:
                _, _, end = page.between(FIRST_MS, time_ms + 1)
                if end:
                    return page.loaded, end - 1
                after = page.first
                break
        most = self._first
        wanted: EntryRange | None = EntryRange(_BEFORE_ALL, after, from_end=True)
        while wanted is not None:
            found = self._read(wanted, most)
            if len(found.rows.positions):
                first = _BEFORE_ALL if found.rest is None else found.rest.end
                self._pages = [self._page(first, after, found.rows)]
                return self._pages[0].loaded, len(found.rows.positions) - 1
            wanted, most = found.rest, min(most * _GROWTH, self._largest)
        return None
