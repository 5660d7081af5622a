"""Reads Arrow record batches that come from a store or a disk: whatever the bytes are, no memory is taken that they do
not fill, and no value lies outside of them.

Arrow trusts what a message says about itself: the size of a compressed buffer before it allocates, and the offsets of
variable-length values when they are read. Both are checked here, without looking at the values themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from statelog.runs.byte_slices import MAX_COLUMN_BYTES

_CONTINUATION: Final = b"\xff\xff\xff\xff"
_RECORD_BATCH: Final = 3
"""The type of a message's header."""
_MOST_GROWTH: Final = {0: 255, 1: 1 << 15}
"""How many times larger a buffer can become when it is decompressed: from LZ4, and from zstd."""
_MOST_SPREAD: Final = 2
"""How many times the size of its columns a batch may take: rows of a longer batch may be written with more offsets."""
_SPARE_BYTES: Final = 64
"""Bytes that a buffer may have beyond its values: padding."""
_ONE_THREAD: Final = pa.ipc.IpcReadOptions(use_threads=False)

_MALFORMED: Final = (pa.ArrowException, OSError, EOFError, ValueError, TypeError, KeyError, IndexError, struct.error)
"""The exceptions that bytes raise which are not a message."""


class MalformedMessage(Exception):
    """The bytes are not a message that an Arrow writer makes."""


def read_batch(data: pa.Buffer, schema: pa.Schema, rows: int, size_bytes: int | None = None) -> pa.RecordBatch:
    """Read a record batch message that has `rows` rows of a schema.

    The message may be compressed if `size_bytes` is given, the size of its columns without compression. Raises
    MalformedMessage.
    """
    try:
        if size_bytes is None:
            batch = pa.ipc.read_record_batch(data, schema)
        else:
            _require_declared(memoryview(data).cast("B"), size_bytes)
            batch = _decompressed(data, schema)
        require_valid(batch)
    except _MALFORMED as error:
        raise MalformedMessage(f"{type(error).__name__}: {error}") from None
    if batch.num_rows != rows:
        raise MalformedMessage(f"it has {batch.num_rows} rows, not {rows}")
    return batch


