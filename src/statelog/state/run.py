"""Runs: sorted, immutable files of state changes that can be searched as they are.

A changeset is a run; a merge of runs is a run. The byte layout is specified in ``docs/format.md``.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from statelog.errors import CorruptionError, ErrorKind
from statelog.state.evolution import can_read, project
from statelog.state.key_groups import Hashes
from statelog.state.schema import StateDescriptor, StateKind, StateSchema

__all__ = [
    "EXPIRY_COLUMN",
    "LOCAL_BLOCK_ROWS",
    "STORED_BLOCK_ROWS",
    "Operation",
    "Run",
    "RunBlock",
    "RunSection",
    "RunWriter",
    "Section",
    "change_schema",
    "encode_run",
]

Positions = npt.NDArray[np.int64]

STORED_BLOCK_ROWS: Final = 16_384
"""Rows per block of a stored run: small enough that a rescaled subtask reads little it does not need."""
LOCAL_BLOCK_ROWS: Final = 1 << 20
"""Rows per block of a local run: a search visits few blocks, and a merge holds one per input."""

_MAGIC: Final = b"SLRUN\x00\x00\x02"
_MAGIC_WITHOUT_EXPIRY: Final = b"SLRUN\x00\x00\x01"
_TAIL: Final = struct.Struct("<IQ4s")
_TAIL_MAGIC: Final = b"SLR1"
_ALIGNMENT: Final = 64
_END_OF_STREAM_BYTES: Final = 8
_COLUMNS: Final = [
    pa.field("hash", pa.uint64(), nullable=False),
    pa.field("key", pa.binary(), nullable=False),
    pa.field("entry", pa.binary(), nullable=False),
    pa.field("op", pa.uint8(), nullable=False),
    pa.field("expiry", pa.int64()),
]
EXPIRY_COLUMN: Final = 4
"""Index of the column that says from when on a put no longer counts, in milliseconds; null is never."""
VALUE_COLUMN: Final = len(_COLUMNS)
"""Index of the first value column of a batch of changes."""


class Operation(IntEnum):
    """What a row does to the entry that it names."""

    PUT = 0
    DELETE = 1
    CLEAR = 2
    """Removes all entries of the key that older runs hold; sorts before the key's other rows."""


class _StoredBlock(msgspec.Struct, frozen=True, array_like=True):
    state: int
    offset: int
    length: int
    rows: int
    first_hash: int
    last_hash: int
    checksum: int


class _Footer(msgspec.Struct, frozen=True):
    states: list[StateSchema]
    blocks: list[_StoredBlock]


_footer_encoder: Final = msgspec.msgpack.Encoder()
_footer_decoder: Final = msgspec.msgpack.Decoder(_Footer)


@dataclass(frozen=True)
class Section:
    """Changes of one state, to be written.

    Parameters
    ----------
    state : StateDescriptor
        The state.
    batches : list of pyarrow.RecordBatch
        Changes of `change_schema(state)`; the concatenation is sorted by hash, key and entry.
    """

    state: StateDescriptor
    batches: list[pa.RecordBatch]


def change_schema(state: StateDescriptor) -> pa.Schema:
    """Columns of a state's changes: hash, key, entry, operation, expiry and the value's fields.

    Timers have one more: the rows of a block in the order of their times, which the writer fills in.
    """
    values = [pa.field(f"v{i}", field.type) for i, field in enumerate(state.value_schema)]
    order = [pa.field("by_time", pa.uint32())] if state.kind is StateKind.TIMER else []
    return pa.schema(_COLUMNS + values + order)


