"""Descriptions of states, and the parts of a run; ``docs/format.md`` specifies the byte layout."""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

import msgspec
import pyarrow as pa

from statelog.errors import CorruptionError, ErrorKind
from statelog.runs.arrow_messages import require_plain
from statelog.runs.key_groups import KeyHash, Natural

_GENERATION: Final = re.compile(r"\$(\d+)\$(.*)", re.DOTALL)


class StateKind(StrEnum):
    """The kinds of keyed state."""

    VALUE = "value"
    LIST = "list"
    MAP = "map"
    REDUCING = "reducing"
    AGGREGATING = "aggregating"
    TIMER = "timer"
    """The timers of an operator: an entry per key and time."""

    @property
    def has_entries(self) -> bool:
        """Whether a key may have several rows, one per entry."""
        return self in (StateKind.LIST, StateKind.MAP, StateKind.TIMER)


class StateLife(StrEnum):
    """How long a state keeps its values: forever, unless ``init`` also deletes it."""

    KEPT = "kept"
    BATCH = "batch"
    """``init`` deletes it, then declares it: every batch begins without values."""
    NONE = "none"
    """``init`` declares it, then deletes it: it cannot be used."""


class TimeDomain(StrEnum):
    """The clock that counts: the processing time of batches, or the watermark."""

    PROCESSING = "processing"
    EVENT = "event"


class StateSchema(msgspec.Struct, frozen=True):
    """A state's description as it is stored."""

    name: str
    """Unique in the operator."""
    kind: str
    """A :class:`StateKind`."""
    entry_schema: bytes
    """Arrow IPC schema message of the map key's fields; empty for other kinds."""
    value_schema: bytes
    """Arrow IPC schema message of the value's fields."""
    expires_by: str = ""
    """The :class:`TimeDomain` that rows expire by; empty if they never do."""


@dataclass(frozen=True)
class StateDescriptor:
    """A state's description in memory."""

    name: str
    """Unique in the operator."""
    kind: StateKind
    value_schema: pa.Schema
    entry_schema: pa.Schema | None = None
    """Fields of the map key; None for other kinds."""
    expires_by: TimeDomain | None = field(default=None, compare=False)
    """The clock that rows expire by; None if they never do.

    It may differ from run to run, so comparisons ignore it.
    """

    def to_stored(self) -> StateSchema:
        """Encode the description for storage."""
        entry = b"" if self.entry_schema is None else encode_schema(self.entry_schema)
        return StateSchema(self.name, str(self.kind), entry, encode_schema(self.value_schema), self.expires_by or "")

    @classmethod
    def from_stored(cls, stored: StateSchema) -> StateDescriptor:
        """Decode a stored description; raises CorruptionError if it is malformed."""
        with reading_description(stored.name):
            entry = decode_schema(stored.entry_schema) if stored.entry_schema else None
            expires_by = TimeDomain(stored.expires_by) if stored.expires_by else None
            kind = StateKind(stored.kind)
        return cls(stored.name, kind, decode_schema(stored.value_schema), entry, expires_by)

    def __str__(self) -> str:
        return described(self.kind, self.name, self.value_schema, self.entry_schema)


def described(kind: str, name: str, values: pa.Schema, entry: pa.Schema | None) -> str:
    """A state for messages, with its fields."""
    schemas = [values] if entry is None else [entry, values]
    fields = (", ".join(f"{field.name} {field.type}" for field in schema) for schema in schemas)
    return f"{kind} state '{name}' ({') to ('.join(fields)})"


def stored_name(name: str, generation: int) -> str:
    """The name of a state in runs, after it was deleted and declared anew `generation` times.

    Rows of a deleted state stay in runs until these are merged, so the new name must not find them.
    """
    return name if generation == 0 else f"${generation}${name}"


def plain_name(stored: str) -> str:
    """The declared name of a state, from its name in runs."""
    found = _GENERATION.fullmatch(stored)
    return found[2] if found else stored


