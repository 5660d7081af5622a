"""One operator of one query without Spark: its driver, its hosts and their workers, its batches and its crashes.

Coordinator, log, and tasks with their local runs and tables are the real ones. This module only replaces Spark: it
numbers batches and attempts, hands rows to subtasks, carries calls to the driver, retries tasks that die, and repeats
the batch if the driver dies.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import BatchTime
from statelog.coordinator.coordinator import Coordinator
from statelog.errors import ConfigurationError, StorageError
from statelog.history.operator_history import History
from statelog.history.query_history import QueryHistory
from statelog.local.policy import MERGE_POLICY
from statelog.log.numbered import NumberedLog
from statelog.log.open import open_log
from statelog.metrics import CheckpointMetrics, Measurements, Observer, RestoreMetrics, RestoreProgress, Step
from statelog.options import Options
from statelog.rpc.messages import Ping, Reply, Request, TaskId, Tick
from statelog.storage import LocalStore, Store
from statelog.storage.names import name_part
from statelog.tasks.attempt import Attempt, Task, WorkerMemory

_MAX_FAILURES: Final = 4
"""Spark's spark.task.maxFailures."""

_MEMORY: Final = "/dev/shm"
_ROOM_BYTES: Final = 1 << 30

_MOST_HOSTS: Final = 100
"""Distance between the host numbers of two starts, so that new hosts differ from all earlier ones."""

_CLOCK_START_S: Final = 1e10
"""Far in the future, so that orphans of a crashed start are old enough to be removed."""

DRIVER_STEPS: Final = frozenset({Step.LAST_ACK, Step.DURABLE})
"""The steps that the driver passes; the others are a task's."""


# ---- Crashes ----


class Crash(Exception):
    """The death of a process at a step; only tests that run single attempts see it."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.step = step


class CrashPoint(Observer):
    """Crashes once at step `at`, in `subtask` or else in any one, and forwards all events to the test's observer."""

    def __init__(self, inner: Observer) -> None:
        self._inner = inner
        self.at: Step | None = None
        self.subtask: int | None = None
        self.crashes = 0
        self.checkpoints: list[CheckpointMetrics] = []

    def arm(self, step: Step | None, subtask: int | None = None) -> None:
        """Crash when the step is next passed, in this subtask or else in any one; step None cancels the crash."""
        self.at, self.subtask = step, subtask

    def step(self, step: Step, batch: int, subtask: int) -> None:
        self._inner.step(step, batch, subtask)
        if step is self.at and self.subtask in (None, subtask):
            self.arm(None)
            self.crashes += 1
            raise Crash(step)

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.checkpoints.append(metrics)
        self._inner.checkpoint(metrics)

    def restore(self, metrics: RestoreMetrics) -> None:
        self._inner.restore(metrics)

    def restoring(self, progress: RestoreProgress) -> None:
        self._inner.restoring(progress)


# ---- Attempts ----


class LocalOperator(Protocol):
    """An operator, keyed or unkeyed, as :class:`LocalQuery` runs it."""

    @property
    def uid(self) -> str:
        """The operator's name."""
        ...

    def config_of(self, query_id: str, run_id: str, parallelism: int) -> OperatorConfig:
        """The operator's configuration in one start of the query."""
        ...

    def split(self, data: Any, parallelism: int, time_ms: int) -> list[Any]:
        """Split a batch's data into the input of each subtask."""
        ...

    def task(self, attempt: Attempt) -> Task:
        """Make the task of an attempt."""
        ...

    def initial_objects(self, parallelism: int) -> list[bytes]:
        """The rows of the initial state for each subtask, as an Arrow IPC stream; empty bytes for no rows."""
        ...


