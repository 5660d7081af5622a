"""Reads the stored entries of a key chunk in order of their times, for states whose map keys begin with a time.

Keys with few entries are read together, in the order in which they are visited. Entries of other keys are read in
pages, from the first time that is asked for.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.operators.keyed.cursor import KeyCursor
from statelog.runs.byte_slices import Budget, Positions
from statelog.runs.schema import StateDescriptor
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
        """The time of each entry; ascending, but for the entries of several keys only within each."""


_L = TypeVar("_L", bound=Loaded)
Part = tuple[_L, int, int]
"""Successive entries: those from the second up to, not including, the third."""

_UNKNOWN: Final[Any] = object()


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


class TimeReader(Generic[_L]):
    """The stored entries of the current key and of those visited next; `decode` makes the form that it gives them in.

    It is made anew for each key chunk.
    """

    def __init__(self, cursor: KeyCursor, state: StateDescriptor, decode: Callable[[EntryRows], _L]) -> None:
        self._cursor = cursor
        self._state = state
        self._decode = decode
        self._counts: EntryCounts | None = None
        self._has_few: npt.NDArray[np.bool_] = np.zeros(0, bool)
        self._visited = 0
        self._places: dict[int, Part[_L] | None] = {}
        self._large: LargeKey[_L] | None = None
        self._large_position = -1

    def few(self) -> Part[_L] | None:
        """The current key's entries, if they are few; an empty part may be one of anything."""
        # This runs for every access, so the common case is written out.
        position = self._cursor.position
        part = self._places.get(position, _UNKNOWN)
        return self._found(position) if part is _UNKNOWN else part

    def parts(self, first_ms: int, end_ms: int) -> Iterable[Part[_L]]:
        """The current key's entries from one time up to, not including, another, in order."""
        few = self.few()
        if few is None:
            return self._large_key().parts(first_ms, end_ms)
        loaded, first, end = few
        first = bisect_left(loaded.times, first_ms, first, end)
        end = bisect_left(loaded.times, end_ms, first, end)
        return ((loaded, first, end),) if first < end else ()

    def last_until(self, time_ms: int) -> tuple[_L, int] | None:
        """The current key's last entry up to a time, itself included: where it is; None if there is none."""
        few = self.few()
        if few is None:
            return self._large_key().last_until(time_ms)
        loaded, first, end = few
        index = bisect_right(loaded.times, time_ms, first, end) - 1
        return (loaded, index) if index >= first else None

    def is_known_empty(self, position: int) -> bool:
        """Whether a key has no stored entry; False also if its entries were not counted yet."""
        return self._counts is not None and not self._counts.entries[position]

    def _found(self, position: int) -> Part[_L] | None:
        """Find the current key's entries, if they are few; else note that they are not."""
        self._cursor.require(self._state.name)
        counts, budget = self._counts, self._cursor.budget
        if counts is None:
            counts = self._counts = self._cursor.table_of(self._state).count_entries(self._state, self._cursor.keys)
            self._has_few = have_few(counts, budget)
        if self._has_few[position]:
            self._load(counts)
        else:
            self._places[position] = None
        return self._places[position]

    def _load(self, counts: EntryCounts) -> None:
        """Load the entries of the current key, and of the keys with few entries that are visited next."""
        budget = self._cursor.budget
        next_ones = self._upcoming()
        next_ones = next_ones[self._has_few[next_ones]]
        fitting = min(
            int(np.searchsorted(np.cumsum(each[next_ones]), most, "right"))
            for each, most in (
                (counts.entries, budget.prefetch_entries),
                (counts.size_bytes, budget.slice_bytes // _PARTS_OF_SLICE),
            )
        )
        picked = np.sort(next_ones[: max(1, fitting)])
        keys = self._cursor.keys.take(picked if counts.entries[picked].any() else picked[:0])
        found = self._cursor.table_of(self._state).entries(self._state, keys)
        self._cursor.loaded_bytes += found.entries.nbytes + found.values.nbytes
        starts = np.searchsorted(found.positions, np.arange(len(picked) + 1)).tolist()
        loaded = self._decode(found)
        parts = [(loaded, start, end) for start, end in pairwise(starts)]
        self._places = dict(zip(picked.tolist(), parts, strict=True))

    def _upcoming(self) -> Positions:
        """The positions that are visited from now on, each once; the current one is the first."""
        position, visits = self._cursor.position, self._cursor.visits
        if visits is None:
            return np.arange(position, len(self._cursor.keys))
        found = np.flatnonzero(visits[self._visited :] == position)
        if not len(found):
            return np.array([position])
        self._visited += int(found[0])
        _, firsts = np.unique(visits[self._visited :], return_index=True)
        upcoming: Positions = visits[self._visited :][np.sort(firsts)]
        return upcoming

    def _large_key(self) -> LargeKey[_L]:
        position, keys = self._cursor.position, self._cursor.keys
        if self._large is None or self._large_position != position:
            table, key = self._cursor.table_of(self._state), keys.keys[position].as_py()
            entries = table.entries_of(self._state, int(keys.hashes[position]), key)
            self._large = LargeKey(entries, self._decode, self._cursor.budget)
            self._large_position = position
        return self._large


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
