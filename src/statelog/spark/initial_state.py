"""Brings the rows of an initial state to the subtasks of a query's first batch.

A streaming plan cannot hold the rows of a batch DataFrame. So a Spark job stores them before the first batch, one
object per subtask: Spark calls a listener when a query starts, and waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from statelog.options import Options
from statelog.spark.registered_stores import with_stores
from statelog.spark.worker_process import worker_process


def store_initial_state(rows: DataFrame, parallelism: int, location: str, folder: str, options: Options) -> list[str]:
    """Store the rows of an initial state; return the object of each subtask, an empty name for one without rows.

    `rows` have the key hash as the last column, each in the partition of its subtask; `folder` is within `location`.
    """
    written = rows.mapInArrow(with_stores(_writer(location, folder, options)), "subtask int, name string").collect()
    names = dict.fromkeys(range(parallelism), "") | {row.subtask: row.name for row in written}
    return [names[subtask] for subtask in range(parallelism)]


def _writer(
    location: str, folder: str, options: Options
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = [batch for batch in batches if batch.num_rows]
        context = TaskContext.get()
        if not held or context is None:
            return
        name = f"{folder}/{context.partitionId()}-{context.taskAttemptId()}.arrow"
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, held[0].schema) as writer:
            for batch in held:
                writer.write_batch(batch)
        worker_process().open_store(location, options).put(name, sink.getvalue().to_pybytes())
        yield pa.RecordBatch.from_pydict(
            {"subtask": pa.array([context.partitionId()], pa.int32()), "name": pa.array([name])}
        )

    return write
