"""Key bytes of single values: encodes and decodes one field of one key."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from statelog.runs.key_columns import encode_column, is_variable

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes, int], tuple[Any, int]]
"""Takes the bytes and the start of the value; returns the value and its end."""

_INT_STRUCTS: Final = {
    1: struct.Struct(">B"),
    2: struct.Struct(">H"),
    4: struct.Struct(">I"),
    8: struct.Struct(">Q"),
}
_FLOAT_STRUCTS: Final = {4: struct.Struct(">f"), 8: struct.Struct(">d")}
_LENGTH: Final = struct.Struct(">I")


def field_encoder(kind: pa.DataType) -> Encode:
    """Make the encoder of a field: a null byte, then the value if there is one."""
    if pa.types.is_null(kind):
        return lambda value: b"\x00"
    encode = _value_encoder(kind)
    return lambda value: b"\x00" if value is None else b"\x01" + encode(value)


def field_decoder(kind: pa.DataType) -> Decode:
    """Make the decoder of a field."""
    if pa.types.is_null(kind):
        return lambda data, at: (None, at + 1)
    decode = _value_decoder(kind)
    return lambda data, at: decode(data, at + 1) if data[at] else (None, at + 1)


def _value_encoder(kind: pa.DataType) -> Encode:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _encode_text
    if is_variable(kind):
        return _encode_bytes
    if pa.types.is_boolean(kind):
        return lambda value: b"\x01" if value else b"\x00"
    if pa.types.is_floating(kind):
        packer = _FLOAT_STRUCTS[kind.bit_width // 8]
        nan = packer.pack(float("nan"))
        return lambda value: nan if value != value else packer.pack(value + 0.0)
    if pa.types.is_signed_integer(kind):
        integers = _INT_STRUCTS[kind.bit_width // 8]
        flip = 1 << (kind.bit_width - 1)
        return lambda value: integers.pack(value + flip)
    if pa.types.is_struct(kind):
        fields = [(field.name, field_encoder(field.type)) for field in kind.fields]
        return lambda value: b"".join([encode(value[name]) for name, encode in fields])
    if pa.types.is_list(kind):
        of_element = field_encoder(kind.value_type)
        return lambda value: _encode_elements([of_element(element) for element in value])
    if pa.types.is_map(kind):
        return _map_encoder(field_encoder(kind.key_type), field_encoder(kind.item_type))
    return lambda value: encode_column(pa.array([value], kind))[0][0].as_py()[1:]


def _value_decoder(kind: pa.DataType) -> Decode:
    if is_variable(kind):
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        return _decode_text if is_text else _decode_bytes
    if pa.types.is_boolean(kind):
        return lambda data, at: (data[at] == 1, at + 1)
    if pa.types.is_floating(kind):
        packer = _FLOAT_STRUCTS[kind.bit_width // 8]
        return lambda data, at: (packer.unpack_from(data, at)[0], at + packer.size)
    if pa.types.is_signed_integer(kind):
        integers = _INT_STRUCTS[kind.bit_width // 8]
        flip = 1 << (kind.bit_width - 1)
        return lambda data, at: (integers.unpack_from(data, at)[0] - flip, at + integers.size)
    if pa.types.is_struct(kind):
        return _struct_decoder([(field.name, field_decoder(field.type)) for field in kind.fields])
    if pa.types.is_list(kind):
        return _elements_decoder(field_decoder(kind.value_type))
    if pa.types.is_map(kind):
        return _elements_decoder(_pair_decoder(field_decoder(kind.key_type), field_decoder(kind.item_type)))
    return _fixed_decoder(kind)


def _encode_text(value: str) -> bytes:
    return _encode_bytes(value.encode())


def _encode_bytes(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


def _encode_elements(elements: list[bytes]) -> bytes:
    return _LENGTH.pack(len(elements)) + b"".join(elements)


def _map_encoder(of_key: Encode, of_item: Encode) -> Encode:
    def encode(value: Any) -> bytes:
        pairs = value.items() if isinstance(value, dict) else value
        return _encode_elements(sorted(of_key(key) + of_item(item) for key, item in pairs))

    return encode


def _decode_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    start = at + 4
    end = start + _LENGTH.unpack_from(data, at)[0]
    return data[start:end], end


def _decode_text(data: bytes, at: int) -> tuple[str, int]:
    value, end = _decode_bytes(data, at)
    return value.decode(), end


def _struct_decoder(fields: list[tuple[str, Decode]]) -> Decode:
    def decode(data: bytes, at: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        for name, one in fields:
            values[name], at = one(data, at)
        return values, at

    return decode


def _elements_decoder(of_element: Decode) -> Decode:
    def decode(data: bytes, at: int) -> tuple[list[Any], int]:
        count = _LENGTH.unpack_from(data, at)[0]
        at += _LENGTH.size
        elements: list[Any] = []
        for _ in range(count):
            element, at = of_element(data, at)
            elements.append(element)
        return elements, at

    return decode


def _pair_decoder(of_key: Decode, of_item: Decode) -> Decode:
    def decode(data: bytes, at: int) -> tuple[tuple[Any, Any], int]:
        key, at = of_key(data, at)
        item, at = of_item(data, at)
        return (key, item), at

    return decode


def _fixed_decoder(kind: pa.DataType) -> Decode:
    width = kind.bit_width // 8

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        unscaled = bytearray(data[at : at + width])
        unscaled[0] ^= 0x80
        unscaled.reverse()
        array = pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(bytes(unscaled))])
        return array[0].as_py(), at + width

    return decode
