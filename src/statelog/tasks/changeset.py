"""Writes a subtask's changeset: the stored form for the checkpoint, and a local run for the next batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, Self

import pyarrow as pa

from statelog.errors import StorageError
from statelog.files import removed_on_failure
from statelog.local.runs import LocalRun, LocalRuns
from statelog.log.references import SegmentRef
from statelog.metrics import Measurements, Metric
from statelog.operators.keyed.changes import BatchChanges
from statelog.rpc.messages import Begun
from statelog.runs import digests
from statelog.stopwatch import Part
from statelog.storage import Store
from statelog.tasks.attempt import Attempt


@dataclass(frozen=True)
class Changeset:
    """A changeset ready to be acked."""

    segments: list[SegmentRef]
    """In order, at least one; of two changes of an entry the one in the later segment counts.

    All but the last are objects.
    """
    payload: bytes
    """Bytes of the last segment, unless it is an object too."""


class Parts(Protocol):
    """The rows that an attempt stores, as they are cut into parts."""

    @property
    def unstored_bytes(self) -> int:
        """Size in memory of the rows that are in no part yet."""

    def take_part(self, compression: str | None, max_bytes: int | None = None) -> tuple[bytes, int]:
        """Encode rows that are in no part yet: all, or about `max_bytes` of them; also returns their number."""


class PartsWriter:
    """Stores the rows of one attempt; many rows in parts, while the batch runs.

    A part is written during the batch once its rows take `upload_part_bytes` of the options in memory, and more than
    the coordinator's `inline_bytes`. The last part is sent with the ack if it has at most `inline_bytes`, or no rows.
    As a context manager, it deletes the attempt's objects if the block fails.
    """

    def __init__(self, parts: Parts, attempt: Attempt, begun: Begun) -> None:
        options = attempt.options
        self._parts = parts
        self._attempt = attempt
        self._begun = begun
        self._part_bytes = max(options.tuning.upload_part_bytes, begun.permit.inline_bytes)
        self._segments: list[SegmentRef] = []
        self._uploads = Uploads(
            lambda: attempt.open_store(begun.permit.store),
            max_bytes=options.max_in_flight_bytes,
            threads=options.tuning.upload_threads,
            recorder=attempt.measurements,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._uploads.abandon()

    def offer(self) -> None:
        """Upload parts while enough rows are waiting; StorageError if an upload has failed."""
        while self._parts.unstored_bytes >= self._part_bytes:
            self._upload(*self._parts.take_part(self._attempt.options.codec, self._part_bytes))

    def finish_parts(self, input_rows: int) -> Changeset:
        """Write the remaining rows; `input_rows` is the number of rows that the subtask has read.

        Raises StorageError if an upload has failed.
        """
        payload = self._last_part(input_rows)
        self._finish_uploads()
        return Changeset(self._segments, payload)

    def _last_part(self, input_rows: int) -> bytes:
        """Write the remaining rows; returns their bytes if they go with the ack."""
        data, rows = self._parts.take_part(self._attempt.options.codec)
        if len(data) <= self._begun.permit.inline_bytes or not rows:
            self._segments.append(self._segment(digests.checksum(data), len(data), rows, input_rows))
            return data
        self._upload(data, rows, input_rows)
        return b""

    def _upload(self, data: bytes, rows: int, input_rows: int = 0) -> None:
        name = f"{self._begun.permit.upload_prefix}/{self._attempt.file_token}-{len(self._segments)}.run"
        self._segments.append(self._segment(digests.checksum(data), len(data), rows, input_rows, name))
        self._attempt.stopwatch.call(Part.UPLOAD, self._uploads.add, name, data)

    def _finish_uploads(self) -> None:
        self._attempt.stopwatch.call(Part.UPLOAD, self._uploads.finish)

    def _segment(self, checksum: bytes, length: int, rows: int, input_rows: int, name: str = "") -> SegmentRef:
        task = self._attempt.task
        return SegmentRef(task.subtask, task.attempt, checksum, 0, length, rows, input_rows, name)


class ChangesetWriter(PartsWriter):
    """Writes the changes of one attempt, for the store and for the next batch."""

    def __init__(self, changes: BatchChanges, attempt: Attempt, begun: Begun) -> None:
        super().__init__(changes, attempt, begun)
        self._changes = changes
        self.local_run: LocalRun | None = None
        """The changes as the next batch finds them, once they are written."""

    def finish(self, local: LocalRuns, input_rows: int) -> Changeset:
        """Write the remaining changes, and the local run that the next batch starts from.

        `input_rows` is the number of rows that the subtask has read. Raises StorageError if an upload has failed.
        """
        payload = self._last_part(input_rows)
        written = local.write_new(self._changes.write_local, self._attempt.file_token)
        with removed_on_failure(written):
            self.local_run = self._local_run([segment.checksum for segment in self._segments])
        local.keep(written, self.local_run)
        with removed_on_failure(local.directory / self.local_run.file_name):
            self._finish_uploads()
        return Changeset(self._segments, payload)

    def finish_local(self, local: LocalRuns, input_rows: int) -> tuple[LocalRun, Changeset]:
        """Write the local run only; the changeset is one segment with its checksum and rows, and no bytes."""
        written, rows = local.write_new(self._changes.write_local, self._attempt.file_token), self._changes.rows
        with removed_on_failure(written), pa.memory_map(str(written)) as mapped:
            checksum = digests.checksum(memoryview(mapped.read_buffer()))
        local_run = self.local_run = self._local_run([checksum] if rows else [])
        local.keep(written, local_run)
        return local_run, Changeset([self._segment(checksum, 0, rows, input_rows)], b"")

    def _local_run(self, checksums: list[bytes]) -> LocalRun:
        batch, head = self._attempt.task.batch, self._begun.view.head
        return LocalRun(batch, batch, head, digests.extend(head, batch, checksums))


class Uploads:
    """The uploads of one attempt of a subtask.

    The order of calls is :meth:`add` for every object, then :meth:`finish`, or :meth:`abandon` if the attempt fails. No
    store is opened and no thread started before the first object. At most `threads` objects are uploaded at a time.
    """

    def __init__(
        self, open_store: Callable[[], Store], *, max_bytes: int, threads: int, recorder: Measurements
    ) -> None:
        self._open_store = open_store
        self._max_bytes = max_bytes
        self._threads = threads
        self._recorder = recorder
        self._started: tuple[Store, ThreadPoolExecutor] | None = None
        self._names: list[str] = []
        self._running: list[Future[None]] = []
        self._changed = threading.Condition()
        self._bytes = 0

    def add(self, name: str, data: bytes) -> None:
        """Schedule an object under a name that is used once; wait first while `max_bytes` or more are in flight.

        Raises StorageError if an earlier upload has failed.
        """
        if self._started is None:
            self._started = self._open_store(), ThreadPoolExecutor(self._threads, "statelog-upload")
        store, pool = self._started
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < self._max_bytes)
            self._bytes += len(data)
            self._recorder.observe(Metric.UPLOAD_QUEUE_BYTES, self._bytes)
        self._require_success()
        self._names.append(name)
        self._running.append(pool.submit(self._write, store, name, data))

    def finish(self) -> None:
        """Wait until all objects are stored; StorageError if an upload has failed."""
        if self._started is not None:
            self._started[1].shutdown()
        self._require_success()

    def abandon(self) -> None:
        """Delete the objects of a failed attempt, as far as possible."""
        if self._started is None:
            return
        store, pool = self._started
        pool.shutdown(cancel_futures=True)
        with suppress(StorageError):  # the coordinator finds them once the batch is over
            store.delete(self._names)

    def _write(self, store: Store, name: str, data: bytes) -> None:
        try:
            store.put(name, data)
        finally:
            with self._changed:
                self._bytes -= len(data)
                self._changed.notify()

    def _require_success(self) -> None:
        for upload in self._running:
            if upload.done():
                upload.result()
