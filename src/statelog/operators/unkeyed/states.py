"""The state handles of unkeyed operators: list, union list and broadcast state."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import pyarrow as pa

from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.unkeyed.snapshot import Elements, StateElements, join_elements, section_schema
from statelog.runs.byte_slices import MAX_COLUMN_BYTES, to_array
from statelog.runs.keys import MapKeyCodec
from statelog.runs.schema import StateSchema, decode_schema, described, encode_schema, reading_description
from statelog.runs.values import RowCodec
from statelog.shown import shown_key, shown_value

Row = tuple[Any, ...]

_CHUNK_ELEMENTS: Final = 256


class OperatorStateMode(StrEnum):
    """How a restart deals out the elements of an unkeyed state to the subtasks."""

    LIST = "operator-list"
    UNION = "operator-union"
    BROADCAST = "operator-broadcast"


@dataclass(frozen=True)
class OperatorStateDescriptor:
    """A state's description in memory."""

    name: str
    """Unique in the operator."""
    mode: OperatorStateMode
    value_schema: pa.Schema
    """Fields of an element, or of a broadcast state's values."""
    entry_schema: pa.Schema | None = None
    """Fields of a broadcast state's keys."""

    def to_stored(self) -> StateSchema:
        """The description as it is stored."""
        entry = b"" if self.entry_schema is None else encode_schema(self.entry_schema)
        return StateSchema(self.name, str(self.mode), entry, encode_schema(self.value_schema))

    @classmethod
    def from_stored(cls, stored: StateSchema) -> OperatorStateDescriptor:
        """The description that was stored; raises CorruptionError if it is not one."""
        entry = decode_schema(stored.entry_schema) if stored.entry_schema else None
        with reading_description(stored.name):
            mode = OperatorStateMode(stored.kind)
        return cls(stored.name, mode, decode_schema(stored.value_schema), entry)

    def __str__(self) -> str:
        return described(self.mode.removeprefix("operator-"), self.name, self.value_schema, self.entry_schema)


@dataclass(frozen=True)
class OperatorStateBinding:
    """A declared state, with the codecs of its elements."""

    descriptor: OperatorStateDescriptor
    codec: RowCodec
    entry_codec: RowCodec | None = None


class Stage(StrEnum):
    """The method of the processor that runs."""

    INIT = "init"
    PROCESS_BROADCAST = "processBroadcast"
    PROCESS = "process"
    CLOSE = "close"


class Phase:
    """Decides, from the method that is running, whether states may be read and written."""

    def __init__(self) -> None:
        self.stage = Stage.INIT

    def require_use(self, subject: str) -> None:
        """Raise ProcessorError outside of the methods that get rows."""
        if self.stage not in (Stage.PROCESS_BROADCAST, Stage.PROCESS):
            raise ProcessorError(
                f"{subject} was used in {self.stage}().",
                kind=ErrorKind.STATE_USAGE,
                hint="Read and write states in process() and processBroadcast(), until the last output row.",
            )

    def require_broadcast(self, subject: str) -> None:
        """Raise ProcessorError where the subtasks see different rows, which would make a broadcast state differ."""
        if self.stage is not Stage.PROCESS_BROADCAST:
            raise ProcessorError(
                f"{subject} was written in {self.stage}().",
                kind=ErrorKind.STATE_USAGE,
                hint="Write broadcast states in processBroadcast(), where every subtask gets the same rows.",
            )


class OperatorListState:
    """A list of elements of one subtask."""

    def __init__(self, state: StateSchema, codec: RowCodec, stored: Sequence[Elements], phase: Phase) -> None:
        self.is_changed = False
        """Whether it was written."""
        self._state = state
        self._codec = codec
        self._phase = phase
        self._stored = tuple(stored)
        self._written: list[Row] = []

    def get(self) -> Iterator[Row]:
        """The elements in order, as they are now; later changes do not show. They are decoded as they are read."""
        self._phase.require_use(self._codec.subject)
        written = [self._codec.copied(row) for row in self._written]
        return itertools.chain(_decoded(self._codec, self._stored), written)

    def update(self, newState: Sequence[Row]) -> None:
        """Replace all elements; an empty list removes them."""
        rows = self._normalized(newState, "update")
        self._stored, self._written = (), rows

    def add(self, value: Row) -> None:
        """Add an element at the end."""
        self._written.extend(self._normalized([value], "add"))

    def addAll(self, values: Sequence[Row]) -> None:
        """Add elements at the end."""
        self._written.extend(self._normalized(values, "addAll"))

    def clear(self) -> None:
        """Remove all elements."""
        self.update([])

    def _normalized(self, rows: Sequence[Row], method: str) -> list[Row]:
        self._phase.require_use(self._codec.subject)
        if not isinstance(rows, (list, tuple)):
            raise ProcessorError(
                f"{self._codec.subject}: {method}() takes a list of tuples, not {shown_value(rows)}.",
                kind=ErrorKind.STATE_USAGE,
                hint="Convert an iterator to a list first.",
            )
        normalized = [self._codec.normalize(row) for row in rows]
        self.is_changed = True
        return normalized

    def section(self, most_bytes: int = MAX_COLUMN_BYTES) -> StateElements:
        """The elements, encoded; raises `RowsTooLarge` if they take more than `most_bytes`."""
        if not self._written:
            return join_elements(self._state, self._stored, most_bytes)
        columns = self._codec.encode(self._written, lambda index: f"element {index}")
        rows = pa.RecordBatch.from_arrays(columns, schema=section_schema(self._state))
        added = StateElements.of(self._state, [rows], most_bytes)
        return join_elements(self._state, [*self._stored, Elements.all_of(added)], most_bytes)


