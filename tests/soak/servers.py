"""What the processes of a life do: its driver, a Python worker, and a tool that looks at what is stored."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from statelog import (
    FencedError,
    Observer,
    Options,
    PinExpiredError,
    StateMissingError,
    Step,
    StorageError,
    Ttl,
    Watermark,
    delete_orphans,
)
from statelog.coordinator.batch import BatchTime
from statelog.history.footprint import Footprint
from statelog.history.pins import Branch, HeldPin
from statelog.history.query_history import QueryHistory
from statelog.log.entry import Parent
from statelog.queries.branch import branch_query
from statelog.queries.load import RestoreTarget, restore_operators
from statelog.queries.save import save_operator
from statelog.reading.rows import one_by_one
from statelog.reading.savepoint import SavedOperator
from statelog.rpc.calls import RpcClient, RpcServer
from statelog.rpc.messages import Ping, Reply, Request, Tick
from statelog.storage import LocalStore, Store
from statelog.storage.links import LinkedStore
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore
from statelog.testing.keyed import KeyedQuery
from statelog.testing.query import LocalQuery, ManualClock
from statelog.testing.rows import OperatorArguments
from tests.model.engine import TickingClock
from tests.model.keyed_commands import INPUT, OUTPUT, Commands, as_input, colliding_hash, good_hash
from tests.model.keyed_model import Key, Row, Rules
from tests.model.stored_files import StoredFiles
from tests.model.stored_state import stored_state
from tests.options import make_options
from tests.storage.full_disk import full_disk
from tests.storage.page_cache import tear_last_frame
from tests.stores import WholeObjects

_SECRET: Final = b"s" * 32
_CHANGING: Final = ("put", "put_if_absent", "append", "sync", "delete")
LATE: Final = ("put", "put_if_absent", "append", "delete")
"""Requests that a store may carry out after the process that made them is dead."""


@dataclass(frozen=True)
class Subject:
    """What a life is about, and stays the same.

    Parameters
    ----------
    directory : str
        Holds locations and the hosts' local directories.
    rules : Rules
        How the operator is set up.
    has_collisions : bool
        Whether different keys share hashes.
    initial : list of Row or None
        The rows of the initial state.
    clock_start_s : float
        The time of all clocks at the begin. Pins have the file system's time, so it is near the real one.
    appends : bool
        Whether the store can append.
    """

    directory: str
    rules: Rules
    has_collisions: bool
    initial: list[Row] | None
    clock_start_s: float
    appends: bool = True

    def describe(self) -> KeyedQuery:
        rules = self.rules
        return KeyedQuery(
            Commands(
                Ttl(rules.ttl_ms, "event" if rules.ttl_by_event else "processing", rules.renews),
                by_watermark=rules.event_time,
            ),
            OperatorArguments(
                input=INPUT,
                output=OUTPUT,
                keys=["a", "b"],
                timeMode="EventTime" if rules.event_time else "ProcessingTime",
                watermark=None if rules.delay_ms is None else Watermark("at", rules.delay_ms),
                keyHash=colliding_hash if self.has_collisions else good_hash,
                initialState=None if self.initial is None else (INPUT, [as_input(row) for row in self.initial]),
            ),
            Options(),
        )


@dataclass(frozen=True)
class Run:
    """A run of the query: its number, who it is, where its state is, and its settings."""

    number: int
    query_id: str
    location: str
    parallelism: int
    first_batch: int
    options: dict[str, Any]


@dataclass(frozen=True)
class Harm:
    """What goes wrong in a process until it is told otherwise.

    Parameters
    ----------
    seed : int
        Chooses what is random.
    rate : float
        Share of the calls of the store that fail, or take long.
    dies_at : int
        It kills itself at so many calls of the store and steps of the batch from now; 0 is never.
    disk_bytes : int
        No file becomes larger, as if the disk were full then; 0 is no limit.
    """

    seed: int = 0
    rate: float = 0.0
    dies_at: int = 0
    disk_bytes: int = 0


class Harmed(Observer, FaultPlan):
    """Does the harm: it sees every step, and every call of the store."""

    def __init__(self, locate: Any, late: Path | None = None) -> None:
        self._locate = locate
        self._late = late
        self.requests = threading.local()
        """The request that a thread is about to make of a :class:`SoakStore`."""
        self.begin(Harm())
        self.faults = 0

    def begin(self, harm: Harm) -> None:
        self._random = random.Random(harm.seed)
        self._rate = harm.rate
        self._left = harm.dies_at

    def step(self, step: Step, batch: int, subtask: int) -> None:
        if self._is_last():
            _die()

    def fault(self, call: Call) -> Fault | None:
        if self._is_last():
            if call.operation not in _CHANGING or self._random.random() < 0.5:
                _die()
            return Fault("after", action=partial(self._tear_and_die, call))
        if self._late is not None and call.operation in LATE and self._random.random() < self._rate / 5:
            return Fault(action=partial(self._leave_and_die, self._late))
        if self._random.random() >= self._rate * (3 if call.operation == "sync" else 1):
            return None
        self.faults += 1
        match self._random.randrange(5):
            case 0:
                return Fault(action=partial(time.sleep, self._random.uniform(0, 0.02)))
            case 1 if call.operation == "append":
                return Fault(torn_bytes=self._random.randrange(200))
            case 2 | 3:
                return Fault("after")
        return Fault("before")

    def _is_last(self) -> bool:
        self._left -= 1
        return self._left == 0

    def _leave_and_die(self, folder: Path) -> None:
        """Die while a request is on its way to the store, which carries it out some time later."""
        folder.mkdir(exist_ok=True)
        name = uuid.uuid4().hex
        (folder / f"{name}.tmp").write_bytes(pickle.dumps(self.requests.latest))
        (folder / f"{name}.tmp").rename(folder / name)
        _die()

    def _tear_and_die(self, call: Call) -> None:
        """Die after an operation, or in the middle of an append; the machine may crash with it."""
        if call.operation == "append" and self._random.random() < 0.7:
            tear_last_frame(Path(self._locate(), call.name), self._random)
        _die()


@contextmanager
def on_disk(harm: Harm, folder: Path, token: str) -> Iterator[None]:
    """Run an attempt on a host's disk, which may be full; one that fails leaves no unfinished file there."""
    try:
        with full_disk(harm.disk_bytes):
            yield
    except Exception:
        # Others may remove folders meanwhile.
        left = [name for _, _, names in os.walk(folder) for name in names if name.endswith(f"-{token}.tmp")]
        if left:
            raise AssertionError(f"an attempt that failed leaves {left}") from None  # its error was injected
        raise


