"""What the sides of ``recovery`` send to the Python workers; imports little, because every worker imports it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from benchmarks.counting import CheckpointRecorder
from statelog import RestoreMetrics

__all__ = ["KeepPayload", "RestoreRecorder"]


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

    def close(self) -> None:
        pass


class RestoreRecorder(CheckpointRecorder):
    """Keeps the metrics of all checkpoints, and how and when the run found its state."""

    def __init__(self) -> None:
        super().__init__()
        self.restores: list[tuple[RestoreMetrics, float]] = []

    def restore(self, metrics: RestoreMetrics) -> None:
        self.restores.append((metrics, time.time()))
