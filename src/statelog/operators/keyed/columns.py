"""States of many keys at once, as Arrow columns; the keys are those of the cursor's chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.changes import LIST_PREFIX, PHASE_SHIFT, ChangeBuffer
from statelog.operators.keyed.cursor import ENTRIES_PER_LOOKUP, KeyCursor
from statelog.operators.keyed.operator import StateBinding
from statelog.runs.byte_slices import Budget, Positions
from statelog.runs.key_columns import differs_from_previous
from statelog.runs.keys import KeyCodec, MapKeyCodec
from statelog.runs.schema import Operation, StateDescriptor, StateKind
from statelog.runs.times import Moment
from statelog.tables.table import EntryRange, EntryRows

Columns = list[pa.Array]
Mask = npt.NDArray[np.bool_]

Expire = Callable[[Any, Moment], Iterable[pa.RecordBatch]]
"""Takes the due timers of some keys, which are deleted; returns output rows."""

_MOST_BYTES: Final = 1 << 30
"""Limit of the entries of a key chunk."""


@dataclass(frozen=True)
class Entries:
    """Rows of a list, a map or timers: by key, within a key in order of their entry keys."""

    key_index: Positions
    """The position of each row's key in the chunk, ascending."""
    entries: pa.Array
    """The entry keys, binary."""
    values: Columns

    def filter(self, mask: Mask) -> Entries:
        """The rows where the mask is set."""
        kept = pa.array(mask)
        return Entries(self.key_index[mask], self.entries.filter(kept), [column.filter(kept) for column in self.values])

    def take(self, rows: Positions) -> Entries:
        """Some rows, in any order."""
        taken = pa.array(rows)
        return Entries(self.key_index[rows], self.entries.take(taken), [column.take(taken) for column in self.values])


class ColumnState(ABC):
    """A state of the chunk's keys."""

    def __init__(self, cursor: KeyCursor, binding: StateBinding) -> None:
        self._cursor = cursor
        self._binding = binding
        self._state = binding.descriptor
        self._ttl = binding.ttl
        self._renews = binding.ttl is not None and binding.ttl.renew_on_read

    def used_as(self, kind: Callable[[KeyCursor, StateBinding], Any]) -> Any:
        """Another handle of the same state, which takes the place of this one."""
        return kind(self._cursor, self._binding)

    @abstractmethod
    def open(self) -> None:
        """Start on a new key chunk: forget everything read and written so far."""

    @abstractmethod
    def flush(self, changes: ChangeBuffer) -> None:
        """Add the changes of the key chunk to those of the batch."""

    def visit(self, position: int) -> None:
        """Make a key of the chunk the current one, for states of rows."""
        self._cursor.position = position

    @property
    def budget(self) -> Budget:
        """How much data is worked on at once."""
        return self._cursor.budget

    def _expiry(self, positions: Positions) -> pa.Array | None:
        return None if self._ttl is None else self._cursor.expiry_column(self._ttl, positions)

    @property
    def key_count(self) -> int:
        """The number of keys in the chunk; raises ProcessorError outside of the processor's calls."""
        return self._require()

    def _require(self) -> int:
        self._cursor.require(f"state '{self._state.name}'")
        return len(self._cursor.keys)


