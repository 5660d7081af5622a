"""Collects the changes of a batch in columns, until they become a changeset."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.errors import ErrorKind, ProcessorError
from statelog.runs.byte_slices import (
    BUDGET,
    MAX_COLUMN_BYTES,
    Budget,
    Pace,
    Positions,
    RowsTooLarge,
    bytes_before,
    cut_rows,
    in_parts,
    to_array,
)
from statelog.runs.merge import merge_runs
from statelog.runs.reader import Run
from statelog.runs.schema import Operation, StateDescriptor, StateKind, change_schema, plain_name
from statelog.runs.values import RowCodec
from statelog.runs.writer import (
    LOCAL_BLOCK_ROWS,
    STORED_BLOCK_BYTES,
    STORED_BLOCK_ROWS,
    RunWriter,
    StateChanges,
    write_run,
)
from statelog.tables.table import KeyBatch, StateTable

LIST_PREFIX: Final = struct.Struct(">IQ")
"""Epoch and batch, with which the entry key of a list element begins."""
_LIST_ORDINAL: Final = struct.Struct(">I")
PHASE_SHIFT: Final = 30
"""The bits of the ordinal below those of the phase."""
_FIRST_ROWS: Final = 1024
_PART_OF_SLICE: Final = 4


@dataclass(frozen=True)
class ListPosition:
    """Gives list elements entry keys that put them behind those of earlier batches.

    An element's entry key is (epoch, batch, ordinal), so appending reads nothing. The ordinal's two top bits are the
    phase of the batch, because each phase counts from zero.
    """

    epoch: int
    batch: int
    phase: int = 0

    def entries(self, count: int) -> list[bytes]:
        """Entry keys of the `count` elements of one key that this phase appends."""
        prefix = LIST_PREFIX.pack(self.epoch, self.batch)
        base = self.phase << PHASE_SHIFT
        return [prefix + _LIST_ORDINAL.pack(ordinal) for ordinal in range(base, base + count)]


class ChangeBuffer:
    """The changes of one subtask in one phase of a batch, in the order of a run."""

    def __init__(self, budget: Budget = BUDGET) -> None:
        self._budget = budget
        self.describe_key: Callable[[int], str] = str
        """Names the key at a position of the current key chunk, for messages."""
        self._sections: dict[str, StateChanges] = {}
        self._paces: dict[str, Pace] = {}
        self._stored: dict[str, int] = {}
        self.rows = 0
        self.unstored_bytes: int = 0
        """Size in memory of the changes that :meth:`take` has not returned yet."""
        self.unstored_rows: int = 0

    def add(
        self,
        state: StateDescriptor,
        codec: RowCodec,
        keys: KeyBatch,
        positions: Sequence[int],
        entries: Sequence[bytes] | None,
        values: Sequence[tuple[Any, ...] | None],
        operations: Sequence[int] | None = None,
        expiry_ms: int | Sequence[int | None] | None = None,
    ) -> None:
        """Add changes of a state; they come after all its earlier changes in the order of a run.

        `positions` has the position in `keys` of each change's key, ascending. `entries` ascend within a key; None
        means that all are empty. Without `operations` a value is a put, and None a delete. From `expiry_ms` on, one
        time for all or one for each, a change no longer counts. Raises ProcessorError if a value does not fit its
        field, or a change is larger than a row may be.
        """
        if not positions:
            return
        picked = np.asarray(positions, np.int64)
        if operations is None:
            has_value = np.fromiter((value is not None for value in values), bool, len(picked))
            operation_column = np.where(has_value, Operation.PUT, Operation.DELETE).astype(np.uint8)
        else:
            operation_column = np.fromiter(operations, np.uint8, len(picked))
        schema = change_schema(state)

        def encode(start: int, end: int) -> pa.RecordBatch:
            count = end - start
            columns = [
                pa.array(keys.hashes[picked[start:end]]),
                _keys_at(keys.keys, picked[start:end]),
                _empty_entries(count) if entries is None else to_array(entries[start:end], pa.binary()),
                pa.array(operation_column[start:end]),
                _expiry_column(expiry_ms[start:end] if isinstance(expiry_ms, Sequence) else expiry_ms, count),
                *codec.encode(values[start:end], lambda index: self.describe_key(positions[start + index])),
            ]
            if state.kind is StateKind.TIMER:
                columns.append(pa.array(np.zeros(count, np.uint32)))  # filled in by the writer
            return pa.RecordBatch.from_arrays(columns, schema=schema)

        batches = self._batches(state)
        max_bytes = self._budget.slice_bytes // _PART_OF_SLICE
        pace = self._paces.setdefault(state.name, Pace(max_bytes, _FIRST_ROWS, self._budget.window_rows))
        start = 0
        while start < len(picked):
            first, end = start, min(start + pace.rows, len(picked))
            size_bytes = 0
            try:
                for batch in in_parts(end, encode, max_bytes, first):
                    if batch.num_rows == 1 and batch.nbytes > self._budget.row_bytes:
                        raise self._too_large(codec.subject, positions[start], f"{batch.nbytes:,} bytes")
                    batches.append(batch)
                    size_bytes += batch.nbytes
                    start += batch.num_rows
            except RowsTooLarge as error:  # the next row alone
                raise self._too_large(codec.subject, positions[start], str(error)) from error
            pace.learn(end - first, size_bytes)
            self.unstored_bytes += size_bytes
        self._count(len(picked))

    def add_columns(
        self,
        state: StateDescriptor,
        keys: KeyBatch,
        positions: Positions,
        entries: pa.Array | None,
        values: Sequence[pa.Array],
        operations: npt.NDArray[np.uint8] | None = None,
        expiry: pa.Array | None = None,
    ) -> None:
        """Add changes that are columns already, of n rows each; the order is that of :meth:`add`.

        Without `operations` all are puts; without `expiry`, int64 in milliseconds, they never expire. Raises
        ProcessorError if a change is larger than a row may be.
        """
        count = len(positions)
        if not count:
            return
        columns = [
            pa.array(keys.hashes[positions]),
            _keys_at(keys.keys, positions),
            _empty_entries(count) if entries is None else entries,
            pa.array(np.full(count, Operation.PUT, np.uint8) if operations is None else operations),
            _expiry_column(None, count) if expiry is None else expiry,
            *values,
        ]
        if state.kind is StateKind.TIMER:
            columns.append(pa.array(np.zeros(count, np.uint32)))  # filled in by the writer
        changes = pa.RecordBatch.from_arrays(columns, schema=change_schema(state))
        batches, first = self._batches(state), 0
        for part in cut_rows(changes, self._budget.slice_bytes // _PART_OF_SLICE):
            if part.num_rows == 1 and part.nbytes > self._budget.row_bytes:
                raise self._too_large(
                    f"state '{plain_name(state.name)}'", int(positions[first]), f"{part.nbytes:,} bytes"
                )
            batches.append(part)
            first += part.num_rows
            self.unstored_bytes += part.nbytes
        self._count(count)

    def _batches(self, state: StateDescriptor) -> list[pa.RecordBatch]:
        return self._sections.setdefault(state.name, StateChanges(state, [])).batches

    def _count(self, rows: int) -> None:
        self.rows += rows
        self.unstored_rows += rows

    def _too_large(self, subject: str, position: int, size: str) -> ProcessorError:
        limit = self._budget.row_bytes
        return ProcessorError(
            f"{subject} of key {self.describe_key(position)}: a value takes {size} with its key; the limit is"
            f" {limit:,}.",
            kind=ErrorKind.TOO_LARGE,
            hint="Keep large objects in a store and their names in the state, or split a value into several entries of"
            " a list or a map.",
        )

    def sections(self) -> list[StateChanges]:
        """All changes, in the order of a run."""
        return [self._sections[name] for name in sorted(self._sections)]

    def take(self, max_bytes: int | None = None) -> list[StateChanges]:
        """Changes that no earlier call has: all of them, or about `max_bytes` of each state, oldest first."""
        taken: list[StateChanges] = []
        for section in self.sections():
            name, batches = section.state.name, section.batches
            first = end = self._stored.get(name, 0)
            taken_bytes = 0
            while end < len(batches) and (max_bytes is None or taken_bytes < max_bytes):
                taken_bytes += batches[end].nbytes
                end += 1
            self._stored[name] = end
            self.unstored_bytes -= taken_bytes
            self.unstored_rows -= sum([batch.num_rows for batch in batches[first:end]])
            taken.append(StateChanges(section.state, batches[first:end]))
        return taken


class BatchChanges:
    """The changes of one subtask in one batch.

    They can be taken in parts while the batch runs; of two changes of an entry, the one in the later part counts.
    """

    def __init__(self, table: StateTable, budget: Budget = BUDGET) -> None:
        self.table = table
        """The state before the current phase."""
        self._budget = budget
        self.buffer = ChangeBuffer(budget)
        """The changes of the current phase."""
        self.phase = 0
        self._runs: list[Run] = []
        self._unstored: list[Run] = []
        self._merged: pa.Buffer | None = None
        """The changes of all phases as a local run, while they are in no part but the last."""

    def begin_phase(self) -> None:
        """Start the next phase: the changes so far become part of the table."""
        self.phase += 1
        self._merged = None
        if self.buffer.rows:
            run = self._as_run(self.buffer.sections())
            if self.buffer.unstored_rows == self.buffer.rows:
                self._unstored.append(run)
            elif self.buffer.unstored_rows:
                self._unstored.append(self._as_run(self.buffer.take()))
            self._runs.append(run)
            self.table = self.table.branch(run)
            self.buffer = ChangeBuffer(self._budget)

    @property
    def rows(self) -> int:
        """Number of changes."""
        return self.buffer.rows + sum([run.rows for run in self._runs])

    @property
    def unstored_bytes(self) -> int:
        """Size in memory of the changes that are in no part yet."""
        return self.buffer.unstored_bytes + sum([run.size_bytes for run in self._unstored])

    def take_part(self, compression: str | None, max_bytes: int | None = None) -> tuple[bytes, int]:
        """Encode changes that are in no part yet, for the store.

        By default all of them; with `max_bytes`, only about so much of each state in the current phase.
        """
        rows = self._unstored_rows
        sink = pa.BufferOutputStream()
        if not self._unstored:
            self._write(self.buffer.take(max_bytes), sink, compression, STORED_BLOCK_ROWS, STORED_BLOCK_BYTES)
        else:
            runs, self._unstored = self._unstored, []
            if max_bytes is None and rows == self.rows:
                self._merged = self._merged_locally()
                self.buffer.take()
                runs = [Run(self._merged, "changes of all phases")]
            elif self.buffer.unstored_rows:
                runs.append(self._as_run(self.buffer.take(max_bytes)))
            self._merge(runs, sink, compression, STORED_BLOCK_ROWS, STORED_BLOCK_BYTES)
        return sink.getvalue().to_pybytes(), rows - self._unstored_rows

    @property
    def _unstored_rows(self) -> int:
        return self.buffer.unstored_rows + sum([run.rows for run in self._unstored])

    def write_local(self, sink: pa.NativeFile) -> None:
        """Write the changes of all phases as one run, uncompressed so that it can be mapped into memory."""
        if not self._runs:
            self._write(self.buffer.sections(), sink, None, LOCAL_BLOCK_ROWS)
        elif self._merged is not None and not self._unstored_rows:
            sink.write(self._merged)
        else:
            self._merge_all(sink)

    def _merged_locally(self) -> pa.Buffer:
        sink = pa.BufferOutputStream()
        self._merge_all(sink)
        return sink.getvalue()

    def _merge_all(self, sink: pa.NativeFile) -> None:
        runs = [*self._runs, self._as_run(self.buffer.sections())]
        self._merge(runs, sink, None, LOCAL_BLOCK_ROWS)

    def _as_run(self, sections: list[StateChanges]) -> Run:
        sink = pa.BufferOutputStream()
        self._write(sections, sink, None, LOCAL_BLOCK_ROWS)
        return Run(sink.getvalue(), f"changes of phase {self.phase}")

    def _write(
        self,
        sections: list[StateChanges],
        sink: pa.NativeFile,
        compression: str | None,
        block_rows: int,
        whole_bytes: int | None = None,
    ) -> None:
        write_run(
            sections,
            sink,
            compression=compression,
            block_rows=block_rows,
            block_bytes=self._budget.slice_bytes,
            whole_bytes=whole_bytes,
        )

    def _merge(
        self,
        runs: list[Run],
        sink: pa.NativeFile,
        compression: str | None,
        block_rows: int,
        whole_bytes: int | None = None,
    ) -> None:
        size_bytes = self._budget.slice_bytes
        writer = RunWriter(
            sink, compression=compression, block_rows=block_rows, block_bytes=size_bytes, whole_bytes=whole_bytes
        )
        merge_runs(runs, writer, is_bottom=False, slice_bytes=size_bytes)


def _keys_at(keys: pa.Array, positions: Positions) -> pa.Array:
    if len(positions) == len(keys) and (np.diff(positions) == 1).all():
        return keys
    sizes = np.diff(bytes_before(keys, np.arange(len(keys) + 1)))
    if int(sizes[positions].sum()) >= MAX_COLUMN_BYTES:
        raise RowsTooLarge(f"keys of {len(positions):,} entries")
    return keys.take(pa.array(positions))


def _expiry_column(expiry_ms: int | Sequence[int | None] | None, count: int) -> pa.Array:
    if expiry_ms is None:
        return pa.nulls(count, pa.int64())
    if isinstance(expiry_ms, int):
        return pa.array(np.full(count, expiry_ms, np.int64))
    return pa.array(expiry_ms, pa.int64())


def _empty_entries(count: int) -> pa.Array:
    offsets = pa.py_buffer(np.zeros(count + 1, np.int32))
    return pa.Array.from_buffers(pa.binary(), count, [None, offsets, pa.py_buffer(b"")])
