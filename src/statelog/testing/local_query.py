"""One operator of one query without Spark: its driver, its hosts and their workers, in this process.

What runs is what runs below Spark: the coordinator, the log, the tasks with their local runs and tables. Only what
Spark does is done here: numbering batches and attempts, handing rows to subtasks, and calling the driver.
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
from statelog.clock import Clock, ManualClock
from statelog.local.runs import LocalRuns
from statelog.local.use import LocalCache
from statelog.log.log import Log
from statelog.log.open import open_log
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.storage import LocalStore, Store
from statelog.tables.open import MemoryTables
from statelog.testing.crashes import CrashPoint

_MEMORY: Final = "/dev/shm"
_ROOM_BYTES: Final = 1 << 30

_MOST_HOSTS: Final = 100
"""New hosts have other numbers than all before."""

_CLOCK_START_S: Final = 1e10
"""Far in the future, so that what a crashed run left behind is old enough to be removed."""


class Task(Protocol):
    """One attempt of one subtask: a KeyedTask, or an UnkeyedTask."""

    def run(self, read: Any) -> Iterator[pa.RecordBatch]:
        """Process the batch."""
        ...


class Worker:
    """What a Python worker keeps from task to task."""

    def __init__(self) -> None:
        self.tables = MemoryTables()
        self._local = LocalCache(released=self.tables.forget)

    def local_runs(self, directory: Path, batch: int) -> LocalRuns:
        """The local runs in the directory of a subtask that runs a batch, with those that are mapped already."""
        return self._local.at(directory, batch)


@dataclass(frozen=True)
class Attempt:
    """What Spark tells a task, and what its host and its worker have.

    Parameters
    ----------
    task : TaskId
        Which task it is.
    parallelism : int
        Number of subtasks.
    options : Options
        Options.
    call : callable
        Calls the driver.
    worker : Worker
        The Python worker that it runs in.
    local : Path
        The subtask's local directory.
    open_store : callable
        Opens a store from its location.
    clock : Clock
        Time.
    """

    task: TaskId
    parallelism: int
    options: Options
    call: Callable[[Request, bytes], Reply]
    worker: Worker
    local: Path
    open_store: Callable[[str], Store]
    clock: Clock

    @property
    def token(self) -> str:
        """Unique among all attempts."""
        return f"{self.task.run_id}-{self.task.attempt}"


class LocalOperator(Protocol):
    """An operator as the query has it, keyed or not."""

    @property
    def uid(self) -> str:
        """Its name."""
        ...

    def config_of(self, query_id: str, run_id: str, instance: str, parallelism: int) -> OperatorConfig:
        """A run of it."""
        ...

    def split(self, data: Any, parallelism: int, time_ms: int) -> list[Any]:
        """What each subtask reads of a batch's data."""
        ...

    def task(self, attempt: Attempt) -> Task:
        """An attempt of one of its subtasks."""
        ...

    def initial_objects(self, parallelism: int) -> list[bytes]:
        """For each subtask the rows of the initial state, as an Arrow IPC stream; empty if there are none."""
        ...


class LocalQuery:
    """Runs an operator, attempt by attempt.

    The order of calls is :meth:`start`, then :meth:`run_subtask`, with a `times` entry for each batch, and again
    :meth:`start` for every later run.

    Parameters
    ----------
    operator : LocalOperator
        The operator; it may be replaced before a start.
    directory : Path
        Holds the store and the hosts' local directories.
    options : Options
        Options.
    query_id : str
        The query.
    open_store : callable
        Opens a store from its location.

    Attributes
    ----------
    times : dict
        The time of each batch, as Spark's offset log has it.
    crash_point : CrashPoint
        Crashes on demand.
    coordinator : Coordinator
        That of the current run.
    directory : Path
        As given.
    stores : list of Store
        Those that are open.
    parallelism : int
        Number of subtasks of the current run.
    first_batch : int
        The first batch of the current run.
    place : callable
        The host of the next attempt of a subtask, from 0 on; always the first one unless it is replaced. What an
        attempt leaves on a host stays there, for the next one that comes there.
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
        self.clock = ManualClock(_CLOCK_START_S)
        self.open_store = open_store
        self.runs = 0
        self.attempts = 0
        self.parallelism = 0
        self.first_batch = -1
        self.coordinator: Coordinator
        self.directory = directory
        self.place: Callable[[int], int] = lambda subtask: 0
        self._first_host = 0
        self.new_workers()
        self.stores: list[Store] = []

    @property
    def location(self) -> str:
        """Where the store is."""
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
        """The current run."""
        return f"run-{self.runs}"

    @property
    def instance(self) -> str:
        """The operator's place in the current driver's program."""
        return f"instance-{self.runs}"

    def open_log(self, store: Store) -> Log:
        """The operator's log in a store."""
        return open_log(store, self.operator.uid, self.options, self.clock)

    def start(self, parallelism: int, first_batch: int, *, keep_local: bool = True) -> None:
        """Start a run, as a new driver process would; without `keep_local` on hosts that have no files yet."""
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
        )
        coordinator.open(first_batch)
        if first_batch == 0:
            coordinator.offer_initial_state(self._store_initial_state(store))
        self.coordinator = coordinator

    def new_token(self) -> bytes:
        """16 bytes that no other entry of the log has."""
        return f"{self.runs}-{self.attempts}".rjust(16).encode()

    def new_workers(self) -> None:
        """Have the next attempts run in Python workers that know nothing yet."""
        self._workers: defaultdict[int, list[Worker]] = defaultdict(lambda: [Worker(), Worker()])

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
        """Name of an attempt in the current run."""
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
        """Release the files of a run that has died, without a word to anyone."""
        for store in self.stores:
            store.close()
        self.stores.clear()


def new_directory() -> Path:
    """A temporary directory, in memory where the system has a place for that: nothing in it outlives the process."""
    in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _ROOM_BYTES
    parent = _MEMORY if in_memory and "TMPDIR" not in os.environ else None
    return Path(tempfile.mkdtemp(prefix="statelog-test-", dir=parent))


def discard(directory: Path, stores: list[Store]) -> None:
    """Release the files of a query, and remove them."""
    for store in stores:
        store.close()
    shutil.rmtree(directory, ignore_errors=True)
