"""Writes runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from statelog.files import cut
from statelog.runs.byte_slices import BUDGET, Positions, join_rows, row_ends
from statelog.runs.key_groups import Hashes
from statelog.runs.schema import (
    ALIGNMENT,
    EIGHTHS,
    EXPIRY_COLUMN,
    MAGIC,
    TAIL,
    TAIL_MAGIC,
    VALUE_COLUMN,
    Footer,
    StateDescriptor,
    StateKind,
    StateSchema,
    StoredBlock,
)

STORED_BLOCK_ROWS: Final = 16_384
"""Rows per block of a stored run: few enough that a rescaled subtask reads little that it does not need."""
STORED_BLOCK_BYTES: Final = 1 << 19
"""Bytes of such a block as columns, unless all its rows have one hash: a look-up reads a block of each run."""
LOCAL_BLOCK_ROWS: Final = 1 << 20
"""Rows per block of a local run: a search visits few blocks, and a merge holds one per input."""

_END_OF_STREAM_BYTES: Final = 8

_footer_encoder: Final = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class StateChanges:
    """Changes of one state, to be written."""

    state: StateDescriptor
    batches: list[pa.RecordBatch]
    """Columns as in `change_schema(state)`; all batches together are sorted by hash, key and entry."""


class RunWriter:
    """Writes a run block by block, so that it may be larger than the memory.

    Order of calls: :meth:`add` for every batch, those of one state in order of hash, then :meth:`finish`. `sink` must
    be at its start; with `written`, the footer of an unfinished run in the sink, at its end. `compression` is
    ``lz4``, ``zstd`` or None; uncompressed blocks can be mapped.

    A block has `block_rows` rows, or `whole_bytes` as columns, or more where it would split rows of one hash. Such rows
    are split only if they exceed `block_bytes` as columns, by default also `whole_bytes`.
    """

    def __init__(
        self,
        sink: pa.NativeFile,
        *,
        compression: str | None,
        block_rows: int,
        block_bytes: int = BUDGET.slice_bytes,
        whole_bytes: int | None = None,
        written: Footer | None = None,
    ) -> None:
        self._sink = sink
        self._compression = compression
        self._block_rows = block_rows
        self._block_bytes = block_bytes
        self._whole_bytes = block_bytes if whole_bytes is None else min(whole_bytes, block_bytes)
        self._states: list[StateSchema] = list(written.states) if written else []
        self._blocks: list[StoredBlock] = list(written.blocks) if written else []
        if not written:
            sink.write(MAGIC)

    @property
    def written(self) -> Footer:
        """The footer so far, with which another writer can continue."""
        return Footer(self._states, self._blocks)

    def add(self, state: StateDescriptor, batch: pa.RecordBatch) -> None:
        """Write changes of a state, with the columns of :func:`change_schema`.

        They are sorted by hash, key and entry, and come after those of earlier calls for the state.
        """
        if batch.num_rows == 0:
            return
        stored = state.to_stored()
        if stored not in self._states:
            assert all(other.name != stored.name for other in self._states), "a run has a state in one form"
            self._states.append(stored)
        number = self._states.index(stored)
        hashes = batch.column(0).to_numpy()
        before = next((block for block in reversed(self._blocks) if block.state == number), None)
        assert before is None or before.last_hash <= hashes[0], "rows come in order of their hashes"
        for start, end in self._block_bounds(batch, hashes):
            self._sink.write(b"\0" * (-self._sink.tell() % ALIGNMENT))
            rows = batch.slice(start, end - start)
            if state.kind is StateKind.TIMER:
                rows = _ordered_by_time(rows)
            message = _encode_batch(rows, self._compression)
            block = StoredBlock(
                state=number,
                offset=self._sink.tell(),
                length=len(message),
                rows=end - start,
                first_hash=int(hashes[start]),
                last_hash=int(hashes[end - 1]),
                checksum=xxhash.xxh3_64_intdigest(message),
                size_bytes=rows.nbytes,
                expiries=_expiries(rows.column(EXPIRY_COLUMN)),
            )
            for piece in cut(memoryview(message)):
                self._sink.write(piece)
            self._blocks.append(block)

    def _block_bounds(self, batch: pa.RecordBatch, hashes: Hashes) -> Iterator[tuple[int, int]]:
        """Split rows into blocks; rows of one hash stay together unless they exceed a block."""
        ends = row_ends(batch) if batch.nbytes > self._whole_bytes else None
        start = 0
        while start < len(hashes):
            end = min(start + self._block_rows, len(hashes))
            if end < len(hashes):
                end = int(np.searchsorted(hashes, hashes[end - 1], "right"))
            if ends is not None and ends[end] - ends[start] > self._whole_bytes:
                fitting = int(np.searchsorted(ends, ends[start] + self._whole_bytes, "right")) - 1
                whole = int(np.searchsorted(hashes, hashes[max(fitting, start)], "left"))
                end = whole if whole > start else self._end_of_hash(start, hashes, ends)
            yield start, end
            start = end

    def _end_of_hash(self, start: int, hashes: Hashes, ends: Positions) -> int:
        """The end of a block whose rows have one hash."""
        end = int(np.searchsorted(hashes, hashes[start], "right"))
        if ends[end] - ends[start] <= self._block_bytes:
            return end
        return max(start + 1, int(np.searchsorted(ends, ends[start] + self._block_bytes, "right")) - 1)

    def finish(self) -> int:
        """Write the footer and return the number of rows written."""
        footer = _footer_encoder.encode(Footer(self._states, self._blocks))
        self._sink.write(footer)
        self._sink.write(TAIL.pack(len(footer), xxhash.xxh3_64_intdigest(footer), TAIL_MAGIC))
        return sum(block.rows for block in self._blocks)


def write_run(
    sections: Iterable[StateChanges],
    sink: pa.NativeFile,
    *,
    compression: str | None,
    block_rows: int,
    block_bytes: int = BUDGET.slice_bytes,
    whole_bytes: int | None = None,
) -> None:
    """Write a run of sections block by block; the parameters are those of :class:`RunWriter`."""
    writer = RunWriter(
        sink, compression=compression, block_rows=block_rows, block_bytes=block_bytes, whole_bytes=whole_bytes
    )
    for section in sections:
        for batch in join_rows(section.batches, block_bytes):
            writer.add(section.state, batch)
    writer.finish()


def encode_run(
    sections: Iterable[StateChanges], *, compression: str | None, block_rows: int, block_bytes: int = BUDGET.slice_bytes
) -> bytes:
    """Encode a run of sections in memory; the parameters are those of :class:`RunWriter`."""
    sink = pa.BufferOutputStream()
    write_run(sections, sink, compression=compression, block_rows=block_rows, block_bytes=block_bytes)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _ordered_by_time(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Timers with their last column filled in."""
    order = np.argsort(rows.column(VALUE_COLUMN).to_numpy(), kind="stable").astype(np.uint32)
    return rows.set_column(VALUE_COLUMN + 1, rows.schema.field(VALUE_COLUMN + 1), pa.array(order))


def _expiries(column: pa.Array) -> list[int]:
    """The `expiries` of a block, from its rows' times of expiry."""
    if column.null_count == len(column):
        return []
    never = np.iinfo(np.int64).max
    at = -(-np.arange(1, EIGHTHS + 1) * len(column) // EIGHTHS) - 1
    found = np.partition(pc.fill_null(column, never).to_numpy(), at)[at]
    times: list[int] = found[found < never].tolist()
    return times


def _encode_batch(batch: pa.RecordBatch, compression: str | None) -> pa.Buffer:
    if compression is None:
        return batch.serialize()
    sink = pa.BufferOutputStream()
    # Threads take longer to begin than a block takes to compress.
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    stream = sink.getvalue()
    start = batch.schema.serialize().size
    return stream.slice(start, stream.size - start - _END_OF_STREAM_BYTES)
