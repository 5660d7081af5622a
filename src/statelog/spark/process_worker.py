"""The tasks of unkeyed operators: one subtask of one batch, inside a Python worker of Spark."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.types import StructType

from statelog.checkpoint.unkeyed_task import UnkeyedTask
from statelog.clock import SystemClock
from statelog.convert.output import RowOutput
from statelog.convert.python_values import row_maker
from statelog.convert.types import state_codecs
from statelog.local.snapshots import LocalSnapshots
from statelog.operators.unkeyed.processor import OperatorContext
from statelog.operators.unkeyed.states import OperatorStateBinding, OperatorStateDescriptor, OperatorStateMode
from statelog.operators.unkeyed.subtask import UnkeyedInput, UnkeyedOperator, UnkeyedSubtask
from statelog.options import Options
from statelog.runs.byte_slices import BUDGET, gather_rows
from statelog.spark.worker import HASH_COLUMN, SUBTASK_COLUMN, TIME_COLUMN
from statelog.spark.worker_process import local_directory, require_one_subtask, task_id, worker_process

BROADCAST_COLUMN: Final = "__statelog_broadcast"


@dataclass(frozen=True)
class OperatorStateDeclaration:
    """A state as the processor's ``init`` declared it on the driver."""

    name: str
    mode: OperatorStateMode
    value_schema: StructType
    entry_schema: StructType | None = None


@dataclass(frozen=True)
class UnkeyedSpec:
    """The description of an unkeyed operator that each of its tasks gets."""

    uid: str
    instance: str
    parallelism: int
    is_streaming: bool
    columns: list[str]
    broadcast_columns: list[str] | None
    """Columns of the broadcast input; None if there is none."""
    states: list[OperatorStateDeclaration]
    output_schema: StructType
    processor: bytes
    """The pickled processor."""
    options: Options
    host: str
    """Address of the driver's endpoint, with `port` and `secret`; empty in batch queries."""
    port: int
    secret: bytes

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Process one partition of one batch, for ``mapInArrow``; see :class:`~statelog.spark.checks.TaskSpec`."""
        context = TaskContext.get()
        assert context is not None
        operator = make_operator(self)
        read = read_input(self, batches, context.partitionId())
        if self.is_streaming:
            return _streaming_task(self, operator, read.subtask, context).run(read)
        time_ms = int(SystemClock().now_s() * 1000) if read.time_ms is None else read.time_ms
        where = OperatorContext(read.subtask, self.parallelism, batchId=0, batchTimeMs=time_ms)
        return UnkeyedSubtask(operator, {}, where).process(read)


def _streaming_task(spec: UnkeyedSpec, operator: UnkeyedOperator, subtask: int, context: TaskContext) -> UnkeyedTask:
    task = task_id(spec, subtask, context)
    process = worker_process()
    return UnkeyedTask(
        task=task,
        partition=context.partitionId(),
        parallelism=spec.parallelism,
        operator=operator,
        options=spec.options,
        call=process.caller(spec, task),
        local=LocalSnapshots(local_directory(spec, task)),
        open_store=lambda location: process.open_store(location, spec.options),
        clock=SystemClock(),
        token=f"{task.attempt}-{secrets.token_hex(4)}",
        measurements=process.measurements,
    )


def make_operator(spec: UnkeyedSpec) -> UnkeyedOperator:
    """Make the operator of a task."""
    return UnkeyedOperator(
        uid=spec.uid,
        processor=pickle.loads(spec.processor),
        states=[bind_operator_state(declaration) for declaration in spec.states],
        to_rows=_row_reader(spec.columns),
        to_broadcast_rows=_row_reader(spec.broadcast_columns or []),
        output=RowOutput(spec.output_schema, spec.uid),
    )


def _row_reader(columns: list[str]) -> Callable[[pa.RecordBatch], list[Any]]:
    make = row_maker(columns)
    return lambda rows: make([column.to_pylist() for column in rows.columns])


def bind_operator_state(declaration: OperatorStateDeclaration) -> OperatorStateBinding:
    """Make a state's codecs; raises ConfigurationError if the type of a field is not supported."""
    codec, entry_codec = state_codecs(declaration.name, declaration.value_schema, declaration.entry_schema)
    entry_schema = None if entry_codec is None else entry_codec.schema
    descriptor = OperatorStateDescriptor(declaration.name, declaration.mode, codec.schema, entry_schema)
    return OperatorStateBinding(descriptor, codec, entry_codec)


def read_input(spec: UnkeyedSpec, batches: Iterable[pa.RecordBatch], partition: int) -> UnkeyedInput:
    """Read all rows of a partition.

    The rows tell the subtask; without rows it is the partition's number. Raises ConfigurationError if the rows belong
    to several subtasks.
    """
    held = [batch for batch in batches if batch.num_rows]
    names = [f"c{index}" for index in range(len(spec.columns))]
    if not held:
        return UnkeyedInput([], None if spec.broadcast_columns is None else [], partition, None)
    subtasks = np.concatenate([batch.column(SUBTASK_COLUMN).to_numpy() for batch in held])
    subtask = require_one_subtask(spec, subtasks, partition)
    time_ms = int(held[0].column(TIME_COLUMN)[0].as_py())
    if spec.broadcast_columns is None:
        return UnkeyedInput([batch.select(names) for batch in held], None, subtask, time_ms)
    is_copy = [batch.column(BROADCAST_COLUMN) for batch in held]
    own = [batch.filter(pc.invert(mask)).select(names) for batch, mask in zip(held, is_copy, strict=True)]
    copies = [batch.filter(mask) for batch, mask in zip(held, is_copy, strict=True)]
    return UnkeyedInput(own, _ordered_copies(copies, len(spec.broadcast_columns)), subtask, time_ms)


def _ordered_copies(batches: Sequence[pa.RecordBatch], columns: int) -> list[pa.RecordBatch]:
    """Sort the broadcast rows by hash, then by value, so that every subtask sees them in the same order."""
    hashes = [number for batch in batches for number in batch.column(HASH_COLUMN).to_pylist()]
    copies = [batch.select([f"b{index}" for index in range(columns)]) for batch in batches]
    values = [repr(row) for batch in copies for row in zip(*map(pa.Array.to_pylist, batch.columns), strict=True)]
    order = [index for _, _, index in sorted(zip(hashes, values, range(len(hashes)), strict=True))]
    return list(gather_rows(copies, np.array(order, np.int64), BUDGET.slice_bytes))