def _decompressed(data: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """Decode a message on this thread: subtasks keep the host's cores busy, and threads of a pool each keep memory."""
    stream = pa.py_buffer(b"".join((schema.serialize(), data)))
    with pa.ipc.open_stream(stream, options=_ONE_THREAD) as reader:
        return reader.read_next_batch()


def read_stream(data: bytes) -> pa.RecordBatchReader:
    """Open an Arrow IPC stream; its schema only, see :func:`stream_batches`. Raises MalformedMessage."""
    try:
        reader = pa.ipc.open_stream(data, options=_ONE_THREAD)
        require_plain(reader.schema)
    except _MALFORMED as error:
        raise MalformedMessage(f"{type(error).__name__}: {error}") from None
    return reader


def stream_batches(data: bytes) -> Iterator[pa.RecordBatch]:
    """The record batches of an Arrow IPC stream. Raises MalformedMessage."""
    view, at = memoryview(data), 0
    try:
        while at + 8 <= len(view) and (length := _length_of(view[at:])):
            _require_declared(view[at : at + length], None)
            at += length
    except _MALFORMED as error:
        raise MalformedMessage(f"{type(error).__name__}: {error}") from None
    with read_stream(data) as reader:
        while True:
            try:
                batch = reader.read_next_batch()
                require_valid(batch)
            except StopIteration:
                return
            except _MALFORMED as error:
                raise MalformedMessage(f"{type(error).__name__}: {error}") from None
            yield batch


def require_plain(schema: pa.Schema) -> None:
    """Raise ValueError if a name of a schema is not text, or a type is one whose values are elsewhere, or code."""
    for field in schema:
        _require_plain(field)


def _require_plain(field: pa.Field) -> None:
    assert field.name is not None  # decoded only now
    kind = field.type
    if isinstance(kind, (pa.BaseExtensionType, pa.DictionaryType, pa.UnionType, pa.RunEndEncodedType)):
        raise ValueError(f"the field {field.name!r} has the type {str(kind)!r:.80}")
    for index in range(kind.num_fields):
        _require_plain(kind.field(index))


# ---- What a message says about itself ----


class _Table:
    """A table of a flatbuffer; ValueError, IndexError or struct.error if it reaches beyond the bytes."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        self._fields = at - self._number("<i", at)
        self._fields_bytes = self._number("<H", self._fields)

    def _number(self, form: str, at: int) -> int:
        if at < 0:
            raise ValueError("a table reaches beyond the message")
        return int(struct.unpack_from(form, self._data, at)[0])

    def _place(self, field: int) -> int | None:
        """The position of a field; None if the table lacks it."""
        entry = 4 + 2 * field
        if entry + 2 > self._fields_bytes:
            return None
        offset = self._number("<H", self._fields + entry)
        return self._at + offset if offset else None

    def number(self, field: int, form: str) -> int:
        place = self._place(field)
        return 0 if place is None else self._number(form, place)

    def table(self, field: int) -> _Table | None:
        place = self._place(field)
        return None if place is None else _Table(self._data, place + self._number("<I", place))

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """A vector of structs of two 64-bit numbers."""
        place = self._place(field)
        if place is None:
            return []
        at = place + self._number("<I", place)
        count = self._number("<I", at)
        return list(struct.iter_unpack("<qq", self._data[at + 4 : at + 4 + 16 * count]))


def _split(message: memoryview) -> tuple[_Table, int]:
    """The table of a message, and the position of its body."""
    if bytes(message[:4]) != _CONTINUATION:
        raise ValueError("no message begins here")
    (length,) = struct.unpack_from("<i", message, 4)
    if not 0 < length <= len(message) - 8:
        raise ValueError("its head reaches beyond the message")
    head = message[8 : 8 + length]
    return _Table(head, struct.unpack_from("<I", head)[0]), 8 + length


def _length_of(stream: memoryview) -> int:
    """The length of the message with which a stream continues; 0 at its end."""
    if bytes(stream[:8]) == _CONTINUATION + bytes(4):
        return 0
    message, body_at = _split(stream)
    length = body_at + message.number(3, "<q")
    if not body_at <= length <= len(stream):
        raise ValueError("its body reaches beyond the stream")
    return length


def _require_declared(message: memoryview, size_bytes: int | None) -> None:
    """Raise ValueError if the buffers of a record batch would take more memory than they can fill.

    `size_bytes` is the size of their values, if it is known.
    """
    table, body_at = _split(message)
    header, body = table.table(2), message[body_at:]
    if table.number(1, "<B") != _RECORD_BATCH or header is None:
        if size_bytes is None:
            return  # the schema of a stream
        raise ValueError("it is not a record batch")
    compression = header.table(3)
    if compression is None:
        return  # nothing is allocated
    growth, total, buffers = _MOST_GROWTH[compression.number(0, "<b")], 0, header.pairs(2)
    for offset, length in buffers:
        if not length:
            continue
        if offset < 0 or length < 8 or offset + length > len(body):
            raise ValueError("a buffer reaches beyond the message")
        (declared,) = struct.unpack_from("<q", body, offset)
        declared = length - 8 if declared == -1 else declared
        if not 0 <= declared <= min(length * growth, MAX_COLUMN_BYTES + _SPARE_BYTES):
            raise ValueError(f"a buffer of {length} bytes cannot have {declared} when it is decompressed")
        total += declared
    if size_bytes is not None and total > _MOST_SPREAD * size_bytes + _SPARE_BYTES * len(buffers):
        raise ValueError(f"its buffers have {total} bytes when they are decompressed, not {size_bytes}")


# ---- What its values refer to ----


def require_valid(batch: pa.RecordBatch) -> None:
    """Raise ValueError or ArrowInvalid if a value of a batch lies outside of its buffers."""
    batch.validate()
    for column in batch.columns:
        _require_inside(column)


def _require_inside(array: pa.Array) -> None:
    """Raise ValueError or ArrowInvalid if a value of an array lies outside of its buffers."""
    kind = array.type
    if not len(array) or (not kind.num_fields and kind.num_buffers <= 2):
        return  # all values have the same size
    if pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            _require_inside(array.field(index))
    elif _offset_type(kind) is not None:
        _require_ascending(array)
        if kind.num_fields:  # else bytes or text, of which any is legal: Spark's strings may be no UTF-8
            _require_inside(array.values)
    else:
        array.validate(full=True)


def _offset_type(kind: pa.DataType) -> type[np.signedinteger[Any]] | None:
    """The type of the offsets of values of different sizes; None for other types."""
    types = pa.types
    if types.is_binary(kind) or types.is_string(kind) or types.is_list(kind) or types.is_map(kind):
        return np.int32
    if types.is_large_binary(kind) or types.is_large_string(kind) or types.is_large_list(kind):
        return np.int64
    return None


def _require_ascending(array: pa.Array) -> None:
    """Raise ValueError unless the offsets of an array ascend; Arrow has checked the first and the last."""
    width = _offset_type(array.type)
    assert width is not None
    offsets = np.frombuffer(array.buffers()[1], width, len(array) + 1, array.offset * np.dtype(width).itemsize)
    if offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any():
        raise ValueError("the offsets of its values do not ascend")
