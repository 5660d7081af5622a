"""A keyed operator for a query without Spark, and a look at its state."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from statelog.changelog import chain
from statelog.changelog.local_runs import LocalRuns
from statelog.changelog.restore import restore_runs
from statelog.checkpoint.admission import OperatorRun
from statelog.checkpoint.history import History
from statelog.checkpoint.task import BatchInput, BatchTask
from statelog.checkpoint.watermark import WatermarkPolicy
from statelog.state.grouping import Window
from statelog.state.key_groups import Hashes, hash_range, subtasks_of
from statelog.state.memory_table import MemoryTable
from statelog.state.merge import Garbage
from statelog.state.operator import InputCodec, KeyedInput, KeyedOperator
from statelog.state.processor_handle import ProcessorHandle
from statelog.state.runs_table import RunsTable
from statelog.state.schema import StateSchema, encode_schema, stored_name
from statelog.state.subtask import BatchContext, KeyedRows, KeyedSubtask
from statelog.state.table import StateTable
from statelog.state.timers import timer_descriptor
from statelog.state.times import Moment
from statelog.storage import LocalStore
from statelog.testing.local_query import Attempt, LocalQuery

__all__ = ["LocalKeyedOperator", "look_at_state"]

_NO_ROWS = pa.RecordBatch.from_pylist([], schema=pa.schema([]))
_LARGEST_VIEW_RUNS = 8
_T = TypeVar("_T")


@dataclass(frozen=True)
class LocalKeyedOperator:
    """A keyed operator.

    Parameters
    ----------
    uid : str
        Its name.
    make : callable
        Makes the operator, for each attempt anew.
    watermark : WatermarkPolicy or None
        Its own watermark.
    deleted : tuple of str
        States of earlier versions that are to go.
    initial : KeyedRows or None
        The rows of the initial state.
    """

    uid: str
    make: Callable[[], KeyedOperator]
    watermark: WatermarkPolicy | None = None
    deleted: tuple[str, ...] = ()
    initial: KeyedRows | None = None

    def run_of(self, query_id: str, run_id: str, instance: str, parallelism: int) -> OperatorRun:
        operator = self.make()
        return OperatorRun(
            query_id,
            run_id,
            self.uid,
            instance,
            parallelism,
            encode_schema(operator.key_codec.schema),
            _stored_states(operator),
            self.watermark,
            self.deleted,
        )

    def split(self, data: KeyedRows, parallelism: int, time_ms: int) -> list[BatchInput]:
        return [
            BatchInput(
                rows.rows if len(rows.hashes) else _NO_ROWS, rows.hashes, subtask, time_ms if len(rows.hashes) else None
            )
            for subtask, rows in enumerate(_parts(data, parallelism))
        ]

    def task(self, attempt: Attempt) -> BatchTask:
        return BatchTask(
            task=attempt.task,
            partition=attempt.task.subtask,
            parallelism=attempt.parallelism,
            operator=self.make(),
            options=attempt.options,
            call=attempt.call,
            local=attempt.worker.local_runs(attempt.local),
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


class _Look:
    """A processor that does nothing but look at its handle, for one key."""

    def __init__(self, look: Callable[[ProcessorHandle], Any]) -> None:
        self.seen: Any = None
        self._look = look

    def init(self, handle: ProcessorHandle) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self.seen = self._look(self._handle)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        return iter(())

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        pass

    def close(self) -> None:
        pass


class _KeysOnly:
    """An input without rows: what is looked at is a key that may have none."""

    def __init__(self, codec: InputCodec) -> None:
        self.keys = codec.keys

    def by_key(self, window: Window) -> list[Iterator[Any]]:
        return [iter(()) for _ in range(len(window.keys))]


def look_at_state(
    query: LocalQuery,
    operator: LocalKeyedOperator,
    history: History,
    key: KeyedRows,
    look: Callable[[ProcessorHandle], _T],
) -> _T:
    """Read a key's state as of the newest checkpoint and its times, as a subtask on a new host would find it.

    Parameters
    ----------
    query : LocalQuery
        The query.
    operator : LocalKeyedOperator
        The operator.
    history : History
        Its checkpoints.
    key : KeyedRows
        One row with the key.
    look : callable
        Reads the states, given the processor's handle.
    """
    processor = _Look(look)
    latest = history.latest
    generations = {} if latest is None else latest.generations
    moment = Moment(0, 0) if latest is None else Moment(latest.batch_time_ms, latest.watermark_ms)
    made = operator.make()
    states = [
        replace(
            state, descriptor=replace(state.descriptor, name=stored_name(state.name, generations.get(state.name, 0)))
        )
        for state in made.states
    ]
    keys = KeyedInput(made.input.key_columns, _KeysOnly(made.input.codec))
    keyed = replace(made, processor=processor, states=states, input=keys, event_time=None)
    subtask = KeyedSubtask(keyed, _table(query, history, moment), BatchContext(0, 0, moment), query.clock)
    for _ in subtask.process(key):
        pass
    seen: _T = processor.seen
    return seen


def _table(query: LocalQuery, history: History, moment: Moment) -> StateTable:
    latest = history.latest
    if latest is None:
        return RunsTable()
    uid, last = query.operator.uid, latest.batch
    origin = chain.genesis(query.query_id, uid, 0, 1)
    directory = query.directory / "view"
    local = LocalRuns(directory)
    if len(local.edges()) > _LARGEST_VIEW_RUNS:
        shutil.rmtree(directory)
    found = restore_runs(
        local,
        genesis=origin,
        head=history.digest(origin, 0, 1, last),
        last_batch=last,
        within=hash_range(0, 1),
        garbage=Garbage(moment, latest.generations),
        fetch=lambda known: history.missing_segments(origin, 0, 1, last, set(known)),
        open_store=lambda: LocalStore(query.location),
        token="view",
    )
    runs = [run for _, run in found]
    if query.options.table == "runs":
        return RunsTable(runs)
    table = MemoryTable()
    table.apply(runs)
    return table
