"""A query of several operators without Spark: its checkpointLocation, its driver, and the attempts of its tasks.

Driver, log, and tasks with their local files are the real ones. This module replaces Spark's part that has no choice:
the files in which Spark notes its batches, and the processes. What happens when is chosen by the caller.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final, TypeVar

import statelog
from statelog import Options, Step
from statelog.coordinator.batch import BatchTime
from statelog.errors import FencedError, StorageError
from statelog.rpc.messages import Ping, Reply, Request, TaskId, TaskRequest, Tick
from statelog.storage import LocalStore, Store
from statelog.storage.store import StoreWrapper
from statelog.tasks.attempt import Attempt, WorkerMemory
from statelog.testing.query import CrashPoint, ManualClock
from tests.model.query_driver import Driver, Member, Results, Surroundings
from tests.model.query_graph import Graph, Row, operator_of

_T = TypeVar("_T")

_CLOCK_START_S: Final = 1e10
"""Far in the future, so that orphans of a crashed start are old enough to be removed."""
_BATCH_MS: Final = 10

Call = Callable[[TaskRequest, bytes], Reply]


# ---- The store ----


@dataclass
class NextAppend:
    """What happens during the next append to a log: a concurrent action, a failure, or both."""

    meanwhile: Callable[[], None] | None = None
    fails: str = ""
    """``before`` or ``after`` its effect; empty if it does not fail."""
    failed: int = 0

    def cancel(self) -> None:
        """Let nothing happen."""
        self.meanwhile, self.fails = None, ""

    def around(self, name: str, effect: Callable[[], _T]) -> _T:
        """Write an object of a log."""
        meanwhile, fails = self.meanwhile, self.fails
        self.cancel()
        if meanwhile is not None:
            meanwhile()
        if fails == "before":
            self.failed += 1
            raise StorageError(f"write {name} failed before it had an effect.")
        result = effect()
        if fails:
            self.failed += 1
            raise StorageError(f"write {name}: the answer is lost.")
        return result


class LogStore(StoreWrapper):
    """A store in which something may happen when a log is written."""

    def __init__(self, inner: Store, next_append: NextAppend) -> None:
        super().__init__(inner)
        self._next_append = next_append

    def _call(self, operation: str, name: str, effect: Callable[[], _T]) -> _T:
        if operation in ("append", "put_if_absent") and name.startswith("log/"):
            return self._next_append.around(name, effect)
        return effect()


# ---- Spark's notes ----


@dataclass(frozen=True)
class SparkNotes:
    """The files in which Spark notes its batches."""

    folder: Path
    query_id: str
    unstored: list[int] = field(default_factory=list)
    """Committed batches, in order, whose commits are not stored yet."""

    def make(self) -> None:
        """Make a new checkpointLocation."""
        for name in ("offsets", "commits"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "metadata").write_text(json.dumps({"id": self.query_id}))

    def offer(self, batch: int, time_ms: int) -> None:
        """Note that a batch begins, unless that is noted already."""
        path = self.folder / "offsets" / str(batch)
        if not path.exists():
            metadata = {"batchWatermarkMs": 0, "batchTimestampMs": time_ms, "conf": {}}
            path.write_text(f"v1\n{json.dumps(metadata)}\n{batch}")

    def commit(self, batch: int, *, is_stored: bool = True) -> None:
        """Note that a batch is done; a commit that is stored is so after all before it.

        What is not stored, the end of the driver undoes.
        """
        self.unstored.append(batch)
        while is_stored and self.unstored:
            (self.folder / "commits" / str(self.unstored.pop(0))).write_text('v1\n{"nextBatchWatermarkMs":0}')

    @property
    def stored_commit(self) -> int:
        """The newest batch whose commit is stored."""
        return max((int(path.name) for path in (self.folder / "commits").iterdir()), default=-1)

    def lose_unstored(self) -> bool:
        """Forget what is not stored, the plans of later batches with it; whether there was anything."""
        if not self.unstored:
            return False
        stored = self.stored_commit
        for path in (self.folder / "offsets").iterdir():
            if int(path.name) > stored:
                path.unlink()
        self.unstored.clear()
        return True

    def time(self, batch: int) -> BatchTime:
        """The time of a batch; FencedError if it is not noted."""
        path = self.folder / "offsets" / str(batch)
        if not path.exists():
            raise FencedError(f"Spark knows no batch {batch}.")
        return BatchTime(json.loads(path.read_text().splitlines()[1])["batchTimestampMs"], 0)

    @property
    def next_batch(self) -> int:
        """The first batch that is not done."""
        return (self.unstored[-1] if self.unstored else self.stored_commit) + 1


# ---- Processes ----


@dataclass(frozen=True)
class TaskPlace:
    """An attempt of a subtask."""

    uid: str
    batch: int
    subtask: int
    attempt: int

    def id_in(self, query_id: str, run: int) -> TaskId:
        """The attempt's id in a start of a query."""
        return TaskId(query_id, run_id_of(run), self.uid, f"instance-{run}", self.batch, self.subtask, self.attempt)


def run_id_of(run: int) -> str:
    """Spark's run id of a start."""
    return f"run-{run}"


def run_attempt(attempt: Attempt, rows: Sequence[Row], time_ms: int) -> list[Row]:
    """Run an attempt with its rows to its end, and return its output."""
    operator = operator_of(attempt.task.uid)
    read = operator.read(rows, attempt.task.subtask, time_ms)
    return [
        (key, number)
        for output in operator.local.task(attempt).run(read)
        for key, number in zip(*(column.to_pylist() for column in output.columns), strict=True)
    ]


