"""What the tests of :mod:`tests.model.test_write_ahead_model` and others share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from statelog.coordinator.admission import OperatorConfig
from statelog.tasks.attempt import Attempt
from statelog.tasks.output_task import OutputRows, OutputTask

KEYED, OUTPUT = "op", "output"


@dataclass(frozen=True)
class OutputOperator:
    """Stores a query's output."""

    uid: str = OUTPUT

    def config_of(self, query_id: str, run_id: str, parallelism: int) -> OperatorConfig:
        return OperatorConfig(
            query_id, run_id, self.uid, parallelism, b"", [], in_front=frozenset({KEYED}), stores_output=True
        )

    def split(self, data: list[Any], parallelism: int, time_ms: int) -> list[OutputRows]:
        """Deal the rows to the subtasks, some of which get several batches, and some none."""
        parts: list[list[pa.RecordBatch]] = [[] for _ in range(parallelism)]
        for place, row in enumerate(data):
            parts[place % parallelism].append(pa.record_batch({"c0": [json.dumps(row)]}))
        return [OutputRows(batches, subtask, time_ms if batches else None) for subtask, batches in enumerate(parts)]

    def task(self, attempt: Attempt) -> OutputTask:
        return OutputTask(attempt, "columns")

    def initial_objects(self, parallelism: int) -> list[bytes]:
        return []
