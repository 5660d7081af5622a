"""A map state by time, of many keys at once: columns of rows, read by key and between two times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.operators.keyed.changes import ChangeBuffer
from statelog.operators.keyed.columns import Columns, ColumnState, Mask, newest_by_time
from statelog.operators.keyed.time_reader import (
    AFTER_MS,
    FIRST_MS,
    LargeKey,
    entry_keys,
    entry_numbers,
    have_few,
)
from statelog.runs.byte_slices import Positions
from statelog.runs.format import Operation
from statelog.tables.table import EntryRows

Int64s = npt.NDArray[np.int64]

END_MS: Final = AFTER_MS - 1
"""The end of time, as far as 64 bits reach."""
_CLEARED_MS: Final = FIRST_MS
"""Stands for the time of a removal of all rows, which precedes the others."""


@dataclass(frozen=True)
class TimeRows:
    """Rows of some keys, by key and then by time."""

    key_index: Positions
    """The position of each row's key in the chunk."""
    times_ms: Int64s
    values: Columns
    until_ms: int = END_MS
    """All rows of these keys before this time are known; later ones may come."""

    def __len__(self) -> int:
        return len(self.times_ms)

    def take(self, rows: Positions | Mask) -> TimeRows:
        """Some of the rows, given by position or mask."""
        if rows.dtype == np.bool_:
            if rows.all():
                return self
            rows = np.flatnonzero(rows)
        picked = pa.array(rows)
        columns = [column.take(picked) for column in self.values]
        return TimeRows(self.key_index[rows], self.times_ms[rows], columns, self.until_ms)

    def followed_by(self, later: TimeRows) -> TimeRows:
        """These rows and those of another, which follow them."""
        return _joined([self, later])


_Changes = tuple[TimeRows, npt.NDArray[np.uint8]]
"""Rows that are set or removed, and the operation of each."""


@dataclass(frozen=True)
class _Loaded:
    times: list[int]
    values: Columns