@dataclass
class QueryEngine:
    """The processes of a query, of which the caller lets one task after the other run.

    `random` chooses the workers on which attempts run. If `is_asynchronous`, Spark stores its commits later, and
    forgets those that it has not stored when the driver ends. `directory` holds the checkpointLocation and the hosts'
    local directories.
    """

    directory: Path
    options: Options
    random: Random
    hosts: int = 2
    is_asynchronous: bool = False
    graph: Graph = field(default_factory=lambda: Graph({}))
    parallelism: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.crash_point = CrashPoint(self.options.observer)
        self.options = replace(self.options, observer=self.crash_point)
        self.next_append = NextAppend()
        self.clock = ManualClock(_CLOCK_START_S)
        self.notes = SparkNotes(self.directory / "checkpoint", "query")
        self.notes.make()
        self.runs = self.attempts = 0
        self.driver: Driver | None = None
        self._stores: list[Store] = []
        self._lock = threading.Lock()
        self._tokens = 0
        self._lost_hosts = 0
        self._time_ms = 1000
        self.around = Surroundings(
            query_id=self.notes.query_id,
            location=self.location,
            options=self.options,
            clock=self.clock,
            open_store=self._opened,
            batch_time=self.notes.time,
            new_token=self._new_token,
            stored_commit=(lambda: self.notes.stored_commit) if self.is_asynchronous else None,
        )

    @property
    def checkpoint_location(self) -> str:
        """The query's checkpointLocation."""
        return str(self.notes.folder)

    @property
    def location(self) -> str:
        """The location of the operators."""
        return str(self.notes.folder / "statelog")

    @property
    def run_id(self) -> str:
        """Spark's run id of the current start."""
        return run_id_of(self.runs)

    def start(self, graph: Graph, parallelism: Mapping[str, int], *, keep_local: bool) -> int:
        """Start the query as a new driver does, and return its first batch; raises what admission does."""
        self.runs += 1
        self.graph, self.parallelism = graph, parallelism
        self._lost_hosts += 0 if keep_local else self.hosts
        self._memories = defaultdict[int, list[WorkerMemory]](lambda: [WorkerMemory(), WorkerMemory()])
        self.driver = None
        batch = self.notes.next_batch
        driver = Driver(self.around, self.run_id)
        driver.start(batch, {uid: Member(operator_of(uid).local, parallelism[uid]) for uid in graph.uids})
        self.driver = driver
        return batch

    def offer(self, batch: int) -> None:
        """Spark begins a batch."""
        self._time_ms += _BATCH_MS
        self.notes.offer(batch, self._time_ms)

    def stop(self) -> None:
        """Stop in good order."""
        if self.driver is not None:
            self.driver.close()
        self.die()

    def die(self) -> Driver | None:
        """The driver dies; returns it, as it may be only cut off, and continue."""
        driver, self.driver = self.driver, None
        self.next_append.cancel()
        self.crash_point.arm(None)
        return driver

    def close(self) -> None:
        """Release all files."""
        for store in self._stores:
            store.close()

    # ---- Tasks ----

    def new_attempt(self) -> int:
        """The id of the next attempt."""
        self.attempts += 1
        return self.attempts

    def run_task(self, place: TaskPlace, rows: Sequence[Row], call: Call) -> list[Row]:
        """Run an attempt to its end, and return its output."""

        def call_driver(request: Request, payload: bytes) -> Reply:
            assert not isinstance(request, Tick | Ping), "tasks of operators do neither"
            return call(request, payload)

        uid, host = place.uid, self._lost_hosts + self.random.randrange(self.hosts)
        parallelism = self.parallelism[uid]
        attempt = Attempt(
            task=place.id_in(self.notes.query_id, self.runs),
            partition=place.subtask,
            parallelism=parallelism,
            options=self.options,
            call=call_driver,
            memory=self.random.choice(self._memories[host]),
            local_of=lambda identity: (
                self.directory / f"host-{host}" / identity / str(parallelism) / str(place.subtask)
            ),
            open_store=self._opened,
            clock=self.clock,
            token=f"{self.run_id}-{place.attempt}",
        )
        return run_attempt(attempt, rows, self.notes.time(place.batch).time_ms)

    # ---- What is stored ----

    def checkpoints(self, uids: Iterable[str] | None = None) -> dict[int, Results]:
        """The results in the location, by batch and operator; of some operators, or by default of all."""
        return Driver.checkpoints(self.around, uids)

    def rewind(self, to: int | None = None) -> int:
        """Take back batches of the stopped query, and return the batch that comes next."""
        return statelog.rewind(self.checkpoint_location, to=to).next_batch

    def forget(self, uid: str) -> None:
        """Give up the state of an operator of the stopped query."""
        statelog.forget(self.checkpoint_location, uid)

    def _new_token(self) -> bytes:
        with self._lock:
            self._tokens += 1
            return f"token-{self._tokens}".rjust(16).encode()

    def _opened(self, location: str) -> Store:
        store = LogStore(LocalStore(location), self.next_append)
        with self._lock:
            self._stores.append(store)
        return store


DRIVER_STEPS: Final = (Step.LAST_ACK, Step.DURABLE)
TASK_STEPS: Final = (Step.RESTORED, Step.ACKING, Step.ACKED, Step.MERGING, Step.MATERIALIZING)
