"""A task that stores its input rows as the batch's output: begin, store, ack. No Spark here."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from statelog.errors import CorruptionError, ErrorKind
from statelog.metrics import Step
from statelog.rpc.messages import Ack, Acked, TaskTimes
from statelog.runs.arrow_messages import MalformedMessage, read_stream, stream_batches
from statelog.stopwatch import Part
from statelog.tasks.attempt import Attempt, require_reply
from statelog.tasks.changeset import PartsWriter

_COLUMNS: Final = b"statelog columns"
"""Key of the user's columns in a stored schema's metadata."""


@dataclass(frozen=True)
class OutputRows:
    """The rows of a subtask in one batch."""

    batches: list[pa.RecordBatch]
    subtask: int
    time_ms: int | None
    """The batch time that the rows carry; None without rows."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum([batch.num_rows for batch in self.batches])


class StoredRows:
    """Rows on their way to the store, as Arrow IPC streams.

    `columns` describes the user's columns. Each stream has it, even one without rows, so that a batch can be read
    without the query that wrote it.
    """

    def __init__(self, columns: str) -> None:
        self._metadata: Mapping[bytes, bytes] = {_COLUMNS: columns.encode()}
        self._schema = pa.schema([])
        self._waiting: list[pa.RecordBatch] = []
        self.unstored_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows; all batches have the same schema."""
        self._schema = batch.schema
        self._waiting.append(batch)
        self.unstored_bytes += batch.nbytes

    def take_part(self, compression: str | None, max_bytes: int | None = None) -> tuple[bytes, int]:
        """Like :meth:`Parts.take_part`; a part has whole batches."""
        sink, rows, taken = pa.BufferOutputStream(), 0, 0
        schema = self._schema.with_metadata(self._metadata)
        with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            while self._waiting and (max_bytes is None or taken < max_bytes):
                batch = self._waiting.pop(0)
                writer.write_batch(batch.replace_schema_metadata(self._metadata))
                rows, taken = rows + batch.num_rows, taken + batch.nbytes
        self.unstored_bytes -= taken
        return sink.getvalue().to_pybytes(), rows


def stored_columns(data: bytes, name: str) -> str:
    """The description of the user's columns in a stored part of object `name`; CorruptionError without one."""
    with _reading(name), read_stream(data) as reader:
        metadata = reader.schema.metadata or {}
        if _COLUMNS not in metadata:
            raise MalformedMessage("it does not describe its columns")
        return str(metadata[_COLUMNS], "utf-8", "replace")


def stored_batches(data: bytes, name: str) -> Iterator[pa.RecordBatch]:
    """The rows of a stored part of object `name`; CorruptionError if it has no valid rows."""
    with _reading(name):
        for batch in stream_batches(data):
            yield batch.replace_schema_metadata(None)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Report bytes that are not rows as damage."""
    try:
        yield
    except MalformedMessage as error:
        raise CorruptionError(
            f"{name}: a batch's output is malformed: {error}.",
            kind=ErrorKind.FORMAT,
            hint="Restore the file from a copy; without it, the batch's output cannot be returned again.",
        ) from None


@dataclass(frozen=True)
class OutputTask:
    """The work of one attempt."""

    attempt: Attempt
    columns: str
    """Describes the user's columns."""

    def run(self, read: OutputRows) -> Generator[pa.RecordBatch, None, Acked]:
        """Store the rows, without output. After a StatelogError, nothing of the attempt counts."""
        attempt = self.attempt
        begun = attempt.begin(read.count, read.time_ms)
        if begun is None:
            return Acked()
        attempt.step(Step.RESTORED)
        rows = StoredRows(self.columns)
        with attempt.stopwatch.counting(Part.ENCODE), PartsWriter(rows, attempt, begun) as writer:
            for batch in read.batches:
                rows.add(batch)
                writer.offer()
            stored = writer.finish_parts(read.count)
        attempt.step(Step.ACKING)
        ack = Ack(
            task=attempt.task,
            segments=stored.segments,
            measured=attempt.measurements.take(),
            times=TaskTimes.of(attempt.stopwatch),
        )
        acked = require_reply(attempt.call(ack, stored.payload), Acked, "an ack")
        attempt.step(Step.ACKED)
        yield from ()
        return acked
