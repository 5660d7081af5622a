"""Spark's key hash of a row, its ``xxhash64``, and how it decides which subtask owns a key at any parallelism.

The assignment is Flink's (FLIP-8 and KeyGroupRangeAssignment): ``subtask = key group * parallelism // 32768``. The key
group is the top 15 bits of the key hash. So a subtask owns one contiguous range of hashes, and the same sorted files
serve every parallelism.

The hash is XXH64 with seed 42, where the hash of each column is the seed of the next, null leaves the hash unchanged,
and nested values are hashed element by element. A map is hashed as the array of its entries sorted by key, as in
:func:`statelog.spark.plan.plan.key_hash`. One difference remains: map keys that are strings of several lengths are
sorted differently here, so such a map has another hash than in Spark. Equal maps still have equal hashes.
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from msgspec import Meta

from statelog.runs.column_values import ColumnValues
from statelog.runs.keys import KeyCodec

Hashes = npt.NDArray[np.uint64]

KEY_GROUPS: Final = 32_768
"""Number of key groups, and therefore the highest parallelism."""

_HASH_BITS: Final = 64
_GROUP_BITS: Final = 15
GROUP_SHIFT: Final = _HASH_BITS - _GROUP_BITS


@dataclass(frozen=True, slots=True)
class HashRange:
    """Key hashes from `first` to `last`, both included."""

    first: int
    last: int


def hash_range(subtask: int, parallelism: int) -> HashRange:
    """Hashes that a subtask (0 to `parallelism` - 1) owns; `parallelism` is 1 to 32,768."""
    first_group = -(-subtask * KEY_GROUPS // parallelism)
    end_group = -(-(subtask + 1) * KEY_GROUPS // parallelism)
    return HashRange(first_group << GROUP_SHIFT, (end_group << GROUP_SHIFT) - 1)


def subtasks_of(hashes: Hashes, parallelism: int) -> npt.NDArray[np.int64]:
    """Subtask that owns each hash."""
    groups = (hashes >> np.uint64(GROUP_SHIFT)).astype(np.int64)
    return groups * parallelism // KEY_GROUPS


# ---- Ranges of numbers in stored documents: a decoder refuses a document with a number outside ----


Natural = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""A count, a size or a place."""
Parallelism = Annotated[int, Meta(ge=1, le=KEY_GROUPS)]
KeyHash = Annotated[int, Meta(ge=0)]


_Hash = Callable[[int, Any], int]
"""Hashes a value with a seed, which is the first argument."""

_SEED: Final = 42
_LONG_DECIMAL_DIGITS: Final = 18
_NAN: Final = {"<d": b"\0\0\0\0\0\0\xf8\x7f", "<f": b"\0\0\xc0\x7f"}
_EPOCH: Final = datetime.datetime(1970, 1, 1)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)


def row_hashes(columns: Sequence[pa.Array]) -> Hashes:
    """Hash the rows of columns of one length n as Spark's ``xxhash64`` does; the result has shape (n,)."""
    hashes = [_SEED] * len(columns[0])
    for column in columns:
        hash_value = _hasher(column.type)
        hashes = [hash_value(seed, value) for seed, value in zip(hashes, ColumnValues().of(column), strict=True)]
    return np.array(hashes, np.uint64)


def _hasher(kind: pa.DataType) -> _Hash:
    hash_present = _present_hasher(kind)
    return lambda seed, value: seed if value is None else hash_present(seed, value)


def _present_hasher(kind: pa.DataType) -> _Hash:
    if pa.types.is_struct(kind):
        return _struct_hasher(kind)
    if pa.types.is_list(kind):
        hash_element = _hasher(kind.value_type)
        return lambda seed, values: reduce(hash_element, values, seed)
    if pa.types.is_map(kind):
        return _map_hasher(kind)
    to_bytes = _encoder(kind)
    return lambda seed, value: xxhash.xxh64_intdigest(to_bytes(value), seed)


def _encoder(kind: pa.DataType) -> Callable[[Any], bytes]:
    """Encodes a value to the bytes that Spark hashes."""
    if pa.types.is_string(kind):
        return lambda value: bytes(value.encode())
    if pa.types.is_binary(kind):
        return bytes
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return struct.Struct("<q" if kind == pa.int64() else "<i").pack
    if pa.types.is_floating(kind):
        form = "<d" if kind == pa.float64() else "<f"
        return lambda value: struct.pack(form, value + 0.0) if value == value else _NAN[form]
    if pa.types.is_decimal(kind):
        return _decimal_encoder(kind)
    if pa.types.is_date32(kind):
        return lambda value: struct.pack("<i", (value - _EPOCH.date()).days)
    if pa.types.is_timestamp(kind):
        return lambda value: struct.pack("<q", _microseconds(value))
    if pa.types.is_duration(kind):
        return lambda value: struct.pack("<q", value // _MICROSECOND)
    if pa.types.is_time64(kind):
        return lambda value: struct.pack("<q", _nanoseconds(value))
    raise AssertionError(f"{kind} was refused as a key")


def _microseconds(value: datetime.datetime) -> int:
    plain = value if value.tzinfo is None else value.astimezone(datetime.UTC).replace(tzinfo=None)
    return (plain - _EPOCH) // _MICROSECOND


def _nanoseconds(value: datetime.time) -> int:
    seconds = (value.hour * 60 + value.minute) * 60 + value.second
    return (seconds * 1_000_000 + value.microsecond) * 1000


def _decimal_encoder(kind: pa.Decimal128Type) -> Callable[[Decimal], bytes]:
    if kind.precision <= _LONG_DECIMAL_DIGITS:
        return lambda value: struct.pack("<q", _unscaled(value, kind.scale))

    def encode(value: Decimal) -> bytes:
        unscaled = _unscaled(value, kind.scale)
        # Like Java's BigInteger.toByteArray: the fewest bytes that hold the number and its sign.
        size = (unscaled if unscaled >= 0 else ~unscaled).bit_length() // 8 + 1
        return unscaled.to_bytes(size, "big", signed=True)

    return encode


def _unscaled(value: Decimal, scale: int) -> int:
    numerator, denominator = value.as_integer_ratio()
    return int(numerator * 10**scale // denominator)


def _struct_hasher(kind: pa.StructType) -> _Hash:
    fields = [(field.name, _hasher(field.type)) for field in kind.fields]

    def hash_value(seed: int, value: dict[str, Any]) -> int:
        for name, hash_field in fields:
            seed = hash_field(seed, value[name])
        return seed

    return hash_value


def _map_hasher(kind: pa.MapType) -> _Hash:
    hash_key, hash_item = _hasher(kind.key_type), _hasher(kind.item_type)
    order = KeyCodec(pa.schema([("key", kind.key_type)]))

    def hash_value(seed: int, pairs: Sequence[tuple[Any, Any]]) -> int:
        for key, item in sorted(pairs, key=lambda pair: order.encode((pair[0],))):
            seed = hash_item(hash_key(seed, key), item)
        return seed

    return hash_value
