"""Canonical bytes of keys: equal keys have equal bytes, however they are encoded.

A key of several fields is the concatenation of its fields. A field is a null byte ``00``, or ``01`` followed by its
value: integers, dates and times big-endian with the sign bit flipped, floats as IEEE 754 big-endian with ``-0.0`` as
``0.0`` and one NaN, booleans as one byte, decimals as 16 bytes like integers, strings and binaries as a 4-byte
big-endian length and the bytes. A struct is its fields. An array is its 4-byte big-endian length and its elements, and
so is a map, with its entries sorted by their bytes.

The grouping keys of a batch are encoded column by column, the keys of map entries one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa

from statelog.errors import ConfigurationError, CorruptionError, ErrorKind, ProcessorError
from statelog.runs.byte_slices import is_variable
from statelog.runs.key_columns import can_decode, decode_columns, encode_column, is_time, joined_by_row
from statelog.runs.values import MISFITS, RowCodec

_CACHE_LIMIT: Final = 100_000
_INT_STRUCTS: Final = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I"), 8: struct.Struct(">Q")}
_FLOAT_STRUCTS: Final = {4: struct.Struct(">f"), 8: struct.Struct(">d")}
_LENGTH: Final = struct.Struct(">I")
_AFTER_ALL: Final = b"\x02"
"""All keys are before it: they begin with a byte that is 0 or 1."""

_Encode = Callable[[Any], bytes]
_Decode = Callable[[bytes, int], tuple[Any, int]]
"""Takes bytes and the position of a value; returns the value and the position after it."""


_MALFORMED: Final = (IndexError, struct.error, pa.ArrowException)
"""What decoding raises for bytes that are not a key; ValueError and OverflowError also for keys Python cannot hold."""


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
        codecs = [_field_codec(field.type) for field in schema]
        self._encoders = [encode for encode, _ in codecs]
        self._decoders = [decode for _, decode in codecs]
        self._has_nested = any(pa.types.is_nested(field.type) for field in schema)
        self._decoded: dict[bytes, tuple[Any, ...]] = {}

    def encode_columns(self, columns: list[pa.Array]) -> pa.Array:
        """Encode n keys, given as a column of length n per field, into a binary column of length n."""
        return joined_by_row([part for column in columns for part in encode_column(column)])

    def decode_columns(self, data: pa.Array) -> list[pa.Array]:
        """Decode n keys, a binary column without nulls, into a column of length n per field.

        Raises CorruptionError if one is not a key of the schema.
        """
        try:
            if all(can_decode(field.type) for field in self.schema):
                return decode_columns(data, self.schema)
            keys = list(map(self._decode, data.to_pylist()))
            return [pa.array([key[index] for key in keys], field.type) for index, field in enumerate(self.schema)]
        except _MALFORMED as error:
            raise _no_key(error) from error

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

    def decode_all(self, keys: Sequence[bytes]) -> list[tuple[Any, ...]]:
        """Decode keys that are rarely decoded again."""
        return [self._decode(key) for key in keys]

    def _decode(self, data: bytes) -> tuple[Any, ...]:
        values: list[Any] = []
        at = 0
        try:
            for decode in self._decoders:
                value, at = decode(data, at)
                values.append(value)
        except _MALFORMED as error:
            raise _no_key(error) from error
        return tuple(values)


def _no_key(error: Exception) -> CorruptionError:
    return CorruptionError(
        f"A stored key cannot be read with the types of its columns: {type(error).__name__}: {error}.",
        kind=ErrorKind.FORMAT,
        hint="If its strings are UTF-8, restore the files from a copy; statelog.verify reports the damaged ones.",
    )


class MapKeyCodec:
    """Converts users' map keys, tuples of one schema, to entry keys and back."""

    def __init__(self, codec: RowCodec) -> None:
        self._codec = codec
        self._keys = KeyCodec(codec.schema, codec.subject)
        self._encoded: dict[tuple[Any, ...], bytes] = {}
        self._unordered = next((field for field in codec.schema if not _is_ordered(field.type)), None)
        self._prefixes: dict[int, MapKeyCodec] = {}

    def encode(self, key: Any) -> bytes:
        """The entry key of a map key; ProcessorError if a value does not fit its field."""
        row = self._codec.normalize(key)
        # Storage types distinguish keys: the local times of an hour that the clock repeats are equal in Python.
        stored = self._codec.to_storage(row)
        if self._codec.is_mutable:
            return self._encode_stored(row, stored)  # lists and maps are not hashable
        entry = self._encoded.get(stored)
        if entry is None:
            if len(self._encoded) >= _CACHE_LIMIT:
                self._encoded.clear()
            entry = self._encoded[stored] = self._encode_stored(row, stored)
        return entry

    def _encode_stored(self, row: tuple[Any, ...], stored: tuple[Any, ...]) -> bytes:
        try:
            return self._keys.encode(stored)
        except (struct.error, *MISFITS) as error:
            raise self._codec.misfit(row, error) from error

    def bounds(self, first: Any, end: Any) -> tuple[bytes, bytes]:
        """The bounds of the entry keys of a range of map keys, the second one not included.

        A bound may have only the first fields of a map key; None means no bound. ProcessorError if a value does not fit
        its field, or if the fields have types whose entry keys are in another order.
        """
        if (field := self._unordered) is not None:
            raise ProcessorError(
                f"{self._codec.subject}: field '{field.name}' has type {field.type}, which does not support ranges.",
                kind=ErrorKind.STATE_USAGE,
                hint="Ranges need map keys that consist of whole numbers, decimals, dates, times or booleans only.",
            )
        return b"" if first is None else self._bound(first), _AFTER_ALL if end is None else self._bound(end)

    def _bound(self, key: Any) -> bytes:
        count = len(key) if isinstance(key, (tuple, list)) else 1
        if not 0 < count < len(self._codec.fields):
            return self.encode(key)
        if count not in self._prefixes:
            self._prefixes[count] = MapKeyCodec(RowCodec(self._codec.fields[:count], self._codec.subject))
        return self._prefixes[count].encode(key)

    def decode(self, entry: bytes) -> tuple[Any, ...]:
        """The map key of an entry key."""
        return self._codec.from_storage(self._keys.decode(entry))


