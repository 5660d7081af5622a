"""Driver and Python workers as processes of their own, and Spark's part: starting them, and starting them again.

They are forks of a process that has loaded everything and used nothing. A :class:`FaultPlan` in the store of the
drivers, or of the workers, sends SIGKILL to its own process at one operation. Spark's part is played by the process
that forks, so it touches no Arrow and opens no store.
"""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import OperatorContext, OperatorHandle, OperatorProcessor, Options, ProtocolError, Tuning
from statelog.coordinator.batch import BatchTime
from statelog.rpc.calls import RpcClient, RpcServer
from statelog.rpc.messages import Ping, Reply, Request, Tick
from statelog.runs.byte_slices import Budget
from statelog.storage import LocalStore, Store, local
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore
from statelog.testing.keyed import KeyedQuery
from statelog.testing.query import LocalQuery
from statelog.testing.rows import OperatorArguments
from statelog.testing.unkeyed import UnkeyedQuery

Kind = Literal["keyed", "unkeyed"]
Role = Literal["driver", "task"]
When = Literal["before", "after", "torn"]
Rows = list[tuple[int, ...]]

BATCHES: Final = 6
PARALLELISMS: Final = {0: 2, 2: 3, 4: 2}
"""The batches that a run starts with, and its parallelism."""

FIRST_BATCH_WITHOUT_DEATHS: Final = 4
"""It and those after it have no rows."""

WORKERS: Final = 2
FIRST_TIME_MS: Final = 1000
TIMEOUT_S: Final = 30.0
"""For one answer of a process; all that they do takes some milliseconds."""

_CHANGING: Final = ("put", "put_if_absent", "append", "sync", "delete")
_SECRET: Final = b"s" * 32


def rows_of(batch: int) -> Rows:
    """The rows k, n of a batch."""
    return [(key, 7 * batch + key) for key in range(5)] if batch < FIRST_BATCH_WITHOUT_DEATHS else []


# ---- The operators ----


class Account(StatefulProcessor):
    """A sum, the numbers since it was last doubled, and a timer that doubles it in the next batch."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._sum = handle.getValueState("sum", "n long")
        self._recent = handle.getListState("recent", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._sum.update(((self._sum.get() or (0,))[0] + row.n,))
            self._recent.appendValue((row.n,))
            if row.n % 3 == 0:
                self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1)
        yield self._row(key)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self._sum.update((2 * self._sum.get()[0],))
        self._recent.clear()
        yield self._row(key)

    def _row(self, key: Any) -> Row:
        recent = [n for (n,) in self._recent.get()]
        return Row(k=key[0], sum=self._sum.get()[0], count=len(recent), recent=sum(recent))

    def close(self) -> None:
        pass


class Kept(OperatorProcessor):
    """Keeps its rows in list state, and returns all of them in every batch."""

    def init(self, handle: OperatorHandle) -> None:
        self._rows = handle.getListState("rows", "k long, n long")

    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[Row]:
        for row in rows:
            self._rows.add((row.k, row.n))
        yield from [Row(k=k, n=n) for k, n in self._rows.get()]


# ---- The scenario ----


@dataclass(frozen=True)
class Scenario:
    """Which process is killed when.

    Parameters
    ----------
    directory : str
        An empty directory for store and local files.
    kind : str
        The operator.
    merging : str
        The option file_merging.
    role : str
        Whose store operations are counted, and who dies.
    when : str
        ``before`` the operation; ``after`` it, where only those count that change the store, because a death after
        another one leaves what a death before it does; or ``torn``: in the middle of an append, which alone counts.
    number : int
        At which operation of all processes of the role, from 1; 0 is never.
    """

    directory: str
    kind: Kind
    merging: str
    role: Role
    when: When
    number: int = 0

    @property
    def killed_at(self) -> str:
        """The operation at which a process was killed; empty if none was."""
        path = Path(self.directory, "killed")
        return path.read_text() if path.exists() else ""

    @property
    def options(self) -> Options:
        """Changesets have parts, the log has several files, and what is not needed goes at once."""
        return Options(
            file_merging=self.merging,
            inline_budget_bytes=400,
            retained_checkpoints=2,
            tuning=Tuning(
                max_file_bytes=3000, upload_part_bytes=1, upload_threads=1, log_min_age_s=0, orphan_min_age_s=0
            ),
        )

    def describe(self) -> KeyedQuery | UnkeyedQuery:
        """The operator."""
        if self.kind == "keyed":
            arguments = OperatorArguments(
                input="k long, n long",
                output="k long, sum long, count long, recent long",
                keys=["k"],
                timeMode="ProcessingTime",
            )
            query = KeyedQuery(Account(), arguments, self.options)
            # Two keys at a time, so that a changeset has parts.
            query.operator = query.operator.with_budget(Budget(window_keys=2))
            return query
        return UnkeyedQuery(Kept(), OperatorArguments(input="k long, n long", output="k long, n long"), self.options)


@dataclass(frozen=True)
class Outcome:
    """What a scenario came to.

    Parameters
    ----------
    output : list of list of tuple
        The output rows of each batch, sorted.
    deaths : int
        How many processes were killed by their stores.
    error : str
        Why it could not go on; empty if it did.
    """

    output: list[Rows]
    deaths: int
    error: str


class KillAt(FaultPlan):
    """Kills its process at an operation; a file counts the operations of all processes that have the same plan."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def fault(self, call: Call) -> Fault | None:
        when = self._scenario.when
        if (when == "after" and call.operation not in _CHANGING) or (when == "torn" and call.operation != "append"):
            return None
        with open(f"{self._scenario.directory}/calls", "ab", buffering=0) as calls:
            calls.write(b".")
            if calls.tell() != self._scenario.number:
                return None
        return Fault("before" if when == "before" else "after", action=partial(self._die, call))

    def _die(self, call: Call) -> None:
        if self._scenario.when == "torn":
            path = f"{self._scenario.directory}/location/{call.name}"
            os.truncate(path, os.stat(path).st_size - 1)
        Path(self._scenario.directory, "killed").write_text(f"{call.operation} {call.name}")
        os.kill(os.getpid(), signal.SIGKILL)


