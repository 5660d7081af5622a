"""The description of an unkeyed operator that its tasks get, and the task that they make of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statelog.clock import SystemClock
from statelog.convert.output import RowOutput
from statelog.convert.python_values import row_maker
from statelog.operators.unkeyed.processor import OperatorContext
from statelog.operators.unkeyed.subtask import UnkeyedInput, UnkeyedOperator, UnkeyedSubtask
from statelog.runs.byte_slices import BUDGET, gather_rows
from statelog.runs.column_values import ColumnValues
from statelog.spark.plan.states import UnkeyedStateDeclaration
from statelog.spark.worker.worker import HASH_COLUMN, SUBTASK_COLUMN, TIME_COLUMN, TaskSpec
from statelog.tasks.attempt import Attempt
from statelog.tasks.unkeyed_task import UnkeyedTask

BROADCAST_COLUMN: Final = "__statelog_broadcast"
_VALUES: Final = ColumnValues()


@dataclass(frozen=True, kw_only=True)
class UnkeyedSpec(TaskSpec):
    """The description of an unkeyed operator that each of its tasks gets."""

    broadcast_columns: list[str] | None
    """Columns of the broadcast input; None if there is none."""
    states: list[UnkeyedStateDeclaration]

    def operator(self) -> UnkeyedOperator:
        """Make the operator of a task."""
        return UnkeyedOperator(
            uid=self.uid,
            processor=pickle.loads(self.processor),
            states=[state.bind() for state in self.states],
            to_rows=_row_reader(self.columns),
            to_broadcast_rows=_row_reader(self.broadcast_columns or []),
            output=RowOutput(self.output_schema, self.uid),
        )

    def read(self, batches: list[pa.RecordBatch], partition: int) -> UnkeyedInput:
        names = [f"c{index}" for index in range(len(self.columns))]
        if not batches:
            return UnkeyedInput([], None if self.broadcast_columns is None else [], partition, None)
        subtasks = np.concatenate([batch.column(SUBTASK_COLUMN).to_numpy() for batch in batches])
        subtask = self.require_one_subtask(subtasks, partition)
        time_ms = int(batches[0].column(TIME_COLUMN)[0].as_py())
        if self.broadcast_columns is None:
            return UnkeyedInput([batch.select(names) for batch in batches], None, subtask, time_ms)
        is_copy = [batch.column(BROADCAST_COLUMN) for batch in batches]
        own = [batch.filter(pc.invert(mask)).select(names) for batch, mask in zip(batches, is_copy, strict=True)]
        copies = [batch.filter(mask) for batch, mask in zip(batches, is_copy, strict=True)]
        return UnkeyedInput(own, _ordered_copies(copies, len(self.broadcast_columns)), subtask, time_ms)

    def task(self, attempt: Attempt) -> UnkeyedTask:
        return UnkeyedTask(attempt, self.operator())

    def run_batch(self, batches: list[pa.RecordBatch], partition: int) -> Iterator[pa.RecordBatch]:
        read = self.read(batches, partition)
        time_ms = int(SystemClock().now_s() * 1000) if read.time_ms is None else read.time_ms
        context = OperatorContext(read.subtask, self.parallelism, batchId=0, batchTimeMs=time_ms)
        return UnkeyedSubtask(self.operator(), {}, context).process(read)


def _row_reader(columns: list[str]) -> Callable[[pa.RecordBatch], list[Any]]:
    make = row_maker(columns)
    return lambda rows: make(list(map(_VALUES.of, rows.columns)))


def _ordered_copies(batches: Sequence[pa.RecordBatch], columns: int) -> list[pa.RecordBatch]:
    """Sort the broadcast rows by hash, then by value, so that every subtask sees them in the same order."""
    hashes = [number for batch in batches for number in batch.column(HASH_COLUMN).to_pylist()]
    copies = [batch.select([f"b{index}" for index in range(columns)]) for batch in batches]
    values = [repr(row) for batch in copies for row in zip(*map(_VALUES.of, batch.columns), strict=True)]
    order = [index for _, _, index in sorted(zip(hashes, values, range(len(hashes)), strict=True))]
    return list(gather_rows(copies, np.array(order, np.int64), BUDGET.slice_bytes))
