"""Canonical key bytes of whole columns; :mod:`statelog.runs.keys` specifies the bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.runs.byte_slices import Positions, is_variable

Bytes = npt.NDArray[np.uint8]


def is_time(kind: pa.DataType) -> bool:
    """Whether values of a type are stored as a number of time units."""
    return bool(
        pa.types.is_date32(kind)
        or pa.types.is_time64(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_duration(kind)
    )


def joined_by_row(parts: list[pa.Array]) -> pa.Array:
    """Concatenate binary arrays row by row."""
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))


def differs_from_previous(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Mask of the values that differ from the previous one; the first value differs."""
    result = np.ones(len(column), bool)
    if len(column) > 1:
        equal = pc.equal(column.slice(1), column.slice(0, len(column) - 1))
        result[1:] = ~equal.to_numpy(zero_copy_only=False)
    return result


def encode_column(column: pa.Array) -> list[pa.Array]:
    """Encode a column of a key as binary columns without nulls; joined row by row they are the field's bytes."""
    kind = column.type
    if is_variable(kind):
        return _encode_variable(column)
    if pa.types.is_struct(kind):
        return _encode_struct(column)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return _encode_collection(column)
    return [_with_null_byte(column, _fixed_payload(column))]


def _with_null_byte(column: pa.Array, payload: Bytes) -> pa.Array:
    """01 and the bytes of the payload where the column has a value, 00 alone elsewhere."""
    count, width = payload.shape
    matrix = np.empty((count, width + 1), np.uint8)
    matrix[:, 0] = 1
    matrix[:, 1:] = payload
    if column.null_count == 0:
        offsets = np.arange(0, (width + 1) * count + 1, width + 1, dtype=np.int32)
        flat = matrix
    else:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(np.where(valid, width + 1, 1), out=offsets[1:])
        matrix[~valid, 0] = 0
        keep = np.ones(matrix.shape, bool)
        keep[~valid, 1:] = False
        flat = matrix[keep]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(flat))]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def _encode_variable(column: pa.Array) -> list[pa.Array]:
    kind = pa.large_binary() if column.type in (pa.large_string(), pa.large_binary()) else pa.binary()
    payload = column.cast(kind).cast(pa.binary())
    lengths = pc.fill_null(pc.binary_length(payload), 0).to_numpy(zero_copy_only=False)
    if column.null_count:
        payload = pc.fill_null(payload, b"")
    return [_with_null_byte(column, _counts(lengths)), payload]


def _encode_struct(column: pa.Array) -> list[pa.Array]:
    parts = [part for index in range(column.type.num_fields) for part in encode_column(column.field(index))]
    flags = _with_null_byte(column, np.empty((len(column), 0), np.uint8))
    return [flags, *(_only_of_values(column, part) for part in parts)]


def _encode_collection(column: pa.Array) -> list[pa.Array]:
    """Number of elements, then an array's elements in order, or a map's entries sorted by their bytes."""
    if not len(column):
        return [pa.array([], pa.binary())]
    offsets = column.offsets.to_numpy()
    start, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    counts = np.diff(offsets)
    if pa.types.is_map(column.type):
        parts = encode_column(column.keys.slice(start, count)) + encode_column(column.items.slice(start, count))
        elements = _sorted_within(joined_by_row(parts), counts)
    else:
        elements = joined_by_row(encode_column(column.values.slice(start, count)))
    # The elements' bytes are contiguous, so the bytes of a row are one stretch of the same buffer.
    _, ends, data = elements.buffers()
    bounds = np.zeros(1, np.int32) if count == 0 else np.frombuffer(ends, np.int32, count + 1, elements.offset * 4)
    stretches = pa.py_buffer(bounds[offsets - start])
    payload = pa.Array.from_buffers(pa.binary(), len(column), [None, stretches, data])
    return [_with_null_byte(column, _counts(counts)), _only_of_values(column, payload)]


def _sorted_within(elements: pa.Array, counts: npt.NDArray[Any]) -> pa.Array:
    """Sort the elements of each row; `counts` holds the number of elements per row."""
    if not len(counts) or counts.max() <= 1:
        return elements
    rows = np.repeat(np.arange(len(counts)), counts)
    table = pa.table({"row": rows, "element": elements})
    return elements.take(pc.sort_indices(table, [("row", "ascending"), ("element", "ascending")]))


def _only_of_values(column: pa.Array, part: pa.Array) -> pa.Array:
    """The part, made empty where the column is null: null structs and arrays may hide values."""
    return part if column.null_count == 0 else pc.if_else(column.is_valid(), part, pa.scalar(b"", pa.binary()))


def _counts(numbers: npt.NDArray[Any]) -> Bytes:
    return numbers.astype(">u4").view(np.uint8).reshape(len(numbers), 4)


