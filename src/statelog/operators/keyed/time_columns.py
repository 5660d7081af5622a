"""A map state by time, of many keys at once: columns of rows, read by key and between two times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.changes import ChangeBuffer
from statelog.operators.keyed.columns import Columns, ColumnState, Mask, newest_by_time
from statelog.operators.keyed.indexing import Int64s
from statelog.operators.keyed.time_reader import (
    AFTER_MS,
    FIRST_MS,
    LargeKey,
    entry_keys,
    entry_numbers,
    have_few,
)
from statelog.runs.byte_slices import Positions
from statelog.runs.schema import Operation, StateDescriptor
from statelog.tables.table import EntryRows

END_MS: Final = AFTER_MS - 1
"""The end of time, as far as 64 bits reach."""
_CLEARED_MS: Final = FIRST_MS
"""Stands for the time of a removal of all rows, which precedes the others."""
_ORDINAL_BITS: Final = 27
"""Of the ordinal of an appended row; the bits above are the number of the batch."""

_Bound = tuple[int, int]
"""A time and an ordinal."""


@dataclass(frozen=True)
class TimeRows:
    """Rows of some keys, by key and then by time."""

    key_index: Positions
    """The position of each row's key in the chunk."""
    times_ms: Int64s
    values: Columns
    until_ms: int = END_MS
    """All rows of these keys before this time are known; later ones may come."""
    ordinals: Int64s | None = None
    """The places of rows of one time; None if a key has one row of a time at most."""

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
        ordinals = None if self.ordinals is None else self.ordinals[rows]
        return TimeRows(self.key_index[rows], self.times_ms[rows], columns, self.until_ms, ordinals)

    def are_before(self, rows: Positions, bound: _Bound) -> Mask:
        """Whether rows are before a time, or at this time and before an ordinal."""
        times_ms, (time_ms, ordinal) = self.times_ms[rows], bound
        before: Mask = times_ms < time_ms
        return before if self.ordinals is None else before | ((times_ms == time_ms) & (self.ordinals[rows] < ordinal))

    def order(self) -> Positions | None:
        """The order of :func:`newest_by_time`."""
        return newest_by_time(self.key_index, *self.entry)

    @property
    def entry(self) -> list[Int64s]:
        """The numbers of the rows' entry keys."""
        return [self.times_ms] if self.ordinals is None else [self.times_ms, self.ordinals]

    def followed_by(self, later: TimeRows) -> TimeRows:
        """These rows and those of another, which follow them."""
        return _joined([self, later])


_Changes = tuple[TimeRows, npt.NDArray[np.uint8]]
"""Rows that are set or removed, and the operation of each."""


@dataclass(frozen=True)
class _Loaded:
    times: list[int]
    rows: TimeRows


