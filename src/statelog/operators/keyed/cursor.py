"""The position of a subtask: its key chunk, the current key in it, and the stored entries of the keys around it."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.changes import ListPosition
from statelog.runs.byte_slices import BUDGET, Budget, Positions
from statelog.runs.schema import StateDescriptor, TimeDomain
from statelog.runs.times import LAST_MS, NO_TIME_MS, Moment, Ttl, expiries_ms, expiry_ms
from statelog.runs.values import RowCodec
from statelog.tables.table import EntryCounts, EntryRange, EntryRows, KeyBatch, KeyEntries, StateTable

Row = tuple[Any, ...]
ENTRIES_PER_LOOKUP: Final = 256
"""Fetching this many entries of a key takes some 4 times as long as looking up one."""
_PAGES_OF_SLICE: Final = 4
"""A page has this part of the bytes that are worked on at once: its rows are Python objects."""
_FEW_ENTRIES: Final = 256
"""Mostly enough to see whether there is any."""


@dataclass
class KeyCursor:
    """The key chunk and the key that all state handles of a subtask work on."""

    table: StateTable
    """The state before the current phase."""
    list_position: ListPosition
    """The place of list elements that are appended now."""
    keys: KeyBatch
    """The keys of the chunk."""
    moment: Moment
    event_ms: Sequence[int | None] | npt.NDArray[np.int64] | None = None
    """Newest event time of each key's rows or timers; None for a key without one, in an array ``NO_TIME_MS``.

    None if no TTL needs it.
    """
    position: int = -1
    """The current key; -1 while none is processed."""
    budget: Budget = BUDGET
    loaded_bytes: int = 0
    """Bytes fetched for the chunk so far."""
    batch_table: StateTable | None = None
    """The values of states that live for one batch only."""
    batch_states: frozenset[str] = frozenset()
    """The stored names of these states."""
    counts: Mapping[str, EntryCounts] = field(default_factory=dict)
    """What the entries of the chunk's keys take, by the stored names of the states, as far as it is known."""

    def table_of(self, state: StateDescriptor) -> StateTable:
        """The table that holds a state."""
        own = self.batch_table
        return self.table if own is None or state.name not in self.batch_states else own

    def count_entries(self, state: StateDescriptor) -> EntryCounts:
        """How many entries each key of the chunk may have, and how large they may be."""
        known = self.counts.get(state.name)
        return self.table_of(state).count_entries(state, self.keys) if known is None else known

    def require(self, subject: str) -> int:
        """The position of the current key; raises ProcessorError if no key is being processed."""
        if self.position < 0:
            raise ProcessorError(
                f"{subject} was used while no key was processed.",
                kind=ErrorKind.STATE_USAGE,
                hint="Read and write state only inside handleInputRows, handleExpiredTimer and handleInitialState.",
            )
        return self.position

    def expiry_ms(self, ttl: Ttl, positions: Sequence[int]) -> int | list[int | None] | None:
        """When entries that are written now expire: one time for all, or one for each position; None is never.

        Without any event time yet, as while the initial state is loaded, entries in event time never expire.
        """
        if ttl.domain is TimeDomain.PROCESSING:
            return expiry_ms(ttl, self.moment.processing_ms)
        watermark_ms, event_ms = self.moment.watermark_ms, self.event_ms
        by_watermark = None if watermark_ms <= 0 else expiry_ms(ttl, watermark_ms)
        if event_ms is None:
            return by_watermark
        duration_ms, newest = ttl.duration_ms, [event_ms[position] for position in positions]
        return [by_watermark if at is None else min(max(watermark_ms, at) + duration_ms, LAST_MS) for at in newest]

    def expiry_column(self, ttl: Ttl, positions: Positions) -> pa.Array:
        """When entries of some keys that are written now expire, int64; null is never. See :meth:`expiry_ms`."""
        if ttl.domain is TimeDomain.PROCESSING:
            return pa.array(np.full(len(positions), expiry_ms(ttl, self.moment.processing_ms)))
        watermark_ms = self.moment.watermark_ms
        has_watermark = watermark_ms > 0
        by_watermark = expiry_ms(ttl, watermark_ms) if has_watermark else 0
        if self.event_ms is None:
            return pa.array(np.full(len(positions), by_watermark), mask=np.full(len(positions), not has_watermark))
        newest = np.asarray(self.event_ms, np.int64)[positions]
        has_time = newest != NO_TIME_MS
        times = np.where(has_time, expiries_ms(ttl, np.maximum(watermark_ms, newest)), by_watermark)
        return pa.array(times, mask=~(has_time | has_watermark))

    def is_live(self, state: StateDescriptor, expiry_ms: int | None) -> bool:
        """Whether a value has not expired."""
        return expiry_ms is None or state.expires_by is None or expiry_ms > self.moment.now_ms(state.expires_by)

    def live_rows(
        self, state: StateDescriptor, expiry: pa.Array, now_ms: int | None = None
    ) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Mask of the rows that have not expired at a time, by default that of the batch; None if none has."""
        if state.expires_by is None or expiry.null_count == len(expiry):
            return None
        times = expiry.fill_null(LAST_MS).to_numpy(zero_copy_only=False)
        live: np.ndarray[Any, np.dtype[np.bool_]] = times > (
            self.moment.now_ms(state.expires_by) if now_ms is None else now_ms
        )
        return None if live.all() else live


class EntryWindow:
    """Stored entries of a key chunk, fetched for many keys at once.

    One fetch reads the whole chunk or, if its keys have very many entries, a stretch that begins with the current key.
    Before a key is fetched, single entries are looked up, until the lookups have taken as long as a fetch would. A key
    whose entries are too many or too large for one fetch is *large*: its entries are looked up, or read in pages.
    """

    def __init__(self, cursor: KeyCursor, state: StateDescriptor, codec: RowCodec) -> None:
        self._cursor = cursor
        self._state = state
        self._codec = codec
        self._counts: EntryCounts | None = None
        self._large: frozenset[int] = frozenset()
        self._fetched = range(0)
        self._starts: list[int] = []
        self._entries: list[bytes] = []
        self._rows: list[Row] = []
        self._current: tuple[int, dict[bytes, Row]] = (-1, {})
        self._looked_up = (-1, 0)
        self._single: tuple[int, KeyEntries | None] = (-1, None)

    def of(self, position: int) -> dict[bytes, Row]:
        """All stored entries of a key that is not large, by entry key."""
        if self._current[0] != position:
            if position not in self._fetched:
                self._fetch(position)
            index = position - self._fetched.start
            part = slice(self._starts[index], self._starts[index + 1])
            entries = dict(zip(self._entries[part], self._rows[part], strict=True))
            self._current = (position, entries)
        return self._current[1]

    def pages(self, position: int, max_entries: int | None = None) -> Iterator[list[tuple[bytes, Row]]]:
        """All stored entries of a key in order, in pages that are read when they are asked for.

        They are those of this phase, also while later keys are processed.
        """
        budget = self._cursor.budget
        limit = budget.prefetch_entries if max_entries is None else min(max_entries, budget.prefetch_entries)
        pages = self._entries_of(position).pages(limit, budget.slice_bytes // _PAGES_OF_SLICE)
        return map(self._decoded, pages)

    def between(self, position: int, first: bytes, end: bytes) -> Iterator[list[tuple[bytes, Row]]]:
        """The stored entries of a key from one entry key up to, not including, another, in order, in pages.

        If the key has many, no others are read.
        """
        if position in self._fetched or self._counted().entries[position] <= ENTRIES_PER_LOOKUP:
            return iter([self._fetched_between(position, first, end)])
        return self._pages_between(self._entries_of(position), EntryRange(first, end))

    def _fetched_between(self, position: int, first: bytes, end: bytes) -> list[tuple[bytes, Row]]:
        if position not in self._fetched:
            self._fetch(position)
        index = position - self._fetched.start
        part = self._starts[index], self._starts[index + 1]
        at = slice(bisect_left(self._entries, first, *part), bisect_left(self._entries, end, *part))
        return list(zip(self._entries[at], map(self._codec.copied, self._rows[at]), strict=True))

    def _pages_between(self, entries: KeyEntries, wanted: EntryRange | None) -> Iterator[list[tuple[bytes, Row]]]:
        budget = self._cursor.budget
        while wanted is not None:
            page = entries.between(wanted, budget.prefetch_entries, budget.slice_bytes // _PAGES_OF_SLICE)
            yield self._decoded(page.rows)
            wanted = page.rest

    def has_entries(self, position: int, but: Container[bytes] = ()) -> bool:
        """Whether a large key has a stored entry, other than some."""
        few = itertools.islice(self.pages(position, _FEW_ENTRIES), 1)
        return any(entry not in but for page in few for entry, _ in page) or any(
            entry not in but for page in self.pages(position) for entry, _ in page
        )

    def _decoded(self, page: EntryRows) -> list[tuple[bytes, Row]]:
        entries, values = page.entries, page.values
        live = self._cursor.live_rows(self._state, page.expiry)
        if live is not None:
            kept = pa.array(live)
            entries, values = entries.filter(kept), values.filter(kept)
        return list(zip(entries.to_pylist(), self._codec.decode(values), strict=True))

    def get(self, position: int, entry: bytes) -> Row | None:
        """One stored entry of a key; None if there is none, or it has expired."""
        if self._current[0] != position and self._should_look_up(position):
            found = self._entries_of(position).find(entry)
            if found is None or not self._cursor.is_live(self._state, found.expiry_ms):
                return None
            return self._codec.decode(found.values)[0]
        return self.of(position).get(entry)

    def _should_look_up(self, position: int) -> bool:
        if position in self._fetched:
            return False
        if self.is_large(position):
            return True
        lookups = self._looked_up[1] + 1 if self._looked_up[0] == position else 1
        self._looked_up = (position, lookups)
        return bool(lookups * ENTRIES_PER_LOOKUP <= self._counted().entries[position])

    def is_large(self, position: int) -> bool:
        """Whether the entries of a key are too many or too large to be fetched as a whole."""
        if self._counts is None:
            self._counted()
        return position in self._large

    def is_known_empty(self, position: int) -> bool:
        """Whether the key has no stored entry; False also if its entries were not counted yet."""
        return self._counts is not None and self._counts.entries[position] == 0

    def _entries_of(self, position: int) -> KeyEntries:
        held, entries = self._single
        if held != position or entries is None:
            keys = self._cursor.keys
            key_hash, key = int(keys.hashes[position]), keys.keys[position].as_py()
            entries = self._cursor.table_of(self._state).entries_of(self._state, key_hash, key)
            self._single = (position, entries)
        return entries

    def _counted(self) -> EntryCounts:
        if self._counts is None:
            cursor, budget = self._cursor, self._cursor.budget
            counts = self._counts = cursor.table_of(self._state).count_entries(self._state, cursor.keys)
            is_large = (counts.entries > budget.prefetch_entries) | (counts.size_bytes > budget.slice_bytes)
            self._large = frozenset(np.flatnonzero(is_large).tolist())
        return self._counts

    def _fetch(self, position: int) -> None:
        start, end = self._stretch(position)
        found = self._cursor.table_of(self._state).entries(self._state, self._cursor.keys.slice(start, end))
        positions, entries, values = found.positions, found.entries, found.values
        self._cursor.loaded_bytes += entries.nbytes + values.nbytes
        live = self._cursor.live_rows(self._state, found.expiry)
        if live is not None:
            kept = pa.array(live)
            positions, entries, values = positions[live], entries.filter(kept), values.filter(kept)
        self._fetched = range(start, end)
        self._starts = np.searchsorted(positions, np.arange(end - start + 1)).tolist()
        self._entries = entries.to_pylist()
        self._rows = self._codec.decode(values)

    def _stretch(self, position: int) -> tuple[int, int]:
        """The keys that are fetched together with one: all, or as many from it on as fit into one fetch."""
        counts, budget = self._counted(), self._cursor.budget
        if counts.entries.sum() <= budget.prefetch_entries and counts.size_bytes.sum() <= budget.slice_bytes:
            return 0, len(counts.entries)
        fitting = min(
            int(np.searchsorted(np.cumsum(each[position:]), most, "right"))
            for each, most in ((counts.entries, budget.prefetch_entries), (counts.size_bytes, budget.slice_bytes))
        )
        return position, position + max(1, fitting)
