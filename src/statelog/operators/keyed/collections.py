"""States with many entries per key: lists and maps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.changes import ChangeBuffer
from statelog.operators.keyed.cursor import EntryWindow, KeyCursor
from statelog.operators.keyed.values import MISSING, KeyedState, Row
from statelog.runs.format import Operation
from statelog.runs.keys import MapKeyCodec
from statelog.runs.schema import StateDescriptor
from statelog.runs.times import Ttl
from statelog.runs.values import RowCodec


@dataclass
class _ListWrites:
    is_cleared: bool = False
    is_renewed: bool = False
    appended: list[Row] = field(default_factory=list)
    """Held."""


_NO_WRITES: Final = _ListWrites()


class ListState(KeyedState):
    """A list of elements per key; appending reads nothing."""

    def open(self) -> None:
        self._stored = EntryWindow(self._cursor, self._state, self._codec)
        self._writes: defaultdict[int, _ListWrites] = defaultdict(_ListWrites)

    def exists(self) -> bool:
        """Whether the list has an element."""
        return any(self._elements())

    def get(self) -> Iterator[Row]:
        """The elements in order, as they are now; later changes do not show."""
        if self._renews:
            self._writes[self._require()].is_renewed = True
        stored, appended = self._elements()
        copied, read_held = self._codec.copied, self._codec.read_held
        return iter([*map(copied, stored), *map(read_held, appended)])

    def put(self, newState: Iterable[Row]) -> None:
        """Replace all elements; the new list has at least one."""
        rows = self._held(newState, "put")
        self._writes[self._require()] = _ListWrites(is_cleared=True, appended=rows)

    def appendValue(self, newState: Row) -> None:
        """Append an element."""
        row = self._codec.hold(newState)
        self._writes[self._require()].appended.append(row)

    def appendList(self, newState: Iterable[Row]) -> None:
        """Append elements; at least one."""
        rows = self._held(newState, "appendList")
        self._writes[self._require()].appended.extend(rows)

    def clear(self) -> None:
        """Remove all elements."""
        self._writes[self._require()] = _ListWrites(is_cleared=True)

    def _held(self, rows: Iterable[Row], method: str) -> list[Row]:
        held = [self._codec.hold(row) for row in rows] if isinstance(rows, Iterable) else []
        if not held:
            raise ProcessorError(
                f"{self._codec.subject}: {method}() takes a list with at least one tuple, not {rows!r:.80}.",
                kind=ErrorKind.STATE_USAGE,
                hint="Use clear() to empty a list, appendValue() for a single element.",
            )
        return held

    def _elements(self) -> tuple[Collection[Row], list[Row]]:
        """The elements that were stored before, and those appended since, which are held."""
        position = self._require()
        writes = self._writes.get(position, _NO_WRITES)
        return () if writes.is_cleared else self._stored.of(position).values(), writes.appended

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
            if writes.is_renewed and not writes.is_cleared:
                stored = self._stored.of(position)
                positions.extend([position] * len(stored))
                entries.extend(stored)
                values.extend(stored.values())
                operations.extend([Operation.PUT] * len(stored))
            count = len(writes.appended)
            positions.extend([position] * count)
            entries.extend(self._cursor.list_position.entries(count))
            values.extend(writes.appended)
            operations.extend([Operation.PUT] * count)
        expiry_ms = self._expiry_ms(positions)
        changes.add(self._state, self._codec, self._cursor.keys, positions, entries, values, operations, expiry_ms)


@dataclass
class _MapWrites:
    is_cleared: bool = False
    puts: dict[bytes, Row | None] = field(default_factory=dict)
    """Held; None is a removed entry."""


class MapState(KeyedState):
    """A map from tuples to tuples per key; large maps are read entry by entry."""

    def __init__(
        self,
        cursor: KeyCursor,
        state: StateDescriptor,
        codec: RowCodec,
        entry_codec: RowCodec,
        to_row: Callable[[Row], Any],
        ttl: Ttl | None = None,
    ) -> None:
        super().__init__(cursor, state, codec, ttl)
        self._keys = MapKeyCodec(entry_codec)
        self._to_row = to_row

    def open(self) -> None:
        self._stored = EntryWindow(self._cursor, self._state, self._codec)
        self._writes: defaultdict[int, _MapWrites] = defaultdict(_MapWrites)

    def exists(self) -> bool:
        """Whether the map has an entry."""
        return bool(self._entries())

    def getValue(self, key: Row) -> Any:
        """The value of a map key; None if the map does not have it."""
        row = self._lookup(self._keys.encode(key))
        return None if row is None else self._to_row(self._codec.copied(row))

    def containsKey(self, key: Row) -> bool:
        """Whether the map has a key."""
        return self._lookup(self._keys.encode(key)) is not None

    def updateValue(self, key: Row, value: Row) -> None:
        """Set the value of a map key."""
        entry = self._keys.encode(key)
        self._writes[self._require()].puts[entry] = self._codec.hold(value)

    def removeKey(self, key: Row) -> None:
        """Remove a map key."""
        entry = self._keys.encode(key)
        self._writes[self._require()].puts[entry] = None

    def clear(self) -> None:
        """Remove all map keys."""
        self._writes[self._require()] = _MapWrites(is_cleared=True)

    def iterator(self) -> Iterator[tuple[Row, Row]]:
        """Pairs of map key and value, as they are now; later changes do not show."""
        self._renew_all()
        pairs = self._entries().items()
        return iter([(self._keys.decode(entry), self._codec.copied(row)) for entry, row in pairs])

    def keys(self) -> Iterator[Row]:
        """The map keys, as they are now."""
        self._renew_all()
        return iter([self._keys.decode(entry) for entry in self._entries()])

    def values(self) -> Iterator[Row]:
        """The values, as they are now."""
        self._renew_all()
        return iter([self._codec.copied(row) for row in self._entries().values()])

    def _lookup(self, entry: bytes) -> Row | None:
        position = self._require()
        writes = self._writes.get(position)
        if writes is not None:
            written: Row | None = writes.puts.get(entry, MISSING)
            if written is not MISSING:
                return None if written is None else self._codec.read_held(written)
            if writes.is_cleared:
                return None
        row = self._stored.get(position, entry)
        if self._renews and row is not None:
            self._writes[self._require()].puts[entry] = row
        return row

    def _entries(self) -> dict[bytes, Row]:
        position = self._require()
        writes = self._writes.get(position)
        if writes is None:
            return self._stored.of(position)
        merged = {} if writes.is_cleared else dict(self._stored.of(position))
        for entry, row in writes.puts.items():
            if row is None:
                merged.pop(entry, None)
            else:
                merged[entry] = self._codec.read_held(row)
        return merged

    def _renew_all(self) -> None:
        if self._renews:
            self._writes[self._require()].puts |= self._entries()

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
        expiry_ms = self._expiry_ms(positions)
        changes.add(self._state, self._codec, self._cursor.keys, positions, entries, values, operations, expiry_ms)