class LocalQuery:
    """Runs an operator, attempt by attempt.

    The order of calls is :meth:`start`, then :meth:`run_subtask` for each batch, which needs an entry in `times`;
    :meth:`start` again stands for a restart of the query. `operator` may be replaced before a start. `directory` holds
    the store and the hosts' local directories.
    """

    def __init__(
        self,
        operator: LocalOperator,
        directory: Path,
        options: Options,
        *,
        query_id: str = "query",
        open_store: Callable[[str], Store] = LocalStore,
    ) -> None:
        self.operator = operator
        self.crash_point = CrashPoint(options.observer)
        self.options = replace(options, observer=self.crash_point)
        self.query_id = query_id
        self.times: dict[int, BatchTime] = {}
        """The time of each batch, as in Spark's offset log."""
        self.clock = ManualClock(_CLOCK_START_S)
        self.open_store = open_store
        self.policy = MERGE_POLICY
        """The sizes that determine merging from the next start on; tests may replace it."""
        self.runs = 0
        self._measurements = Measurements()
        """The measurements of all tasks, as if they ran in one Python worker."""
        self.attempts = 0
        self.parallelism = 0
        self.first_batch = -1
        self.coordinator: Coordinator
        self.directory = directory
        self.keeps: Callable[[QueryHistory], bool] | None = None
        """Whether the next start keeps the stored checkpoint of its first batch; tests may replace it."""
        self.place: Callable[[int], int] = lambda subtask: 0
        """The host of a subtask's next attempt, from 0; tests may replace it. Files stay on their host."""
        self._first_host = 0
        self.new_workers()
        self.stores: list[Store] = []

    @property
    def location(self) -> str:
        """Location of the store."""
        return str(self.directory / "location")

    @property
    def local(self) -> Path:
        """The local directory of the first host."""
        return self.local_of(0)

    def local_of(self, host: int) -> Path:
        """The local directory of a host."""
        return self.directory / f"host-{self._first_host + host}"

    @property
    def run_id(self) -> str:
        """Spark's run id of the current start."""
        return f"run-{self.runs}"

    @property
    def instance(self) -> str:
        """The operator's instance in the current driver."""
        return f"instance-{self.runs}"

    def open_log(self, store: Store) -> NumberedLog:
        """The query's log in a store."""
        return open_log(store, self.options, self.clock)

    @property
    def identity(self) -> str:
        """The operator's identity in the current start."""
        return self.coordinator.operator(self.operator.uid).identity

    def start(self, parallelism: int, first_batch: int, *, keep_local: bool = True) -> None:
        """Start the query, as a new driver process would; without `keep_local` its hosts have no local files."""
        self.release()
        self.runs += 1
        self._first_host += 0 if keep_local else _MOST_HOSTS
        self.new_workers()
        self.parallelism = parallelism
        self.first_batch = first_batch
        store = self._opened(self.location)
        config = self.operator.config_of(self.query_id, self.run_id, parallelism)
        coordinator = Coordinator(
            [replace(config, options=self.options, instance=self.instance)],
            store=store,
            location=self.location,
            log=self.open_log(store),
            options=self.options,
            clock=self.clock,
            new_token=self.new_token,
            batch_time=lambda batch: self.times[batch],
            measurements=Measurements(),
            deletes_in_background=False,
            slots=2,
            merge_policy=self.policy,
        )
        rows = {uid: self._store_initial_state(store) for uid in coordinator.beginning(first_batch)}
        coordinator.open(first_batch, initial_rows=rows, keeps=self.keeps)
        self.coordinator = coordinator

    def new_token(self) -> bytes:
        """16 bytes that are unique among the log's entries."""
        return f"{self.runs}-{self.attempts}".rjust(16).encode()

    def new_workers(self) -> None:
        """Replace the Python workers with new ones, which remember nothing."""
        self._workers = defaultdict[int, list[WorkerMemory]](lambda: [WorkerMemory(self.policy) for _ in range(2)])

    def _store_initial_state(self, store: Store) -> list[str]:
        names: list[str] = []
        for subtask, data in enumerate(self.operator.initial_objects(self.parallelism)):
            names.append(f"{name_part(self.operator.uid)}/initial/{self.run_id}/{subtask}.arrow" if data else "")
            if data:
                store.put(names[-1], data)
        return names

    def run_subtask(self, batch: int, subtask: int, read: Any) -> list[pa.RecordBatch]:
        """Run one attempt of a subtask to its end, and return its output."""
        self.attempts += 1
        host = self.place(subtask)
        workers = self._workers[host]
        task = self.operator.task(
            Attempt(
                task=self.task_id(batch, subtask, self.attempts),
                partition=subtask,
                parallelism=self.parallelism,
                options=self.options,
                call=self.call,
                memory=workers[self.attempts % len(workers)],
                local_of=lambda identity: self.local_of(host) / identity / str(self.parallelism) / str(subtask),
                open_store=self._opened,
                clock=self.clock,
                token=f"{self.run_id}-{self.attempts}",
                measurements=self._measurements,
            )
        )
        return list(task.run(read))

    def task_id(self, batch: int, subtask: int, attempt: int) -> TaskId:
        """The id of an attempt in the current start."""
        return TaskId(self.query_id, self.run_id, self.operator.uid, self.instance, batch, subtask, attempt)

    def call(self, request: Request, payload: bytes) -> Reply:
        """Call the driver, as tasks do."""
        assert not isinstance(request, Tick | Ping), "tasks do neither"
        return self.coordinator.handle(request, payload)

    def _opened(self, location: str) -> Store:
        store = self.open_store(location)
        self.stores.append(store)
        return store

    def release(self) -> None:
        """Close the stores of a start that has died; its log stays as it is."""
        for store in self.stores:
            store.close()
        self.stores.clear()


