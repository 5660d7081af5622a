"""The descriptions of operators that their tasks get, and the tasks that they make of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo
from pyspark.sql.types import StructField, StructType

from statelog.clock import SystemClock
from statelog.convert.codecs import ColumnCodecs, ProcessorCalls, ProcessorCodecs
from statelog.convert.ddl import parse_type_json
from statelog.convert.output import RowOutput
from statelog.convert.python_values import row_maker
from statelog.convert.times import TimeMode
from statelog.convert.types import key_decoder
from statelog.local.stored_reader import read_stored
from statelog.log.open import open_location
from statelog.log.references import SegmentRef
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.operator import BatchContext, KeyedInput, KeyedOperator, KeyedRows
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.operators.unkeyed.processor import OperatorContext
from statelog.operators.unkeyed.subtask import UnkeyedInput, UnkeyedOperator, UnkeyedSubtask
from statelog.options import Options
from statelog.runs.byte_slices import BUDGET, gather_rows
from statelog.runs.column_values import ColumnValues
from statelog.runs.key_groups import subtasks_of
from statelog.runs.keys import KeyCodec
from statelog.runs.times import Moment
from statelog.spark.plan.states import KeyedStateDeclaration, UnkeyedStateDeclaration, bind_states
from statelog.spark.worker.worker import (
    HASH_COLUMN,
    SUBTASK_COLUMN,
    TIME_COLUMN,
    TaskSpec,
    task_function,
    worker_process,
)
from statelog.stopwatch import Stopwatch
from statelog.tables.runs import RunsTable
from statelog.tasks.attempt import Attempt
from statelog.tasks.keyed_task import BatchInput, KeyedTask
from statelog.tasks.output_task import OutputRows, OutputTask, stored_batches, stored_columns
from statelog.tasks.unkeyed_task import UnkeyedTask

INITIAL_COLUMN: Final = "__statelog_initial"

NO_ROWS: Final = KeyedRows(pa.RecordBatch.from_pylist([], schema=pa.schema([])), np.zeros(0, np.uint64))


@dataclass(frozen=True, kw_only=True)
class KeyedSpec(TaskSpec):
    """The description of a keyed operator that each of its tasks gets."""

    key_schema: pa.Schema
    session_zone: str
    key_columns: list[int]
    """Positions of the grouping columns in `columns`."""
    initial_columns: list[str] = field(default_factory=list)
    """Columns of the initial state; empty if there is none."""
    initial_key_columns: list[int] = field(default_factory=list)
    codecs: ProcessorCodecs
    time_mode: TimeMode
    event_time: EventTime | None
    """The event time of the input."""
    output_event_time: EventTime | None
    states: list[KeyedStateDeclaration]

    def operator(self) -> KeyedOperator:
        """Make the operator of a task."""
        key_codec = KeyCodec(self.key_schema)
        states = bind_states(self.states, self.uid)
        calls = ProcessorCalls(
            columns=self.columns,
            key_columns=self.key_columns,
            key_codec=key_codec,
            output=self.output_schema,
            states={binding.name: binding.descriptor for binding in (*states.kept, *states.batch)},
            times=self.time_mode.timer_values,
        )
        initial = None
        if self.initial_columns:
            initial = KeyedInput(self.initial_key_columns, self.codecs.input(self.initial_columns))
        return KeyedOperator(
            uid=self.uid,
            processor=self.codecs.adapted(pickle.loads(self.processor), calls),
            key_codec=key_codec,
            decode_keys=key_decoder(key_codec, self.session_zone),
            states=states.kept,
            batch_states=states.batch,
            deleted_states=states.deleted,
            input=KeyedInput(self.key_columns, self.codecs.input(self.columns)),
            output=self.codecs.output(self.output_schema, self.session_zone, self.uid),
            timer_values=self.time_mode.timer_values,
            expired_timer=ExpiredTimerInfo,
            timer_domain=self.time_mode.domain,
            event_time=self.event_time,
            output_event_time=self.output_event_time,
            initial=initial,
            takes_columns=self.codecs.takes_columns,
            makes_objects=isinstance(self.codecs, ColumnCodecs) and self.codecs.makes_objects,
            adds_floats=isinstance(self.codecs, ColumnCodecs) and self.codecs.adds_floats,
        )

    def read(self, batches: list[pa.RecordBatch], partition: int) -> BatchInput:
        if not batches:
            return BatchInput(NO_ROWS, partition, None)
        rows = pa.Table.from_batches(batches)
        read = _keyed_rows(rows, "c", self.columns)
        subtask = self.require_one_subtask(subtasks_of(read.hashes, self.parallelism), partition)
        return BatchInput(read, subtask, _time_ms(rows))

    def task(self, attempt: Attempt) -> KeyedTask:
        return KeyedTask(attempt, self.operator())

    def run_batch(self, batches: list[pa.RecordBatch], partition: int) -> Iterator[pa.RecordBatch]:
        clock = SystemClock()
        now_ms = int(clock.now_s() * 1000)
        read, initial = NO_ROWS, None
        if batches:
            rows = pa.Table.from_batches(batches)
            now_ms = _time_ms(rows)
            if self.initial_columns:
                is_initial = rows.column(rows.schema.get_field_index(INITIAL_COLUMN))
                initial = _keyed_rows(rows.filter(is_initial), "i", self.initial_columns)
                rows = rows.filter(pc.invert(is_initial))
            read = _keyed_rows(rows, "c", self.columns)
        context = BatchContext(epoch=0, batch=0, moment=Moment(now_ms, self.codecs.batch_watermark_ms))
        return KeyedSubtask(self.operator(), RunsTable(), context, Stopwatch(clock)).process(read, initial)


def _keyed_rows(rows: pa.Table, prefix: str, columns: list[str]) -> KeyedRows:
    """The rows of the input whose columns are named `prefix` and position."""
    hashes = rows.column(rows.schema.get_field_index(HASH_COLUMN)).to_numpy().view(np.uint64)
    return KeyedRows(rows.select([f"{prefix}{index}" for index in range(len(columns))]), hashes)


def _time_ms(rows: pa.Table) -> int:
    """The batch time that the rows carry."""
    return int(rows.column(rows.schema.get_field_index(TIME_COLUMN))[0].as_py())


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


@dataclass(frozen=True, kw_only=True)
class OutputSpec(TaskSpec):
    """The description of the operator that each of its tasks gets."""

    column_types: str
    """The type of the rows, as Spark's JSON."""

    def read(self, batches: list[pa.RecordBatch], partition: int) -> OutputRows:
        if not batches:
            return OutputRows([], partition, None)
        subtasks = np.concatenate([batch.column(SUBTASK_COLUMN).to_numpy() for batch in batches])
        subtask = self.require_one_subtask(subtasks, partition)
        names = [f"c{index}" for index in range(len(self.columns))]
        rows = [batch.select(names) for batch in batches]
        return OutputRows(rows, subtask, int(batches[0].column(TIME_COLUMN)[0].as_py()))

    def task(self, attempt: Attempt) -> OutputTask:
        return OutputTask(attempt, self.column_types)

    def run_batch(self, batches: list[pa.RecordBatch], partition: int) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError("only streams have output to store")


