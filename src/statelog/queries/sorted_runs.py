"""Stores the rows of DataFrames as runs of state. Spark sorts them, so no process holds all rows of a subtask.

Two steps run in Python: before the shuffle, keys and entries are encoded, because rows are sorted by their bytes; after
it, the sorted rows are written, one run after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from statelog.convert.state_tables import EXPIRES, HASH, POSITION, Positions, StateColumns
from statelog.log.open import open_location
from statelog.log.references import StoredRun
from statelog.runs import digests
from statelog.runs.schema import (
    EXPIRY_COLUMN,
    VALUE_COLUMN,
    Operation,
    StateDescriptor,
    StateKind,
    StateSchema,
    change_schema,
    decode_schema,
    encode_schema,
)
from statelog.runs.writer import STORED_BLOCK_BYTES, STORED_BLOCK_ROWS, RunWriter
from statelog.spark.plan.keyed_plan import KeyedFrame
from statelog.spark.plan.placement import to_subtasks
from statelog.spark.plan.plan import subtask_of
from statelog.spark.worker.worker import task_function

_STORED: Final = "subtask long, name string, length long, checksum binary, rows long, first string, last string"
_SENT: Final = ("hash", "key", "entry", "expires")
_LOWEST: Final = -(1 << 63)


@dataclass(frozen=True)
class StateRows:
    """The rows of a state."""

    state: StateDescriptor
    frame: KeyedFrame
    """Columns as in :class:`StateColumns`, in this order, without the hash and the positions of elements.

    The elements of a list stand together in a partition, in order.
    """
    values: StructType
    """The fields of a value; a timer's is its time."""


@dataclass(frozen=True)
class RunsPlace:
    """The place for runs."""

    location: str
    folder: str
    """Within the location. Each subtask has its own folder below it."""
    compression: str | None
    run_bytes: int = 16 << 20
    """A run that reaches this size ends with its current batch of rows, and with all rows of the last one's hash."""


def store_sorted(rows: StateRows, parallelism: int, place: RunsPlace, name: str) -> dict[int, list[StoredRun]]:
    """Store a state as runs, whose names begin with `name`; return them by subtask, in order of their hashes.

    Raises ConfigurationError in the tasks if two rows are for one entry.
    """
    frame, state = rows.frame, rows.state
    keys = encode_schema(frame.key_schema)
    long, binary = LongType(), BinaryType()
    sent = [StructField(*column) for column in zip(_SENT, (long, binary, binary, long), strict=True)]
    sent += [StructField(f"v{index}", field.dataType) for index, field in enumerate(rows.values)]
    encoded = frame.rows("c").mapInArrow(task_function(_Encode(keys, state.to_stored())), StructType(sent))
    placed = to_subtasks(encoded, parallelism, subtask_of(F.col("hash"), parallelism))
    unsigned = F.col("hash").bitwiseXOR(F.lit(_LOWEST))
    written = placed.sortWithinPartitions(unsigned, "key", "entry").mapInArrow(
        task_function(_Write(keys, state.to_stored(), place, name)), _STORED
    )
    runs: dict[int, list[StoredRun]] = {}
    for row in written.collect():
        first, last = int(row["first"]), int(row["last"])
        run = StoredRun(row["name"], 0, row["length"], bytes(row["checksum"]), row["rows"], first, last)
        runs.setdefault(row["subtask"], []).append(run)
    return {subtask: sorted(own, key=lambda run: run.first_hash) for subtask, own in runs.items()}


@dataclass(frozen=True)
class _Encode:
    """Encodes the keys and entries of a partition's rows; the values stay as Spark sends them."""

    key_schema: bytes
    state: StateSchema

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        state, key_schema = StateDescriptor.from_stored(self.state), decode_schema(self.key_schema)
        columns, positions = StateColumns(key_schema, state), Positions()
        is_list = state.kind is StateKind.LIST
        names = [name for name in columns.schema.names if name != HASH and not (is_list and name == POSITION)]
        first, last = len(key_schema) + len(state.entry_schema or ()), len(names) - (EXPIRES in names)
        for batch in batches:
            own = dict(zip([*names, HASH], batch.columns, strict=True))
            if is_list:
                own[POSITION] = pa.array(np.zeros(batch.num_rows, np.int64))
            offset = 0
            for puts in columns.to_puts(pa.Table.from_arrays(list(own.values()), list(own))):
                entries = columns.element_entries(positions.of(puts)) if is_list else puts.column(2)
                sent = [puts.column(0).view(pa.int64()), puts.column(1), entries, puts.column(EXPIRY_COLUMN)]
                values = [column.slice(offset, puts.num_rows) for column in batch.columns[first:last]]
                offset += puts.num_rows
                yield pa.RecordBatch.from_arrays(
                    [*sent, *values], [*_SENT, *(f"v{index}" for index in range(len(values)))]
                )