# ---- Processes ----


@dataclass(frozen=True)
class Run:
    """A run of the query; `host` is where local files are, and with `may_die` its processes may be killed."""

    number: int
    parallelism: int
    first_batch: int
    host: int
    may_die: bool


@dataclass(frozen=True)
class Order:
    """What a worker is to do: one attempt of a subtask, for the driver that answers at a port."""

    run: Run
    port: int
    batch: int
    subtask: int
    attempt: int


@dataclass(frozen=True)
class Failed:
    """Something has failed; `is_lost` says that a task could not reach its driver."""

    text: str
    is_lost: bool


class ProcessQuery(LocalQuery):
    """The query as one of its processes has it."""

    def __init__(self, scenario: Scenario, described: KeyedQuery | UnkeyedQuery, role: Role) -> None:
        plan = KillAt(scenario)

        def open_faulty(location: str) -> Store:
            has_faults = role == scenario.role and self.may_die
            return FaultStore(LocalStore(location), plan if has_faults else FaultPlan())

        super().__init__(described.operator, Path(scenario.directory), scenario.options, open_store=open_faulty)
        self.times = {batch: BatchTime(FIRST_TIME_MS + batch, 0) for batch in range(BATCHES)}
        self.may_die = False


class DriverQuery(ProcessQuery):
    """The driver's side."""

    def call(self, request: Request, payload: bytes) -> Reply:
        if not isinstance(request, Tick | Ping):
            # The tokens of log entries are made of it.
            self.attempts = request.task.attempt
        return super().call(request, payload)


class WorkerQuery(ProcessQuery):
    """A worker's side: the driver is another process, and local files are on the run's host."""

    host = 0
    port = 0
    client: RpcClient | None = None

    def local_of(self, host: int) -> Path:
        return self.directory / f"host-{self.host}"

    def call(self, request: Request, payload: bytes) -> Reply:
        if self.client is None:
            self.client = RpcClient("127.0.0.1", self.port, _SECRET)
        return self.client.call(request, payload)


def serve_as_driver(scenario: Scenario, spark: Connection) -> None:
    """Start the runs that Spark asks for, answer their tasks, and end them: a run of None is the end of the last."""
    query = DriverQuery(scenario, scenario.describe(), "driver")
    server = RpcServer("127.0.0.1", 0, _SECRET, query.call)
    while True:
        run: Run | None = _receive(spark)
        if run is None:
            query.coordinator.close()
            query.release()
        else:
            query.runs, query.may_die = run.number - 1, run.may_die
            query.start(run.parallelism, run.first_batch)
        spark.send(server.port)


def serve_as_worker(scenario: Scenario, spark: Connection) -> None:
    """Run attempts of subtasks as Spark orders them."""
    described = scenario.describe()
    query = WorkerQuery(scenario, described, "task")
    while True:
        order: Order = _receive(spark)
        run = order.run
        query.runs, query.parallelism, query.host, query.may_die = run.number, run.parallelism, run.host, run.may_die
        query.attempts, query.port = order.attempt - 1, order.port
        data = described.data(rows_of(order.batch), ())
        read = query.operator.split(data, run.parallelism, query.times[order.batch].time_ms)[order.subtask]
        try:
            rows = described.output(query.run_subtask(order.batch, order.subtask, read))
        except Exception as error:
            spark.send(Failed(traceback.format_exc(), isinstance(error, ProtocolError)))
        else:
            spark.send([tuple(row) for row in rows])


def _receive(connection: Connection) -> Any:
    """The next message; a process that nobody talks to any more must not stay."""
    if not connection.poll(2 * TIMEOUT_S):
        raise TimeoutError("nobody talks to this process")
    return connection.recv()


class ScenarioError(Exception):
    """Something happened that no death explains."""


class Died(Exception):
    """A process was killed by its store."""


