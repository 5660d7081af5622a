"""States with many entries per key: lists and maps."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.changes import ChangeBuffer
from statelog.operators.keyed.cursor import EntryWindow, KeyCursor, Row
from statelog.operators.keyed.operator import StateBinding
from statelog.operators.keyed.values import MISSING, AggregatingState, KeyedState, ReducingState, ValueState
from statelog.runs.keys import MapKeyCodec
from statelog.runs.schema import Operation, StateDescriptor, StateKind
from statelog.runs.times import Ttl
from statelog.runs.values import RowCodec
from statelog.shown import shown_value

# Python 3.11 takes longer to look up a member of an enumeration than to append it to a list.
_PUT, _DELETE, _CLEAR = Operation.PUT, Operation.DELETE, Operation.CLEAR


class _EntryChanges:
    """Changes of entries in the order of a run, which are handed on together or, of large keys, in parts."""

    def __init__(self, add: Callable[[list[int], list[bytes], list[Row | None], list[int]], None]) -> None:
        self._add = add
        self._begin()

    def _begin(self) -> None:
        self.positions: list[int] = []
        self.entries: list[bytes] = []
        self.values: list[Row | None] = []
        self.operations: list[int] = []

    def put(self, position: int, entries: Collection[bytes], values: Iterable[Row]) -> None:
        """Add entries of a key."""
        count = len(entries)
        self.positions.extend([position] * count)
        self.entries.extend(entries)
        self.values.extend(values)
        self.operations.extend([_PUT] * count)

    def add(self, position: int, entry: bytes, value: Row | None, operation: Operation) -> None:
        """Add one change."""
        self.positions.append(position)
        self.entries.append(entry)
        self.values.append(value)
        self.operations.append(operation)

    def hand_on(self) -> None:
        """Add the changes so far to those of the batch."""
        self._add(self.positions, self.entries, self.values, self.operations)
        self._begin()


class _CollectionState(KeyedState):
    """A state with many entries per key."""

    def open(self) -> None:
        self._stored = EntryWindow(self._cursor, self._state, self._codec)

    def _changes(self, changes: ChangeBuffer) -> _EntryChanges:
        """Collects the changes that flushing makes, with their expiry."""

        def add(positions: list[int], entries: list[bytes], values: list[Row | None], operations: list[int]) -> None:
            keys, expiry_ms = self._cursor.keys, self._expiry_ms(positions)
            changes.add(self._state, self._codec, keys, positions, entries, values, operations, expiry_ms)

        return _EntryChanges(add)


@dataclass
class _ListWrites:
    is_cleared: bool = False
    is_renewed: bool = False
    appended: list[Row] = field(default_factory=list)
    """Held rows."""


class ListState(_CollectionState):
    """A list of elements per key; appending reads nothing."""

    def open(self) -> None:
        super().open()
        self._writes: defaultdict[int, _ListWrites] = defaultdict(_ListWrites)

    def exists(self) -> bool:
        """Whether the list has an element."""
        position = self._require()
        writes = self._writes.get(position)
        if writes is not None and (writes.appended or writes.is_cleared):
            return bool(writes.appended)
        return (
            self._stored.has_entries(position) if self._is_paged(position, writes) else bool(self._stored.of(position))
        )

    def get(self) -> Iterator[Row]:
        """The elements in order, as they are now; later changes do not show."""
        position = self._require()
        if self._renews:
            self._writes[position].is_renewed = True
        writes = self._writes.get(position)
        if self._is_paged(position, writes):
            appended = [] if writes is None else writes.appended.copy()
            stored = (row for page in self._stored.pages(position) for _, row in page)
            return itertools.chain(stored, map(self._codec.read_held, appended))
        return iter(self._elements(position, writes))

    def put(self, newState: Iterable[Row]) -> None:
        """Replace all elements; the new list must have at least one."""
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
                f"{self._codec.subject}: {method}() takes a list with at least one tuple, not {shown_value(rows)}.",
                kind=ErrorKind.STATE_USAGE,
                hint="Use clear() to empty a list, or appendValue() for a single element.",
            )
        return held

    def _is_paged(self, position: int, writes: _ListWrites | None) -> bool:
        return not (writes is not None and writes.is_cleared) and self._stored.is_large(position)

    def _elements(self, position: int, writes: _ListWrites | None) -> list[Row]:
        is_cleared = writes is not None and writes.is_cleared
        stored = [] if is_cleared else [self._codec.copied(row) for row in self._stored.of(position).values()]
        return stored if writes is None else [*stored, *map(self._codec.read_held, writes.appended)]

    def flush(self, changes: ChangeBuffer) -> None:
        made = self._changes(changes)
        for position, writes in sorted(self._writes.items()):
            if writes.is_cleared and not self._stored.is_known_empty(position):
                made.add(position, b"", None, _CLEAR)
            elif writes.is_renewed and self._is_paged(position, writes):
                for page in self._stored.pages(position):
                    made.put(position, [entry for entry, _ in page], [row for _, row in page])
                    made.hand_on()
            elif writes.is_renewed and not writes.is_cleared:
                stored = self._stored.of(position)
                made.put(position, stored, stored.values())
            if writes.appended:
                appended = writes.appended
                made.put(position, self._cursor.list_position.entries(len(appended)), appended)
        made.hand_on()


@dataclass
class _MapWrites:
    is_cleared: bool = False
    is_renewed: bool = False
    """Whether all stored entries are written again; small maps put theirs instead."""
    puts: dict[bytes, Row | None] = field(default_factory=dict)
    """Held rows; None is a removed entry. None of the keys is ever removed."""
    ordered: list[bytes] = field(default_factory=list)
    """The keys of `puts` in order, but for those since the last call of :meth:`between`."""

    def between(self, low: bytes, high: bytes) -> list[tuple[bytes, Row | None]]:
        """The writes from one entry key up to, not including, another, in order."""
        for entry in itertools.islice(reversed(self.puts), len(self.puts) - len(self.ordered)):
            insort(self.ordered, entry)
        found = self.ordered[bisect_left(self.ordered, low) : bisect_left(self.ordered, high)]
        return [(entry, self.puts[entry]) for entry in found]


class MapState(_CollectionState):
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
        super().open()
        self._writes: defaultdict[int, _MapWrites] = defaultdict(_MapWrites)

    def exists(self) -> bool:
        """Whether the map has an entry."""
        position = self._require()
        writes = self._writes.get(position)
        if self._is_paged(position, writes):
            puts = {} if writes is None else writes.puts
            return any(row is not None for row in puts.values()) or self._stored.has_entries(position, puts)
        return bool(self._entries(position, writes))

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

    def removeRange(self, first: Row | None = None, end: Row | None = None) -> None:
        """Remove the map keys of a :meth:`range`."""
        puts = self._writes[self._require()].puts
        for entry in [entry for entry, _ in self._between(first, end)]:  # without the values, which are read in pages
            puts[entry] = None

    def clear(self) -> None:
        """Remove all map keys."""
        self._writes[self._require()] = _MapWrites(is_cleared=True)

    def range(self, first: Row | None = None, end: Row | None = None) -> Iterator[tuple[Row, Row]]:
        """Pairs in order of their map keys, from one map key up to, not including, another, as they are now.

        A bound may have only the first fields of a map key; None is no bound. If a map has many entries, no others are
        read. ProcessorError if the map keys have fields of types without an order here, such as text.
        """
        found = self._between(first, end)
        if self._renews:
            found = self._renewed(self._writes[self._require()].puts, found)
        return ((self._keys.decode(entry), row) for entry, row in found)

    def iterator(self) -> Iterator[tuple[Row, Row]]:
        """Pairs of map key and value, as they are now; later changes do not show."""
        pages = self._read_all()
        if isinstance(pages, dict):
            return iter([(self._keys.decode(entry), self._codec.copied(row)) for entry, row in pages.items()])
        return ((self._keys.decode(entry), row) for entry, row in pages)

    def keys(self) -> Iterator[Row]:
        """The map keys, as they are now."""
        pages = self._read_all()
        if isinstance(pages, dict):
            return iter([self._keys.decode(entry) for entry in pages])
        return (self._keys.decode(entry) for entry, _ in pages)

    def values(self) -> Iterator[Row]:
        """The values, as they are now."""
        pages = self._read_all()
        if isinstance(pages, dict):
            return iter([self._codec.copied(row) for row in pages.values()])
        return (row for _, row in pages)

    def _between(self, first: Row | None, end: Row | None) -> Iterator[tuple[bytes, Row]]:
        """The entries of a range in order, as they are after the writes so far; their values are copies."""
        position = self._require()
        low, high = self._keys.bounds(first, end)
        writes = self._writes.get(position)
        puts = [] if writes is None else writes.between(low, high)
        is_cleared = writes is not None and writes.is_cleared
        return self._merged(iter([]) if is_cleared else self._stored.between(position, low, high), puts)

    def _merged(
        self, pages: Iterator[list[tuple[bytes, Row]]], puts: list[tuple[bytes, Row | None]]
    ) -> Iterator[tuple[bytes, Row]]:
        for page in pages:
            if page:
                reached = bisect_right(puts, page[-1][0], key=itemgetter(0))
                written, puts = dict(puts[:reached]), puts[reached:]
                stored = [(entry, row) for entry, row in page if entry not in written]
                yield from sorted([*stored, *self._put(written.items())], key=itemgetter(0)) if written else stored
        yield from self._put(puts)

    def _put(self, puts: Iterable[tuple[bytes, Row | None]]) -> Iterator[tuple[bytes, Row]]:
        return ((entry, self._codec.read_held(row)) for entry, row in puts if row is not None)

    @staticmethod
    def _renewed(puts: dict[bytes, Row | None], found: Iterator[tuple[bytes, Row]]) -> Iterator[tuple[bytes, Row]]:
        for entry, row in found:
            puts.setdefault(entry, row)
            yield entry, row

    def _read_all(self) -> dict[bytes, Row] | Iterator[tuple[bytes, Row]]:
        """The entries of the map or, if it is large, an iterator that reads them in pages; its values are copies."""
        position = self._require()
        writes = self._writes.get(position)
        if not self._is_paged(position, writes):
            entries = self._entries(position, writes)
            if self._renews:
                self._writes[position].puts |= entries
            return entries
        if self._renews:
            self._writes[position].is_renewed = True
        return self._with_writes(self._stored.pages(position), {} if writes is None else writes.puts.copy())

    def _with_writes(
        self, pages: Iterator[list[tuple[bytes, Row]]], puts: dict[bytes, Row | None]
    ) -> Iterator[tuple[bytes, Row]]:
        """Stored entries as they are after the writes `puts`, which are used up; then the new ones, as in a dict."""
        for page in pages:
            for entry, row in page:
                if entry not in puts:
                    yield entry, row
                elif (written := puts.pop(entry)) is not None:
                    yield entry, self._codec.read_held(written)
        for entry, written in puts.items():
            if written is not None:
                yield entry, self._codec.read_held(written)

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

    def _is_paged(self, position: int, writes: _MapWrites | None) -> bool:
        return not (writes is not None and writes.is_cleared) and self._stored.is_large(position)

    def _entries(self, position: int, writes: _MapWrites | None) -> dict[bytes, Row]:
        if writes is None:
            return self._stored.of(position)
        merged = {} if writes.is_cleared else dict(self._stored.of(position))
        for entry, row in writes.puts.items():
            if row is None:
                merged.pop(entry, None)
            else:
                merged[entry] = self._codec.read_held(row)
        return merged

    def flush(self, changes: ChangeBuffer) -> None:
        made = self._changes(changes)
        for position, writes in sorted(self._writes.items()):
            known_empty = self._stored.is_known_empty(position)
            if writes.is_cleared and not known_empty:
                made.add(position, b"", None, _CLEAR)
            puts = sorted(writes.puts.items())
            if writes.is_renewed:
                puts = self._renew(made, position, puts)
            for entry, row in puts:
                if row is not None:
                    made.add(position, entry, row, _PUT)
                elif not writes.is_cleared and not known_empty:
                    made.add(position, entry, None, _DELETE)
        made.hand_on()

    def _renew(
        self, made: _EntryChanges, position: int, puts: list[tuple[bytes, Row | None]]
    ) -> list[tuple[bytes, Row | None]]:
        """Write the stored entries of a large map again, with those of `puts` in between; returns the rest of these."""
        for page in self._stored.pages(position):
            if page:
                reached = bisect_right(puts, page[-1][0], key=itemgetter(0))
                for entry, row in sorted({**dict(page), **dict(puts[:reached])}.items()):
                    made.add(position, entry, row, _DELETE if row is None else _PUT)
                puts = puts[reached:]
                made.hand_on()
        return puts


_WITHOUT_MAP_KEYS: Final[dict[StateKind, type[ValueState | ReducingState | AggregatingState | ListState]]] = {
    StateKind.VALUE: ValueState,
    StateKind.REDUCING: ReducingState,
    StateKind.AGGREGATING: AggregatingState,
    StateKind.LIST: ListState,
}


def make_row_state(cursor: KeyCursor, binding: StateBinding) -> KeyedState:
    """The state of rows of a binding."""
    descriptor, codec, ttl = binding.descriptor, binding.codec, binding.ttl
    if binding.entry_codec is not None:
        return MapState(cursor, descriptor, codec, binding.entry_codec, binding.to_row, ttl)
    return _WITHOUT_MAP_KEYS[descriptor.kind](cursor, descriptor, codec, ttl)
