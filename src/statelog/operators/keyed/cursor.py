"""The position of a subtask: its key chunk, the current key in it, and the stored entries of the keys around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.changes import ListPosition
from statelog.runs.byte_slices import BUDGET, Budget, Positions
from statelog.runs.schema import StateDescriptor, TimeDomain
from statelog.runs.times import NO_TIME_MS, Moment, Ttl
from statelog.runs.values import RowCodec
from statelog.tables.table import KeyBatch, StateTable

Row = tuple[Any, ...]

_ENTRIES_PER_LOOKUP: Final = 1024
"""Fetching this many entries of a key takes some 4 times as long as looking up one."""
_NEVER_MS: Final = (1 << 63) - 1


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

    def table_of(self, state: StateDescriptor) -> StateTable:
        """The table that holds a state."""
        own = self.batch_table
        return self.table if own is None or state.name not in self.batch_states else own

    def require(self, subject: str) -> int:
        """The position of the current key; raises ProcessorError if no key is being processed."""
        if self.position < 0:
            raise ProcessorError(
                f"{subject} was used while no key is processed.",
                kind=ErrorKind.STATE_USAGE,
                hint="State can be read and written only inside handleInputRows, handleExpiredTimer and"
                " handleInitialState.",
            )
        return self.position

    def expiry_ms(self, ttl: Ttl, positions: Sequence[int]) -> int | list[int | None] | None:
        """When entries that are written now expire: one time for all, or one for each position; None is never.

        Without any event time yet, as while the initial state is loaded, entries in event time never expire.
        """
        if ttl.domain is TimeDomain.PROCESSING:
            return self.moment.processing_ms + ttl.duration_ms
        watermark_ms, event_ms = self.moment.watermark_ms, self.event_ms
        by_watermark = None if watermark_ms <= 0 else watermark_ms + ttl.duration_ms
        if event_ms is None:
            return by_watermark
        newest = [event_ms[position] for position in positions]
        return [by_watermark if at is None else max(watermark_ms, at) + ttl.duration_ms for at in newest]

    def expiry_column(self, ttl: Ttl, positions: Positions) -> pa.Array:
        """When entries of some keys that are written now expire, int64; null is never. See :meth:`expiry_ms`."""
        if ttl.domain is TimeDomain.PROCESSING:
            return pa.array(np.full(len(positions), self.moment.processing_ms + ttl.duration_ms))
        watermark_ms = self.moment.watermark_ms
        has_watermark = watermark_ms > 0
        by_watermark = watermark_ms + ttl.duration_ms if has_watermark else 0
        if self.event_ms is None:
            return pa.array(np.full(len(positions), by_watermark), mask=np.full(len(positions), not has_watermark))
        newest = np.asarray(self.event_ms, np.int64)[positions]
        has_time = newest != NO_TIME_MS
        times = np.where(has_time, np.maximum(watermark_ms, newest) + ttl.duration_ms, by_watermark)
        return pa.array(times, mask=~(has_time | has_watermark))

    def live_rows(
        self, state: StateDescriptor, expiry: pa.Array, now_ms: int | None = None
    ) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Mask of the rows that have not expired at a time, by default that of the batch; None if none has."""
        if state.expires_by is None or expiry.null_count == len(expiry):
            return None
        times = expiry.fill_null(_NEVER_MS).to_numpy(zero_copy_only=False)
        live: np.ndarray[Any, np.dtype[np.bool_]] = times > (
            self.moment.now_ms(state.expires_by) if now_ms is None else now_ms
        )
        return None if live.all() else live


class EntryWindow:
    """Stored entries of a key chunk, fetched for many keys at once.

    One fetch reads the whole chunk or, if its keys have very many entries, a stretch that begins with the current key.
    Before a key is fetched, single entries are looked up, until the lookups have taken as long as a fetch would. A key
    with very many entries is not fetched for single entries at all.
    """

    def __init__(self, cursor: KeyCursor, state: StateDescriptor, codec: RowCodec) -> None:
        self._cursor = cursor
        self._state = state
        self._codec = codec
        self._counts: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self._most_at_once = cursor.budget.prefetch_entries
        self._fetched = range(0)
        self._starts: list[int] = []
        self._entries: list[bytes] = []
        self._rows: list[Row] = []
        self._current: tuple[int, dict[bytes, Row]] = (-1, {})
        self._looked_up = (-1, 0)

    def of(self, position: int) -> dict[bytes, Row]:
        """All stored entries of a key, by entry key."""
        if self._current[0] != position:
            if position not in self._fetched:
                self._fetch(position)
            index = position - self._fetched.start
            part = slice(self._starts[index], self._starts[index + 1])
            entries = dict(zip(self._entries[part], self._rows[part], strict=True))
            self._current = (position, entries)
        return self._current[1]

    def get(self, position: int, entry: bytes) -> Row | None:
        """One stored entry of a key; None if there is none, or it has expired."""
        if self._current[0] != position and self._should_look_up(position):
            key = self._cursor.keys.slice(position, position + 1)
            found = self._cursor.table_of(self._state).get_many(self._state, key, entry)
            if self._cursor.live_rows(self._state, found.expiry) is not None:
                return None
            rows = self._codec.decode(found.values)
            return rows[0] if rows else None
        return self.of(position).get(entry)

    def _should_look_up(self, position: int) -> bool:
        if position in self._fetched:
            return False
        count = self._count(position)
        if count > self._most_at_once:
            return True
        lookups = self._looked_up[1] + 1 if self._looked_up[0] == position else 1
        self._looked_up = (position, lookups)
        return lookups * _ENTRIES_PER_LOOKUP <= count

    def is_known_empty(self, position: int) -> bool:
        """Whether the key has no stored entry; False also if its entries were not counted yet."""
        return self._counts is not None and self._counts[position] == 0

    def _count(self, position: int) -> int:
        if self._counts is None:
            cursor = self._cursor
            table = cursor.table_of(self._state)
            self._counts = table.count_entries(self._state, cursor.keys)
            mean_bytes = max(1, table.mean_bytes(self._state))
            self._most_at_once = max(1, min(self._most_at_once, cursor.budget.slice_bytes // mean_bytes))
        return int(self._counts[position])

    def _fetch(self, position: int) -> None:
        self._count(position)
        assert self._counts is not None
        start, end = 0, len(self._counts)
        if self._counts.sum() > self._most_at_once:
            total = np.cumsum(self._counts[position:])
            start, end = position, position + max(1, int(np.searchsorted(total, self._most_at_once, "right")))
        found = self._cursor.table_of(self._state).entries(self._state, self._cursor.keys.slice(start, end))
        positions, entries, values = found.positions, found.entries, found.values
        size_bytes = entries.nbytes + values.nbytes
        self._cursor.loaded_bytes += size_bytes
        if end - start == 1 and size_bytes > self._cursor.budget.key_bytes:
            raise ProcessorError(
                f"{self._codec.subject}: the key's {len(entries):,} entries take {size_bytes:,} bytes; at most"
                f" {self._cursor.budget.key_bytes:,} can be read as a whole.",
                kind=ErrorKind.TOO_LARGE,
                hint="Read single entries of a map (getValue, containsKey), spread the entries over several keys, or"
                " clear() the state.",
            )
        live = self._cursor.live_rows(self._state, found.expiry)
        if live is not None:
            kept = pa.array(live)
            positions, entries, values = positions[live], entries.filter(kept), values.filter(kept)
        self._fetched = range(start, end)
        self._starts = np.searchsorted(positions, np.arange(end - start + 1)).tolist()
        self._entries = entries.to_pylist()
        self._rows = self._codec.decode(values)
