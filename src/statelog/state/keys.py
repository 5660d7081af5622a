"""Canonical bytes of keys: equal keys have equal bytes, whatever wrote them.

A key of several fields is the concatenation of its fields. A field is a null byte ``00``, or ``01``
followed by its value: integers, dates and timestamps big-endian with the sign bit flipped, floats as
IEEE 754 big-endian with ``-0.0`` as ``0.0`` and one NaN, booleans as one byte, decimals as 16 bytes
like integers, strings and binaries as a 4-byte big-endian length and the bytes.

The grouping keys of a batch are encoded column by column, the keys of map entries one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statelog.errors import ConfigurationError, ErrorKind

__all__ = ["KeyCodec"]

_EMPTY: Final = pa.scalar(b"", pa.binary())
_CACHE_LIMIT: Final = 100_000

_INT_STRUCTS: Final = {
    1: struct.Struct(">B"),
    2: struct.Struct(">H"),
    4: struct.Struct(">I"),
    8: struct.Struct(">Q"),
}
_FLOAT_STRUCTS: Final = {4: struct.Struct(">f"), 8: struct.Struct(">d")}
_LENGTH: Final = struct.Struct(">I")


class KeyCodec:
    """Encodes and decodes keys of one schema.

    Parameters
    ----------
    schema : pyarrow.Schema
        The key's fields.
    purpose : str
        What the key is for, in messages: "grouping column", or "map key of state 'x'".

    Raises
    ------
    ConfigurationError
        If a field's type cannot be a key.
    """

    def __init__(self, schema: pa.Schema, purpose: str = "grouping column") -> None:
        self.schema = schema
        for field in schema:
            if not _is_supported(field.type):
                raise ConfigurationError(
                    f"{purpose} '{field.name}' has type {field.type}, which cannot be a key.",
                    kind=ErrorKind.UNSUPPORTED_KEY_TYPE,
                    hint="Use booleans, integers, floats, decimals, strings, binaries, dates or timestamps; "
                    "cast other types, or group by their fields.",
                )
        self._encoders = [_value_encoder(field.type) for field in schema]
        self._decoders = [_value_decoder(field.type) for field in schema]
        self._decoded: dict[bytes, tuple[Any, ...]] = {}

    def encode_columns(self, columns: list[pa.Array]) -> pa.Array:
        """Encode keys column by column.

        Parameters
        ----------
        columns : list of pyarrow.Array
            One per field of the schema, all of the same length n.

        Returns
        -------
        pyarrow.Array
            n canonical keys, binary.
        """
        parts: list[pa.Array] = []
        for column in columns:
            parts.extend(_encode_column(column))
        if len(parts) == 1:
            return parts[0]
        return pc.binary_join_element_wise(*parts, _EMPTY)

    def encode(self, key: tuple[Any, ...]) -> bytes:
        """Encode one key whose values are of the schema's storage types."""
        parts = [
            b"\x00" if value is None else b"\x01" + encode(value)
            for encode, value in zip(self._encoders, key, strict=True)
        ]
        return b"".join(parts)

    def decode(self, data: bytes) -> tuple[Any, ...]:
        """Decode one key into the schema's storage types."""
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
            at += 1
            if data[at - 1] == 0:
                values.append(None)
            else:
                value, at = decode(data, at)
                values.append(value)
        return tuple(values)


def _is_supported(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_boolean(kind)
        or pa.types.is_signed_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal128(kind)
        or _is_variable(kind)
        or _is_time(kind)
    )


def _is_variable(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date32(kind) or pa.types.is_timestamp(kind) or pa.types.is_duration(kind))


