"""Rows in RocksDB: keys that sort as runs do, values as MessagePack, and the ways in and out.

A row's key is ``01``, the state's number (2 bytes), the key hash (8), the length of the key (4), the key, and the
entry. Integers are big-endian, so the entries of a key lie side by side and in order. A timer has a second row, which
puts all timers of a state in the order of their times: ``02``, the state's number, the timer's entry (8 bytes, its
time), hash, length and key. ``00`` holds :class:`TableHeader`. Another version of the format does not read the table,
but makes it again from the local runs.
"""

from __future__ import annotations

import itertools
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statelog.runs.byte_slices import BUDGET, in_parts, to_array
from statelog.runs.evolution import project
from statelog.runs.schema import EXPIRY_COLUMN, VALUE_COLUMN, StateDescriptor, StateSchema
from statelog.tables.table import EntryPage, EntryRange, EntryRows, FoundEntry, KeyBatch, KeyEntries

VERSION: Final = 1
CONTENTS_KEY: Final = b"\x00"
_ROWS: Final = b"\x01"
_TIMES: Final = b"\x02"
_NUMBER: Final = struct.Struct(">H")
_LENGTH: Final = struct.Struct(">I")
_HASH_BYTES: Final = 8
_TIME_BYTES: Final = 8
_SIGN: Final = 1 << 63

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode


class HeldState(msgspec.Struct, array_like=True):
    """A state that has rows in the table, or had some."""

    name: str
    """The name in runs; empty once the state is deleted."""
    newest: int
    """Number of the description that its newest rows were written with."""


class TableHeader(msgspec.Struct):
    """The table's own record of its content, written together with every change."""

    version: int = VERSION
    digest: bytes | None = None
    """Chain digest of the state; None while only a part of a run is applied."""
    forms: list[StateSchema] = []
    """The state descriptions that rows were written with, by number; a value begins with the number of its own."""
    states: list[HeldState] = []
    """The states, by number."""
    looked_at: bytes = b""
    """Key of the last row that was checked for expiry; empty to begin with the first."""


# ---- Keys ----


def of_state(number: int) -> tuple[bytes, bytes]:
    """Key prefixes of a state's rows, and of its timers' second rows."""
    packed = _NUMBER.pack(number)
    return _ROWS + packed, _TIMES + packed


def after(prefix: bytes) -> bytes:
    """The first key after all keys with a prefix."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1])


def key_prefixes(number: int, keys: KeyBatch) -> Iterator[bytes]:
    """Key prefix of the rows of each key of a state."""
    prefix, _ = of_state(number)
    hashes = keys.hashes.astype(">u8").tobytes()
    pack = _LENGTH.pack
    for index, key in enumerate(keys.keys.to_pylist()):
        yield prefix + hashes[_HASH_BYTES * index : _HASH_BYTES * (index + 1)] + pack(len(key)) + key


def time_entry(time_ms: int) -> bytes:
    """The entry of a timer, which sorts by time."""
    return (time_ms + _SIGN).to_bytes(_TIME_BYTES, "big")


def row_keys(number: int, rows: pa.RecordBatch) -> list[bytes]:
    """Row keys of some rows of a run; without an entry a row key is the prefix of all rows of its key."""
    prefix, _ = of_state(number)
    return _joined(prefix, *_hash_and_key(rows), rows.column(2))


def timer_keys(number: int, rows: pa.RecordBatch) -> list[bytes]:
    """Row keys of the second rows of some timers of a run."""
    _, prefix = of_state(number)
    return _joined(prefix, rows.column(2), *_hash_and_key(rows))


def _hash_and_key(rows: pa.RecordBatch) -> tuple[pa.Array, pa.Array, pa.Array]:
    hashes, keys = rows.column(0).to_numpy(), rows.column(1)
    lengths = pc.binary_length(keys).to_numpy()
    return _big_endian(hashes, _HASH_BYTES), _big_endian(lengths, _LENGTH.size), keys


def _big_endian(numbers: np.ndarray[Any, Any], width: int) -> pa.Array:
    stored = pa.py_buffer(numbers.astype(f">u{width}"))
    return pa.Array.from_buffers(pa.binary(width), len(numbers), [None, stored])


def _joined(prefix: bytes, *parts: pa.Array) -> list[bytes]:
    # Large binaries: the keys of some rows may almost fill an array already, and become longer here.
    whole = [pa.scalar(prefix, pa.large_binary()), *(part.cast(pa.large_binary()) for part in parts)]
    joined: list[bytes] = pc.binary_join_element_wise(*whole, pa.scalar(b"", pa.large_binary())).to_pylist()
    return joined


def split_by_time(row: bytes) -> tuple[int, bytes, int]:
    """Hash, key and time of a timer's second row."""
    start = len(_TIMES) + _NUMBER.size
    hash_at = start + _TIME_BYTES
    key_at = hash_at + _HASH_BYTES + _LENGTH.size
    time_ms = int.from_bytes(row[start:hash_at], "big") - _SIGN
    return int.from_bytes(row[hash_at : hash_at + _HASH_BYTES], "big"), row[key_at:], time_ms