class TimeColumns(ColumnState):
    """Rows by time, of each key. A time is a whole number of milliseconds; the state has no TTL.

    If the map keys have a second field, it is the ordinal of a row among those of one time.

    Keys with few rows are read together, and each of the others in pages. What is read is the state before the phase;
    the chunk's own changes show only where that is asked for.
    """

    def open(self) -> None:
        self._few: Mask | None = None
        self._written: list[_Changes] = []
        self._appended = 0
        self._is_joined = False
        self._large_key: tuple[int, LargeKey[_Loaded]] | None = None

    def few(self) -> Mask:
        """Which keys have so few rows that they are read together."""
        self._require()
        if self._few is None:
            self._few = have_few(self._cursor.count_entries(self._state), self._cursor.budget)
        return self._few

    def read(self, positions: Positions, *, with_changes: bool = False) -> TimeRows:
        """All rows of keys that have few."""
        rows = self._read(positions, self._state)
        if not with_changes or not len(positions):
            return rows
        return self._changed(rows, positions, (FIRST_MS, FIRST_MS), (AFTER_MS, FIRST_MS))

    def read_fields(self, positions: Positions, names: Sequence[str]) -> TimeRows:
        """The same, as it was before the phase, with some of the fields."""
        fields = [self._state.value_schema.field(name) for name in names]
        return self._read(positions, replace(self._state, value_schema=pa.schema(fields)))

    def _read(self, positions: Positions, state: StateDescriptor) -> TimeRows:
        self._require()
        if not len(positions):
            return replace(self.nothing(), values=[pa.nulls(0, field.type) for field in state.value_schema])
        cursor = self._cursor
        keys = cursor.keys if len(positions) == len(cursor.keys) else cursor.keys.take(positions)
        found = cursor.table_of(state).entries(state, keys)
        cursor.loaded_bytes += found.entries.nbytes + found.values.nbytes
        return self._decoded(found, positions[found.positions])

    def pages(
        self, position: int, first_ms: int = FIRST_MS, end_ms: int = AFTER_MS, *, with_changes: bool = False
    ) -> Iterator[TimeRows]:
        """The rows of a key from one time up to, not including, another, in parts of bounded size.

        The last part may be empty, and is known up to the end of time.
        """
        at, owner = (first_ms, FIRST_MS), np.array([position])
        for loaded, first, end in self._large(position).parts(first_ms, end_ms):
            if first == end:
                continue
            part, held, last_ms = slice(first, end), loaded.rows, loaded.times[end - 1]
            columns = [column.slice(first, end - first) for column in held.values]
            ordinals = None if held.ordinals is None else held.ordinals[part]
            # More rows of the last time may come, if rows have ordinals.
            until = (last_ms + 1, FIRST_MS) if ordinals is None else (last_ms, int(ordinals[-1]) + 1)
            rows = TimeRows(np.full(end - first, position), held.times_ms[part], columns, until[0], ordinals)
            yield self._changed(rows, owner, at, until) if with_changes else rows
            at = until
        rest = self.nothing()
        yield self._changed(rest, owner, at, (end_ms, FIRST_MS)) if with_changes else rest

    def last_until(self, position: int, time_ms: int) -> int | None:
        """The time of a key's last row up to a time, itself included; None if there is none."""
        found = self._large(position).last_until(time_ms)
        return None if found is None else found[0].times[found[1]]

    def put(self, rows: TimeRows) -> None:
        """Set rows, in any order; of two of one key and time the later counts."""
        self._write(rows, Operation.PUT)

    def append(self, key_index: Positions, times_ms: Int64s, values: Columns) -> None:
        """Add rows behind those of their times, in any order of times; nothing is read.

        The ordinals follow from the number of the batch, which no later batch of the state has. A batch whose chunk of
        keys gets more than 134 million rows is refused.
        """
        first = self._cursor.list_position.batch << _ORDINAL_BITS
        ordinals = first + self._appended + np.arange(len(key_index))
        self._appended += len(key_index)
        if self._appended > 1 << _ORDINAL_BITS:
            raise ProcessorError(
                f"state '{self._state.name}': a key has more than {1 << _ORDINAL_BITS:,} rows in one batch.",
                kind=ErrorKind.TOO_LARGE,
                hint="Read fewer rows per batch, or spread them over several keys.",
            )
        self.put(TimeRows(key_index, times_ms, values, ordinals=ordinals))

    def remove(self, key_index: Positions, times_ms: Int64s, ordinals: Int64s | None = None) -> None:
        """Remove the rows of some times."""
        rows = TimeRows(key_index, times_ms, self._nulls(len(times_ms)), ordinals=ordinals)
        self._write(rows, Operation.DELETE)

    def clear(self, positions: Positions) -> None:
        """Remove all rows of some keys; what is put afterwards stays."""
        self._written = [
            (rows.take(is_kept), operations[is_kept])
            for rows, operations in self._written
            if (is_kept := ~np.isin(rows.key_index, positions)).any()
        ]
        positions = positions[self._cursor.count_entries(self._state).entries[positions] > 0]
        count = len(positions)
        ordinals = np.full(count, -1) if self._fields > 1 else None
        rows = TimeRows(positions, np.full(count, _CLEARED_MS), self._nulls(count), ordinals=ordinals)
        self._write(rows, Operation.CLEAR)

    def flush(self, changes: ChangeBuffer) -> None:
        # Large rows of a large key come in order, and are not joined: they may not fit into one column.
        parts = self._written if _ascend(self._written) else [self._own()] if self._written else []
        for rows, operations in parts:
            entries = entry_keys(rows.entry)
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
        order = rows.order()
        if order is not None:
            rows, operations = rows.take(order), operations[order]
        self._written, self._is_joined = [(rows, operations)], True
        return rows, operations

    def _changed(self, rows: TimeRows, positions: Positions, first: _Bound, end: _Bound) -> TimeRows:
        """Rows of some keys between two bounds, with the chunk's own changes of them."""
        if not self._written:
            return rows
        own, operations = self._own()
        near = np.arange(*np.searchsorted(own.key_index, [positions[0], positions[-1] + 1]))
        places = np.searchsorted(positions, own.key_index[near])
        is_own = positions[places] == own.key_index[near]
        near = near[is_own & ~own.are_before(near, first) & own.are_before(near, end)]
        both = rows.followed_by(own.take(near))
        is_put = np.concatenate([np.ones(len(rows), bool), operations[near] == Operation.PUT])
        order = both.order()
        if order is None:
            order = np.arange(len(both))
        return replace(both.take(order[is_put[order]]), until_ms=rows.until_ms)

    def _large(self, position: int) -> LargeKey[_Loaded]:
        """A key's entries in pages, of which the last ones stay, as long as no other key is requested."""
        self._require()
        if self._large_key is None or self._large_key[0] != position:
            cursor, state = self._cursor, self._state
            key_hash, key = int(cursor.keys.hashes[position]), cursor.keys.keys[position].as_py()
            entries = cursor.table_of(state).entries_of(state, key_hash, key)
            self._large_key = position, LargeKey(entries, self._page, cursor.budget)
        return self._large_key[1]

    def _page(self, found: EntryRows) -> _Loaded:
        rows = self._decoded(found, found.positions)
        return _Loaded(rows.times_ms.tolist(), rows)

    def _decoded(self, found: EntryRows, key_index: Positions) -> TimeRows:
        times_ms, *ordinals = entry_numbers(found.entries, self._fields)
        values = [column.combine_chunks() for column in found.values.columns]
        return TimeRows(key_index, times_ms, values, END_MS, *ordinals)

    @property
    def _fields(self) -> int:
        """The number of fields of the map keys."""
        return len(self._state.entry_schema or "t")

    def _nulls(self, count: int) -> Columns:
        return [pa.nulls(count, field.type) for field in self._state.value_schema]

    def nothing(self) -> TimeRows:
        """No rows."""
        nothing = np.zeros(0, np.int64)
        return TimeRows(nothing, nothing, self._nulls(0), END_MS, nothing if self._fields > 1 else None)


def _ascend(parts: Sequence[_Changes]) -> bool:
    """Whether all rows of successive parts are in order."""
    if any(rows.order() is not None for rows, _ in parts):
        return False
    ends = [[[int(column[at]) for column in (rows.key_index, *rows.entry)] for at in (0, -1)] for rows, _ in parts]
    return all(before[1] < later[0] for before, later in pairwise(ends))


def _joined(parts: Sequence[TimeRows]) -> TimeRows:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part.values for part in parts), strict=True)
    numbers = zip(*([part.key_index, *part.entry] for part in parts), strict=True)
    key_index, times_ms, *ordinals = map(np.concatenate, numbers)
    return TimeRows(
        key_index, times_ms, [pa.concat_arrays(list(column)) for column in columns], parts[-1].until_ms, *ordinals
    )
