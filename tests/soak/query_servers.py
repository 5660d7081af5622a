"""The processes of a query of several operators: its driver, and a Python worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from statelog import FencedError, Options
from statelog.clock import Clock
from statelog.rpc.calls import RpcClient, RpcServer
from statelog.rpc.messages import Ping, Reply, Request, Tick
from statelog.storage import LocalStore, Store
from statelog.storage.links import LinkedStore
from statelog.tasks.attempt import Attempt, WorkerMemory
from statelog.testing.query import ManualClock
from tests.model.engine import TickingClock
from tests.model.query_driver import Driver, Member, Surroundings
from tests.model.query_engine import SparkNotes, TaskPlace, run_attempt, run_id_of
from tests.model.query_graph import Row, operator_of
from tests.options import make_options
from tests.soak.query_tools import STATE
from tests.soak.servers import Harm, Harmed, SoakStore, on_disk

_WORDS: Final = b"q" * 32
"""The secret of the calls."""


@dataclass(frozen=True)
class QueryRun:
    """A start of a query: its number, the parallelism of each operator, and its settings."""

    number: int
    parallelism: Mapping[str, int]
    first_batch: int
    options: dict[str, Any]


def surroundings(
    notes: SparkNotes,
    options: Options,
    clock: Clock,
    open_store: Callable[[str], Store] = LocalStore,
    new_token: Callable[[], bytes] = bytes,
    stored_commit: Callable[[], int] | None = None,
) -> Surroundings:
    """Those of a query in a checkpointLocation; without `new_token` for those who only read."""
    location = str(notes.folder / STATE)
    return Surroundings(notes.query_id, location, options, clock, open_store, notes.time, new_token, stored_commit)


class ShiftedClock:
    """A clock whose time of day is ahead of another's by some seconds, and may jump."""

    def __init__(self, clock: Clock, ahead_s: float = 0.0) -> None:
        self._clock = clock
        self.ahead_s = ahead_s

    def now_s(self) -> float:
        return self._clock.now_s() + self.ahead_s

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s()


def late_folder(notes: SparkNotes) -> Path:
    """Where requests are that the store has not carried out when the process died which made them."""
    return notes.folder.parent / "late"


def linked_store(location: str, appends: bool, harmed: Harmed) -> Store:
    """The store of a location, from which those of its parents are reached."""
    return LinkedStore(SoakStore(location, appends, harmed), lambda parent: SoakStore(parent, appends, harmed))


class QueryDriver:
    """The driver's process, behind the RPC server."""

    def __init__(self, notes: SparkNotes, clock_start_s: float, appends: bool) -> None:
        self._notes = notes
        self._appends = appends
        self._harmed = Harmed(lambda: str(notes.folder / STATE), late_folder(notes))
        self._clock = ManualClock(clock_start_s)
        self._shifted = ShiftedClock(self._clock)
        self._start_s = clock_start_s
        self._tokens = itertools.count()
        self._run = 0
        self._has_claimed = False
        self._stored_commit: int | None = None
        self._driver: Driver | None = None
        self._stores: list[Store] = []
        self._server = RpcServer("127.0.0.1", 0, _WORDS, self._call)

    def start(self, run: QueryRun, now_s: float, ahead_s: float, stored_commit: int | None, harm: Harm) -> int:
        """Start the query, and return the port that its tasks call."""
        self.begin(now_s, ahead_s, stored_commit, harm)
        self._run, self._driver, self._has_claimed = run.number, None, False
        options = make_options(observer=self._harmed, **run.options)
        find_stored = None if stored_commit is None else self._find_stored
        around = surroundings(self._notes, options, self._shifted, self._opened, self._new_token, find_stored)
        driver = Driver(around, run_id_of(run.number))
        driver.start(run.first_batch, {uid: Member(operator_of(uid).local, n) for uid, n in run.parallelism.items()})
        self._driver = driver
        return self._server.port

    def begin(self, now_s: float, ahead_s: float, stored_commit: int | None, harm: Harm) -> None:
        """A batch is about to begin; the clock's time of day is ahead by some seconds.

        With asynchronous progress `stored_commit` is the newest batch whose commit is stored.
        """
        self._harmed.begin(harm)
        self._stored_commit = stored_commit
        self._shifted.ahead_s = ahead_s
        self._clock.advance(self._start_s + now_s - self._clock.now_s())

    def has_claimed(self) -> bool:
        """Whether the start has at least tried to claim the log, for which it has made a token."""
        return self._has_claimed

    def stop(self, harm: Harm) -> None:
        """End the start in good order."""
        self._harmed.begin(harm)
        if self._driver is not None:
            self._driver.close()
        for store in self._stores:
            store.close()
        self._stores.clear()

    def _call(self, request: Request, payload: bytes) -> Reply:
        assert not isinstance(request, Tick | Ping), "tasks of operators do neither"
        if self._driver is None:
            raise FencedError("No start has begun.")
        return self._driver.handle(request, payload)

    def _opened(self, location: str) -> Store:
        store = linked_store(location, self._appends, self._harmed)
        self._stores.append(store)
        return store

    def _find_stored(self) -> int:
        assert self._stored_commit is not None
        return self._stored_commit

    def _new_token(self) -> bytes:
        self._has_claimed = True
        return f"{self._run}-{next(self._tokens)}".rjust(16).encode()


@dataclass(frozen=True)
class QueryTask:
    """One attempt, with the driver's port, its host and how far that is ahead, its maintenance, and its rows."""

    run: QueryRun
    port: int
    host: int
    place: TaskPlace
    time_ms: int
    now_s: float
    ahead_s: float
    is_slow: bool
    rows: list[Row]
    harm: Harm


class QueryWorker:
    """A Python worker: it runs one attempt after the other, all for the same driver."""

    def __init__(self, notes: SparkNotes, clock_start_s: float, appends: bool) -> None:
        self._notes = notes
        self._appends = appends
        self._start_s = clock_start_s
        self._harmed = Harmed(lambda: str(notes.folder / STATE), late_folder(notes))
        self._memory = WorkerMemory()
        self._client: RpcClient | None = None

    def run(self, task: QueryTask) -> list[Row]:
        """Run an attempt to its end; return its output."""
        self._harmed.begin(task.harm)
        place = task.place
        parallelism = task.run.parallelism[place.uid]
        store = linked_store(str(self._notes.folder / STATE), self._appends, self._harmed)
        clock = (TickingClock if task.is_slow else ManualClock)(self._start_s + task.now_s)
        attempt = Attempt(
            task=place.id_in(self._notes.query_id, task.run.number),
            partition=place.subtask,
            parallelism=parallelism,
            options=make_options(observer=self._harmed, **task.run.options),
            call=partial(self._call, task.port),
            memory=self._memory,
            local_of=lambda identity: (
                host_folder(self._notes, task.host) / identity / str(parallelism) / str(place.subtask)
            ),
            open_store=lambda location: store,
            clock=ShiftedClock(clock, task.ahead_s),
            token=f"{task.run.number}-{place.attempt}",
        )
        with on_disk(task.harm, host_folder(self._notes, task.host), attempt.token):
            output = run_attempt(attempt, task.rows, task.time_ms)
        store.close()
        return output

    def _call(self, port: int, request: Request, payload: bytes) -> Reply:
        if self._client is None:
            self._client = RpcClient("127.0.0.1", port, _WORDS)
        return self._client.call(request, payload)


def host_folder(notes: SparkNotes, host: int) -> Path:
    """The local directory of a host."""
    return notes.folder.parent / f"host-{host}"
