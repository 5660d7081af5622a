"""State handles: what a processor reads and writes, prefetched in bulk and buffered per batch.

The handles have the methods of ``pyspark.sql.streaming``'s ValueState, ListState and MapState. A handle is
opened on a window of keys and then moved from key to key; it reads the table once per window, on the first
access, and collects its changes until :meth:`flush`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from statelog.errors import ErrorKind, ProcessorError
from statelog.state.changes import ChangeBuffer
from statelog.state.cursor import EntryWindow, KeyCursor
from statelog.state.keys import KeyCodec
from statelog.state.run import Operation
from statelog.state.schema import StateDescriptor
from statelog.state.values import RowCodec

__all__ = ["KeyedState", "ListState", "MapState", "ValueState"]

Row = tuple[Any, ...]

_MISSING: Final = object()
_CACHE_LIMIT: Final = 100_000


class KeyedState(ABC):
    """What all kinds share: the cursor, the descriptor and the codec."""

    def __init__(self, cursor: KeyCursor, state: StateDescriptor, codec: RowCodec) -> None:
        self._cursor = cursor
        self._state = state
        self._codec = codec

    @abstractmethod
    def open(self) -> None:
        """Start on the cursor's window."""

    @abstractmethod
    def flush(self, changes: ChangeBuffer) -> None:
        """Hand over the window's changes."""


class ValueState(KeyedState):
    """One value per key."""

    def open(self) -> None:
        self._loaded: list[Row | None] | None = None
        self._writes: dict[int, Row | None] = {}
        self._normalize = self._codec.normalize
        self._is_mutable = self._codec.is_mutable

    def exists(self) -> bool:
        """Whether the key has a value."""
        return self._current() is not None

    def get(self) -> Row | None:
        """The key's value as a tuple; None if it has none."""
        position = self._cursor.position
        row: Any = self._writes.get(position, _MISSING)
        if row is _MISSING:
            row = self._current() if self._loaded is None else self._loaded[position]
        return self._codec.copied(row) if self._is_mutable and row is not None else row

    def update(self, newValue: Row) -> None:
        """Replace the key's value."""
        position = self._cursor.position
        if position < 0:
            self._cursor.require(self._codec.subject)
        self._writes[position] = self._normalize(newValue)

    def clear(self) -> None:
        """Remove the key's value."""
        self._writes[self._cursor.require(self._codec.subject)] = None

    def _current(self) -> Row | None:
        position = self._cursor.position
        row = self._writes.get(position, _MISSING)
        if row is not _MISSING:
            return row  # type: ignore[return-value]  # the sentinel is excluded
        if self._loaded is None:
            self._cursor.require(self._codec.subject)
            self._loaded = self._load()
        return self._loaded[position]

    def _load(self) -> list[Row | None]:
        found = self._cursor.table.get_many(self._state, self._cursor.keys)
        rows = self._codec.decode(found.values)
        if len(rows) == len(self._cursor.keys):
            return list(rows)
        loaded: list[Row | None] = [None] * len(self._cursor.keys)
        for position, row in zip(found.positions.tolist(), rows, strict=True):
            loaded[position] = row
        return loaded

    def flush(self, changes: ChangeBuffer) -> None:
        writes = self._writes
        if self._loaded is not None:
            loaded = self._loaded
            absent = [p for p, row in writes.items() if row is None and loaded[p] is None]
            for position in absent:
                del writes[position]
        positions = sorted(writes)
        values = [writes[position] for position in positions]
        changes.add(self._state, self._codec, self._cursor.keys, positions, None, values)


@dataclass
class _ListWrites:
    is_cleared: bool = False
    appended: list[Row] = field(default_factory=list)


class ListState(KeyedState):
    """A list of elements per key; appending reads nothing."""

    def open(self) -> None:
        self._stored = EntryWindow(self._cursor, self._state, self._codec)
        self._writes: dict[int, _ListWrites] = {}

    def exists(self) -> bool:
        """Whether the list has an element."""
        return bool(self._elements())

    def get(self) -> Iterator[Row]:
        """The elements in order, as they are now; later changes do not show."""
        return iter([self._codec.copied(row) for row in self._elements()])

    def put(self, newState: Sequence[Row]) -> None:
        """Replace the list; it must not become empty."""
        rows = self._normalized(newState, "put")
        writes = self._own_writes()
        writes.is_cleared = True
        writes.appended = rows

    def appendValue(self, newState: Row) -> None:
        """Append an element."""
        row = self._codec.normalize(newState)
        self._own_writes().appended.append(row)

    def appendList(self, newState: Sequence[Row]) -> None:
        """Append elements; at least one."""
        rows = self._normalized(newState, "appendList")
        self._own_writes().appended.extend(rows)

    def clear(self) -> None:
        """Remove all elements."""
        writes = self._own_writes()
        writes.is_cleared = True
        writes.appended = []

    def _normalized(self, rows: Sequence[Row], method: str) -> list[Row]:
        if not isinstance(rows, (list, tuple)) or not rows:
            raise ProcessorError(
                f"{self._codec.subject}: {method}() takes a list with at least one tuple, not {rows!r:.80}.",
                kind=ErrorKind.STATE_USAGE,
                hint="Use clear() to empty a list, appendValue() for a single element.",
            )
        return [self._codec.normalize(row) for row in rows]

    def _own_writes(self) -> _ListWrites:
        position = self._cursor.require(self._codec.subject)
        writes = self._writes.get(position)
        if writes is None:
            writes = self._writes[position] = _ListWrites()
        return writes

    def _elements(self) -> list[Row]:
        position = self._cursor.require(self._codec.subject)
        writes = self._writes.get(position)
        if writes is None:
            return list(self._stored.of(position).values())
        if writes.is_cleared:
            return writes.appended
        return [*self._stored.of(position).values(), *writes.appended]

    def flush(self, changes: ChangeBuffer) -> None:
        positions: list[int] = []
        entries: list[bytes] = []
        values: list[Row | None] = []
        operations: list[int] = []
        for position, writes in sorted(self._writes.items()):
            if writes.is_cleared and not self._stored.is_known_empty(position):
                positions.append(position)
                entries.append(b"")
                values.append(None)
                operations.append(Operation.CLEAR)
            count = len(writes.appended)
            positions.extend([position] * count)
            entries.extend(self._cursor.list_position.entries(0, count))
            values.extend(writes.appended)
            operations.extend([Operation.PUT] * count)
        changes.add(self._state, self._codec, self._cursor.keys, positions, entries, values, operations)