class ValueColumns(ColumnState):
    """A row per key, or none."""

    def open(self) -> None:
        self._stored: Mask | None = None
        self._values: Columns | None = None
        self._has: Mask = np.zeros(0, bool)
        self._changed: Mask = np.zeros(0, bool)

    def read(self, alive_after_ms: int | None = None) -> tuple[Columns, Mask]:
        """The values of all keys, null where there is none, and which keys have one.

        Values that expire up to `alive_after_ms` do not count; by default up to the time of the batch.
        """
        count = self._require()
        if self._stored is None:
            self._load(count, alive_after_ms)
        assert self._values is not None
        if self._renews:
            self._changed |= self._has
        return self._values, self._has

    def write(self, values: Columns, positions: Positions | None = None) -> None:
        """Put values, one for each of some keys or of all; of two values of a key the later counts."""
        count = self._require()
        if positions is None:
            self._values, self._has, self._changed = values, np.ones(count, bool), np.ones(count, bool)
            return
        self._begin(count)
        assert self._values is not None
        rows = np.arange(count)
        rows[positions] = count + np.arange(len(positions))
        picked = pa.array(rows)
        self._values = [
            pa.concat_arrays([held, new]).take(picked) for held, new in zip(self._values, values, strict=True)
        ]
        self._has[positions] = self._changed[positions] = True

    def count_ttl_from(self, event_ms: npt.NDArray[np.int64]) -> None:
        """Let a TTL in event time count from these times of the chunk's keys, not from the newest of their rows.

        ``NO_TIME_MS`` stands for none.
        """
        self._require()
        self._cursor.event_ms = event_ms

    def clear(self, positions: Positions | Mask) -> None:
        """Remove the values of some keys."""
        count = self._require()
        self._begin(count)
        assert self._values is not None
        kept = np.ones(count, bool)
        kept[positions] = False
        self._values = [pc.if_else(pa.array(kept), column, pa.scalar(None, column.type)) for column in self._values]
        self._has[positions] = False
        self._changed[positions] = True

    def _begin(self, count: int) -> None:
        if self._values is None:
            self._values = [pa.nulls(count, field.type) for field in self._state.value_schema]
            self._has, self._changed = np.zeros(count, bool), np.zeros(count, bool)

    def _load(self, count: int, alive_after_ms: int | None) -> None:
        state, cursor = self._state, self._cursor
        found = cursor.table_of(state).get_many(state, cursor.keys)
        cursor.loaded_bytes += found.values.nbytes
        positions, values = found.positions, [column.combine_chunks() for column in found.values.columns]
        live = cursor.live_rows(state, found.expiry, alive_after_ms)
        if live is not None:
            positions, values = positions[live], [column.filter(pa.array(live)) for column in values]
        stored = np.zeros(count, bool)
        stored[positions] = True
        if len(positions) < count:
            rows = np.zeros(count, np.int64)
            rows[positions] = np.arange(len(positions))
            picked = pa.array(rows, mask=~stored)
            values = [column.take(picked) for column in values]
        self._stored = stored
        if self._values is None:
            self._values, self._has, self._changed = values, stored.copy(), np.zeros(count, bool)
            return
        own = pa.array(self._changed)
        self._values = [pc.if_else(own, new, held) for new, held in zip(self._values, values, strict=True)]
        self._has = np.where(self._changed, self._has, stored)

    def flush(self, changes: ChangeBuffer) -> None:
        if self._values is None or not self._changed.any():
            return
        changed = self._changed
        if self._stored is not None:
            changed = changed & (self._has | self._stored)
        positions = np.flatnonzero(changed)
        values, operations = self._values, None
        if len(positions) < len(changed):
            picked = pa.array(positions)
            values = [column.take(picked) for column in values]
        if not self._has[positions].all():
            operations = np.where(self._has[positions], Operation.PUT, Operation.DELETE).astype(np.uint8)
        expiry = self._expiry(positions)
        changes.add_columns(self._state, self._cursor.keys, positions, None, values, operations, expiry)