def _encode_column(column: pa.Array) -> list[pa.Array]:
    """Encode a column as one or two binary arrays whose concatenation is the field's bytes."""
    kind = column.type
    if _is_variable(kind):
        return _encode_variable(column)
    valid = None if column.null_count == 0 else column.is_valid().to_numpy(zero_copy_only=False)
    payload = _fixed_payload(column)
    width = payload.shape[1]
    matrix = np.empty((len(column), width + 1), np.uint8)
    matrix[:, 0] = 1
    matrix[:, 1:] = payload
    if valid is None:
        offsets = np.arange(0, (width + 1) * len(column) + 1, width + 1, dtype=np.int32)
        flat = matrix
    else:
        lengths = np.where(valid, width + 1, 1)
        offsets = np.zeros(len(column) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        matrix[~valid, 0] = 0
        keep = np.ones(matrix.shape, bool)
        keep[~valid, 1:] = False
        flat = matrix[keep]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(flat))]
    return [pa.Array.from_buffers(pa.binary(), len(column), buffers)]


def _encode_variable(column: pa.Array) -> list[pa.Array]:
    kind = pa.large_binary() if column.type in (pa.large_string(), pa.large_binary()) else pa.binary()
    payload = column.cast(kind).cast(pa.binary())
    lengths = pc.fill_null(pc.binary_length(payload), 0).to_numpy(zero_copy_only=False)
    count = len(column)
    matrix = np.empty((count, 5), np.uint8)
    matrix[:, 0] = 1
    matrix[:, 1:] = lengths.astype(">u4").view(np.uint8).reshape(count, 4)
    if column.null_count == 0:
        offsets = np.arange(0, 5 * count + 1, 5, dtype=np.int32)
        flat = matrix
    else:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        payload = pc.fill_null(payload, b"")
        matrix[~valid, 0] = 0
        keep = np.ones(matrix.shape, bool)
        keep[~valid, 1:] = False
        flat = matrix[keep]
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(np.where(valid, 5, 1), out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(flat))]
    return [pa.Array.from_buffers(pa.binary(), count, buffers), payload]


def _fixed_payload(column: pa.Array) -> Any:
    """Bytes of the values of a fixed-width column, one row per value; rows of nulls are arbitrary."""
    kind = column.type
    count = len(column)
    if pa.types.is_boolean(kind):
        values = pc.fill_null(column, False).to_numpy(zero_copy_only=False)
        return values.astype(np.uint8).reshape(count, 1)
    if pa.types.is_decimal128(kind):
        unscaled = np.frombuffer(column.buffers()[1], np.uint8, count * 16, column.offset * 16)
        matrix = unscaled.reshape(count, 16)[:, ::-1].copy()
        matrix[:, 0] ^= 0x80
        return matrix
    if pa.types.is_floating(kind):
        floats = pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False) + 0.0
        floats[np.isnan(floats)] = np.nan
        return _big_endian(floats)
    if _is_time(kind):
        column = column.cast(pa.int32() if pa.types.is_date32(kind) else pa.int64())
    values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    bits = values.dtype.itemsize * 8
    flipped = values ^ values.dtype.type(-(1 << (bits - 1)))
    return _big_endian(flipped)


def _big_endian(values: Any) -> Any:
    swapped = values.astype(values.dtype.newbyteorder(">"))
    return swapped.view(np.uint8).reshape(len(values), values.dtype.itemsize)


def _value_encoder(kind: pa.DataType) -> Callable[[Any], bytes]:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _encode_text
    if _is_variable(kind):
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
    return lambda value: _encode_column(pa.array([value], kind))[0][0].as_py()[1:]


def _value_decoder(kind: pa.DataType) -> Callable[[bytes, int], tuple[Any, int]]:
    if _is_variable(kind):
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
    return _fixed_decoder(kind)


def _fixed_decoder(kind: pa.DataType) -> Callable[[bytes, int], tuple[Any, int]]:
    width = kind.bit_width // 8

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        unscaled = bytearray(data[at : at + width])
        unscaled[0] ^= 0x80
        unscaled.reverse()
        array = pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(bytes(unscaled))])
        return array[0].as_py(), at + width

    return decode


def _encode_text(value: str) -> bytes:
    return _encode_bytes(value.encode())


def _encode_bytes(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


def _decode_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    start = at + 4
    end = start + _LENGTH.unpack_from(data, at)[0]
    return data[start:end], end


def _decode_text(data: bytes, at: int) -> tuple[str, int]:
    value, end = _decode_bytes(data, at)
    return value.decode(), end
