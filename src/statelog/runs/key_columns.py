"""Key bytes of whole columns: encodes the fields of keys for all rows at once."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_EMPTY: Final = pa.scalar(b"", pa.binary())


def is_variable(kind: pa.DataType) -> bool:
    """Whether values of a type are strings or binaries."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def is_time(kind: pa.DataType) -> bool:
    """Whether values of a type are stored as a number of time units."""
    return bool(
        pa.types.is_date32(kind)
        or pa.types.is_time64(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_duration(kind)
    )


def join(parts: list[pa.Array]) -> pa.Array:
    """Concatenate binary arrays row by row."""
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, _EMPTY)


def encode_column(column: pa.Array) -> list[pa.Array]:
    """Encode a column of a key as one or more binary columns without nulls.

    Their concatenation, row by row, is the field's bytes.
    """
    kind = column.type
    if is_variable(kind):
        return _encode_variable(column)
    if pa.types.is_struct(kind):
        return _encode_struct(column)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return _encode_collection(column)
    return [_with_null_byte(column, _fixed_payload(column))]


def _with_null_byte(column: pa.Array, payload: npt.NDArray[np.uint8]) -> pa.Array:
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
        elements = _sorted_within(join(parts), counts)
    else:
        elements = join(encode_column(column.values.slice(start, count)))
    # The elements' bytes are contiguous, so those of a row are one stretch of the same buffer.
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
    """The part, but empty where the column is null: null structs and arrays may hide values."""
    return part if column.null_count == 0 else pc.if_else(column.is_valid(), part, _EMPTY)


def _counts(numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return numbers.astype(">u4").view(np.uint8).reshape(len(numbers), 4)


def _fixed_payload(column: pa.Array) -> npt.NDArray[np.uint8]:
    """Bytes of the values of a fixed-width column, one row per value; rows of nulls are arbitrary."""
    kind = column.type
    count = len(column)
    if pa.types.is_null(kind):
        return np.empty((count, 0), np.uint8)
    if pa.types.is_boolean(kind):
        flags = pc.fill_null(column, False).to_numpy(zero_copy_only=False)
        payload: npt.NDArray[np.uint8] = flags.astype(np.uint8).reshape(count, 1)
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


def _big_endian(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    swapped = values.astype(values.dtype.newbyteorder(">"))
    return swapped.view(np.uint8).reshape(len(values), values.dtype.itemsize)