def opened(location: str, appends: bool) -> Store:
    """The store of a location, a directory; it may be one that cannot append."""
    return LocalStore(location) if appends else WholeObjects(LocalStore(location))


class SoakStore(FaultStore):
    """A store with harm, at a location; it notes each request that may come late."""

    def __init__(self, location: str, appends: bool, harmed: Harmed) -> None:
        super().__init__(opened(location, appends), harmed)
        self._location = location
        self._requests = harmed.requests

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._note("put", name, bytes(data))
        super().put(name, data)

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        self._note("put_if_absent", name, bytes(data))
        return super().put_if_absent(name, data)

    def append(self, name: str, parts: list[bytes | memoryview], *, at: int) -> None:
        self._note("append", name, [bytes(part) for part in parts], at=at)
        super().append(name, parts, at=at)

    def delete(self, names: list[str]) -> None:
        self._note("delete", names)
        super().delete(names)

    def _note(self, method: str, *arguments: Any, **more: Any) -> None:
        self._requests.latest = self._location, method, arguments, more


def carry_out(request: Path, appends: bool) -> None:
    """Have the store carry out a request of a dead process; the store may refuse it."""
    location, method, arguments, more = pickle.loads(request.read_bytes())
    request.unlink()
    store = opened(location, appends)
    with suppress(StorageError):
        getattr(store, method)(*arguments, **more)
    store.close()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class SoakQuery(LocalQuery):
    """The query as one of its processes has it."""

    def __init__(self, subject: Subject) -> None:
        self.run = Run(0, "", "location", 1, 0, {})
        self._appends = subject.appends
        self.harmed = Harmed(lambda: self.location)
        super().__init__(
            subject.describe().operator,
            Path(subject.directory),
            Options(observer=self.harmed),
            open_store=lambda location: LinkedStore(self._open_own(location), self._open_own),
        )

    def _open_own(self, location: str) -> Store:
        return SoakStore(location, self._appends, self.harmed)

    @property
    def location(self) -> str:
        return str(self.directory / self.run.location)

    def take_over(self, run: Run) -> None:
        """Be a process of this run."""
        self.run = run
        self.runs, self.query_id, self.parallelism = run.number, run.query_id, run.parallelism
        self.options = make_options(observer=self.crash_point, **run.options)


