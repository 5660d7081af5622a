"""Writes a subtask's changeset: a local run for the next batch, and the stored form for the checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from statelog.checkpoint.attempt import Attempt
from statelog.checkpoint.protocol import Begun
from statelog.errors import StorageError
from statelog.local.runs import LocalRun, LocalRuns
from statelog.log.references import SegmentRef
from statelog.metrics import Measurements, Metric
from statelog.operators.keyed.changes import BatchChanges
from statelog.runs import digests
from statelog.storage import Store


@dataclass(frozen=True)
class Changeset:
    """A changeset ready to be acked."""

    segments: list[SegmentRef]
    """In order, at least one; of two changes of an entry the one in the later segment counts.

    All but the last are objects.
    """
    payload: bytes
    """Bytes of the last segment, unless it is an object too."""


class ChangesetWriter:
    """Writes the changes of one attempt; large ones in parts, while the batch runs.

    A part is written during the batch once its changes take `upload_part_bytes` of the options in memory, and more than
    the coordinator's `inline_bytes`. The last part is sent with the ack if it has at most so many or no changes. As a
    context manager it deletes the attempt's objects if the block fails.
    """

    def __init__(self, changes: BatchChanges, attempt: Attempt, begun: Begun) -> None:
        options = attempt.options
        self._changes = changes
        self._attempt = attempt
        self._begun = begun
        self._part_bytes = max(options.upload_part_bytes, begun.inline_bytes)
        self._segments: list[SegmentRef] = []
        self._uploads = Uploads(
            lambda: attempt.open_store(begun.store),
            max_bytes=options.max_in_flight_bytes,
            threads=options.upload_threads,
            recorder=attempt.measurements,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._uploads.abandon()

    def offer(self) -> None:
        """Upload parts while enough changes have come together; StorageError if an upload has failed."""
        while self._changes.unstored_bytes >= self._part_bytes:
            self._upload(*self._changes.take_part(self._attempt.options.codec, self._part_bytes))

    def finish(self, local: LocalRuns, input_rows: int) -> Changeset:
        """Write the remaining changes, and the local run that the next batch starts from.

        `input_rows` is the number of rows that the subtask has read. Raises StorageError if an upload has failed.
        """
        data, rows = self._changes.take_part(self._attempt.options.codec)
        payload = b""
        if len(data) <= self._begun.inline_bytes or not rows:
            payload = data
            self._segments.append(self._segment(digests.checksum(data), len(data), rows, input_rows))
        else:
            self._upload(data, rows, input_rows)
        written = local.write_new(self._changes.write_local, self._attempt.file_token)
        local.keep(written, self._local_run([segment.checksum for segment in self._segments]))
        self._uploads.finish()
        return Changeset(self._segments, payload)

    def finish_local(self, local: LocalRuns, input_rows: int) -> tuple[LocalRun, Changeset]:
        """Write the local run only; the changeset is one segment with its checksum and rows, and no bytes."""
        written, rows = local.write_new(self._changes.write_local, self._attempt.file_token), self._changes.rows
        with pa.memory_map(str(written)) as mapped:
            checksum = digests.checksum(memoryview(mapped.read_buffer()))
        local_run = self._local_run([checksum] if rows else [])
        local.keep(written, local_run)
        return local_run, Changeset([self._segment(checksum, 0, rows, input_rows)], b"")

    def _local_run(self, checksums: list[bytes]) -> LocalRun:
        batch, head = self._attempt.task.batch, self._begun.head
        return LocalRun(batch, batch, head, digests.extend(head, batch, checksums))

    def _upload(self, data: bytes, rows: int, input_rows: int = 0) -> None:
        name = f"{self._begun.upload_prefix}/{self._attempt.file_token}-{len(self._segments)}.run"
        self._segments.append(self._segment(digests.checksum(data), len(data), rows, input_rows, name))
        self._uploads.add(name, data)

    def _segment(self, checksum: bytes, length: int, rows: int, input_rows: int, name: str = "") -> SegmentRef:
        task = self._attempt.task
        return SegmentRef(task.subtask, task.attempt, checksum, 0, length, rows, input_rows, name)


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
