"""The operator that stores a query's output: its tasks, and the rows that they stored as a DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from statelog.convert.ddl import parse_type_json
from statelog.local.stored_reader import read_stored
from statelog.log.open import open_location
from statelog.log.references import SegmentRef
from statelog.options import Options
from statelog.spark.worker.worker import SUBTASK_COLUMN, TIME_COLUMN, TaskSpec, task_function, worker_process
from statelog.tasks.attempt import Attempt
from statelog.tasks.output_task import OutputRows, OutputTask, stored_batches, stored_columns


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
    """The type of the rows of a stored segment: the declared one if it is the same, which may have types of users.

    Raises CorruptionError if it is another one and has types that are not Spark's own.
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