# ---- The driver ----


class _DriverQuery(SoakQuery):
    tokens = itertools.count()

    def new_token(self) -> bytes:
        return f"{self.runs}-{next(self.tokens)}".rjust(16).encode()

    def call(self, request: Request, payload: bytes) -> Reply:
        if not isinstance(request, Tick | Ping) and request.task.run_id != self.run_id:
            raise FencedError("That run is over.")
        return super().call(request, payload)


class Driver:
    """The driver's process: its coordinator, behind the RPC server."""

    def __init__(self, subject: Subject) -> None:
        self._query = _DriverQuery(subject)
        self._query.clock = self._clock = ManualClock(subject.clock_start_s)
        self._start_s = subject.clock_start_s
        self._server = RpcServer("127.0.0.1", 0, _SECRET, self._query.call)

    def start(self, run: Run, times: dict[int, BatchTime], now_s: float, harm: Harm) -> int:
        """Start a run, and return the port that its tasks call."""
        self._advance(now_s)
        self._query.harmed.begin(harm)
        self._query.take_over(run)
        self._query.times = times
        self._query.runs -= 1  # that starting counts
        self._query.start(run.parallelism, run.first_batch)
        return self._server.port

    def begin(self, batch: int, time: BatchTime, now_s: float, harm: Harm) -> int:
        """A batch is about to begin; return the number of faults so far."""
        self._query.harmed.begin(harm)
        self._query.times[batch] = time
        self._advance(now_s)
        return self._query.harmed.faults

    def _advance(self, now_s: float) -> None:
        self._clock.advance(self._start_s + now_s - self._clock.now_s())

    def save(self, batch: int, target: str) -> SavedOperator | None:
        """Write a savepoint; None if the checkpoint is no longer retained."""
        query = self._query
        with query.coordinator.holding(batch) as history:
            if history is None:
                return None
            uid = query.operator.uid
            own = history.histories[history.names_at(batch)[uid]]
            return save_operator(own, batch, uid, location=query.location, target=target, run_all=one_by_one)

    def stop(self, harm: Harm) -> None:
        """End the run in good order."""
        self._query.harmed.begin(harm)
        self._query.coordinator.close()
        self._query.release()


# ---- Workers ----


@dataclass(frozen=True)
class Task:
    """One attempt of a subtask, with the driver's port, its host, the maintenance, and the rows of the whole batch."""

    run: Run
    port: int
    host: int
    batch: int
    subtask: int
    attempt: int
    time_ms: int
    now_s: float
    is_slow: bool
    rows: list[Row]
    harm: Harm


class _WorkerQuery(SoakQuery):
    port = 0
    client: RpcClient | None = None

    def call(self, request: Request, payload: bytes) -> Reply:
        if self.client is None:
            self.client = RpcClient("127.0.0.1", self.port, _SECRET)
        return self.client.call(request, payload)


