"""The tasks' side: one subtask of one batch, inside a Python worker of Spark."""

from __future__ import annotations

import gc
import os
import pickle
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import StructType

from statelog.changelog.local_runs import LocalRuns
from statelog.checkpoint.protocol import TaskId
from statelog.checkpoint.task import BatchInput, BatchTask, MemoryTables
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind
from statelog.options import Options
from statelog.spark.output import OutputRows
from statelog.spark.rpc import RpcClient
from statelog.spark.types import row_codec, row_maker
from statelog.state.changes import ListPosition
from statelog.state.key_groups import subtasks_of
from statelog.state.keys import KeyCodec
from statelog.state.runs_table import RunsTable
from statelog.state.schema import StateDescriptor, StateKind
from statelog.state.subtask import KeyedOperator, KeyedSubtask, StateBinding
from statelog.storage import open_store

__all__ = ["HASH_COLUMN", "TIME_COLUMN", "StateDeclaration", "SubtaskSpec", "bind_state"]

HASH_COLUMN: Final = "__statelog_hash"
TIME_COLUMN: Final = "__statelog_time_ms"

_NO_ROWS: Final = pa.RecordBatch.from_pylist([], schema=pa.schema([]))


@dataclass(frozen=True)
class StateDeclaration:
    """A state as the processor's ``init`` declared it on the driver."""

    name: str
    kind: StateKind
    value_schema: StructType
    entry_schema: StructType | None = None


@dataclass(frozen=True)
class SubtaskSpec:
    """What every task of an operator is told.

    Parameters
    ----------
    uid, instance : str
        The operator.
    parallelism : int
        Number of subtasks.
    is_streaming : bool
        Whether the operator is part of a streaming query.
    key_schema : pyarrow.Schema
        Types of the grouping columns.
    columns : list of str
        Names of the input columns.
    key_columns : list of int
        Which of them are the grouping columns.
    states : list of StateDeclaration
        The states.
    output_schema : StructType
        Type of the output rows.
    processor : bytes
        The pickled processor.
    options : Options
        Options.
    host, port, secret
        Where the coordinator answers; empty for batch queries.
    """

    uid: str
    instance: str
    parallelism: int
    is_streaming: bool
    key_schema: pa.Schema
    columns: list[str]
    key_columns: list[int]
    states: list[StateDeclaration]
    output_schema: StructType
    processor: bytes
    options: Options
    host: str
    port: int
    secret: bytes

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Process one partition of one batch; what ``mapInArrow`` calls.

        Yields
        ------
        pyarrow.RecordBatch
            Output rows. The last ones come after the checkpoint has this subtask's changes.
        """
        context = TaskContext.get()
        assert context is not None
        operator = _operator(self)
        read = _read_input(self, batches, context.partitionId())
        if not self.is_streaming:
            subtask = KeyedSubtask(operator, RunsTable(), ListPosition(0, 0), SystemClock())
            yield from subtask.process(read.rows, read.hashes)
            return
        yield from _run_streaming(self, operator, read, context)


class _WorkerProcess:
    """What a Python worker keeps from task to task. Everything in it can be lost at any time."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, int, bytes], RpcClient] = {}
        self._local: dict[Path, LocalRuns] = {}
        self.tables = MemoryTables()
        # Spark's worker collects garbage after every task; what is loaded by now need not be visited again.
        gc.freeze()

    def client(self, spec: SubtaskSpec) -> RpcClient:
        """The connection to the driver; a new one after a fork or a failure."""
        address = (spec.host, spec.port, spec.secret)
        client = self._clients.get(address)
        if client is None or client.process_id != os.getpid() or client.is_broken:
            client = self._clients[address] = RpcClient(*address)
        return client

    def local_runs(self, directory: Path) -> LocalRuns:
        """The local runs in a directory, with those that are mapped already."""
        return self._local.setdefault(directory, LocalRuns(directory))


@cache
def _worker_process() -> _WorkerProcess:
    return _WorkerProcess()