@dataclass(frozen=True)
class _Write:
    """Writes the sorted rows of a subtask as runs."""

    key_schema: bytes
    state: StateSchema
    place: RunsPlace
    name: str

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None, "runs in a task"
        subtask, state = context.partitionId(), StateDescriptor.from_stored(self.state)
        columns = StateColumns(decode_schema(self.key_schema), state)
        store = open_location(self.place.location)
        changes = (self._changes(state, batch) for batch in batches if batch.num_rows)
        for number, run in enumerate(_runs(state, columns.distinct(changes), self.place)):
            name = f"{self.place.folder}/{subtask}/{self.name}-{context.taskAttemptId()}-{number}.run"
            store.put(name, run.data)
            stored = {
                "subtask": subtask,
                "name": name,
                "length": len(run.data),
                "checksum": digests.checksum(run.data),
                "rows": run.rows,
                "first": str(run.first),
                "last": str(run.last),
            }
            yield pa.RecordBatch.from_pylist([stored])

    def _changes(self, state: StateDescriptor, batch: pa.RecordBatch) -> pa.RecordBatch:
        hashes, keys, entries, expires, *values = batch.columns
        schema = change_schema(state)
        operations = pa.array(np.full(batch.num_rows, Operation.PUT, np.uint8))
        own = [value.cast(field.type) for value, field in zip(values, list(schema)[VALUE_COLUMN:], strict=False)]
        if state.kind is StateKind.TIMER:
            own.append(pa.nulls(batch.num_rows, pa.uint32()))  # the writer fills it in
        columns = [hashes.view(pa.uint64()), keys, entries, operations, expires, *own]
        return pa.RecordBatch.from_arrays(columns, schema=schema)


@dataclass(frozen=True)
class _Run:
    data: bytes
    rows: int
    first: int
    last: int


def _runs(state: StateDescriptor, batches: Iterable[pa.RecordBatch], place: RunsPlace) -> Iterator[_Run]:
    """Encode sorted changes as runs of bounded size, which have no hash in common."""
    writing: _Writing | None = None
    for batch in batches:
        rest = batch
        if writing is not None and writing.size_bytes >= place.run_bytes:
            hashes = batch.column(0).to_numpy()
            same = int(np.searchsorted(hashes, np.uint64(writing.last), "right"))
            writing.add(batch.slice(0, same))
            rest = batch.slice(same)
            if rest.num_rows:
                yield writing.finish()
                writing = None
        if rest.num_rows:
            writing = writing or _Writing(state, place.compression)
            writing.add(rest)
    if writing is not None:
        yield writing.finish()


class _Writing:
    """A run that is being written in memory."""

    def __init__(self, state: StateDescriptor, compression: str | None) -> None:
        self._state = state
        self._sink = pa.BufferOutputStream()
        self._writer = RunWriter(
            self._sink, compression=compression, block_rows=STORED_BLOCK_ROWS, whole_bytes=STORED_BLOCK_BYTES
        )
        self._first: int | None = None
        self.last = 0

    @property
    def size_bytes(self) -> int:
        """Bytes written so far."""
        return int(self._sink.tell())

    def add(self, changes: pa.RecordBatch) -> None:
        if not changes.num_rows:
            return
        self._writer.add(self._state, changes)
        if self._first is None:
            self._first = changes.column(0)[0].as_py()
        self.last = changes.column(0)[changes.num_rows - 1].as_py()

    def finish(self) -> _Run:
        rows = self._writer.finish()
        assert self._first is not None, "a run has rows"
        return _Run(self._sink.getvalue().to_pybytes(), rows, self._first, self.last)