class EntryColumns(ColumnState):
    """Rows of the keys: elements of a list, or entries of a map."""

    def __init__(self, cursor: KeyCursor, binding: StateBinding) -> None:
        super().__init__(cursor, binding)
        self._map_keys = None if self._state.entry_schema is None else KeyCodec(self._state.entry_schema)
        self._ranges = None if binding.entry_codec is None else MapKeyCodec(binding.entry_codec)

    def open(self) -> None:
        self._read: Entries | None = None
        self._written: list[tuple[Entries, npt.NDArray[np.uint8]]] = []
        self._cleared: Mask | None = None
        self._appended: npt.NDArray[np.int64] | None = None

    def read(self) -> Entries:
        """All rows of the chunk's keys."""
        self._require()
        if self._read is None:
            self._read = self._load()
        return self._changed(self._read, self._written)

    def between(self, first: Any, end: Any) -> Entries:
        """The entries from one map key up to another, which is not included, of all keys; None is no bound."""
        self._require()
        assert self._ranges is not None
        low, high = self._ranges.bounds(first, end)
        stored = self._load_between(low, high) if self._read is None else _between(self._read, low, high)[0]
        written = [(*_between(rows, low, high), operations) for rows, operations in self._written]
        return self._changed(
            stored, [(rows, operations[within]) for rows, within, operations in written if within.any()]
        )

    def _changed(self, held: Entries, written: list[tuple[Entries, npt.NDArray[np.uint8]]]) -> Entries:
        """Stored rows as they are after some of the chunk's own changes."""
        if self._cleared is not None:
            held = held.filter(~self._cleared[held.key_index])
        if written:
            held = _newest([(held, np.full(len(held.key_index), Operation.PUT, np.uint8)), *written])[0]
        if self._renews and len(held.key_index):
            self._written.append((held, np.full(len(held.key_index), Operation.PUT, np.uint8)))
        return held

    def map_keys(self, entries: pa.Array) -> Columns:
        """The map keys of entry keys."""
        assert self._map_keys is not None
        return self._map_keys.decode_columns(entries)

    def entry_keys(self, map_keys: Columns) -> pa.Array:
        """The entry keys of map keys."""
        assert self._map_keys is not None
        return self._map_keys.encode_columns(map_keys)

    def put(self, key_index: Positions, entries: pa.Array, values: Columns) -> None:
        """Put rows, in any order; of two rows of one entry the later counts."""
        self._require()
        self._write(Entries(key_index, entries, values), Operation.PUT)

    def remove(self, key_index: Positions, entries: pa.Array) -> None:
        """Remove rows."""
        self._require()
        nulls = [pa.nulls(len(key_index), field.type) for field in self._state.value_schema]
        self._write(Entries(key_index, entries, nulls), Operation.DELETE)

    def append(self, key_index: Positions, values: Columns) -> None:
        """Add elements to lists, in their order within each key."""
        count = self._require()
        if self._appended is None:
            self._appended = np.zeros(count, np.int64)
        order = np.argsort(key_index, kind="stable")
        owners = key_index[order]
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        counts = np.diff(np.append(firsts, len(owners)))
        ordinals = np.arange(len(owners)) - np.repeat(firsts, counts) + self._appended[owners]
        self._appended[owners[firsts]] += counts
        picked = pa.array(order)
        self._write(
            Entries(owners, self._list_entries(ordinals), [column.take(picked) for column in values]), Operation.PUT
        )

    def clear(self, positions: Positions | Mask) -> None:
        """Remove all rows of some keys."""
        count = self._require()
        if self._cleared is None:
            self._cleared = np.zeros(count, bool)
        self._cleared[positions] = True
        gone = np.zeros(count, bool)
        gone[positions] = True
        self._written = [
            (rows.filter(~gone[rows.key_index]), operations[~gone[rows.key_index]])
            for rows, operations in self._written
        ]

    def flush(self, changes: ChangeBuffer) -> None:
        state, keys = self._state, self._cursor.keys
        parts = list(self._written)
        if self._cleared is not None:
            cleared = np.flatnonzero(self._cleared)
            nulls = [pa.nulls(len(cleared), field.type) for field in state.value_schema]
            rows = Entries(cleared, pa.array([b""] * len(cleared), pa.binary()), nulls)
            parts.append((rows, np.full(len(cleared), Operation.CLEAR, np.uint8)))
        if not parts:
            return
        rows, operations = _newest(parts, keeps_all=True)
        expiry = self._expiry(rows.key_index)
        changes.add_columns(state, keys, rows.key_index, rows.entries, rows.values, operations, expiry)

    def _write(self, rows: Entries, operation: Operation) -> None:
        if len(rows.key_index):
            self._written.append((rows, np.full(len(rows.key_index), operation, np.uint8)))

    def _list_entries(self, ordinals: npt.NDArray[np.int64]) -> pa.Array:
        place = self._cursor.list_position
        prefix = LIST_PREFIX.pack(place.epoch, place.batch)
        matrix = np.empty((len(ordinals), len(prefix) + 4), np.uint8)
        matrix[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
        numbers = ordinals + (place.phase << PHASE_SHIFT)
        matrix[:, len(prefix) :] = numbers.astype(">u4").view(np.uint8).reshape(-1, 4)
        return _binaries(matrix)

    def _load(self) -> Entries:
        cursor = self._cursor
        return self._opened([(None, cursor.table_of(self._state).entries(self._state, cursor.keys))])

    def _load_between(self, low: bytes, high: bytes) -> Entries:
        state, cursor, keys, budget = self._state, self._cursor, self._cursor.keys, self._cursor.budget
        has_many = cursor.count_entries(state).entries > ENTRIES_PER_LOOKUP
        if not has_many.any():
            self._read = self._load()
            return _between(self._read, low, high)[0]
        few, table = np.flatnonzero(~has_many), cursor.table_of(state)
        found: list[tuple[Positions | None, EntryRows]] = [(few, table.entries(state, keys.take(few)))]
        for position in np.flatnonzero(has_many).tolist():
            entries = table.entries_of(state, int(keys.hashes[position]), keys.keys[position].as_py())
            wanted: EntryRange | None = EntryRange(low, high)
            while wanted is not None:
                page = entries.between(wanted, budget.prefetch_entries, budget.slice_bytes)
                found.append((np.array([position]), page.rows))
                wanted = page.rest
        rows = _between(self._opened(found), low, high)[0]
        return rows.take(np.argsort(rows.key_index, kind="stable"))

    def _opened(self, found: list[tuple[Positions | None, EntryRows]]) -> Entries:
        """Rows of the table that have not expired, with the positions of their keys in the chunk."""
        state, cursor = self._state, self._cursor
        size_bytes = sum(rows.entries.nbytes + rows.values.nbytes for _, rows in found)
        cursor.loaded_bytes += size_bytes
        if size_bytes > _MOST_BYTES:
            raise ProcessorError(
                f"state '{state.name}': the entries of {len(cursor.keys):,} keys take {size_bytes:,} bytes; at most"
                f" {_MOST_BYTES:,} can be read as a whole.",
                kind=ErrorKind.TOO_LARGE,
                hint="Spread the entries over several keys, read a map by range(), or clear() the state.",
            )
        owners = np.concatenate([rows.positions if keys is None else keys[rows.positions] for keys, rows in found])
        entries = pa.chunked_array([chunk for _, rows in found for chunk in rows.entries.chunks], pa.binary())
        values = pa.concat_tables([rows.values for _, rows in found])
        expiry = pa.concat_arrays([rows.expiry for _, rows in found])
        opened = Entries(owners, entries.combine_chunks(), [column.combine_chunks() for column in values.columns])
        live = cursor.live_rows(state, expiry)
        return opened if live is None else opened.filter(live)


def _between(rows: Entries, low: bytes, high: bytes) -> tuple[Entries, Mask]:
    """The rows between two entry keys, and which these are."""
    is_within: Mask = pc.and_(
        pc.greater_equal(rows.entries, pa.scalar(low, pa.binary())), pc.less(rows.entries, pa.scalar(high, pa.binary()))
    ).to_numpy(zero_copy_only=False)
    return (rows if is_within.all() else rows.filter(is_within)), is_within


class TimerColumns:
    """The timers of the chunk's keys."""

    def __init__(self, cursor: KeyCursor, state: StateDescriptor) -> None:
        self.state = state
        self.lowest_ms: int | None = None
        """The earliest time registered since due timers were last read from the table."""
        self._cursor = cursor

    def open(self) -> None:
        """Start on a new key chunk: forget everything written so far."""
        self._written: list[tuple[Positions, npt.NDArray[np.int64], Operation]] = []

    @property
    def key_count(self) -> int:
        """The number of keys in the chunk; raises ProcessorError outside of the processor's calls."""
        self._cursor.require("A timer")
        return len(self._cursor.keys)

    def register(self, key_index: Positions, times_ms: npt.NDArray[np.int64]) -> None:
        """Register timers; the same time registered twice for a key is one timer."""
        if len(times_ms):
            earliest = int(times_ms.min())
            self.lowest_ms = earliest if self.lowest_ms is None else min(self.lowest_ms, earliest)
            self._write(key_index, times_ms, Operation.PUT)

    def delete(self, key_index: Positions, times_ms: npt.NDArray[np.int64]) -> None:
        """Delete timers; nothing happens where there is none."""
        if len(times_ms):
            self._write(key_index, times_ms, Operation.DELETE)

    def delete_all(self, position: int) -> None:
        """Delete the timers that a key had before the phase."""
        cursor, keys = self._cursor, self._cursor.keys
        held = cursor.table.entries_of(self.state, int(keys.hashes[position]), keys.keys[position].as_py())
        for page in held.pages(cursor.budget.prefetch_entries, cursor.budget.slice_bytes):
            times_ms = page.values.column(0).to_numpy()
            self.delete(np.full(len(times_ms), position), times_ms)

    def flush(self, changes: ChangeBuffer) -> None:
        """Add the changes of the key chunk to those of the batch."""
        if not self._written:
            return
        key_index = np.concatenate([owners for owners, _, _ in self._written])
        times_ms = np.concatenate([times for _, times, _ in self._written])
        operations = np.concatenate([np.full(len(times), kind, np.uint8) for _, times, kind in self._written])
        order = newest_by_time(key_index, times_ms)
        if order is not None:
            key_index, times_ms, operations = key_index[order], times_ms[order], operations[order]
        big_endian = (times_ms.view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8").view(np.uint8)
        # A deletion carries its time too, so that a search by time finds it.
        values = [pa.array(times_ms, pa.int64())]
        changes.add_columns(
            self.state, self._cursor.keys, key_index, _binaries(big_endian.reshape(-1, 8)), values, operations
        )

    def _write(self, key_index: Positions, times_ms: npt.NDArray[np.int64], operation: Operation) -> None:
        self._cursor.require("A timer")
        self._written.append((np.asarray(key_index, np.int64), np.asarray(times_ms, np.int64), operation))


def newest_by_time(key_index: Positions, *numbers: npt.NDArray[np.int64]) -> Positions | None:
    """The order of rows by key, time and perhaps ordinal, of equal rows the last alone; None if that is their own."""
    own = [key_index, *numbers]
    ascends = np.zeros(max(0, len(key_index) - 1), bool)
    for column in reversed(own):
        ascends = (column[1:] > column[:-1]) | ((column[1:] == column[:-1]) & ascends)
    if ascends.all():
        return None
    order = np.lexsort(own[::-1])
    is_last = np.ones(len(order), bool)
    is_last[:-1] = np.any([np.diff(column[order]) != 0 for column in own], axis=0)
    return order[is_last]


def _binaries(matrix: npt.NDArray[np.uint8]) -> pa.Array:
    """A binary column of the rows of a matrix."""
    count, width = matrix.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(matrix))]
    )


