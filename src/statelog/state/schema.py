"""Descriptions of states: name, kind and the types of their values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec
import pyarrow as pa

__all__ = ["StateDescriptor", "StateKind", "StateSchema", "decode_schema", "encode_schema"]


class StateKind(StrEnum):
    """The kinds of keyed state."""

    VALUE = "value"
    LIST = "list"
    MAP = "map"


class StateSchema(msgspec.Struct, frozen=True):
    """A state's description as it is stored.

    Parameters
    ----------
    name : str
        The state's name, unique in its operator.
    kind : str
        ``value``, ``list`` or ``map``.
    entry_schema : bytes
        Arrow IPC schema message of the map key's fields; empty for other kinds.
    value_schema : bytes
        Arrow IPC schema message of the value's fields.
    """

    name: str
    kind: str
    entry_schema: bytes
    value_schema: bytes


@dataclass(frozen=True)
class StateDescriptor:
    """A state's description in memory.

    Parameters
    ----------
    name : str
        The state's name, unique in its operator.
    kind : StateKind
        What kind of state it is.
    value_schema : pyarrow.Schema
        Fields of the value.
    entry_schema : pyarrow.Schema or None
        Fields of the map key; None for other kinds.
    """

    name: str
    kind: StateKind
    value_schema: pa.Schema
    entry_schema: pa.Schema | None = None

    def to_stored(self) -> StateSchema:
        """The description as it is stored."""
        entry = b"" if self.entry_schema is None else encode_schema(self.entry_schema)
        return StateSchema(self.name, str(self.kind), entry, encode_schema(self.value_schema))

    @classmethod
    def from_stored(cls, stored: StateSchema) -> StateDescriptor:
        """The description that was stored."""
        entry = decode_schema(stored.entry_schema) if stored.entry_schema else None
        return cls(stored.name, StateKind(stored.kind), decode_schema(stored.value_schema), entry)

    def __str__(self) -> str:
        fields = ", ".join(f"{field.name} {field.type}" for field in self.value_schema)
        if self.entry_schema is None:
            return f"{self.kind} state '{self.name}' ({fields})"
        keys = ", ".join(f"{field.name} {field.type}" for field in self.entry_schema)
        return f"{self.kind} state '{self.name}' ({keys}) to ({fields})"


def encode_schema(schema: pa.Schema) -> bytes:
    """Encode a schema as an Arrow IPC message, without its metadata."""
    return bytes(schema.remove_metadata().serialize())


def decode_schema(data: bytes) -> pa.Schema:
    """Decode a schema from an Arrow IPC message."""
    return pa.ipc.read_schema(pa.py_buffer(data))