def _run_streaming(
    spec: SubtaskSpec, operator: KeyedOperator, read: BatchInput, context: TaskContext
) -> Iterator[pa.RecordBatch]:
    task = _task_id(spec, read, context)
    process = _worker_process()
    batch_task = BatchTask(
        task=task,
        partition=context.partitionId(),
        parallelism=spec.parallelism,
        operator=operator,
        options=spec.options,
        call=process.client(spec).call,
        local=process.local_runs(_local_directory(spec, task)),
        tables=process.tables,
        open_store=open_store,
        clock=SystemClock(),
        token=f"{task.attempt}-{secrets.token_hex(4)}",
    )
    return batch_task.run(read)


def _task_id(spec: SubtaskSpec, read: BatchInput, context: TaskContext) -> TaskId:
    batch = context.getLocalProperty("streaming.sql.batchId")
    query_id = context.getLocalProperty("sql.streaming.queryId")
    run_id = context.getLocalProperty("spark.jobGroup.id")
    if batch is None or query_id is None or run_id is None:
        raise ConfigurationError(
            f"operator '{spec.uid}' is part of a stream, but ran outside of a micro-batch.",
            kind=ErrorKind.NO_BATCH_ID,
            hint="Run its actions on the thread that Spark calls foreachBatch on, and while the batch lasts.",
        )
    return TaskId(query_id, run_id, spec.uid, spec.instance, int(batch), read.subtask, context.taskAttemptId())


def _read_input(spec: SubtaskSpec, batches: Iterable[pa.RecordBatch], partition: int) -> BatchInput:
    """Read all rows; the subtask's number comes from them, or from the partition if there are none."""
    held = [batch for batch in batches if batch.num_rows]
    if not held:
        return BatchInput(_NO_ROWS, np.zeros(0, np.uint64), partition, None)
    rows = held[0] if len(held) == 1 else pa.concat_batches(held)
    hashes = rows.column(rows.schema.get_field_index(HASH_COLUMN)).to_numpy().view(np.uint64)
    times = rows.column(rows.schema.get_field_index(TIME_COLUMN)).to_numpy()
    subtasks = subtasks_of(hashes, spec.parallelism)
    if (subtasks != subtasks[0]).any():
        raise ConfigurationError(
            f"operator '{spec.uid}': partition {partition} holds rows of several subtasks.",
            kind=ErrorKind.PARTITIONS_RENUMBERED,
            hint="Was spark.sql.shuffle.partitions or the plan changed by another optimizer rule? Please report it.",
        )
    names = [name for name in rows.schema.names if name not in (HASH_COLUMN, TIME_COLUMN)]
    return BatchInput(rows.select(names), hashes, int(subtasks[0]), int(times[0]))


def _operator(spec: SubtaskSpec) -> KeyedOperator:
    schema = spec.key_schema
    return KeyedOperator(
        uid=spec.uid,
        processor=pickle.loads(spec.processor),
        key_codec=KeyCodec(schema),
        key_columns=spec.key_columns,
        states=[bind_state(declaration) for declaration in spec.states],
        to_rows=_row_reader(spec.columns),
        output=OutputRows(spec.output_schema),
        timer_values=TimerValues(-1, -1),
    )


def bind_state(declaration: StateDeclaration) -> StateBinding:
    """Make a state's codecs.

    Raises
    ------
    ConfigurationError
        If a field's type is not supported.
    """
    subject = f"state '{declaration.name}'"
    codec = row_codec(declaration.value_schema, subject)
    make = row_maker(declaration.value_schema.names)
    entry = declaration.entry_schema
    entry_codec = None if entry is None else row_codec(entry, f"map key of {subject}")
    if entry_codec is not None:
        KeyCodec(entry_codec.schema, entry_codec.subject)
    descriptor = StateDescriptor(
        declaration.name, declaration.kind, codec.schema, None if entry_codec is None else entry_codec.schema
    )
    return StateBinding(descriptor, codec, entry_codec, lambda row: make([[value] for value in row])[0])


def _row_reader(columns: list[str]) -> Callable[[pa.RecordBatch], list[Any]]:
    make = row_maker(columns)
    return lambda rows: make([column.to_pylist() for column in rows.columns])


def _local_directory(spec: SubtaskSpec, task: TaskId) -> Path:
    base = spec.options.local_directory
    if base is None:
        base = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    operator = f"{task.query_id}-{spec.uid.encode().hex()}"
    return Path(base) / "statelog" / operator / str(spec.parallelism) / str(task.subtask)
