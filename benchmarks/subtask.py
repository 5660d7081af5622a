"""A keyed subtask without Spark and without a coordinator: batches of rows in, output rows and changes out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from statelog import Options
from statelog.clock import SystemClock
from statelog.operators.keyed.subtask import BatchContext, KeyedRows, KeyedSubtask
from statelog.runs.reader import Run
from statelog.runs.times import Moment
from statelog.tables.runs import RunsTable
from statelog.testing.arguments import OperatorArguments
from statelog.testing.keyed import KeyedQuery


@dataclass(frozen=True)
class BatchRun:
    """One batch as it was run."""

    rows: list[Any]
    """The output."""
    process_s: float
    """Time for the processor's calls, reading the state and converting the rows."""
    changeset_s: float
    """Time for collecting the writes and encoding them, once to be searched and once to be stored."""


class Subtask:
    """The only subtask of an operator, batch after batch, with its state in memory."""

    def __init__(
        self, processor: Any, columns: str, output: StructType, time_mode: str = "None", *, uses_frames: bool = False
    ) -> None:
        arguments = OperatorArguments(columns, output, keys=["key"], timeMode=time_mode, pandas=uses_frames)
        self._query = KeyedQuery(processor, arguments, Options())
        self._table = RunsTable()
        self._batch = 0

    def data(self, rows: Sequence[Any]) -> KeyedRows:
        """The input of a batch."""
        return self._query.data(rows)

    def run(self, data: KeyedRows, *, now_ms: int = 0, keep: bool = True, act: Any = None) -> BatchRun:
        """Run a batch at this time; without `keep` the next one does not see its changes.

        `act` becomes the processor's attribute of that name.
        """
        operator = self._query.operator.make()
        if act is not None:
            processor: Any = operator.processor
            processor.act = act
        context = BatchContext(epoch=1, batch=self._batch, moment=Moment(now_ms, now_ms))
        started_s = time.perf_counter()
        subtask = KeyedSubtask(operator, self._table, context, SystemClock())
        output = list(subtask.process(data))
        processed_s = time.perf_counter()
        local = pa.BufferOutputStream()
        subtask.changes.write_local(local)
        subtask.changes.take_part("lz4")
        ended_s = time.perf_counter()
        if keep:
            self._table.apply([Run(local.getvalue(), f"batch {self._batch}")])
            self._batch += 1
        return BatchRun(
            rows=self._query.output(output),
            process_s=processed_s - started_s - subtask.flush_s,
            changeset_s=ended_s - processed_s + subtask.flush_s,
        )
