"""The phases of a batch: each reads the changes of those before it, and all together make one changeset."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from statelog.operators.keyed.changes import ChangeBuffer
from statelog.runs.byte_slices import BUDGET, Budget
from statelog.runs.merge import merge_runs
from statelog.runs.reader import Run
from statelog.runs.writer import LOCAL_BLOCK_ROWS, STORED_BLOCK_ROWS, RunWriter
from statelog.tables.table import StateTable


@dataclass(frozen=True)
class Part:
    """A part of a changeset: an encoded run, and its number of rows."""

    data: bytes
    rows: int


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

    def begin_phase(self) -> None:
        """Start the next phase: the changes so far become part of the table."""
        self.phase += 1
        if self.buffer.rows:
            run = self._as_run(self.buffer)
            if self.buffer.unstored_rows == self.buffer.rows:
                self._unstored.append(run)
            elif self.buffer.unstored_rows:
                part = self.buffer.take_part(compression=None, block_rows=LOCAL_BLOCK_ROWS)
                self._unstored.append(Run(part, f"rest of phase {self.phase}"))
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

    def take_part(self, compression: str | None, max_bytes: int | None = None) -> Part:
        """Encode changes that are in no part yet, for the store.

        By default all of them; with `max_bytes`, of the current phase only about so much of each state.
        """
        rows = self._unstored_rows
        if not self._unstored:
            data = self.buffer.take_part(compression=compression, block_rows=STORED_BLOCK_ROWS, max_bytes=max_bytes)
        else:
            runs, self._unstored = self._unstored, []
            if self.buffer.unstored_rows:
                rest = self.buffer.take_part(compression=None, block_rows=LOCAL_BLOCK_ROWS, max_bytes=max_bytes)
                runs.append(Run(rest, f"changes of phase {self.phase}"))
            sink = pa.BufferOutputStream()
            self._merge(runs, sink, compression=compression, block_rows=STORED_BLOCK_ROWS)
            data = sink.getvalue()
        return Part(data.to_pybytes(), rows - self._unstored_rows)

    @property
    def _unstored_rows(self) -> int:
        return self.buffer.unstored_rows + sum([run.rows for run in self._unstored])

    def write_local(self, sink: pa.NativeFile) -> None:
        """Write the changes of all phases as one run, uncompressed so that it can be mapped into memory."""
        if not self._runs:
            self.buffer.write(sink, compression=None, block_rows=LOCAL_BLOCK_ROWS)
            return
        runs = [*self._runs, self._as_run(self.buffer)] if self.buffer.rows else self._runs
        self._merge(runs, sink, compression=None, block_rows=LOCAL_BLOCK_ROWS)

    def _as_run(self, buffer: ChangeBuffer) -> Run:
        sink = pa.BufferOutputStream()
        buffer.write(sink, compression=None, block_rows=LOCAL_BLOCK_ROWS)
        return Run(sink.getvalue(), f"changes of phase {self.phase}")

    def _merge(self, runs: list[Run], sink: pa.NativeFile, *, compression: str | None, block_rows: int) -> None:
        size_bytes = self._budget.slice_bytes
        writer = RunWriter(sink, compression=compression, block_rows=block_rows, block_bytes=size_bytes)
        merge_runs(runs, writer, is_bottom=False, slice_bytes=size_bytes)
