"""A driver program on three executors of one core: a ledger query that is harmed in several ways, started again with
another parallelism, and an operator without keys. What happened is written to ``story.json``."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StreamingQuery

import statelog
from statelog import (
    CheckpointMetrics,
    Metric,
    Observer,
    OperatorContext,
    OperatorHandle,
    OperatorProcessor,
    Options,
    Step,
)
from statelog.coordinator.coordinator import Coordinator
from statelog.errors import StatelogError
from statelog.rpc.messages import Ack, Acked
from statelog.spark.driver import executor_internals
from statelog.spark.driver.endpoint import require_endpoint
from statelog.spark.plan.placement import rebalanced
from tests.spark.faults import make_marker, take_marker, wait_until
from tests.spark.jobs.ledger import note_jvm, run_main
from tests.spark.support import Job, is_alive, make_orders, make_session

EXECUTORS = 3
PARALLELISM = 4
WARM_UP = 2
STICKY = 25
ORDERS_PER_BATCH = 40


@dataclass
class Story:
    """What happened.

    Parameters
    ----------
    places : dict
        For each batch its attempts in order of time: the subtask, and the process id of the executor.
    fetches : dict
        For each batch how often state was fetched.
    acks : list
        Of each ack batch, subtask, attempt, and why it was refused, if it was.
    executors : list
        Process ids of all executors.
    findings : list
        Those of the doctor before the queries.
    numbers : dict
        Other things, by name.
    """

    places: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    fetches: dict[int, int] = field(default_factory=dict)
    acks: list[tuple[int, int, int, str]] = field(default_factory=list)
    executors: list[int] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Watch(Observer):
    """Notes where subtasks run and how often they fetch, and does harm where a marker says so."""

    folder: str

    def step(self, step: Step, batch: int, subtask: int) -> None:
        if step == Step.RESTORED:
            noted = json.dumps([time.time_ns(), batch, subtask, _executor_pid(), os.getpid()])
            _write(Path(self.folder, f"place-{batch}-{subtask}-{time.time_ns()}"), noted)
        if step != Step.ACKING:
            return
        if take_marker(f"{self.folder}/kill-worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        if take_marker(f"{self.folder}/zombie"):
            # Spark's daemon hangs up on its workers when its executor is gone.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            self._stall(subtask)
        if take_marker(f"{self.folder}/hold"):
            self._stall(subtask)

    def _stall(self, subtask: int) -> None:
        _write(Path(self.folder, "stalled"), json.dumps([_executor_pid(), os.getpid(), subtask]))
        wait_until(Path(self.folder, "go-on").exists, "the sign to continue")

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        _write(
            Path(self.folder, f"fetches-{metrics.batch}"),
            str(metrics.measured.counts.get(str(Metric.STATE_FETCHES), 0)),
        )


class Numbers(OperatorProcessor):
    """Numbers the rows of each subtask, and ends a row with how many there were."""

    def init(self, handle: OperatorHandle) -> None:
        self.seen = handle.getListState("seen", "count long")

    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[Row]:
        (count,) = next(iter(self.seen.get()), (0,))
        new = [row.seq for row in rows]
        if new:
            self.seen.update([(count + len(new),)])
        yield Row(subtask=context.subtaskIndex, count=count + len(new), new=len(new))


def main(arguments: dict[str, Any]) -> None:
    """Tell the whole story."""
    settings = {
        **statelog.spark_conf(),
        "spark.executor.memory": "512m",
        # How busy the machine is must not decide.
        "spark.locality.wait": "20s",
        "spark.task.maxFailures": "8",
        # Calls go through TLS; in the other tests they are in clear.
        "spark.authenticate": "true",
        "spark.authenticate.secret": "the executors' own",
        "spark.network.crypto.enabled": "true",
        "spark.network.crypto.saslFallback": "false",
    }
    session = make_session(f"local-cluster[{EXECUTORS},1,1024]", settings)
    note_jvm(session, arguments)
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("statelog").setLevel(logging.DEBUG)
    story = Story()
    _record_acks(story)
    try:
        location = str(Path(arguments["root"], "doctor"))
        story.findings = [asdict(one) for one in statelog.doctor(location)]
        story.numbers["encrypts"] = bool(require_endpoint(session)[1].certificate)
        _Ledger(session, Path(arguments["root"]), story).tell()
        _numbers(session, Path(arguments["root"]), story)
        Path(arguments["root"], "story.json").write_text(json.dumps(asdict(story)))
    finally:
        name = session.sparkContext.applicationId
        session.stop()
        shutil.rmtree(Path(pyspark.__file__).parent / "work" / name, ignore_errors=True)


class _Ledger:
    """A query that goes on while executors come and go."""

    def __init__(self, session: SparkSession, root: Path, story: Story) -> None:
        self._session = session
        self._job = Job(root / "ledger")
        self._watched = root / "watched"
        self._options = Options(observer=Watch(str(self._watched)))
        self._story = story
        self._watched.mkdir()
        self._batch = -1

    def tell(self) -> None:
        numbers = self._story.numbers
        self._add(WARM_UP)
        query = (
            self._job.ledger(self._session, PARALLELISM, self._options)
            .writeStream.outputMode("update")
            .foreachBatch(self._job.save)
            .option("checkpointLocation", str(self._job.checkpoint))
            .start()
        )
        query.processAllAvailable()
        numbers["cached while running"] = _cached_tables(self._session)
        self._run(query, STICKY)
        numbers["sticky"] = [WARM_UP, self._batch + 1]

        self._allow_executors(EXECUTORS - 1)
        victim = self._places(self._batch)[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: self._is_level(EXECUTORS - 1), "new places for what an executor had", 120)
        self._run(query, 1)
        numbers["killed between"] = [self._batch, victim]

        self._allow_executors(EXECUTORS)
        numbers["added"] = self._run_until_level(query)

        numbers["killed within"] = self._stall(query, "hold")

        zombie = numbers["zombie"] = self._stall(query, "zombie")
        self._run(query, 1)
        Path(self._watched, "go-on").touch()
        wait_until(lambda: not is_alive(zombie["worker"]), "the end of a worker whose executor is gone", 60)
        numbers["replaced"] = self._run_until_level(query)

        make_marker(self._watched / "kill-worker")
        self._run(query, 1)
        numbers["worker killed"] = self._batch

        self._run_until_level(query)
        workers = self._workers(self._batch)
        wait_until(lambda: not any(map(is_alive, workers)), "the end of idle Python workers", 120)
        self._run(query, 1)
        numbers["idle"] = [self._batch, len(workers & self._workers(self._batch))]
        query.stop()
        wait_until(lambda: not _cached_tables(self._session), "the end of the cached table", 30)

        self._add(2)
        numbers["restarted"] = self._batch - 1
        self._job.run(self._job.ledger(self._session, 2, self._options))
        self._finish()

    def _add(self, batches: int) -> None:
        for _ in range(batches):
            self._batch += 1
            self._job.add(make_orders(1, seed=self._batch, rows=ORDERS_PER_BATCH))

    def _run(self, query: StreamingQuery, batches: int) -> None:
        self._add(batches)
        query.processAllAvailable()

    def _stall(self, query: StreamingQuery, marker: str) -> dict[str, int]:
        """Stop a task before its ack, kill its executor, and let the batch continue."""
        make_marker(self._watched / marker)
        self._add(1)
        wait_until(Path(self._watched, "stalled").exists, "a task that stalls", 60)
        executor, worker, subtask = json.loads(Path(self._watched, "stalled").read_text())
        Path(self._watched, "stalled").unlink()
        os.kill(executor, signal.SIGKILL)
        query.processAllAvailable()
        return {"batch": self._batch, "subtask": subtask, "executor": executor, "worker": worker}

    def _allow_executors(self, count: int) -> None:
        """Have Spark start executors until there are so many, and no more."""
        context: Any = self._session.sparkContext
        jvm: Any = self._session._jvm
        nothing = jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(jvm.java.util.HashMap())
        assert context._jsc.sc().requestTotalExecutors(count, 0, nothing)

    def _is_level(self, executors: int) -> bool:
        """Whether there are so many executors, and all subtasks have their place on them."""
        there = executor_internals.executors(self._session)
        (plan,) = require_endpoint(self._session)[1].plans()
        assert plan.placement is not None
        return len(there) == executors and not rebalanced(plan.placement.places(), there, executors)

    def _run_until_level(self, query: StreamingQuery) -> list[int]:
        """Run batches until the subtasks are level; return the first of some batches after that, and their end."""
        deadline = time.monotonic() + 180
        while not self._is_level(EXECUTORS):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the subtasks do not come to rest on {EXECUTORS} executors")
            self._run(query, 2)
        self._run(query, 3)
        return [self._batch - 2, self._batch + 1]

    def _workers(self, batch: int) -> set[int]:
        """The Python workers that ran a batch."""
        return {json.loads(path.read_text())[4] for path in self._watched.glob(f"place-{batch}-*-*")}

    def _places(self, batch: int) -> dict[int, int]:
        """The executor of each subtask's last attempt in a batch."""
        noted = sorted(json.loads(path.read_text()) for path in self._watched.glob(f"place-{batch}-*-*"))
        return {subtask: pid for _, _, subtask, pid, _ in noted}

    def _finish(self) -> None:
        for _, batch, subtask, pid, _ in sorted(json.loads(path.read_text()) for path in self._watched.glob("place-*")):
            self._story.places.setdefault(batch, []).append((subtask, pid))
            if pid not in self._story.executors:
                self._story.executors.append(pid)
        for path in self._watched.glob("fetches-*"):
            self._story.fetches[int(path.name.split("-")[1])] = int(path.read_text())