class RunWriter:
    """Writes a run block by block, so that a run larger than the memory can be written.

    The order of calls is :meth:`add` for every batch, all of one state after another, then :meth:`finish`.

    Parameters
    ----------
    sink : pyarrow.NativeFile
        Where the bytes go; it must be at its start.
    compress : bool
        Whether the blocks' buffers are compressed with lz4; uncompressed blocks can be mapped.
    block_rows : int
        Rows per block; a block grows beyond it when rows of one hash would be parted.
    """

    def __init__(self, sink: pa.NativeFile, *, compress: bool, block_rows: int) -> None:
        self._sink = sink
        self._compress = compress
        self._block_rows = block_rows
        self._states: list[StateSchema] = []
        self._blocks: list[_StoredBlock] = []
        sink.write(_MAGIC)

    def add(self, state: StateDescriptor, batch: pa.RecordBatch) -> None:
        """Write changes of a state.

        Parameters
        ----------
        state : StateDescriptor
            The state; calls for one state follow each other.
        batch : pyarrow.RecordBatch
            Changes of `change_schema(state)`, sorted by hash, key and entry, with hashes above those of the
            calls before for this state.
        """
        if batch.num_rows == 0:
            return
        stored = state.to_stored()
        if not self._states or self._states[-1] != stored:
            self._states.append(stored)
        hashes = batch.column(0).to_numpy()
        for start, end in _block_bounds(hashes, self._block_rows):
            _pad(self._sink)
            rows = batch.slice(start, end - start)
            if state.kind is StateKind.TIMER:
                rows = _ordered_by_time(rows)
            message = _encode_batch(rows, self._compress)
            block = _StoredBlock(
                state=len(self._states) - 1,
                offset=self._sink.tell(),
                length=len(message),
                rows=end - start,
                first_hash=int(hashes[start]),
                last_hash=int(hashes[end - 1]),
                checksum=xxhash.xxh3_64_intdigest(message),
            )
            self._sink.write(message)
            self._blocks.append(block)

    def finish(self) -> int:
        """Write the footer and return the number of rows written."""
        footer = _footer_encoder.encode(_Footer(self._states, self._blocks))
        self._sink.write(footer)
        self._sink.write(_TAIL.pack(len(footer), xxhash.xxh3_64_intdigest(footer), _TAIL_MAGIC))
        return sum(block.rows for block in self._blocks)


def encode_run(sections: Iterable[Section], *, compress: bool, block_rows: int) -> bytes:
    """Encode a run of sections in memory; the parameters are those of :class:`RunWriter`."""
    sink = pa.BufferOutputStream()
    writer = RunWriter(sink, compress=compress, block_rows=block_rows)
    for section in sections:
        if section.batches:
            writer.add(section.state, pa.concat_batches(section.batches))
    writer.finish()
    data: bytes = sink.getvalue().to_pybytes()
    return data


class Run:
    """A run that can be searched.

    Parameters
    ----------
    buffer : pyarrow.Buffer
        The run's bytes; a memory map is read only where it is searched.
    name : str
        Where the bytes come from, for messages.
    offset : int
        Where the run starts in that object, for messages.

    Raises
    ------
    CorruptionError
        If the bytes are not a run, or the footer is damaged. Blocks are checked when first read.
    """

    def __init__(self, buffer: pa.Buffer, name: str, offset: int = 0) -> None:
        self.name = name
        self.size_bytes = buffer.size
        footer = self._read_footer(buffer, offset)
        has_expiry = buffer.slice(0, len(_MAGIC)).to_pybytes() == _MAGIC
        self.sections: dict[str, RunSection] = {}
        self._evolved: dict[str, RunSection] = {}
        descriptors = [StateDescriptor.from_stored(stored) for stored in footer.states]
        for index, state in enumerate(descriptors):
            schema = change_schema(state)
            blocks = [
                RunBlock(buffer, stored, schema, name, offset, has_expiry=has_expiry)
                for stored in footer.blocks
                if stored.state == index
            ]
            self.sections[state.name] = RunSection(state, blocks)
        self.rows = sum(stored.rows for stored in footer.blocks)

    def _read_footer(self, buffer: pa.Buffer, offset: int) -> _Footer:
        where = f"{self.name}, run of {buffer.size} bytes at offset {offset}"
        if buffer.size < len(_MAGIC) + _TAIL.size:
            raise _damaged(f"{where}: too short for a run.", ErrorKind.FORMAT)
        if buffer.slice(0, len(_MAGIC)).to_pybytes() not in (_MAGIC, _MAGIC_WITHOUT_EXPIRY):
            raise _damaged(f"{where}: no run of a known version starts here.", ErrorKind.FORMAT)
        tail_at = buffer.size - _TAIL.size
        length, checksum, magic = _TAIL.unpack(buffer.slice(tail_at).to_pybytes())
        if magic != _TAIL_MAGIC or length > tail_at - len(_MAGIC):
            raise _damaged(f"{where}: its last {_TAIL.size} bytes are damaged.", ErrorKind.FORMAT)
        data = buffer.slice(tail_at - length, length).to_pybytes()
        if xxhash.xxh3_64_intdigest(data) != checksum:
            raise _damaged(f"{where}: its footer at {offset + tail_at - length} is damaged.")
        try:
            return _footer_decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise _damaged(f"{where}: its footer is of an unknown form: {error}.", ErrorKind.FORMAT) from error

    def section(self, state: StateDescriptor) -> RunSection | None:
        """The changes of one state, with the fields that are wanted; None if the run has none.

        Raises
        ------
        CorruptionError
            If the run holds the state with another kind, or with fields that cannot be those.
        """
        section = self.sections.get(state.name)
        if section is None or section.state == state:
            return section
        evolved = self._evolved.get(state.name)
        if evolved is None or evolved.state != state:
            if not can_read(section.state, state):
                raise _damaged(f"{self.name}: holds {section.state} where {state} is expected.", ErrorKind.FORMAT)
            blocks: list[RunBlock] = [_EvolvedBlock(block, section.state, state) for block in section.blocks]
            evolved = self._evolved[state.name] = RunSection(state, blocks)
        return evolved

    def verify(self) -> None:
        """Read every block and check it."""
        for section in self.sections.values():
            for block in section.blocks:
                block.load()