def is_deleted(stored: str, generations: Mapping[str, int]) -> bool:
    """Whether a stored name is of an earlier generation than the current one."""
    found = _GENERATION.fullmatch(stored)
    name, generation = (found[2], int(found[1])) if found else (stored, 0)
    return generation < generations.get(name, 0)


def encode_schema(schema: pa.Schema) -> bytes:
    """Encode a schema as an Arrow IPC message, without its metadata."""
    return bytes(schema.remove_metadata().serialize())


def decode_schema(data: bytes) -> pa.Schema:
    """Decode a schema from an Arrow IPC message; CorruptionError if it is malformed, or has types that are code."""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
        require_plain(schema)
    except (pa.ArrowException, OSError, EOFError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unknown("A stored schema", error) from None
    return schema


@contextmanager
def reading_description(name: str) -> Iterator[None]:
    """Report as damage a value that the description of a state cannot have."""
    try:
        yield
    except CorruptionError:
        raise
    except ValueError as error:
        raise _unknown(f"The stored description of state '{name}'", error) from None


def _unknown(what: str, error: Exception) -> CorruptionError:
    return CorruptionError(
        f"{what} is of an unknown form: {type(error).__name__}: {error}.",
        kind=ErrorKind.FORMAT,
        hint="Restore the file from a copy, or use the version of statelog that wrote it, which may be a newer one.",
    )


MAGIC: Final = b"SLRUN\x00\x00\x01"
TAIL: Final = struct.Struct("<IQ4s")
TAIL_MAGIC: Final = b"SLR1"
ALIGNMENT: Final = 64
_COLUMNS: Final = [
    pa.field("hash", pa.uint64(), nullable=False),
    pa.field("key", pa.binary(), nullable=False),
    pa.field("entry", pa.binary(), nullable=False),
    pa.field("op", pa.uint8(), nullable=False),
    pa.field("expiry", pa.int64()),
]
EIGHTHS: Final = 8
ENTRY_COLUMN: Final = 2
"""Index of the column of entry keys; before it are the hashes and the keys."""
EXPIRY_COLUMN: Final = 4
"""Index of the expiry column: the time in milliseconds from which a put no longer counts; null is never."""
VALUE_COLUMN: Final = len(_COLUMNS)
"""Index of the first value column of a batch of changes."""
ORDER_COLUMN: Final = "by_time"
"""Name of the last column of timers."""


class Operation(IntEnum):
    """The effect of a row on the entry that it names."""

    PUT = 0
    DELETE = 1
    CLEAR = 2
    """Removes all entries of the key that older runs hold; sorts before the key's other rows."""


class StoredBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block, as the footer lists it."""

    state: int
    """Index in the states of the footer."""
    offset: Natural
    length: Natural
    rows: Natural
    first_hash: KeyHash
    last_hash: KeyHash
    checksum: int
    size_bytes: Natural
    """Size of the columns without compression."""
    expiries: list[int] = []
    """The times by which one, two and more eighths of the rows expire, rounded up; ends before the first that never do.

    From the eighths, a merge knows how much it would leave out, without a look at the rows.
    """

    def expired_rows(self, now_ms: int) -> int:
        """The number of rows that have expired at least."""
        return -(-self.rows * bisect_right(self.expiries, now_ms) // EIGHTHS)


class Footer(msgspec.Struct, frozen=True):
    """The states of a run, and its blocks."""

    states: list[StateSchema]
    blocks: list[StoredBlock]


def change_schema(state: StateDescriptor) -> pa.Schema:
    """Columns of a state's changes: hash, key, entry, operation, expiry and the value's fields.

    Timers have one more, which the writer fills in: the rows of a block in order of their times.
    """
    values = [pa.field(f"v{i}", field.type) for i, field in enumerate(state.value_schema)]
    order = [pa.field(ORDER_COLUMN, pa.uint32())] if state.kind is StateKind.TIMER else []
    return pa.schema(_COLUMNS + values + order)