def _numbers(session: SparkSession, root: Path, story: Story) -> None:
    """An operator without keys, whose state does not change in every batch."""
    job, watched = Job(root / "numbers"), root / "numbers-watched"
    watched.mkdir()
    for batch in range(5):
        job.add(make_orders(1, seed=batch, rows=2 if batch % 3 else 40))
    options = Options(observer=Watch(str(watched)))
    df = statelog.process(
        job.read(session), Numbers(), "subtask int, count long, new long", parallelism=PARALLELISM, options=options
    )
    job.run(df)
    story.numbers["numbers"] = job.results()
    story.numbers["numbers fetched"] = {path.name.split("-")[1]: int(path.read_text()) for path in watched.glob("f*")}


def _cached_tables(session: SparkSession) -> int:
    context: Any = session.sparkContext
    return int(context._jsc.getPersistentRDDs().size())


def _record_acks(story: Story) -> None:
    take = Coordinator.ack

    def ack(self: Coordinator, ack: Ack, payload: bytes) -> Acked:
        task = ack.task
        refused = ""
        try:
            return take(self, ack, payload)
        except StatelogError as error:
            refused = str(error.kind)
            raise
        finally:
            story.acks.append((task.batch, task.subtask, task.attempt, refused))

    Coordinator.ack = ack  # type: ignore[method-assign]  # only for the test


def _executor_pid() -> int:
    """The executor that this Python worker belongs to: the parent of the daemon that made it."""
    daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(daemon.rpartition(")")[2].split()[1])


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp".replace("place", "tmp").replace("fetches", "tmp"))
    temporary.write_text(text)
    temporary.rename(path)


if __name__ == "__main__":
    run_main(main)
