"""Uploads parts of a changeset while the batch runs, with a bound on the bytes in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from statelog.errors import StorageError
from statelog.metrics import Metric, Recorder
from statelog.storage import Store


class Uploads:
    """The uploads of one attempt of a subtask.

    The order of calls is :meth:`add` for every object, then :meth:`finish`, or :meth:`abandon` if the attempt fails. No
    store is opened and no thread started before the first object. At most `threads` objects are uploaded at a time.
    """

    def __init__(self, open_store: Callable[[], Store], *, max_bytes: int, threads: int, recorder: Recorder) -> None:
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
