"""Canonical bytes of keys: equal keys have equal bytes, however they are encoded.

A key of several fields is the concatenation of its fields. A field is a null byte ``00``, or ``01`` followed by its
value: integers, dates and times big-endian with the sign bit flipped, floats as IEEE 754 big-endian with ``-0.0`` as
``0.0`` and one NaN, booleans as one byte, decimals as 16 bytes like integers, strings and binaries as a 4-byte
big-endian length and the bytes. A struct is its fields. An array is its 4-byte big-endian length and its elements, and
so is a map, with its entries sorted by their bytes.

The grouping keys of a batch are encoded column by column, the keys of map entries one by one.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from statelog.errors import ConfigurationError, ErrorKind
from statelog.runs.key_columns import encode_column, is_time, is_variable, join
from statelog.runs.key_values import field_decoder, field_encoder

_CACHE_LIMIT: Final = 100_000


class KeyCodec:
    """Encodes and decodes keys of one schema; ConfigurationError if the type of a field cannot be a key.

    `purpose` stands before a field's name in that error, as in "map key of state 'x'". `with_maps` allows fields that
    are or contain maps.
    """

    def __init__(self, schema: pa.Schema, purpose: str = "grouping column", *, with_maps: bool = True) -> None:
        self.schema = schema
        for field in schema:
            if not _is_supported(field.type, with_maps=with_maps):
                raise ConfigurationError(
                    f"{purpose} '{field.name}' has type {field.type}, which cannot be a key.",
                    kind=ErrorKind.UNSUPPORTED_KEY_TYPE,
                    hint="Use booleans, numbers, strings, binaries, dates or times, or structs and arrays of them;"
                    " cast other types, or group by their fields.",
                )
        self._encoders = [field_encoder(field.type) for field in schema]
        self._decoders = [field_decoder(field.type) for field in schema]
        self._has_nested = any(pa.types.is_nested(field.type) for field in schema)
        self._decoded: dict[bytes, tuple[Any, ...]] = {}

    def encode_columns(self, columns: list[pa.Array]) -> pa.Array:
        """Encode n keys, given as a column of length n per field, into a binary column of length n."""
        return join([part for column in columns for part in encode_column(column)])

    def encode(self, key: tuple[Any, ...]) -> bytes:
        """Encode one key of values as Arrow gives them: structs as dicts, arrays as lists."""
        return b"".join([encode(value) for encode, value in zip(self._encoders, key, strict=True)])

    def decode(self, data: bytes) -> tuple[Any, ...]:
        """Decode one key into values as Arrow gives them: structs as dicts, maps as lists of pairs."""
        if self._has_nested:
            return self._decode(data)  # not cached: the caller may change lists and dicts
        key = self._decoded.get(data)
        if key is None:
            if len(self._decoded) >= _CACHE_LIMIT:
                self._decoded.clear()
            key = self._decoded[data] = self._decode(data)
        return key

    def _decode(self, data: bytes) -> tuple[Any, ...]:
        values: list[Any] = []
        at = 0
        for decode in self._decoders:
            value, at = decode(data, at)
            values.append(value)
        return tuple(values)


def _is_supported(kind: pa.DataType, *, with_maps: bool) -> bool:
    if pa.types.is_struct(kind):
        return all(_is_supported(field.type, with_maps=with_maps) for field in kind.fields)
    if pa.types.is_list(kind):
        return _is_supported(kind.value_type, with_maps=with_maps)
    if pa.types.is_map(kind):
        return with_maps and all(_is_supported(part, with_maps=True) for part in (kind.key_type, kind.item_type))
    return bool(
        pa.types.is_null(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_signed_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal128(kind)
        or is_variable(kind)
        or is_time(kind)
    )