@dataclass(frozen=True)
class _StoredOutput:
    """Reads stored rows, in the tasks of a DataFrame whose rows are the places of segments."""

    location: str
    segments: list[SegmentRef]
    options: Options

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        store = worker_process().open_store(self.location, self.options)
        for batch in batches:
            for place in batch.column(0).to_pylist():
                segment = self.segments[place]
                yield from stored_batches(read_stored(store, segment, "a batch's output"), segment.name)


def output_columns(location: str, segment: SegmentRef, declared: StructType) -> StructType:
    """The type of the rows of a stored segment: the declared one, which may have user-defined types, if both are equal.

    Raises CorruptionError if they differ and the stored one has types that are not Spark's own.
    """
    text = stored_columns(read_stored(open_location(location), segment, "a batch's output"), segment.name)
    if text == declared.json():
        return declared
    return parse_type_json(text, f"{segment.name}, a batch's output at offset {segment.offset}")


def output_frame(
    session: SparkSession, location: str, segments: Iterable[SegmentRef], columns: StructType, options: Options
) -> DataFrame:
    """The rows of a batch that the operator has stored in these segments; each segment is read by a task."""
    filled = [segment for segment in segments if segment.rows]
    plain = StructType([StructField(f"c{place}", field.dataType) for place, field in enumerate(columns)])
    places = session.range(0, len(filled), 1, max(len(filled), 1))
    rows = places.mapInArrow(task_function(_StoredOutput(location, filled, options)), plain)
    return rows.toDF(*columns.names)