# ---- Batches ----


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
    """Whether the driver also dies at a task's step."""
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
        outputs = self.try_first(data, time)
        self._done = (self.next_batch, data)
        self.next_batch += 1
        return outputs

    def try_first(self, data: Any, time: BatchTime) -> list[pa.RecordBatch]:
        """Run a first attempt of each subtask of the next batch; later attempts may get other data."""
        self.query.times[self.next_batch] = time
        return self._complete(self.next_batch, data)

    def repeat(self, *, in_new_run: bool) -> list[pa.RecordBatch]:
        """Run the last batch again: in later attempts, or in a new start, as if Spark had not committed the batch."""
        if self._done is None:
            raise ConfigurationError("There is no batch to repeat.", hint="Push some rows first.")
        number, data = self._done
        if in_new_run or not self._is_running or self.query.first_batch > number:
            self._start(number)
        return self._complete(number, data)

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
        """Stop the query normally."""
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
        """The operator's checkpoints in the log."""
        with closing(LocalStore(self.query.location)) as store:
            found = QueryHistory(self.query.open_log(store).read())
        return found.of(self.query.operator.uid) or History()

    def snapshot(self) -> Snapshot:
        """Copy what would remain of the query without its processes."""
        store = LocalStore(self.query.location)
        objects = {info.name: store.read(info.name) for info in store.list()}
        return Snapshot(self.query.query_id, self.parallelism, self.next_batch, dict(self.query.times), objects)

    def load(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot; to be called before the first batch."""
        with closing(LocalStore(self.query.location)) as store:
            for name, data in snapshot.objects.items():
                store.put(name, data)
        self.query.times.update(snapshot.times)
        self.next_batch = snapshot.next_batch


# ---- Files ----


def new_directory() -> Path:
    """Make a temporary directory, in memory if there is room for it, because nothing in it outlives the process."""
    in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _ROOM_BYTES
    parent = _MEMORY if in_memory and "TMPDIR" not in os.environ else None
    return Path(tempfile.mkdtemp(prefix="statelog-test-", dir=parent))


def discard(directory: Path, stores: list[Store]) -> None:
    """Close the stores of a query and remove its files."""
    for store in stores:
        store.close()
    shutil.rmtree(directory, ignore_errors=True)


class ManualClock:
    """A clock for tests that stands still until it is advanced."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._now_s += seconds

    def now_s(self) -> float:
        return self._now_s

    def monotonic_s(self) -> float:
        return self._now_s
