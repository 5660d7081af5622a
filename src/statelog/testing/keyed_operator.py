"""Plugs a keyed operator into a query without Spark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow as pa

from statelog.checkpoint.admission import OperatorConfig
from statelog.checkpoint.keyed_task import BatchInput, KeyedTask
from statelog.log.entry import QueryOperators, Settings
from statelog.operators.keyed.operator import KeyedOperator
from statelog.operators.keyed.subtask import KeyedRows
from statelog.operators.keyed.timers import timer_descriptor
from statelog.operators.watermark import WatermarkPolicy
from statelog.runs.byte_slices import Budget
from statelog.runs.key_groups import Hashes, subtasks_of
from statelog.runs.schema import StateSchema, encode_schema
from statelog.testing.local_query import Attempt

_NO_ROWS: Final = pa.RecordBatch.from_pylist([], schema=pa.schema([]))


@dataclass(frozen=True)
class LocalKeyedOperator:
    """A keyed operator of a :class:`statelog.testing.local_query.LocalQuery`."""

    uid: str
    make: Callable[[], KeyedOperator]
    """Makes the operator, anew for each attempt."""
    watermark: WatermarkPolicy | None = None
    """The operator's own watermark."""
    deleted: tuple[str, ...] = ()
    """States of earlier versions that the processor deletes."""
    initial: KeyedRows | None = None
    """The rows of the initial state."""
    operators: QueryOperators | None = None
    """The query's operators, as checkpoints note them."""
    settings: Settings = field(default_factory=dict)
    """The settings that the state depends on."""

    def with_budget(self, budget: Budget) -> LocalKeyedOperator:
        """The operator with another budget, the bound of the bytes that a subtask works on at once."""
        return replace(self, make=lambda: replace(self.make(), budget=budget))

    def config_of(self, query_id: str, run_id: str, instance: str, parallelism: int) -> OperatorConfig:
        operator = self.make()
        return OperatorConfig(
            query_id,
            run_id,
            self.uid,
            instance,
            parallelism,
            encode_schema(operator.key_codec.schema),
            _stored_states(operator),
            self.watermark,
            self.deleted,
            self.operators,
            self.settings,
        )

    def split(self, data: KeyedRows, parallelism: int, time_ms: int) -> list[BatchInput]:
        return [
            BatchInput(
                rows.rows if len(rows.hashes) else _NO_ROWS, rows.hashes, subtask, time_ms if len(rows.hashes) else None
            )
            for subtask, rows in enumerate(_parts(data, parallelism))
        ]

    def task(self, attempt: Attempt) -> KeyedTask:
        return KeyedTask(
            task=attempt.task,
            partition=attempt.task.subtask,
            parallelism=attempt.parallelism,
            operator=self.make(),
            options=attempt.options,
            call=attempt.call,
            local=attempt.worker.local_runs(attempt.local, attempt.task.batch),
            tables=attempt.worker.tables,
            open_store=attempt.open_store,
            clock=attempt.clock,
            token=attempt.token,
        )

    def initial_objects(self, parallelism: int) -> list[bytes]:
        if self.initial is None:
            return []
        return [_as_stream(part) if len(part.hashes) else b"" for part in _parts(self.initial, parallelism)]


def _stored_states(operator: KeyedOperator) -> list[StateSchema]:
    descriptors = [binding.descriptor for binding in operator.states]
    if operator.timer_domain is not None:
        descriptors.append(timer_descriptor(operator.timer_domain))
    return [descriptor.to_stored() for descriptor in sorted(descriptors, key=lambda state: state.name)]


def _parts(data: KeyedRows, parallelism: int) -> list[KeyedRows]:
    """The rows of each subtask."""
    subtasks = subtasks_of(data.hashes, parallelism)
    parts: list[KeyedRows] = []
    for subtask in range(parallelism):
        own = np.flatnonzero(subtasks == subtask)
        parts.append(KeyedRows(data.rows.take(pa.array(own)), data.hashes[own]))
    return parts


def _as_stream(part: KeyedRows) -> bytes:
    """An Arrow IPC stream of rows with their hashes as the last column."""
    hashes: Hashes = part.hashes
    rows = part.rows.append_column("hash", pa.array(hashes.view(np.int64)))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data
