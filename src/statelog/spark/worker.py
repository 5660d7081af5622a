"""The tasks of keyed operators: one subtask of one batch, inside a Python worker of Spark."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.types import StructType

from statelog.checkpoint.keyed_task import BatchInput, KeyedTask
from statelog.clock import SystemClock
from statelog.convert.codecs import ProcessorCodecs
from statelog.convert.python_values import row_maker
from statelog.convert.times import SparkTimes, TimeMode
from statelog.convert.types import key_decoder, state_codecs
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.operator import KeyedInput, KeyedOperator, StateBinding
from statelog.operators.keyed.subtask import BatchContext, KeyedRows, KeyedSubtask
from statelog.options import Options
from statelog.runs.key_groups import subtasks_of
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateDescriptor, StateKind, StateLife
from statelog.runs.times import Moment, Ttl
from statelog.spark.deleted_states import deleted_state
from statelog.spark.worker_process import local_directory, require_one_subtask, task_id, worker_process
from statelog.tables.runs import RunsTable

HASH_COLUMN: Final = "__statelog_hash"
SUBTASK_COLUMN: Final = "__statelog_subtask"
TIME_COLUMN: Final = "__statelog_time_ms"
INITIAL_COLUMN: Final = "__statelog_initial"

_NO_ROWS: Final = pa.RecordBatch.from_pylist([], schema=pa.schema([]))
_NOTHING: Final = KeyedRows(_NO_ROWS, np.zeros(0, np.uint64))


@dataclass(frozen=True)
class StateDeclaration:
    """A state as the processor's ``init`` declared it on the driver."""

    name: str
    kind: StateKind
    value_schema: StructType
    entry_schema: StructType | None = None
    ttl: Ttl | None = None
    life: StateLife = StateLife.KEPT


@dataclass(frozen=True)
class KeyedSpec:
    """The description of a keyed operator that each of its tasks gets."""

    uid: str
    instance: str
    parallelism: int
    is_streaming: bool
    key_schema: pa.Schema
    session_zone: str
    columns: list[str]
    key_columns: list[int]
    """Positions of the grouping columns in `columns`."""
    initial_columns: list[str]
    """Columns of the initial state; empty if there is none."""
    initial_key_columns: list[int]
    form: ProcessorCodecs
    time_mode: TimeMode
    event_time: EventTime | None
    """The event time of the input."""
    output_event_time: EventTime | None
    states: list[StateDeclaration]
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
        operator = keyed_operator(self)
        if self.is_streaming:
            return _run_streaming(self, operator, _read_input(self, batches, context.partitionId()), context)
        return _run_batch(self, operator, batches)


def _run_batch(spec: KeyedSpec, operator: KeyedOperator, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Process a partition of a batch query: state starts empty and is discarded afterwards."""
    held = [batch for batch in batches if batch.num_rows]
    clock = SystemClock()
    now_ms = int(clock.now_s() * 1000)
    read, initial = _NOTHING, None
    if held:
        rows = pa.Table.from_batches(held)
        now_ms = rows.column(rows.schema.get_field_index(TIME_COLUMN))[0].as_py()
        if spec.initial_columns:
            is_initial = rows.column(rows.schema.get_field_index(INITIAL_COLUMN))
            initial = _keyed_rows(rows.filter(is_initial), "i", spec.initial_columns)
            rows = rows.filter(pc.invert(is_initial))
        read = _keyed_rows(rows, "c", spec.columns)
    context = BatchContext(epoch=0, batch=0, moment=Moment(now_ms, spec.form.batch_watermark_ms))
    return KeyedSubtask(operator, RunsTable(), context, clock).process(read, initial)


def _keyed_rows(rows: pa.Table, prefix: str, columns: list[str]) -> KeyedRows:
    """The rows of the input whose columns are named `prefix` and position."""
    hashes = rows.column(rows.schema.get_field_index(HASH_COLUMN)).to_numpy().view(np.uint64)
    return KeyedRows(rows.select([f"{prefix}{index}" for index in range(len(columns))]), hashes)


def _run_streaming(
    spec: KeyedSpec, operator: KeyedOperator, read: BatchInput, context: TaskContext
) -> Iterator[pa.RecordBatch]:
    task = task_id(spec, read.subtask, context)
    process = worker_process()
    batch_task = KeyedTask(
        task=task,
        partition=context.partitionId(),
        parallelism=spec.parallelism,
        operator=operator,
        options=spec.options,
        call=process.caller(spec, task),
        local=process.local_runs(local_directory(spec, task), task.batch),
        tables=process.tables,
        open_store=lambda location: process.open_store(location, spec.options),
        clock=SystemClock(),
        token=f"{task.attempt}-{secrets.token_hex(4)}",
        measurements=process.measurements,
    )
    return batch_task.run(read)


def _read_input(spec: KeyedSpec, batches: Iterable[pa.RecordBatch], partition: int) -> BatchInput:
    """Read all rows of a partition.

    The rows tell the subtask; without rows it is the partition's number. Raises ConfigurationError if the rows belong
    to several subtasks.
    """
    held = [batch for batch in batches if batch.num_rows]
    if not held:
        return BatchInput(_NO_ROWS, _NOTHING.hashes, partition, None)
    rows = pa.Table.from_batches(held)
    read = _keyed_rows(rows, "c", spec.columns)
    subtask = require_one_subtask(spec, subtasks_of(read.hashes, spec.parallelism), partition)
    time_ms = held[0].column(rows.schema.get_field_index(TIME_COLUMN))[0].as_py()
    return BatchInput(read.rows, read.hashes, subtask, int(time_ms))


def keyed_operator(spec: KeyedSpec) -> KeyedOperator:
    """Make the operator of a task."""
    form = spec.form
    key_codec = KeyCodec(spec.key_schema)
    return KeyedOperator(
        uid=spec.uid,
        processor=pickle.loads(spec.processor),
        key_codec=key_codec,
        decode_key=key_decoder(key_codec, spec.session_zone),
        states=[bind_state(state) for state in spec.states if state.life is StateLife.KEPT],
        batch_states=[bind_state(state) for state in spec.states if state.life is StateLife.BATCH],
        deleted_states=deleted_states(spec.states, spec.uid),
        input=KeyedInput(spec.key_columns, form.input(spec.columns)),
        output=form.output(spec.output_schema, spec.session_zone, spec.uid),
        times=SparkTimes(spec.time_mode),
        timer_domain=spec.time_mode.domain,
        event_time=spec.event_time,
        output_event_time=spec.output_event_time,
        initial=KeyedInput(spec.initial_key_columns, form.input(spec.initial_columns))
        if spec.initial_columns
        else None,
    )


def deleted_states(declarations: Iterable[StateDeclaration], uid: str) -> dict[str, Any]:
    """The handles of the states that ``init`` declares and then deletes, by name."""
    return {
        state.name: deleted_state(state.name, state.kind, uid) for state in declarations if state.life is StateLife.NONE
    }


def bind_state(declaration: StateDeclaration) -> StateBinding:
    """Make a state's codecs; raises ConfigurationError if the type of a field is not supported."""
    codec, entry_codec = state_codecs(declaration.name, declaration.value_schema, declaration.entry_schema)
    make = row_maker(declaration.value_schema.names)
    descriptor = StateDescriptor(
        declaration.name,
        declaration.kind,
        codec.schema,
        None if entry_codec is None else entry_codec.schema,
        None if declaration.ttl is None else declaration.ttl.domain,
    )
    return StateBinding(
        declaration.name,
        descriptor,
        codec,
        entry_codec,
        lambda row: make([[value] for value in row])[0],
        declaration.ttl,
    )