class TimeColumns(ColumnState):
    """Rows by time, of each key. A time is a whole number of milliseconds; the state has no TTL.

    Keys with few rows are read together, and each of the others in pages. What is read is the state before the phase;
    the chunk's own changes show only where that is asked for.
    """

    def open(self) -> None:
        self._few: Mask | None = None
        self._written: list[_Changes] = []
        self._is_joined = False

    def few(self) -> Mask:
        """Which keys have so few rows that they are read together."""
        self._require()
        if self._few is None:
            self._few = have_few(self._cursor.count_entries(self._state), self._cursor.budget)
        return self._few

    def read(self, positions: Positions, *, with_changes: bool = False) -> TimeRows:
        """All rows of keys that have few."""
        self._require()
        cursor, state = self._cursor, self._state
        keys = cursor.keys if len(positions) == len(cursor.keys) else cursor.keys.take(positions)
        found = cursor.table_of(state).entries(state, keys)
        cursor.loaded_bytes += found.entries.nbytes + found.values.nbytes
        (times_ms,) = entry_numbers(found.entries, 1)
        rows = TimeRows(positions[found.positions], times_ms, _columns(found))
        return self._changed(rows, positions, FIRST_MS, AFTER_MS) if with_changes else rows

    def pages(
        self, position: int, first_ms: int = FIRST_MS, end_ms: int = AFTER_MS, *, with_changes: bool = False
    ) -> Iterator[TimeRows]:
        """The rows of a key from one time up to, not including, another, in parts of bounded size.

        The last part may be empty, and is known up to the end of time.
        """
        at_ms, owner = first_ms, np.array([position])
        for loaded, first, end in self._large(position).parts(first_ms, end_ms):
            if first == end:
                continue
            until_ms = loaded.times[end - 1] + 1
            times = np.array(loaded.times[first:end], np.int64)
            columns = [column.slice(first, end - first) for column in loaded.values]
            rows = TimeRows(np.full(end - first, position), times, columns, until_ms)
            yield self._changed(rows, owner, at_ms, until_ms) if with_changes else rows
            at_ms = until_ms
        rest = self._nothing()
        yield self._changed(rest, owner, at_ms, end_ms) if with_changes else rest

    def last_until(self, position: int, time_ms: int) -> int | None:
        """The time of a key's last row up to a time, itself included; None if there is none."""
        found = self._large(position).last_until(time_ms)
        return None if found is None else found[0].times[found[1]]

    def put(self, rows: TimeRows) -> None:
        """Set rows, in any order; of two of one key and time the later counts."""
        self._write(rows, Operation.PUT)

    def remove(self, key_index: Positions, times_ms: Int64s) -> None:
        """Remove the rows of some times."""
        self._write(TimeRows(key_index, times_ms, self._nulls(len(times_ms))), Operation.DELETE)

    def clear(self, positions: Positions) -> None:
        """Remove all rows of some keys, which have no other changes."""
        times_ms = np.full(len(positions), _CLEARED_MS)
        self._write(TimeRows(positions, times_ms, self._nulls(len(positions))), Operation.CLEAR)

    def flush(self, changes: ChangeBuffer) -> None:
        # Large rows of a large key come in order, and are not joined: they may not fit into one column.
        parts = self._written if _ascend(self._written) else [self._own()] if self._written else []
        for rows, operations in parts:
            entries = entry_keys([rows.times_ms])
            is_clear = operations == Operation.CLEAR
            if is_clear.any():
                places = np.where(is_clear, len(rows), np.arange(len(rows)))
                entries = pa.concat_arrays([entries, pa.array([b""], pa.binary())]).take(pa.array(places))
            changes.add_columns(self._state, self._cursor.keys, rows.key_index, entries, rows.values, operations)

    def _write(self, rows: TimeRows, operation: Operation) -> None:
        self._require()
        if len(rows):
            self._written.append((rows, np.full(len(rows), operation, np.uint8)))
            self._is_joined = False

    def _own(self) -> _Changes:
        """The chunk's own changes by key and time, each once."""
        if self._is_joined:
            return self._written[0]
        rows = _joined([rows for rows, _ in self._written])
        operations = np.concatenate([operations for _, operations in self._written])
        order = newest_by_time(rows.key_index, rows.times_ms)
        if order is not None:
            rows, operations = rows.take(order), operations[order]
        self._written, self._is_joined = [(rows, operations)], True
        return rows, operations

    def _changed(self, rows: TimeRows, positions: Positions, first_ms: int, end_ms: int) -> TimeRows:
        """Rows of some keys between two times, with the chunk's own changes of them."""
        if not self._written:
            return rows
        own, operations = self._own()
        first, last = np.searchsorted(own.key_index, [positions[0], positions[-1] + 1]).tolist()
        near = np.arange(first, last)
        places = np.searchsorted(positions, own.key_index[near])
        times_ms = own.times_ms[near]
        near = near[(positions[places] == own.key_index[near]) & (times_ms >= first_ms) & (times_ms < end_ms)]
        both = rows.followed_by(own.take(near))
        is_put = np.concatenate([np.ones(len(rows), bool), operations[near] == Operation.PUT])
        order = newest_by_time(both.key_index, both.times_ms)
        if order is None:
            order = np.arange(len(both))
        found = both.take(order[is_put[order]])
        return TimeRows(found.key_index, found.times_ms, found.values, rows.until_ms)

    def _large(self, position: int) -> LargeKey[_Loaded]:
        self._require()
        cursor, state = self._cursor, self._state
        key_hash, key = int(cursor.keys.hashes[position]), cursor.keys.keys[position].as_py()
        return LargeKey(cursor.table_of(state).entries_of(state, key_hash, key), _decoded, cursor.budget)

    def _nulls(self, count: int) -> Columns:
        return [pa.nulls(count, field.type) for field in self._state.value_schema]

    def _nothing(self) -> TimeRows:
        return TimeRows(np.zeros(0, np.int64), np.zeros(0, np.int64), self._nulls(0))


def _ascend(parts: Sequence[_Changes]) -> bool:
    """Whether all rows of successive parts are in order."""
    if any(newest_by_time(rows.key_index, rows.times_ms) is not None for rows, _ in parts):
        return False
    pairs = pairwise([rows for rows, _ in parts])
    return all(
        (before.key_index[-1], before.times_ms[-1]) < (later.key_index[0], later.times_ms[0]) for before, later in pairs
    )


def _decoded(found: EntryRows) -> _Loaded:
    (times,) = entry_numbers(found.entries, 1)
    return _Loaded(times.tolist(), _columns(found))


def _columns(found: EntryRows) -> Columns:
    return [column.combine_chunks() for column in found.values.columns]


def _joined(parts: Sequence[TimeRows]) -> TimeRows:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part.values for part in parts), strict=True)
    return TimeRows(
        np.concatenate([part.key_index for part in parts]),
        np.concatenate([part.times_ms for part in parts]),
        [pa.concat_arrays(list(column)) for column in columns],
        parts[-1].until_ms,
    )
