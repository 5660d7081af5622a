"""The base of all state handles, and the states with one value per key: plain, reduced, aggregated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.changes import ChangeBuffer
from statelog.operators.keyed.cursor import KeyCursor, Row
from statelog.runs.schema import StateDescriptor
from statelog.runs.times import Ttl
from statelog.runs.values import RowCodec

MISSING: Final[Any] = object()
"""Stands for a key that was not written; None stands for a removed value."""


class KeyedState(ABC):
    """A state of the cursor's current key."""

    def __init__(self, cursor: KeyCursor, state: StateDescriptor, codec: RowCodec, ttl: Ttl | None = None) -> None:
        self._cursor = cursor
        self._state = state
        self._codec = codec
        self._ttl = ttl
        self._renews = ttl is not None and ttl.renew_on_read

    @abstractmethod
    def open(self) -> None:
        """Start on a new key chunk: forget everything read and written so far."""

    @abstractmethod
    def flush(self, changes: ChangeBuffer) -> None:
        """Add the changes of the key chunk to those of the batch."""

    def _require(self) -> int:
        return self._cursor.require(self._codec.subject)

    def _expiry_ms(self, positions: Sequence[int]) -> int | Sequence[int | None] | None:
        return None if self._ttl is None else self._cursor.expiry_ms(self._ttl, positions)


_Input = TypeVar("_Input")
_Result = TypeVar("_Result")


class _SingleState(KeyedState):
    """A state with one row per key."""

    def open(self) -> None:
        self._loaded: list[Row | None] | None = None
        self._writes: dict[int, Row | None] = {}  # held rows
        self._hold = self._codec.hold
        self._copied = self._codec.copied if self._codec.is_mutable else None

    def exists(self) -> bool:
        """Whether the key has a value."""
        return self._current() is not None

    def clear(self) -> None:
        """Remove the key's value."""
        self._writes[self._require()] = None

    def _read(self) -> Row | None:
        """The key's value as a tuple; None if it has none."""
        # This runs for every read of a value, so the common case is written out.
        position = self._cursor.position
        row: Any = self._writes.get(position, MISSING)
        if row is not MISSING:
            return None if row is None else self._codec.read_held(row)
        row = self._current() if self._loaded is None else self._loaded[position]
        if self._renews and row is not None:
            self._writes[position] = row
        return row if row is None or self._copied is None else self._copied(row)

    def _write(self, newValue: Row) -> None:
        """Replace the key's value."""
        position = self._cursor.position
        if position < 0:
            self._require()
        self._writes[position] = self._hold(newValue)

    def _function_of(self, aggregate: ReadyMade) -> AggregateFunction[Any, Any]:
        return aggregate.row_function(self._state.value_schema[0].type)

    def _current(self) -> Row | None:
        position = self._cursor.position
        row: Row | None = self._writes.get(position, MISSING)
        if row is not MISSING:
            return row
        if self._loaded is None:
            self._require()
            self._loaded = self._load()
        return self._loaded[position]

    def _load(self) -> list[Row | None]:
        found = self._cursor.table_of(self._state).get_many(self._state, self._cursor.keys)
        self._cursor.loaded_bytes += found.values.nbytes
        rows = self._codec.decode(found.values)
        live = self._cursor.live_rows(self._state, found.expiry)
        if len(rows) == len(self._cursor.keys) and live is None:
            return list(rows)
        loaded: list[Row | None] = [None] * len(self._cursor.keys)
        for index, (position, row) in enumerate(zip(found.positions.tolist(), rows, strict=True)):
            if live is None or live[index]:
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
        expiry_ms = self._expiry_ms(positions)
        changes.add(self._state, self._codec, self._cursor.keys, positions, None, values, expiry_ms=expiry_ms)


class ValueState(_SingleState):
    """One value per key."""

    # No calls in between: these run for every read and write of a value.
    get = _SingleState._read
    update = _SingleState._write


class ReducingState(_SingleState):
    """One value per key, reduced from all added values.

    Made by ``handle.getReducingState(name, schema, reduce_function)``. The function takes the value so far and the
    added one, both tuples of the schema, and returns the next; it should be associative. For a schema with one field,
    it may also be a ready-made aggregate: ``statelog.Sum``, ``Min`` or ``Max`` of that field. Flink's ReducingState.
    """

    _reduce: Callable[[Row, Row], Row]

    def get(self) -> Row | None:
        """The reduced value; None if nothing was added."""
        return self._read()

    def add(self, value: Row) -> None:
        """Reduce one more value into the state."""
        held = self._read()
        self._write(value if held is None else self._reduce(held, self._codec.normalize(value)))

    def bind(self, reduce: Callable[[Row, Row], Row] | ReadyMade) -> None:
        """Set the function; called once, before the first key."""
        self._reduce = self._function_of(reduce).merge if isinstance(reduce, ReadyMade) else reduce


class AggregateFunction(ABC, Generic[_Input, _Result]):
    """Adds values to an accumulator, and computes a result from it; Flink's AggregateFunction.

    The accumulator is a tuple of the state's schema. ``merge`` is needed for session and sliding windows only.
    """

    @abstractmethod
    def createAccumulator(self) -> Row:
        """An accumulator without values."""

    @abstractmethod
    def add(self, value: _Input, accumulator: Row) -> Row:
        """The accumulator with one more value; the given accumulator must not be changed."""

    @abstractmethod
    def getResult(self, accumulator: Row) -> _Result:
        """The result of an accumulator."""

    def merge(self, one: Row, other: Row) -> Row:
        """An accumulator of the values of both. Must be associative, and must not change the given accumulators."""
        raise ProcessorError(
            f"{type(self).__name__} does not define how accumulators are merged.",
            kind=ErrorKind.STATE_USAGE,
            hint="Implement merge(one, other); session windows need it.",
        )


@runtime_checkable
class ReadyMade(Protocol):
    """An aggregate that users name instead of writing a function, such as ``statelog.Sum("x")``."""

    def row_function(self, kind: pa.DataType) -> AggregateFunction[Any, Any]:
        """The aggregate of one value at a time; `kind` is the type of the accumulator's first field."""


class AggregatingState(_SingleState):
    """An accumulator per key; the values that are added to it may have another type.

    Made by ``handle.getAggregatingState(name, accumulator_schema, aggregate_function)``. The function may also be a
    ready-made aggregate: ``statelog.Count``, ``Sum``, ``Min``, ``Max`` or ``Mean``. Flink's AggregatingState.
    """

    _function: AggregateFunction[Any, Any]

    def get(self) -> Any:
        """The result of all added values; None if nothing was added."""
        held = self._read()
        return None if held is None else self._function.getResult(held)

    def add(self, value: Any) -> None:
        """Add a value to the accumulator."""
        held = self._read()
        self._write(self._function.add(value, self._function.createAccumulator() if held is None else held))

    def getAccumulator(self) -> Row | None:
        """The accumulator itself; None if nothing was added."""
        return self._read()

    def mergeAccumulator(self, accumulator: Row) -> None:
        """Merge another accumulator into this one."""
        held = self._read()
        self._write(accumulator if held is None else self._function.merge(held, accumulator))

    def bind(self, function: AggregateFunction[Any, Any] | ReadyMade) -> None:
        """Set the function; called once, before the first key."""
        self._function = self._function_of(function) if isinstance(function, ReadyMade) else function