def _fixed_payload(column: pa.Array) -> Bytes:
    """Bytes of the values of a fixed-width column, one row per value; rows of nulls are arbitrary."""
    kind = column.type
    count = len(column)
    if pa.types.is_null(kind):
        return np.empty((count, 0), np.uint8)
    if pa.types.is_boolean(kind):
        flags = pc.fill_null(column, False).to_numpy(zero_copy_only=False)
        payload: Bytes = flags.astype(np.uint8).reshape(count, 1)
        return payload
    if pa.types.is_decimal128(kind):
        if count == 0:
            return np.empty((0, 16), np.uint8)
        unscaled = np.frombuffer(column.buffers()[1], np.uint8, count * 16, column.offset * 16)
        matrix = unscaled.reshape(count, 16)[:, ::-1].copy()
        matrix[:, 0] ^= 0x80
        return matrix
    if pa.types.is_floating(kind):
        floats = pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False) + 0.0
        floats[np.isnan(floats)] = np.nan
        return _big_endian(floats)
    if is_time(kind):
        column = column.cast(pa.int32() if pa.types.is_date32(kind) else pa.int64())
    values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    bits = values.dtype.itemsize * 8
    return _big_endian(values ^ values.dtype.type(-(1 << (bits - 1))))


def _big_endian(values: npt.NDArray[Any]) -> Bytes:
    swapped = values.astype(values.dtype.newbyteorder(">"))
    return swapped.view(np.uint8).reshape(len(values), values.dtype.itemsize)


# ---- Decoding ----


def can_decode(kind: pa.DataType) -> bool:
    """Whether :func:`decode_columns` knows the type: keys with arrays or maps are decoded one by one."""
    if pa.types.is_struct(kind):
        return all(can_decode(field.type) for field in kind.fields)
    return not (pa.types.is_list(kind) or pa.types.is_map(kind))


def decode_columns(data: pa.Array, schema: pa.Schema) -> list[pa.Array]:
    """Decode n keys, a binary column without nulls, into a column per field of the schema."""
    offsets = np.frombuffer(data.buffers()[1], np.int32, len(data) + 1, data.offset * 4) if len(data) else np.zeros(1)
    whole = data.buffers()[2]
    source = np.frombuffer(whole, np.uint8) if whole is not None and whole.size else np.zeros(0, np.uint8)
    at = offsets[:-1].astype(np.int64)
    columns: list[pa.Array] = []
    for field in schema:
        column, at = _decode_column(source, at, field.type)
        columns.append(column)
    return columns


def _decode_column(source: Bytes, at: Positions, kind: pa.DataType) -> tuple[pa.Array, Positions]:
    """Decode one field of each key, which begins at the position `at`; also returns the positions after it."""
    count = len(at)
    if pa.types.is_null(kind):
        return pa.nulls(count), at + 1
    valid = source[at] != 0
    rows = np.flatnonzero(valid)
    values, ends = _decode_values(source, at[rows] + 1, kind)
    if len(rows) == count:
        return values, ends
    behind = at + 1
    behind[rows] = ends
    places = np.zeros(count, np.int64)
    places[rows] = np.arange(len(rows))
    return values.take(pa.array(places, mask=~valid)), behind


def _decode_values(source: Bytes, at: Positions, kind: pa.DataType) -> tuple[pa.Array, Positions]:
    count = len(at)
    if is_variable(kind):
        lengths = _fixed(source, at, 4).view(">u4")[:, 0].astype(np.int64)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        if offsets[-1] > len(source):
            raise IndexError("a length reaches beyond the keys")
        inside = np.arange(offsets[-1]) + np.repeat(at + 4 - offsets[:-1], lengths)
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(source[inside])]
        return pa.Array.from_buffers(pa.binary(), count, buffers).cast(kind), at + 4 + lengths
    if pa.types.is_struct(kind):
        children: list[pa.Array] = []
        for field in kind.fields:
            child, at = _decode_column(source, at, field.type)
            children.append(child)
        return pa.StructArray.from_arrays(children, fields=kind.fields), at
    if pa.types.is_boolean(kind):
        return pa.array(source[at] == 1), at + 1
    width = kind.bit_width // 8
    matrix = _fixed(source, at, width)
    if not pa.types.is_floating(kind):
        matrix[:, 0] ^= 0x80
    native = np.ascontiguousarray(matrix[:, ::-1])  # Arrow's numbers are little-endian
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(native)]), at + width


def _fixed(source: Bytes, at: Positions, width: int) -> Bytes:
    """Some bytes from each position on, shape (n, width)."""
    taken: Bytes = source[at[:, np.newaxis] + np.arange(width)]
    return taken