class RunSection:
    """The changes of one state in a run, in blocks by hash."""

    def __init__(self, state: StateDescriptor, blocks: list[RunBlock]) -> None:
        self.state = state
        self.blocks = blocks
        self.rows = sum(block.rows for block in blocks)

    def blocks_between(self, first: int, last: int) -> list[RunBlock]:
        """Blocks that may hold a hash from `first` to `last`."""
        return [block for block in self.blocks if block.first_hash <= last and first <= block.last_hash]


class RunBlock:
    """Rows of one state whose hashes lie between two bounds; read and checked on first use."""

    def __init__(
        self, buffer: pa.Buffer, stored: _StoredBlock, schema: pa.Schema, name: str, base: int, *, has_expiry: bool
    ) -> None:
        self.rows = stored.rows
        self.first_hash = stored.first_hash
        self.last_hash = stored.last_hash
        self._buffer = buffer
        self._stored = stored
        self._schema = schema
        self._has_expiry = has_expiry
        self._where = f"{name}, block at offset {base + stored.offset}"

    @cached_property
    def batch(self) -> pa.RecordBatch:
        """The block's rows as they were written, kept once they are read."""
        return self.load()

    def take(self, rows: Positions) -> pa.RecordBatch:
        """Some of the rows, in ascending order."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
            return self.batch.slice(int(rows[0]), len(rows))
        return self.batch.take(pa.array(rows))

    def load(self) -> pa.RecordBatch:
        """Read the block's rows without keeping them.

        Raises
        ------
        CorruptionError
            If the bytes are not those that were written.
        """
        stored = self._stored
        if stored.offset + stored.length > self._buffer.size:
            raise _damaged(f"{self._where}: reaches beyond the run's end.", ErrorKind.FORMAT)
        data = self._buffer.slice(stored.offset, stored.length)
        if xxhash.xxh3_64_intdigest(memoryview(data)) != stored.checksum:
            raise _damaged(f"{self._where}: its {stored.length} bytes are damaged.")
        if self._has_expiry:
            return pa.ipc.read_record_batch(data, self._schema)
        rows = pa.ipc.read_record_batch(data, self._schema.remove(EXPIRY_COLUMN))
        return rows.add_column(EXPIRY_COLUMN, self._schema.field(EXPIRY_COLUMN), pa.nulls(stored.rows, pa.int64()))

    def due(self, after_ms: int, until_ms: int) -> Positions:
        """Rows of timers whose times lie after one and up to another, found by bisection."""
        times = self.batch.column(VALUE_COLUMN).to_numpy()
        by_time = self.batch.column(VALUE_COLUMN + 1).to_numpy()
        first = bisect.bisect_right(by_time, after_ms, key=lambda row: times[row])
        last = bisect.bisect_right(by_time, until_ms, key=lambda row: times[row])
        return np.sort(by_time[first:last]).astype(np.int64)

    @cached_property
    def hashes(self) -> Hashes:
        """Key hashes of the rows, ascending."""
        hashes: Hashes = self.batch.column(0).to_numpy()
        return hashes

    def spans(self, hashes: Hashes) -> tuple[Positions, Positions]:
        """First row of each hash, and the row after its last; equal where the block has none.

        Parameters
        ----------
        hashes : numpy.ndarray of uint64, shape (n,)
            Key hashes, ascending.
        """
        own = self.hashes
        low = np.searchsorted(own, hashes, "left")
        inside = np.minimum(low, len(own) - 1)
        high = low + (own[inside] == hashes)
        following = np.minimum(high, len(own) - 1)
        several = np.flatnonzero((high > low) & (following == high) & (own[following] == hashes))
        if len(several):
            high[several] = np.searchsorted(own, hashes[several], "right")
        return low, high

    def find(self, key_hash: int, key: bytes, entry: bytes) -> int | None:
        """Row of one entry, found by bisection; None if the block does not name the entry."""
        low, high = (int(span[0]) for span in self.spans(np.array([key_hash], np.uint64)))
        keys, entries = self.batch.column(1), self.batch.column(2)
        end = high
        while low < high:
            middle = (low + high) // 2
            if (keys[middle].as_py(), entries[middle].as_py()) < (key, entry):
                low = middle + 1
            else:
                high = middle
        found = low < end and keys[low].as_py() == key and entries[low].as_py() == entry
        return low if found else None

    def match(self, hashes: Hashes, keys: pa.Array) -> tuple[Positions, Positions]:
        """Find all rows of some keys.

        Parameters
        ----------
        hashes : numpy.ndarray of uint64, shape (n,)
            Key hashes, ascending.
        keys : pyarrow.Array of binary, length n
            The keys that they belong to; only rows with equal key bytes match.

        Returns
        -------
        queries, rows : numpy.ndarray of int64, shape (m,)
            Pairs of position in `hashes` and row of the block, both ascending.
        """
        low, high = self.spans(hashes)
        queries = np.flatnonzero(high > low)
        rows = low[queries]
        counts = high[queries] - rows
        if len(counts) and counts.max() > 1:
            starts = np.repeat(rows - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
            rows = starts + np.arange(len(starts))
            queries = np.repeat(queries, counts)
        same = pc.equal(self.batch.column(1).take(pa.array(rows)), keys.take(pa.array(queries)))
        if same.true_count < len(rows):
            mask = same.to_numpy(zero_copy_only=False)
            queries, rows = queries[mask], rows[mask]
        return queries, rows


class _EvolvedBlock(RunBlock):
    """A block whose state has other fields by now; values are converted when they are taken or loaded."""

    def __init__(self, block: RunBlock, stored: StateDescriptor, wanted: StateDescriptor) -> None:
        self.rows = block.rows
        self.first_hash = block.first_hash
        self.last_hash = block.last_hash
        self._block = block
        self._was = stored
        self._wanted = wanted

    @cached_property
    def batch(self) -> pa.RecordBatch:
        return self._block.batch

    def take(self, rows: Positions) -> pa.RecordBatch:
        return self._converted(self._block.take(rows))

    def load(self) -> pa.RecordBatch:
        return self._converted(self._block.load())

    def _converted(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        values = project(rows.columns[VALUE_COLUMN:], self._was, self._wanted)
        return pa.RecordBatch.from_arrays([*rows.columns[:VALUE_COLUMN], *values], schema=change_schema(self._wanted))


def _block_bounds(hashes: Hashes, block_rows: int) -> list[tuple[int, int]]:
    """Split rows into blocks without parting rows of one hash."""
    bounds: list[tuple[int, int]] = []
    start = 0
    while start < len(hashes):
        end = min(start + block_rows, len(hashes))
        if end < len(hashes):
            end = int(np.searchsorted(hashes, hashes[end - 1], "right"))
        bounds.append((start, end))
        start = end
    return bounds


def _ordered_by_time(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Timers with their last column filled in."""
    order = np.argsort(rows.column(VALUE_COLUMN).to_numpy(), kind="stable").astype(np.uint32)
    return rows.set_column(VALUE_COLUMN + 1, rows.schema.field(VALUE_COLUMN + 1), pa.array(order))


def _encode_batch(batch: pa.RecordBatch, compress: bool) -> pa.Buffer:
    if not compress:
        return batch.serialize()
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    stream = sink.getvalue()
    start = batch.schema.serialize().size
    return stream.slice(start, stream.size - start - _END_OF_STREAM_BYTES)


def _pad(sink: pa.BufferOutputStream) -> None:
    sink.write(b"\0" * (-sink.tell() % _ALIGNMENT))


def _damaged(message: str, kind: ErrorKind = ErrorKind.CHECKSUM) -> CorruptionError:
    return CorruptionError(message, kind=kind, hint="Restore the file from a copy; nothing was changed.")
