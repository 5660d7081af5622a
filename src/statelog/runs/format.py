"""What runs consist of, for their writer and their reader; the byte layout is specified in ``docs/format.md``."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import msgspec
import pyarrow as pa

from statelog.runs.schema import StateDescriptor, StateKind, StateSchema

MAGIC: Final = b"SLRUN\x00\x00\x02"
MAGIC_WITHOUT_EXPIRY: Final = b"SLRUN\x00\x00\x01"
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
EXPIRY_COLUMN: Final = 4
"""Index of the column that says from when on a put no longer counts, in milliseconds; null is never."""
VALUE_COLUMN: Final = len(_COLUMNS)
"""Index of the first value column of a batch of changes."""


class Operation(IntEnum):
    """What a row does to the entry that it names."""

    PUT = 0
    DELETE = 1
    CLEAR = 2
    """Removes all entries of the key that older runs hold; sorts before the key's other rows."""


class StoredBlock(msgspec.Struct, frozen=True, array_like=True):
    state: int
    offset: int
    length: int
    rows: int
    first_hash: int
    last_hash: int
    checksum: int
    size_bytes: int = 0
    """As columns, without compression; 0 in older runs, which do not say."""


class Footer(msgspec.Struct, frozen=True):
    states: list[StateSchema]
    blocks: list[StoredBlock]


def change_schema(state: StateDescriptor) -> pa.Schema:
    """Columns of a state's changes: hash, key, entry, operation, expiry and the value's fields.

    Timers have one more: the rows of a block in the order of their times, which the writer fills in.
    """
    values = [pa.field(f"v{i}", field.type) for i, field in enumerate(state.value_schema)]
    order = [pa.field("by_time", pa.uint32())] if state.kind is StateKind.TIMER else []
    return pa.schema(_COLUMNS + values + order)