# ---- Values ----


def encode_values(rows: pa.RecordBatch, state: StateDescriptor, form: int) -> list[bytes]:
    """Values of some rows of a run: number of their description, expiry, and the fields in Arrow's storage types."""
    end = VALUE_COLUMN + len(state.value_schema)
    columns = [column.view(_storage_type(column.type)).to_pylist() for column in rows.columns[VALUE_COLUMN:end]]
    expiry = rows.column(EXPIRY_COLUMN).to_pylist()
    return [_encode((form, *row)) for row in zip(expiry, *columns, strict=True)]


def decode_expiry(value: bytes) -> int | None:
    """The expiry of a value."""
    expiry: int | None = _decode(value)[1]
    return expiry


def decode_values(
    values: Sequence[bytes], forms: Sequence[StateDescriptor], wanted: StateDescriptor
) -> tuple[pa.Table, pa.Array]:
    """Encoded values as columns of `wanted`, and their expiry; `forms` are the table's descriptions by number."""
    rows = [_decode(value) for value in values]
    batches: list[pa.RecordBatch] = []
    for form, group in itertools.groupby(rows, key=lambda row: row[0]):
        alike = list(group)
        batches += in_parts(len(alike), partial(_to_columns, alike, forms[form], wanted), BUDGET.slice_bytes)
    return pa.Table.from_batches(batches, wanted.value_schema), pa.array([row[1] for row in rows], pa.int64())


def _to_columns(
    rows: list[list[Any]], stored: StateDescriptor, wanted: StateDescriptor, start: int, end: int
) -> pa.RecordBatch:
    _, _, *columns = zip(*rows[start:end], strict=True)
    arrays = [
        to_array(column, _storage_type(field.type)).view(field.type)
        for column, field in zip(columns, stored.value_schema, strict=True)
    ]
    if stored != wanted:
        arrays = project(arrays, stored, wanted)
    return pa.RecordBatch.from_arrays(arrays, schema=wanted.value_schema)


