"""The description of a keyed operator that its tasks get, and the task that they make of it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo

from statelog.clock import SystemClock
from statelog.convert.codecs import ColumnCodecs, ProcessorCalls, ProcessorCodecs
from statelog.convert.times import TimeMode
from statelog.convert.types import key_decoder
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.operator import BatchContext, KeyedInput, KeyedOperator, KeyedRows
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.runs.key_groups import subtasks_of
from statelog.runs.keys import KeyCodec
from statelog.runs.times import Moment
from statelog.spark.plan.states import KeyedStateDeclaration, bind_states
from statelog.spark.worker.worker import HASH_COLUMN, TIME_COLUMN, TaskSpec
from statelog.stopwatch import Stopwatch
from statelog.tables.runs import RunsTable
from statelog.tasks.attempt import Attempt
from statelog.tasks.keyed_task import BatchInput, KeyedTask

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