def _is_ordered(kind: pa.DataType) -> bool:
    """Whether the bytes of keys of a type sort in the order of the keys; null sorts first."""
    return bool(
        pa.types.is_signed_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal128(kind) or is_time(kind)
    )


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


# ---- Single values ----


def _field_codec(kind: pa.DataType) -> tuple[_Encode, _Decode]:
    """Encoder and decoder of a field: a null byte, then the value if there is one."""
    if pa.types.is_null(kind):
        return lambda value: b"\x00", lambda data, at: (None, at + 1)
    encode, decode = _value_codec(kind)
    return (
        lambda value: b"\x00" if value is None else b"\x01" + encode(value),
        lambda data, at: decode(data, at + 1) if data[at] else (None, at + 1),
    )


def _value_codec(kind: pa.DataType) -> tuple[_Encode, _Decode]:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _encode_text, _decode_text
    if is_variable(kind):
        return _encode_bytes, _decode_bytes
    if pa.types.is_boolean(kind):
        return lambda value: b"\x01" if value else b"\x00", lambda data, at: (data[at] == 1, at + 1)
    if pa.types.is_floating(kind):
        floats = _FLOAT_STRUCTS[kind.bit_width // 8]
        nan = floats.pack(float("nan"))
        return (
            lambda value: nan if value != value else floats.pack(value + 0.0),
            lambda data, at: (floats.unpack_from(data, at)[0], at + floats.size),
        )
    if pa.types.is_signed_integer(kind):
        integers = _INT_STRUCTS[kind.bit_width // 8]
        flip = 1 << (kind.bit_width - 1)
        return (
            lambda value: integers.pack(value + flip),
            lambda data, at: (integers.unpack_from(data, at)[0] - flip, at + integers.size),
        )
    if pa.types.is_struct(kind):
        return _struct_codec([(field.name, *_field_codec(field.type)) for field in kind.fields])
    if pa.types.is_list(kind):
        of_element, to_element = _field_codec(kind.value_type)
        return lambda value: _joined([of_element(element) for element in value]), _elements_decoder(to_element)
    if pa.types.is_map(kind):
        return _map_codec(*_field_codec(kind.key_type), *_field_codec(kind.item_type))
    return lambda value: encode_column(pa.array([value], kind))[0][0].as_py()[1:], _fixed_decoder(kind)


def _encode_text(value: str) -> bytes:
    return _encode_bytes(value.encode())


def _encode_bytes(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


def _joined(elements: list[bytes]) -> bytes:
    return _LENGTH.pack(len(elements)) + b"".join(elements)


def _decode_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    start = at + 4
    end = start + _LENGTH.unpack_from(data, at)[0]
    return data[start:end], end


def _decode_text(data: bytes, at: int) -> tuple[str, int]:
    value, end = _decode_bytes(data, at)
    return value.decode(), end


def _struct_codec(fields: list[tuple[str, _Encode, _Decode]]) -> tuple[_Encode, _Decode]:
    def encode(value: Any) -> bytes:
        return b"".join([of_field(value[name]) for name, of_field, _ in fields])

    def decode(data: bytes, at: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        for name, _, to_field in fields:
            values[name], at = to_field(data, at)
        return values, at

    return encode, decode


def _elements_decoder(of_element: _Decode) -> _Decode:
    def decode(data: bytes, at: int) -> tuple[list[Any], int]:
        count = _LENGTH.unpack_from(data, at)[0]
        at += _LENGTH.size
        elements: list[Any] = []
        for _ in range(count):
            element, at = of_element(data, at)
            elements.append(element)
        return elements, at

    return decode


def _map_codec(of_key: _Encode, to_key: _Decode, of_item: _Encode, to_item: _Decode) -> tuple[_Encode, _Decode]:
    def encode(value: Any) -> bytes:
        pairs = value.items() if isinstance(value, dict) else value
        return _joined(sorted(of_key(key) + of_item(item) for key, item in pairs))

    def decode_pair(data: bytes, at: int) -> tuple[tuple[Any, Any], int]:
        key, at = to_key(data, at)
        item, at = to_item(data, at)
        return (key, item), at

    return encode, _elements_decoder(decode_pair)


def _fixed_decoder(kind: pa.DataType) -> _Decode:
    width = kind.bit_width // 8

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        unscaled = bytearray(data[at : at + width])
        if len(unscaled) < width:
            raise IndexError("a value reaches beyond the key")
        unscaled[0] ^= 0x80
        unscaled.reverse()
        array = pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(bytes(unscaled))])
        return array[0].as_py(), at + width

    return decode
