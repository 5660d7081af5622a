"""A map state by time: rows in order, read between two times. Windows keep their accumulators in it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from statelog.operators.keyed.changes import ChangeBuffer
from statelog.operators.keyed.time_reader import AFTER_MS, FIRST_MS, Part, TimeReader, entry_numbers, time_entry
from statelog.operators.keyed.values import MISSING, KeyedState, Row
from statelog.runs.format import Operation
from statelog.tables.table import EntryRows

_PUT, _DELETE, _CLEAR = int(Operation.PUT), int(Operation.DELETE), int(Operation.CLEAR)
_NO_WRITES: Final[dict[int, Row | None]] = {}


@dataclass(frozen=True)
class _Rows:
    times: list[int]
    rows: list[Row]


class Timeline(KeyedState):
    """Tuples by time, of each key. A time is a whole number of milliseconds; the state has no TTL."""

    def open(self) -> None:
        self._stored = TimeReader(self._cursor, self._state, self._decoded)
        self._writes: dict[int, dict[int, Row | None]] = {}
        self._orders: dict[int, list[int]] = {}  # the times of the writes, as far as they were needed
        self._cleared: set[int] = set()
        self._is_mutable = self._codec.is_mutable

    def _decoded(self, found: EntryRows) -> _Rows:
        (times,) = entry_numbers(found.entries, 1)
        return _Rows(times.tolist(), self._codec.decode(found.values))

    def get(self, time_ms: int) -> Row | None:
        """The row of a time; None if there is none."""
        position = self._cursor.position
        row: Row | None = MISSING
        if position in self._writes:
            row = self._writes[position].get(time_ms, MISSING)
        if row is MISSING:
            row = None if position in self._cleared else self._stored_at(time_ms)
        return self._codec.copied(row) if self._is_mutable and row is not None else row

    def _stored_at(self, time_ms: int) -> Row | None:
        few = self._stored.few()
        parts = self._stored.parts(time_ms, time_ms + 1) if few is None else (few,)
        for loaded, first, end in parts:
            if first < end:
                index = bisect_left(loaded.times, time_ms, first, end)
                if index < end and loaded.times[index] == time_ms:
                    return loaded.rows[index]
        return None

    def put(self, time_ms: int, row: Row) -> None:
        """Set the row of a time."""
        self._write(time_ms, self._codec.normalize(row))

    def remove(self, time_ms: int) -> None:
        """Remove the row of a time, if there is one."""
        self._write(time_ms, None)

    def _write(self, time_ms: int, row: Row | None) -> None:
        position = self._cursor.position
        writes = self._writes.get(position)
        if writes is None:
            writes = self._writes[self._require()] = {}
        writes[time_ms] = row

    def clear(self) -> None:
        """Remove all rows."""
        position = self._require()
        self._writes.pop(position, None)
        self._orders.pop(position, None)
        self._cleared.add(position)

    def between(self, first_ms: int = FIRST_MS, end_ms: int = AFTER_MS) -> Iterator[tuple[int, Row]]:
        """Times and rows in order, from one time up to, not including, another.

        They are read while they are asked for; what changes meanwhile may show or not.
        """
        position = self._cursor.position
        writes = self._writes.get(position)
        if position in self._cleared:
            stored: Iterator[tuple[int, Row]] = iter(())
        else:
            few = self._stored.few()
            if few is None:
                stored = chain.from_iterable(map(self._rows_of, self._stored.parts(first_ms, end_ms)))
            else:
                loaded, first, end = few
                first = bisect_left(loaded.times, first_ms, first, end)
                stored = self._rows_of((loaded, first, bisect_left(loaded.times, end_ms, first, end)))
        if writes is None:
            return stored
        order = self._order_of(position, writes)
        changed = order[bisect_left(order, first_ms) : bisect_left(order, end_ms)]
        return self._overlaid(stored, changed, writes) if changed else stored

    def _order_of(self, position: int, writes: dict[int, Row | None]) -> list[int]:
        """The times of a key's writes in order; most writes are in that order already."""
        order = self._orders.setdefault(position, [])
        for time_ms in reversed(list(islice(reversed(writes), len(writes) - len(order)))):
            insort(order, time_ms)
        return order

    def split(self, time_ms: int) -> tuple[list[int], int | None]:
        """The times before a time, and the first one from it on; None if there is none."""
        position = self._cursor.position
        few = None
        if position not in self._writes and position not in self._cleared:
            few = self._stored.few()
        if few is None:
            before = [start_ms for start_ms, _ in self.between(end_ms=time_ms)]
            return before, next((start_ms for start_ms, _ in self.between(time_ms)), None)
        loaded, first, end = few
        place = bisect_left(loaded.times, time_ms, first, end)
        return loaded.times[first:place], loaded.times[place] if place < end else None

    def from_last_until(self, time_ms: int, end_ms: int) -> Iterator[tuple[int, Row]]:
        """Times and rows as :meth:`between`, from the last time up to `time_ms`, itself included.

        That last one is left out if it was set or removed since the key chunk began.
        """
        position = self._cursor.position
        writes = self._writes.get(position)
        is_cleared = position in self._cleared
        few = None if writes or is_cleared else self._stored.few()
        if few is not None:
            loaded, first, end = few
            first = max(bisect_right(loaded.times, time_ms, first, end) - 1, first)
            return self._rows_of((loaded, first, bisect_left(loaded.times, end_ms, first, end)))
        behind = self.between(time_ms + 1, end_ms)
        found = None if is_cleared else self._stored.last_until(time_ms)
        if found is None:
            return behind
        loaded, index = found
        is_changed = writes is not None and loaded.times[index] in writes
        return behind if is_changed else chain(self._rows_of((loaded, index, index + 1)), behind)

    def _rows_of(self, part: Part[_Rows]) -> Iterator[tuple[int, Row]]:
        loaded, first, end = part
        rows = loaded.rows[first:end]
        return zip(loaded.times[first:end], map(self._codec.copied, rows) if self._is_mutable else rows, strict=True)

    def _overlaid(
        self, stored: Iterator[tuple[int, Row]], changed: Sequence[int], writes: Mapping[int, Row | None]
    ) -> Iterator[tuple[int, Row]]:
        """The stored rows with the written ones at the times `changed`, which ascend."""
        at = 0
        for time_ms, row in chain(stored, ((AFTER_MS, ()),)):
            while at < len(changed) and changed[at] < time_ms:
                written = writes.get(changed[at])
                if written is not None:
                    yield changed[at], self._codec.copied(written)
                at += 1
            if time_ms < AFTER_MS and (at == len(changed) or changed[at] != time_ms):
                yield time_ms, row

    def flush(self, changes: ChangeBuffer) -> None:
        positions: list[int] = []
        entries: list[bytes] = []
        values: list[Row | None] = []
        operations: list[int] = []
        for position in sorted(self._cleared.union(self._writes)) if self._cleared else sorted(self._writes):
            is_empty: bool | None = None
            if position in self._cleared:
                is_empty = True
                if not self._stored.is_known_empty(position):
                    positions.append(position)
                    entries.append(b"")
                    values.append(None)
                    operations.append(_CLEAR)
            writes = self._writes.get(position, _NO_WRITES)
            for time_ms, row in sorted(writes.items()) if len(writes) > 1 else writes.items():
                if row is None:
                    if is_empty is None:
                        is_empty = self._stored.is_known_empty(position)
                    if is_empty:
                        continue
                positions.append(position)
                entries.append(time_entry(time_ms))
                values.append(row)
                operations.append(_DELETE if row is None else _PUT)
        changes.add(self._state, self._codec, self._cursor.keys, positions, entries, values, operations)
