"""Snapshots: the whole state of one subtask of an unkeyed operator, in one file.

A snapshot has a section per state, and a section has a row per element. So a range of elements can move to another
subtask by its row numbers alone, whatever it means. ``docs/format.md`` specifies the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import msgspec
import pyarrow as pa
import xxhash

from statelog.errors import CorruptionError, ErrorKind
from statelog.runs.arrow_messages import MalformedMessage, read_batch
from statelog.runs.byte_slices import MAX_COLUMN_BYTES, RowsTooLarge, size_of
from statelog.runs.key_groups import Natural
from statelog.runs.schema import StateSchema, decode_schema
from statelog.sealed import MALFORMED

_MAGIC: Final = b"SLSNP\x00\x00\x01"
_HEADER: Final = struct.Struct("<8sIQ")
_ALIGNMENT: Final = 64
_HEAD_BYTES: Final = 4096
"""Enough for the index of a snapshot with few states."""
_HINT: Final = "Restore the file from a copy; the state cannot be rebuilt without it."


class _StoredSection(msgspec.Struct, frozen=True, array_like=True):
    state: StateSchema
    offset: Natural
    length: Natural
    count: Natural
    checksum: bytes


_index_encoder: Final = msgspec.msgpack.Encoder()
_index_decoder: Final = msgspec.msgpack.Decoder(list[_StoredSection])


def section_schema(state: StateSchema) -> pa.Schema:
    """Columns of a state's elements: the map key if it is a map, then the value's fields."""
    entry = [pa.field("entry", pa.binary(), nullable=False)] if state.entry_schema else []
    values = [pa.field(f"v{index}", field.type) for index, field in enumerate(decode_schema(state.value_schema))]
    return pa.schema(entry + values)


@dataclass(frozen=True)
class StateElements:
    """The elements of one state, encoded."""

    state: StateSchema
    data: bytes | memoryview
    """An Arrow record batch message of `section_schema(state)`."""
    count: int
    checksum: bytes
    """xxh3-128 of `data`."""
    where: str = "memory"
    """The source of `data`, for messages."""

    @classmethod
    def of(
        cls, state: StateSchema, batches: Sequence[pa.RecordBatch], most_bytes: int = MAX_COLUMN_BYTES
    ) -> StateElements:
        """Encode rows of `section_schema(state)`; raises `RowsTooLarge` if they take more than `most_bytes`."""
        if (size_bytes := size_of(batches)) > most_bytes:
            raise RowsTooLarge(f"{size_bytes:,} bytes")
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        data = rows.serialize().to_pybytes()
        return cls(state, data, rows.num_rows, xxhash.xxh3_128_digest(data))

    @cached_property
    def rows(self) -> pa.RecordBatch:
        """The elements, a row each; the first read raises CorruptionError if they are damaged, or are not elements."""
        if xxhash.xxh3_128_digest(self.data) != self.checksum:
            raise CorruptionError(f"{self.where}: state '{self.state.name}' is damaged.", hint=_HINT)
        try:
            return read_batch(pa.py_buffer(self.data), section_schema(self.state), self.count)
        except MalformedMessage as error:
            raise _unknown(self.where, f"state '{self.state.name}' is malformed: {error}") from None


@dataclass(frozen=True)
class Elements:
    """Consecutive elements of a section."""

    section: StateElements
    first: int
    count: int

    @classmethod
    def all_of(cls, section: StateElements) -> Elements:
        """Every element of a section."""
        return cls(section, 0, section.count)

    @property
    def rows(self) -> pa.RecordBatch:
        """The elements, a row each."""
        return self.section.rows.slice(self.first, self.count)


def join_elements(state: StateSchema, parts: Sequence[Elements], most_bytes: int = MAX_COLUMN_BYTES) -> StateElements:
    """Join elements to one section; a single whole section is returned as it is, byte for byte.

    Raises `RowsTooLarge` if they take more than `most_bytes`.
    """
    if len(parts) == 1 and parts[0].count == parts[0].section.count:
        return parts[0].section
    none = pa.RecordBatch.from_pylist([], schema=section_schema(state))
    return StateElements.of(state, [part.rows for part in parts] or [none], most_bytes)


def encode_snapshot(sections: Sequence[StateElements]) -> bytes:
    """Encode a snapshot; the sections are in the order of their states' names."""
    index: list[_StoredSection] = []
    body: list[bytes | memoryview] = []
    offset = 0
    for section in sections:
        length = len(section.data)
        index.append(_StoredSection(section.state, offset, length, section.count, section.checksum))
        body += [section.data, bytes(-length % _ALIGNMENT)]
        offset += length + -length % _ALIGNMENT
    encoded = _index_encoder.encode(index)
    head = _HEADER.pack(_MAGIC, len(encoded), xxhash.xxh3_64_intdigest(encoded)) + encoded
    return b"".join([head, bytes(-len(head) % _ALIGNMENT), *body])


class Snapshot:
    """The sections of a stored snapshot, by the names of their states.

    Raises CorruptionError if the bytes are not a snapshot, or the index is damaged; a section is checked when it is
    first read.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._where = f"{name}, snapshot of {len(data)} bytes"
        view = memoryview(data)
        base, index = _read_index(view, self._where)
        self.sections: dict[str, StateElements] = {}
        for stored in index:
            start = base + stored.offset
            section = view[start : start + stored.length]
            if len(section) != stored.length:
                raise _unknown(self._where, f"state '{stored.state.name}' reaches beyond the end")
            self.sections[stored.state.name] = StateElements(
                stored.state, section, stored.count, stored.checksum, f"{self._where}, offset {start}"
            )


def section_sizes(read: Callable[[int], bytes], name: str) -> dict[str, tuple[int, int]]:
    """The number of elements and the bytes of each state in a snapshot; `read` returns so many of its first bytes.

    Only the index is read and checked. Raises the errors of :class:`Snapshot`.
    """
    where = f"{name}, snapshot"
    head = read(_HEAD_BYTES)
    if len(head) >= _HEADER.size and (end := _HEADER.size + _HEADER.unpack(head[: _HEADER.size])[1]) > len(head):
        head = read(end)
    return {stored.state.name: (stored.count, stored.length) for stored in _read_index(memoryview(head), where)[1]}


def _read_index(view: memoryview, where: str) -> tuple[int, list[_StoredSection]]:
    """The offset of the first section, and the index of all."""
    if len(view) < _HEADER.size:
        raise _unknown(where, "it is too short")
    magic, length, checksum = _HEADER.unpack(view[: _HEADER.size])
    if magic != _MAGIC:
        raise _unknown(where, f"it starts with {magic!r}")
    end = _HEADER.size + length
    data = view[_HEADER.size : end]
    if len(data) != length or xxhash.xxh3_64_intdigest(data) != checksum:
        raise CorruptionError(f"{where}: its index is damaged.", hint=_HINT)
    try:
        return end + -end % _ALIGNMENT, _index_decoder.decode(data)
    except MALFORMED as error:
        raise _unknown(where, f"its index has another form: {error}") from error


def _unknown(where: str, reason: str) -> CorruptionError:
    return CorruptionError(
        f"{where}: it is not a snapshot of a known version: {reason}.",
        kind=ErrorKind.FORMAT,
        hint="Restore the file from a copy, or use the version of statelog that wrote it, which may be a newer one.",
    )
