"""The phases of a batch: each sees what the ones before it have written, and all of it is one changeset."""

from __future__ import annotations

import pyarrow as pa

from statelog.state.changes import ChangeBuffer
from statelog.state.merge import merge_runs
from statelog.state.run import Run
from statelog.state.run_writer import LOCAL_BLOCK_ROWS, RunWriter
from statelog.state.table import StateTable

__all__ = ["BatchChanges"]


class BatchChanges:
    """The changes of one subtask in one batch.

    Attributes
    ----------
    table : StateTable
        The state as the current phase finds it.
    buffer : ChangeBuffer
        The changes of the current phase.
    phase : int
        Its number.
    """

    def __init__(self, table: StateTable) -> None:
        self.table = table
        self.buffer = ChangeBuffer()
        self.phase = 0
        self._runs: list[Run] = []

    def begin_phase(self) -> None:
        """Start the next phase: what has been written so far becomes part of the table."""
        self.phase += 1
        if self.buffer.rows:
            run = self._as_run(self.buffer)
            self._runs.append(run)
            self.table = self.table.branch(run)
            self.buffer = ChangeBuffer()

    @property
    def rows(self) -> int:
        """Number of changes; of an entry that several phases changed, each change counts."""
        return sum(run.rows for run in self._runs) + self.buffer.rows

    def encode(self, *, compress: bool, block_rows: int) -> bytes:
        """Encode the changes of all phases as one run."""
        if not self._runs:
            return self.buffer.encode(compress=compress, block_rows=block_rows)
        runs = [*self._runs, self._as_run(self.buffer)] if self.buffer.rows else self._runs
        sink = pa.BufferOutputStream()
        writer = RunWriter(sink, compress=compress, block_rows=block_rows)
        merge_runs(runs, writer, is_bottom=False)
        data: bytes = sink.getvalue().to_pybytes()
        return data

    def _as_run(self, buffer: ChangeBuffer) -> Run:
        data = buffer.encode(compress=False, block_rows=LOCAL_BLOCK_ROWS)
        return Run(pa.py_buffer(data), f"changes of phase {self.phase}")