@dataclass
class _MapWrites:
    is_cleared: bool = False
    puts: dict[bytes, Row | None] = field(default_factory=dict)


class MapState(KeyedState):
    """A map from tuples to tuples per key; large maps are read entry by entry.

    Parameters
    ----------
    entry_codec : RowCodec
        Converts the map keys.
    to_row : callable
        Makes what :meth:`getValue` returns from a tuple.
    """

    def __init__(
        self,
        cursor: KeyCursor,
        state: StateDescriptor,
        codec: RowCodec,
        entry_codec: RowCodec,
        to_row: Callable[[Row], Any],
    ) -> None:
        super().__init__(cursor, state, codec)
        self._entry_codec = entry_codec
        self._keys = KeyCodec(entry_codec.schema, entry_codec.subject)
        self._encoded: dict[Row, bytes] = {}
        self._to_row = to_row

    def open(self) -> None:
        self._stored = EntryWindow(self._cursor, self._state, self._codec)
        self._writes: dict[int, _MapWrites] = {}

    def exists(self) -> bool:
        """Whether the map has an entry."""
        return bool(self._entries())

    def getValue(self, key: Row) -> Any:
        """The value of a map key; None if the map does not have it."""
        row = self._lookup(self._encode(key))
        return None if row is None else self._to_row(self._codec.copied(row))

    def containsKey(self, key: Row) -> bool:
        """Whether the map has a key."""
        return self._lookup(self._encode(key)) is not None

    def updateValue(self, key: Row, value: Row) -> None:
        """Set the value of a map key."""
        entry = self._encode(key)
        self._own_writes().puts[entry] = self._codec.normalize(value)

    def removeKey(self, key: Row) -> None:
        """Remove a map key."""
        entry = self._encode(key)
        self._own_writes().puts[entry] = None

    def clear(self) -> None:
        """Remove all map keys."""
        writes = self._own_writes()
        writes.is_cleared = True
        writes.puts = {}

    def iterator(self) -> Iterator[tuple[Row, Row]]:
        """Pairs of map key and value, as they are now; later changes do not show."""
        pairs = self._entries().items()
        return iter([(self._decode(entry), self._codec.copied(row)) for entry, row in pairs])

    def keys(self) -> Iterator[Row]:
        """The map keys, as they are now."""
        return iter([self._decode(entry) for entry in self._entries()])

    def values(self) -> Iterator[Row]:
        """The values, as they are now."""
        return iter([self._codec.copied(row) for row in self._entries().values()])

    def _own_writes(self) -> _MapWrites:
        position = self._cursor.require(self._codec.subject)
        writes = self._writes.get(position)
        if writes is None:
            writes = self._writes[position] = _MapWrites()
        return writes

    def _lookup(self, entry: bytes) -> Row | None:
        position = self._cursor.require(self._codec.subject)
        writes = self._writes.get(position)
        if writes is not None:
            row = writes.puts.get(entry, _MISSING)
            if row is not _MISSING:
                return row  # type: ignore[return-value]  # the sentinel is excluded
            if writes.is_cleared:
                return None
        return self._stored.get(position, entry)

    def _entries(self) -> dict[bytes, Row]:
        position = self._cursor.require(self._codec.subject)
        writes = self._writes.get(position)
        if writes is None:
            return self._stored.of(position)
        merged = {} if writes.is_cleared else dict(self._stored.of(position))
        for entry, row in writes.puts.items():
            if row is None:
                merged.pop(entry, None)
            else:
                merged[entry] = row
        return merged

    def _encode(self, key: Row) -> bytes:
        row = self._entry_codec.normalize(key)
        entry = self._encoded.get(row)
        if entry is None:
            if len(self._encoded) >= _CACHE_LIMIT:
                self._encoded.clear()
            entry = self._encoded[row] = self._keys.encode(self._entry_codec.to_storage(row))
        return entry

    def _decode(self, entry: bytes) -> Row:
        return self._entry_codec.from_storage(self._keys.decode(entry))

    def flush(self, changes: ChangeBuffer) -> None:
        positions: list[int] = []
        entries: list[bytes] = []
        values: list[Row | None] = []
        operations: list[int] = []
        for position, writes in sorted(self._writes.items()):
            known_empty = self._stored.is_known_empty(position)
            if writes.is_cleared and not known_empty:
                positions.append(position)
                entries.append(b"")
                values.append(None)
                operations.append(Operation.CLEAR)
            for entry, row in sorted(writes.puts.items()):
                if row is None and (writes.is_cleared or known_empty):
                    continue
                positions.append(position)
                entries.append(entry)
                values.append(row)
                operations.append(Operation.DELETE if row is None else Operation.PUT)
        changes.add(self._state, self._codec, self._cursor.keys, positions, entries, values, operations)
