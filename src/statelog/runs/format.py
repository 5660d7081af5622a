"""The parts of a run, for writer and reader; ``docs/format.md`` specifies the byte layout."""

from __future__ import annotations

import struct
from bisect import bisect_right
from enum import IntEnum
from typing import Final

import msgspec
import pyarrow as pa

from statelog.runs.key_groups import KeyHash, Natural
from statelog.runs.schema import StateDescriptor, StateKind, StateSchema

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

    Eighths tell a merge how much it would leave out, without a look at the rows.
    """

    def expired_rows(self, now_ms: int) -> int:
        """At least so many rows have expired."""
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