def _storage_type(kind: pa.DataType) -> pa.DataType:
    """A type of equal layout whose values MessagePack can hold without loss."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_temporal(kind):
        return pa.int64() if kind.bit_width == 64 else pa.int32()
    if pa.types.is_decimal(kind):
        return pa.binary(kind.byte_width)
    if pa.types.is_map(kind):
        fields = [("key", kind.key_type, False), ("value", kind.item_type, True)]
        entry = pa.struct([pa.field(name, _storage_type(part), nullable) for name, part, nullable in fields])
        return pa.list_(pa.field("entries", entry, nullable=False))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_storage_type(kind.value_type)))
    if pa.types.is_struct(kind):
        # Fields are named by position, as several may have the same name.
        return pa.struct([pa.field(str(index), _storage_type(part.type)) for index, part in enumerate(kind.fields)])
    return kind


# ---- The entries of one key, read one by one or in pages ----


_Row = tuple[bytes, bytes]


class RocksRows(Protocol):
    """The rows of a database: row keys and encoded values."""

    def value_at(self, key: bytes) -> bytes | None:
        """The value of a row key; None if there is none."""

    def scan(self, prefix: bytes, start: bytes) -> Iterator[_Row]:
        """Row keys that begin with a prefix, from `start` on, with their values."""

    def scan_between(self, prefix: bytes, wanted: EntryRange) -> Iterator[_Row]:
        """Entries in a range with their values, from the end that is read first."""

    def entry_rows(self, state: StateDescriptor, rows: Sequence[_Row]) -> EntryRows:
        """Entries and their values as the answer of a table."""


class EntriesInRocks(KeyEntries):
    """The entries of a key: the rows whose row keys begin with a prefix; None has none."""

    def __init__(self, table: RocksRows, state: StateDescriptor, prefix: bytes | None) -> None:
        self._table = table
        self._state = state
        self._prefix = prefix

    def find(self, entry: bytes) -> FoundEntry | None:
        value = None if self._prefix is None else self._table.value_at(self._prefix + entry)
        if value is None:
            return None
        rows = self._table.entry_rows(self._state, [(entry, value)])
        return FoundEntry(rows.values, rows.expiry[0].as_py())

    def pages(self, max_entries: int, max_bytes: int) -> Iterator[EntryRows]:
        prefix = start = self._prefix
        while prefix is not None and start is not None:
            # No iterator of RocksDB stays open between two pages: the processor may never ask for the next.
            rows, start = self._read(prefix, start, max_entries, max_bytes)
            if rows:
                yield self._table.entry_rows(self._state, rows)

    def between(self, wanted: EntryRange, max_entries: int, max_bytes: int) -> EntryPage:
        found: list[_Row] = []
        rest = None
        for entry, value in () if self._prefix is None else self._table.scan_between(self._prefix, wanted):
            max_bytes -= len(entry) + len(value)
            if found and (len(found) >= max_entries or max_bytes < 0):
                _, rest = wanted.cut(found[-1][0] if wanted.from_end else entry)
                break
            found.append((entry, value))
        if wanted.from_end:
            found.reverse()
        return EntryPage(self._table.entry_rows(self._state, found), rest)

    def _read(self, prefix: bytes, start: bytes, max_entries: int, max_bytes: int) -> tuple[list[_Row], bytes | None]:
        """The entries of a page, with their values, and the row key of the next page."""
        rows: list[_Row] = []
        read_bytes = 0
        for key, value in self._table.scan(prefix, start):
            entry = key[len(prefix) :]
            read_bytes += len(entry) + len(value)
            if rows and (len(rows) == max_entries or read_bytes > max_bytes):
                return rows, key
            rows.append((entry, value))
        return rows, None


# ---- Sorted files, which RocksDB ingests unchanged ----


_FILE_BYTES: Final = 64 << 20


class SortedFiles:
    """Writes rows to sorted files, which RocksDB ingests without buffering, flushing and compacting their rows.

    A row that does not sort after all rows before it is left out. The folder is emptied first.
    """

    def __init__(self, folder: Path, new_writer: Callable[[], Any]) -> None:
        self._folder = folder
        self._new_writer = new_writer
        self._writer: Any = None
        self._paths: list[str] = []
        self._last = b""
        self.remove()
        folder.mkdir(parents=True)

    def add(self, rows: Iterable[_Row]) -> list[_Row]:
        """Add rows (non-empty key, value), and return those that were left out."""
        last = self._last
        left_out: list[_Row] = []
        for key, value in rows:
            if key <= last:
                left_out.append((key, value))
                continue
            if self._writer is None:
                self._begin()
            self._writer[key] = value
            last = key
        self._last = last
        if self._writer is not None and self._writer.file_size() >= _FILE_BYTES:
            self._finish()
        return left_out

    def _begin(self) -> None:
        self._paths.append(str(self._folder / f"{len(self._paths)}.sst"))
        self._writer = self._new_writer()
        self._writer.open(self._paths[-1])

    def _finish(self) -> None:
        self._writer.finish()
        self._writer = None

    def finish(self) -> list[str]:
        """End the last file, and return the paths of all."""
        if self._writer is not None:
            self._finish()
        return self._paths

    def remove(self) -> None:
        """Remove files that were not ingested."""
        shutil.rmtree(self._folder, ignore_errors=True)
