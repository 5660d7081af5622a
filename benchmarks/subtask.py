"""A keyed subtask without Spark and without a coordinator: batches of rows in, output rows and changes out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from statelog.clock import SystemClock
from statelog.convert.input import FrameInput, RowInput
from statelog.convert.output import FrameOutput, RowOutput
from statelog.convert.times import SparkTimes, TimeMode
from statelog.convert.types import key_decoder
from statelog.operators.keyed.operator import KeyedInput, KeyedOperator, StateBinding
from statelog.operators.keyed.subtask import BatchContext, KeyedRows, KeyedSubtask
from statelog.runs.key_groups import Hashes
from statelog.runs.keys import KeyCodec
from statelog.runs.reader import Run
from statelog.runs.schema import StateKind
from statelog.runs.times import Moment, Ttl
from statelog.spark.states import KeyedStateDeclaration
from statelog.tables.runs import RunsTable

__all__ = ["BatchRun", "Subtask"]

_NO_ROWS: Final = pa.RecordBatch.from_pylist([], schema=pa.schema([]))
_MAX_FRAME_BYTES: Final = (1 << 31) - 1
_MAX_FRAME_ROWS: Final = 10_000


@dataclass(frozen=True)
class BatchRun:
    """One batch as it was run.

    Parameters
    ----------
    output : list of pyarrow.RecordBatch
        The output rows.
    process_s : float
        Time for the processor's calls, reading the state and converting the rows.
    changeset_s : float
        Time for collecting what was written and encoding it, once to be searched and once to be stored.
    """

    output: list[pa.RecordBatch]
    process_s: float
    changeset_s: float

    @property
    def total_s(self) -> float:
        """All of the batch's time."""
        return self.process_s + self.changeset_s

    def rows(self) -> list[dict[str, Any]]:
        """The output rows as dictionaries."""
        return [row for batch in self.output for row in batch.to_pylist()]


class Subtask:
    """The only subtask of an operator, batch after batch, with its state in memory.

    Parameters
    ----------
    processor : StatefulProcessor
        The processor. Its key is the column ``key``, a long.
    output : StructType
        Type of the output rows.
    time_mode : TimeMode
        Its time mode.
    uses_frames : bool
        Whether it takes pandas frames.
    """

    def __init__(
        self,
        processor: Any,
        output: StructType,
        time_mode: TimeMode = TimeMode.NONE,
        *,
        uses_frames: bool = False,
    ) -> None:
        self._processor = processor
        self._output = output
        self._time_mode = time_mode
        self._uses_frames = uses_frames
        self._states = _declared_states(processor)
        self._table = RunsTable()
        self._batch = 0

    def run(self, columns: dict[str, pa.Array] | None = None, *, now_ms: int = 0, keep: bool = True) -> BatchRun:
        """Run a batch.

        Parameters
        ----------
        columns : dict of str to pyarrow.Array, optional
            The input columns, ``key`` among them; a batch without rows if there are none.
        now_ms : int
            Both of the batch's times, milliseconds.
        keep : bool
            Whether the next batch sees what this one has written.
        """
        rows = _NO_ROWS if columns is None else pa.RecordBatch.from_pydict(columns)
        hashes = np.zeros(0, np.uint64) if columns is None else _hashes(columns["key"])
        operator = self._operator(rows.schema.names)
        context = BatchContext(epoch=1, batch=self._batch, moment=Moment(now_ms, now_ms))
        started_s = time.perf_counter()
        subtask = KeyedSubtask(operator, self._table, context, SystemClock())
        output = list(subtask.process(KeyedRows(rows, hashes)))
        processed_s = time.perf_counter()
        local = pa.BufferOutputStream()
        subtask.changes.write_local(local)
        subtask.changes.take_part("lz4")
        ended_s = time.perf_counter()
        if keep:
            self._table.apply([Run(local.getvalue(), f"batch {self._batch}")])
            self._batch += 1
        return BatchRun(
            output=output,
            process_s=processed_s - started_s - subtask.flush_s,
            changeset_s=ended_s - processed_s + subtask.flush_s,
        )

    def _operator(self, columns: list[str]) -> KeyedOperator:
        key_codec = KeyCodec(pa.schema([("key", pa.int64())]))
        frames = FrameInput(columns, _MAX_FRAME_ROWS, _MAX_FRAME_BYTES)
        return KeyedOperator(
            uid="benchmark",
            processor=self._processor,
            key_codec=key_codec,
            decode_key=key_decoder(key_codec, "UTC"),
            states=self._states,
            input=KeyedInput(
                [columns.index("key")] if columns else [], frames if self._uses_frames else RowInput(columns)
            ),
            output=FrameOutput(self._output, "UTC", "benchmark")
            if self._uses_frames
            else RowOutput(self._output, "benchmark"),
            times=SparkTimes(self._time_mode),
            timer_domain=self._time_mode.domain,
        )


def _hashes(keys: pa.Array) -> Hashes:
    """Key hashes, as evenly spread as Spark's: the finalizer of MurmurHash3."""
    hashes = keys.to_numpy().astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(factor)
    mixed: Hashes = hashes ^ (hashes >> np.uint64(33))
    return mixed


def _declared_states(processor: Any) -> list[StateBinding]:
    handle = _Declarations()
    processor.init(handle)
    processor.close()
    return [declaration.bind() for declaration in handle.states]


class _Declarations:
    """What ``init`` gets to say which states there are."""

    def __init__(self) -> None:
        self.states: list[KeyedStateDeclaration] = []

    def getValueState(self, name: str, schema: StructType, ttlDurationMs: int | None = None) -> None:
        self._add(name, StateKind.VALUE, schema, None, ttlDurationMs)

    def getListState(self, name: str, schema: StructType, ttlDurationMs: int | None = None) -> None:
        self._add(name, StateKind.LIST, schema, None, ttlDurationMs)

    def getMapState(self, name: str, key: StructType, value: StructType, ttlDurationMs: int | None = None) -> None:
        self._add(name, StateKind.MAP, value, key, ttlDurationMs)

    def _add(self, name: str, kind: StateKind, value: StructType, entry: StructType | None, ttl_ms: int | None) -> None:
        self.states.append(KeyedStateDeclaration(name, kind, value, entry, None if ttl_ms is None else Ttl(ttl_ms)))