def _decoded(codec: RowCodec, parts: Iterable[Elements]) -> Iterator[Row]:
    for part in parts:
        for start in range(0, part.count, _CHUNK_ELEMENTS):
            yield from codec.decode(part.rows.slice(start, _CHUNK_ELEMENTS))


class BroadcastState:
    """A map from tuples to tuples that is the same at every subtask."""

    def __init__(
        self, state: StateSchema, codec: RowCodec, entry_codec: RowCodec, stored: Sequence[Elements], phase: Phase
    ) -> None:
        self.is_changed = False
        """Whether it was written."""
        self._state = state
        self._codec = codec
        self._keys = MapKeyCodec(entry_codec)
        self._stored = tuple(stored)
        self._phase = phase
        self._loaded: dict[bytes, Row | _StoredValue] | None = None

    def get(self, key: Row) -> Row | None:
        """The value of a key; None if the map does not have it."""
        entry = self._keys.encode(key)
        return self._codec.copied(self._value(entry)) if entry in self._entries() else None

    def contains(self, key: Row) -> bool:
        """Whether the map has a key."""
        return self._keys.encode(key) in self._entries()

    def items(self) -> Iterator[tuple[Row, Row]]:
        """Pairs of key and value as they are now, in an order that is the same at every subtask."""
        entries = sorted(self._entries())
        return iter([(self._keys.decode(entry), self._codec.copied(self._value(entry))) for entry in entries])

    def put(self, key: Row, value: Row) -> None:
        """Set the value of a key."""
        self._phase.require_broadcast(self._codec.subject)
        self._entries()[self._keys.encode(key)] = self._codec.normalize(value)
        self.is_changed = True

    def remove(self, key: Row) -> None:
        """Remove a key, if the map has it."""
        self._phase.require_broadcast(self._codec.subject)
        self._entries().pop(self._keys.encode(key), None)
        self.is_changed = True

    def section(self, most_bytes: int = MAX_COLUMN_BYTES) -> StateElements:
        """The entries in order of their keys, encoded; equal maps have equal bytes.

        Raises `RowsTooLarge` if they take more than `most_bytes`.
        """
        if not self.is_changed:
            return join_elements(self._state, self._stored, most_bytes)
        entries = sorted(self._entries())
        values = [self._value(entry) for entry in entries]
        columns = [
            to_array(entries, pa.binary()),
            *self._codec.encode(values, lambda index: shown_key(self._keys.decode(entries[index]))),
        ]
        rows = pa.RecordBatch.from_arrays(columns, schema=section_schema(self._state))
        return StateElements.of(self._state, [rows], most_bytes)

    def _entries(self) -> dict[bytes, Row | _StoredValue]:
        self._phase.require_use(self._codec.subject)
        if self._loaded is None:
            self._loaded = {
                entry: _StoredValue(part, index)
                for part in self._stored
                for index, entry in enumerate(part.rows.column(0).to_pylist())
            }
        return self._loaded

    def _value(self, entry: bytes) -> Row:
        entries = self._entries()
        held = entries[entry]
        if isinstance(held, _StoredValue):
            row = held.elements.rows.slice(held.index, 1)
            [held] = self._codec.decode(row.select(range(1, row.num_columns)))
            entries[entry] = held
        return held


@dataclass(frozen=True)
class _StoredValue:
    """A value that is not decoded yet."""

    elements: Elements
    index: int


def make_state(
    binding: OperatorStateBinding, stored: Sequence[Elements], phase: Phase
) -> OperatorListState | BroadcastState:
    """The handle of a declared state, for the processor."""
    state = binding.descriptor.to_stored()
    if binding.entry_codec is None:
        return OperatorListState(state, binding.codec, stored, phase)
    return BroadcastState(state, binding.codec, binding.entry_codec, stored, phase)
