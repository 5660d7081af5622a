"""What the sides of ``count`` send to the Python workers; imports little, because every worker imports it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statelog import CheckpointMetrics, Observer

__all__ = ["CheckpointRecorder", "CommitRecorder", "CountRows", "count_batches"]


class CountRows(StatefulProcessor):
    """Counts the rows of each key."""

    def init(self, handle: Any) -> None:
        self._n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        before = self._n.get()
        n = sum(1 for _ in rows) + (before[0] if before else 0)
        self._n.update((n,))
        yield Row(key=key[0], n=n)

    def close(self) -> None:
        pass


def count_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The stateless ceiling: reads all rows of a partition and returns how many they are."""
    total = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"n": pa.array([total], pa.int64())})


class CheckpointRecorder(Observer):
    """Keeps the metrics of all checkpoints."""

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointMetrics] = []

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.checkpoints.append(metrics)


class CommitRecorder(Observer):
    """Keeps only how long the commits took, so that it hardly adds to the memory that is measured."""

    def __init__(self) -> None:
        self.commit_s = array("d")

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.commit_s.append(metrics.commit_s)