def _newest(
    parts: list[tuple[Entries, npt.NDArray[np.uint8]]], *, keeps_all: bool = False
) -> tuple[Entries, npt.NDArray[np.uint8]]:
    """The rows of several parts by key and entry; of the rows of one entry the last. Deletions only if `keeps_all`."""
    key_index = np.concatenate([rows.key_index for rows, _ in parts])
    entries = pa.concat_arrays([rows.entries for rows, _ in parts])
    operations = np.concatenate([operations for _, operations in parts])
    columns = zip(*(rows.values for rows, _ in parts), strict=True)
    whole = Entries(key_index, entries, [pa.concat_arrays(list(column)) for column in columns])
    table = pa.table({"key": key_index, "entry": entries, "place": -np.arange(len(key_index))})
    order = pc.sort_indices(table, [(name, "ascending") for name in table.schema.names]).to_numpy().astype(np.int64)
    sorted_keys, sorted_entries = key_index[order], entries.take(pa.array(order))
    is_newest = differs_from_previous(sorted_entries)
    is_newest[1:] |= sorted_keys[1:] != sorted_keys[:-1]
    order = order[is_newest]
    if not keeps_all:
        order = order[operations[order] == Operation.PUT]
    return whole.take(order), operations[order]


class Arrivals(TimerColumns):
    """The processing times at which keys got something that has a time limit: timers that fire when the limit is over.

    The limit is not stored, so a new limit at a restart also applies to the arrivals that are there.
    """

    limit_ms: int
    expire: Expire

    def bind(self, limit_ms: int, expire: Expire) -> None:
        """Set the limit, and the function that is called for the arrivals whose limit is over."""
        self.limit_ms = limit_ms
        self.expire = expire


def make_state(cursor: KeyCursor, binding: StateBinding) -> Any:
    """The columns of a state."""
    if binding.descriptor.kind is StateKind.TIMER:
        return Arrivals(cursor, binding.descriptor)
    return EntryColumns(cursor, binding) if binding.descriptor.kind.has_entries else ValueColumns(cursor, binding)