class Worker:
    """A Python worker: it runs one attempt after the other, all for the same driver."""

    def __init__(self, subject: Subject) -> None:
        self._described = subject.describe()
        self._query = _WorkerQuery(subject)
        self._start_s = subject.clock_start_s

    def run(self, task: Task) -> tuple[list[str], int]:
        """Run an attempt to its end; return its output and the number of faults in it."""
        query = self._query
        query.harmed.begin(task.harm)
        faults = query.harmed.faults
        query.take_over(task.run)
        query.port, query.attempts = task.port, task.attempt - 1
        query.place = lambda subtask: task.host
        query.clock = (TickingClock if task.is_slow else ManualClock)(self._start_s + task.now_s)
        data = self._described.data([as_input(row) for row in task.rows])
        read = query.operator.split(data, task.run.parallelism, task.time_ms)[task.subtask]
        with on_disk(task.harm, query.local_of(task.host), f"{query.run_id}-{task.attempt}"):
            output = self._described.output(query.run_subtask(task.batch, task.subtask, read))
        query.release()
        return [text for (text,) in output], query.harmed.faults - faults


# ---- Looking, and restoring ----


@dataclass(frozen=True)
class Stored:
    """What a location holds.

    Parameters
    ----------
    missing : dict
        For each checkpoint that must be restorable the objects that it needs and that are gone.
    unreferenced : list of str
        Objects that no entry names.
    checkpoints : int
        How many can be restored.
    newest, newest_base : int
        The newest batch, and the last one that the newest materialized state of a subtask holds.
    is_branch : bool
        Whether it may need objects of a parent's.
    """

    missing: dict[int, list[str]]
    unreferenced: list[str]
    checkpoints: int
    newest: int
    newest_base: int
    is_branch: bool = False


class Tool:
    """Works on what is stored, without the query's coordinator."""

    def __init__(self, subject: Subject) -> None:
        self._query = SoakQuery(subject)

    def look(self, run: Run) -> Stored:
        """What the location of a run holds."""
        self._query.take_over(run)
        files = StoredFiles(self._query)
        latest = files.history.latest_record
        if latest is None:
            return Stored({}, files.unreferenced, 0, -1, -1)
        retained = [one.batch for one in files.query.entries if one.batch >= files.query.retained_from]
        return Stored(
            files.missing(len(retained)),
            files.unreferenced,
            sum(map(files.query.has_batch, retained)),
            latest.batch,
            max((base_range.base.through for base_range in latest.base_map.ranges), default=-1)
            if latest.base_map
            else -1,
            files.is_branch,
        )

    def read(self, run: Run, batch: int) -> dict[Key, dict[str, Any]] | None:
        """The state of each key in a checkpoint; None if it is no longer retained."""
        self._query.take_over(run)
        try:
            return stored_state(self._query.location, batch)
        except (PinExpiredError, StateMissingError):
            return None

    def delete_orphans(self, run: Run) -> int:
        """Delete by hand what nobody needs; return how many objects that were."""
        self._query.take_over(run)
        return len(delete_orphans(self._query.location, min_age_s=0, release=True))

    def restore(self, saved: SavedOperator, source: str, run: Run) -> None:
        """Begin a run's location with a savepoint of the batch before its first."""
        restore_operators([saved], source, self._target(run), one_by_one)

    def branch(self, parent: Run, run: Run) -> None:
        """Begin a run's location with the state of its parent before its first batch."""
        batch = run.first_batch - 1
        self._query.take_over(run)
        place = self._query.location
        self._query.take_over(parent)
        location = self._query.location
        store = LinkedStore(LocalStore(location), LocalStore)
        query = QueryHistory(self._query.open_log(store).read())
        pin = HeldPin(store, Footprint.of(query, batch), Branch(place), owner="branch", lasts_s=None, is_shared=True)
        branch_query(query, Parent(location, batch, pin.name), self._target(run))

    def _target(self, run: Run) -> RestoreTarget:
        """The location of a run, emptied."""
        self._query.take_over(run)
        shutil.rmtree(self._query.location, ignore_errors=True)
        return RestoreTarget(
            self._query.location,
            run.query_id,
            f"begin-{run.number}",
            run.first_batch - 1,
            replace(self._query.options, observer=Observer()),
            self._query.clock,
            partial(os.urandom, 16),
        )
