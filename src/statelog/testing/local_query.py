"""One operator of one query without Spark: its driver, its hosts and their workers, in this process.

Coordinator, log, and tasks with their local runs and tables are the real ones. This module only replaces Spark: it
numbers batches and attempts, hands rows to subtasks, and carries calls to the driver.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from statelog.checkpoint.admission import OperatorConfig
from statelog.checkpoint.batch import BatchTime
from statelog.checkpoint.coordinator import Coordinator
from statelog.checkpoint.protocol import Acked, Begin, Fetch, ReadProgress, Reply, Request, TaskId, Tick
from statelog.clock import Clock
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.local.runs import LocalRuns
from statelog.local.use import LocalCache
from statelog.log.log import Log
from statelog.log.open import open_log
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.storage import LocalStore, Store
from statelog.tables.open import MemoryTables
from statelog.testing.clock import ManualClock
from statelog.testing.crashes import CrashPoint

_MEMORY: Final = "/dev/shm"
_ROOM_BYTES: Final = 1 << 30

_MOST_HOSTS: Final = 100
"""Distance between the host numbers of two starts, so that new hosts differ from all earlier ones."""

_CLOCK_START_S: Final = 1e10
"""Far in the future, so that orphans of a crashed start are old enough to be removed."""


class Task(Protocol):
    """One attempt of one subtask: a KeyedTask, or an UnkeyedTask."""

    def run(self, read: Any) -> Iterator[pa.RecordBatch]:
        """Process the batch."""
        ...


class Worker:
    """The memory of a Python worker from task to task."""

    def __init__(self, policy: MergePolicy = MERGE_POLICY) -> None:
        self.tables = MemoryTables()
        self._local = LocalCache(released=self.tables.forget, policy=policy)

    def local_runs(self, directory: Path, batch: int) -> LocalRuns:
        """The local runs in the directory of a subtask; those that are mapped already are reused."""
        return self._local.at(directory, batch)


@dataclass(frozen=True)
class Attempt:
    """The surroundings of one attempt of a task: Spark's arguments, the worker, and the host's files."""

    task: TaskId
    parallelism: int
    options: Options
    call: Callable[[Request, bytes], Reply]
    """Calls the driver."""
    worker: Worker
    local: Path
    """The subtask's local directory."""
    open_store: Callable[[str], Store]
    clock: Clock

    @property
    def token(self) -> str:
        """Unique among all attempts."""
        return f"{self.task.run_id}-{self.task.attempt}"


class LocalOperator(Protocol):
    """An operator, keyed or unkeyed, as :class:`LocalQuery` runs it."""

    @property
    def uid(self) -> str:
        """The operator's name."""
        ...

    def config_of(self, query_id: str, run_id: str, instance: str, parallelism: int) -> OperatorConfig:
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
        """The sizes that merging goes by from the next start on; tests may replace it."""
        self.runs = 0
        self.attempts = 0
        self.parallelism = 0
        self.first_batch = -1
        self.coordinator: Coordinator
        self.directory = directory
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

    def open_log(self, store: Store) -> Log:
        """The operator's log in a store."""
        return open_log(store, self.operator.uid, self.options, self.clock)

    def start(self, parallelism: int, first_batch: int, *, keep_local: bool = True) -> None:
        """Start the query, as a new driver process would; without `keep_local` its hosts have no local files."""
        self.release()
        self.runs += 1
        self._first_host += 0 if keep_local else _MOST_HOSTS
        self.new_workers()
        self.parallelism = parallelism
        self.first_batch = first_batch
        store = self.open_store(self.location)
        self.stores.append(store)
        coordinator = Coordinator(
            self.operator.config_of(self.query_id, self.run_id, self.instance, parallelism),
            store=store,
            location=self.location,
            root=self.operator.uid,
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
        coordinator.open(first_batch)
        if first_batch == 0:
            coordinator.offer_initial_state(self._store_initial_state(store))
        self.coordinator = coordinator

    def new_token(self) -> bytes:
        """16 bytes that are unique among the log's entries."""
        return f"{self.runs}-{self.attempts}".rjust(16).encode()

    def new_workers(self) -> None:
        """Replace the Python workers by new ones, which remember nothing."""
        self._workers: defaultdict[int, list[Worker]] = defaultdict(lambda: [Worker(self.policy), Worker(self.policy)])

    def _store_initial_state(self, store: Store) -> list[str]:
        names: list[str] = []
        for subtask, data in enumerate(self.operator.initial_objects(self.parallelism)):
            names.append(f"{self.operator.uid}/initial/{self.runs}-{subtask}.arrow" if data else "")
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
                parallelism=self.parallelism,
                options=self.options,
                call=self.call,
                worker=workers[self.attempts % len(workers)],
                local=self.local_of(host) / str(self.parallelism) / str(subtask),
                open_store=self._open_on_task,
                clock=self.clock,
            )
        )
        return list(task.run(read))

    def task_id(self, batch: int, subtask: int, attempt: int) -> TaskId:
        """The id of an attempt in the current start."""
        return TaskId(self.query_id, self.run_id, self.operator.uid, self.instance, batch, subtask, attempt)

    def call(self, request: Request, payload: bytes) -> Reply:
        """Call the driver, as tasks do."""
        assert not isinstance(request, Tick), "only a clock source ticks"
        if isinstance(request, Begin):
            return self.coordinator.begin(request)
        if isinstance(request, Fetch):
            return self.coordinator.fetch(request)
        if isinstance(request, ReadProgress):
            self.coordinator.progress(request)
            return Acked()
        return self.coordinator.ack(request, payload)

    def _open_on_task(self, location: str) -> Store:
        store = self.open_store(location)
        self.stores.append(store)
        return store

    def release(self) -> None:
        """Close the stores of a start that has died; its log stays as it is."""
        for store in self.stores:
            store.close()
        self.stores.clear()


def new_directory() -> Path:
    """Make a temporary directory, in memory if the system has room for it, as nothing in it outlives the process."""
    in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _ROOM_BYTES
    parent = _MEMORY if in_memory and "TMPDIR" not in os.environ else None
    return Path(tempfile.mkdtemp(prefix="statelog-test-", dir=parent))


def discard(directory: Path, stores: list[Store]) -> None:
    """Close the stores of a query and remove its files."""
    for store in stores:
        store.close()
    shutil.rmtree(directory, ignore_errors=True)
