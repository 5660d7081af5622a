"""The micro-batches of a query: like Spark, it retries tasks that die, and repeats the batch if the driver dies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from statelog.checkpoint.batch import BatchTime
from statelog.checkpoint.history import History
from statelog.errors import ConfigurationError, StorageError
from statelog.storage import LocalStore
from statelog.testing.crashes import DRIVER_STEPS, Crash
from statelog.testing.local_query import LocalQuery

_MAX_FAILURES: Final = 4
"""Spark's spark.task.maxFailures."""


@dataclass(frozen=True)
class Snapshot:
    """A query without its processes: Spark's knowledge of it, and the objects of its store."""

    query_id: str
    parallelism: int
    """Number of subtasks of the last start."""
    next_batch: int
    times: dict[int, BatchTime]
    objects: dict[str, bytes]


@dataclass(frozen=True)
class DriverDeath:
    """The effect of the next crash."""

    always: bool = False
    """Whether the driver dies at a task's step too."""
    parallelism: int | None = None
    """Number of subtasks of the next start; None leaves it unchanged."""
    keep_local: bool = True
    """Whether the next start finds the host's local files."""


class MicroBatches:
    """Runs a query batch by batch.

    `parallelism` is that of the next start, `next_batch` the number of the next batch, and `death` the effect of the
    next crash.
    """

    def __init__(self, query: LocalQuery, parallelism: int) -> None:
        self.query = query
        self.next_batch = 0
        self.parallelism = parallelism
        self.death = DriverDeath()
        self._is_running = False
        self._done: tuple[int, Any] | None = None

    @property
    def last_time(self) -> BatchTime:
        """The time of the newest batch; zero before the first."""
        return self.query.times.get(self.next_batch - 1, BatchTime(0, 0))

    def run(self, data: Any, time: BatchTime) -> list[pa.RecordBatch]:
        """Run the next batch, and return the output that Spark would keep; the operator splits `data` by subtask."""
        number = self.next_batch
        self.query.times[number] = time
        outputs = self._complete(number, data)
        self._done = (number, data)
        self.next_batch += 1
        return outputs

    def repeat(self, *, in_new_run: bool) -> list[pa.RecordBatch]:
        """Run the last batch again: in later attempts, or in a new start, as if Spark had not committed the batch."""
        if self._done is None:
            raise ConfigurationError("There is no batch to repeat.", hint="Push some rows first.")
        number, data = self._done
        if in_new_run or not self._is_running or self.query.first_batch > number:
            self._start(number)
        return self._complete(number, data)

    def try_first(self, data: Any, time: BatchTime) -> None:
        """Run a first attempt of each subtask of the next batch; later attempts may get other data."""
        number = self.next_batch
        self.query.times[number] = time
        self._complete(number, data)

    def forget(self, parallelism: int | None) -> None:
        """Restart as if Spark had not committed the last batch: the next batch has its number."""
        self.next_batch -= 1
        self._done = None
        self.restart(parallelism, keep_local=True)

    def restart(self, parallelism: int | None, *, keep_local: bool) -> None:
        """Stop the query, and start it again for the next batch."""
        self.stop()
        self.parallelism = self.parallelism if parallelism is None else parallelism
        self._start(self.next_batch, keep_local=keep_local)

    def stop(self) -> None:
        """Stop the query in good order."""
        if self._is_running:
            self._is_running = False
            self.query.coordinator.close()
        self.query.release()

    def _start(self, batch: int, *, keep_local: bool = True) -> None:
        self._is_running = False
        for failures in range(1, _MAX_FAILURES + 1):
            try:
                self.query.start(self.parallelism, batch, keep_local=keep_local)
            except StorageError:
                if failures == _MAX_FAILURES:
                    raise
            else:
                self._is_running = True
                return

    def _complete(self, number: int, data: Any) -> list[pa.RecordBatch]:
        """Run all subtasks; if the driver dies, run all of them again in a new start."""
        while True:
            if not self._is_running:
                self._start(number)
            parts = self.query.operator.split(data, self.parallelism, self.query.times[number].time_ms)
            try:
                outputs = [self._run_subtask(number, subtask, part) for subtask, part in enumerate(parts)]
            except Crash:
                self._is_running = False
                self.parallelism = self.death.parallelism or self.parallelism
                self._start(number, keep_local=self.death.keep_local)
                continue
            except BaseException:
                # The query has ended with this error; the next start begins from the previous checkpoint.
                self._is_running = False
                raise
            return [batch for output in outputs for batch in output]

    def _run_subtask(self, number: int, subtask: int, part: Any) -> list[pa.RecordBatch]:
        failures = 0
        while True:
            try:
                return self.query.run_subtask(number, subtask, part)
            except Crash as crash:
                if crash.step in DRIVER_STEPS or self.death.always:
                    raise
                failures += 1
            except StorageError:
                failures += 1
                if failures == _MAX_FAILURES:
                    raise

    # ---- Durable state ----

    def history(self) -> History:
        """The checkpoints in the log."""
        store = LocalStore(self.query.location)
        try:
            return History(self.query.open_log(store).read())
        finally:
            store.close()

    def snapshot(self) -> Snapshot:
        """Copy the query as it would outlive its processes."""
        store = LocalStore(self.query.location)
        objects = {info.name: store.read(info.name) for info in store.list()}
        return Snapshot(self.query.query_id, self.parallelism, self.next_batch, dict(self.query.times), objects)

    def load(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot; to be called before the first batch."""
        store = LocalStore(self.query.location)
        for name, data in snapshot.objects.items():
            store.put(name, data)
        store.close()
        self.query.times.update(snapshot.times)
        self.next_batch = snapshot.next_batch