class Process:
    """A fork that answers messages.

    Parameters
    ----------
    serve : callable
        What it does with its end of the connection.
    """

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self._connection, other_end = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            _serve_and_exit(serve, other_end)
        other_end.close()

    def send(self, message: object) -> None:
        """Send a message; a process that is gone does not get it."""
        with suppress(OSError):
            self._connection.send(message)

    def receive(self) -> Any:
        """Its answer.

        Raises
        ------
        Died
            If it was killed.
        ScenarioError
            If it failed, ended in another way, or does not answer.
        """
        try:
            if not self._connection.poll(TIMEOUT_S):
                raise ScenarioError(f"a process does not answer within {TIMEOUT_S} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            status = self.end()
            if status == -signal.SIGKILL:
                raise Died from None
            raise ScenarioError(f"a process ended by itself with {status}") from None
        if isinstance(answer, Failed) and not answer.is_lost:
            raise ScenarioError(answer.text)
        return answer

    def end(self) -> int:
        """Kill it if it has not ended, and return its status."""
        if self._pid == 0:
            return 0
        os.kill(self._pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pid = 0
        self._connection.close()
        return status


def _serve_and_exit(serve: Callable[[Connection], None], connection: Connection) -> NoReturn:
    """Run the whole life of a fork: nothing of what the parent would do at its end may happen here."""
    try:
        serve(connection)
    except BaseException:
        with suppress(OSError):
            connection.send(Failed(traceback.format_exc(), False))
    finally:
        os._exit(1)


# ---- Spark ----


class Spark:
    """Runs a scenario: the batches one after the other, in each the subtasks one after the other.

    A task whose worker dies is tried again in another worker. When the driver dies everything is started anew, for
    every other kill on a new host, and the batch is repeated, because it is committed when its tasks have ended.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._run = Run(0, 0, 0, 0, False)
        self._driver: Process | None = None
        self._port = 0
        self._workers: dict[int, Process] = {}
        self._attempts = 0
        self._deaths = 0

    def run(self) -> Outcome:
        """Run all batches, with a restart in the middle, and one before the last batches, in which nobody dies."""
        output: list[Rows] = []
        error = ""
        try:
            for batch in range(BATCHES):
                if batch in PARALLELISMS:
                    self._stop()
                    self._start(PARALLELISMS[batch], batch)
                output.append(self._complete(batch))
            self._stop()
        except Exception:
            error = traceback.format_exc()
        finally:
            self._end_all()
        return Outcome(output, self._deaths, error)

    def _start(self, parallelism: int, batch: int) -> None:
        """Start a run, and another one with another driver if that dies before it can answer."""
        while True:
            host = self._deaths if self._scenario.number % 2 else 0
            self._run = Run(self._run.number + 1, parallelism, batch, host, batch < FIRST_BATCH_WITHOUT_DEATHS)
            if self._driver is None:
                self._driver = Process(partial(serve_as_driver, self._scenario))
            self._driver.send(self._run)
            try:
                self._port = self._driver.receive()
                return
            except Died:
                self._lose_driver()

    def _stop(self) -> None:
        """Have the driver end the run in good order; it may die over that."""
        if self._driver is not None:
            self._driver.send(None)
            try:
                self._driver.receive()
            except Died:
                self._lose_driver()

    def _complete(self, batch: int) -> Rows:
        while True:
            try:
                rows: Rows = []
                for subtask in range(self._run.parallelism):
                    rows += self._complete_subtask(batch, subtask)
                return sorted(rows)
            except Died:
                self._lose_driver()
                self._start(self._run.parallelism, batch)

    def _complete_subtask(self, batch: int, subtask: int) -> Rows:
        """Run attempts of a subtask until one succeeds.

        Raises
        ------
        Died
            If the driver was killed.
        """
        while True:
            self._attempts += 1
            number = self._attempts % WORKERS
            if number not in self._workers:
                self._workers[number] = Process(partial(serve_as_worker, self._scenario))
            worker = self._workers[number]
            worker.send(Order(self._run, self._port, batch, subtask, self._attempts))
            try:
                answer = worker.receive()
            except Died:
                self._deaths += 1
                del self._workers[number]
                continue
            if isinstance(answer, Failed):
                # Only the driver's death explains it.
                assert self._driver is not None
                self._driver.receive()
                raise ScenarioError(answer.text)
            rows: Rows = answer
            return rows

    def _lose_driver(self) -> None:
        """The driver has died: its executors, and so the workers, go with it."""
        self._deaths += 1
        self._end_all()

    def _end_all(self) -> None:
        processes = [*self._workers.values(), *([self._driver] if self._driver else [])]
        self._driver = None
        self._workers.clear()
        for process in processes:
            process.end()


def main(connection_fd: int) -> None:
    """Run scenarios until nobody asks for more."""
    # A collection in a fork would copy the pages that it shares, and no fork lives for long.
    gc.disable()
    # Nothing here crashes the machine.
    for module, name in ((os, "fsync"), (local, "sync_data")):
        setattr(module, name, lambda fd: None)
    with Connection(connection_fd) as test:
        while True:
            try:
                scenario: Scenario = test.recv()
                test.send(Spark(scenario).run())
            except (EOFError, OSError):
                return
