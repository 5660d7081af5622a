"""What the sides send to the Python workers; imports little, because every worker imports it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statelog import TimeWindow, WindowContext, WindowProcessor


class CountRows(StatefulProcessor):
    """Counts the rows of each key."""

    def init(self, handle: Any) -> None:
        self._n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        before = self._n.get()
        n = sum(1 for _ in rows) + (before[0] if before else 0)
        self._n.update((n,))
        yield Row(key=key[0], n=n)


def count_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The stateless ceiling: reads all rows of a partition and returns how many they are."""
    total = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"n": pa.array([total], pa.int64())})


class KeepPayload(StatefulProcessor):
    """Counts the rows of each key, keeps its payload, and tells how long the payload was that it has found again."""

    def init(self, handle: Any) -> None:
        self._kept = handle.getValueState("kept", "n long, payload binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        before = self._kept.get()
        n = before[0] if before else 0
        for row in rows:
            n += 1
            payload = bytes(row.payload)
        self._kept.update((n, payload))
        found = len(payload) if before and bytes(before[1]) == payload else 0
        yield Row(key=key[0], n=n, found=found)


class CountWindowRows(WindowProcessor):
    """Reads all rows of a window, and returns how many they are and how long their payloads."""

    def process(
        self, key: tuple[Any, ...], window: TimeWindow | None, rows: Iterator[Any], context: WindowContext
    ) -> Iterator[Row]:
        lengths = [len(row.payload) for row in rows]
        yield Row(key=key[0], n=len(lengths), bytes=sum(lengths))
