"""What the Spark tests share: input, the processors, the plain-Python answer, and jobs that run, die and continue.

A story is: make a :class:`Job`, add input, run it, do harm, run it again, and compare what the sink got for
every batch with :func:`ledger_model`, which knows neither Spark nor statelog.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import DataStreamWriter, StatefulProcessor, StreamingQuery

import statelog
from statelog import Options
from tests.spark.faults import take_marker, wait_until
from tests.spark.file_systems import Mount
from tests.spark.inputs import add_json

REPOSITORY = Path(__file__).parents[2]
IS_ONE_BATCH = importlib.util.find_spec("pyspark.sql.streaming.datasource") is None
"""Whether Spark is older than 4.2: then a query with a source in Python and ``availableNow`` is one micro-batch."""
ORDERS = "seq long, user string, item string, amount long, action string"
LEDGER = "user string, count long, amount long, history string, items string"

Order = dict[str, Any]
Answer = list[list[Any]]
ForEachBatch = Callable[[DataFrame, int], None]


# ---- Input and the independent answer ----


def make_orders(batches: int, *, seed: int = 1, rows: int = 30, users: int = 14) -> list[list[Order]]:
    """Orders of some users: purchases, refunds, and closed accounts."""
    rng = random.Random(seed)
    return [
        [
            {
                "seq": batch * rows + row,
                "user": f"user-{rng.randrange(users)}",
                "item": rng.choice("abcde"),
                "amount": rng.randrange(1, 100),
                "action": rng.choices(("buy", "refund", "close"), (8, 3, 1))[0],
            }
            for row in range(rows)
        ]
        for batch in range(batches)
    ]


def ledger_model(batches: Iterable[list[Order]]) -> dict[int, Answer]:
    """What :class:`Ledger` must return for every batch."""
    accounts: dict[str, dict[str, Any]] = {}
    answers: dict[int, Answer] = {}
    for number, orders in enumerate(batches):
        touched: dict[str, None] = {}
        for order in sorted(orders, key=lambda order: order["seq"]):
            user = order["user"]
            touched[user] = None
            if order["action"] == "close":
                accounts.pop(user, None)
                continue
            account = accounts.setdefault(user, {"count": 0, "amount": 0, "history": [], "items": {}})
            account["count"] += 1
            account["amount"] += order["amount"]
            account["history"].append(order["amount"])
            if order["action"] == "buy":
                account["items"][order["item"]] = account["items"].get(order["item"], 0) + 1
            else:
                account["items"].pop(order["item"], None)
            if len(account["history"]) > 5:
                account["history"] = account["history"][-2:]
        nothing = {"count": 0, "amount": 0, "history": [], "items": {}}
        answers[number] = sorted(
            [
                user,
                (account := accounts.get(user, nothing))["count"],
                account["amount"],
                ",".join(map(str, account["history"])),
                ",".join(f"{item}={count}" for item, count in sorted(account["items"].items())),
            ]
            for user in touched
        )
    return answers


class Ledger(StatefulProcessor):
    """Keeps a value, a list and a map per user.

    Parameters
    ----------
    poison : str, optional
        A file. The first order after it was made kills the worker that handles it, and removes the file.
    """

    def __init__(self, poison: str = "") -> None:
        self._poison = poison

    def init(self, handle: Any) -> None:
        self._account = handle.getValueState("account", "count long, amount long")
        self._history = handle.getListState("history", "amount long")
        self._items = handle.getMapState("items", "item string", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in sorted(rows, key=lambda row: row.seq):
            if row.action == "close":
                for state in (self._account, self._history, self._items):
                    state.clear()
                continue
            count, amount = self._account.get() or (0, 0)
            self._account.update((count + 1, amount + row.amount))
            self._history.appendValue((row.amount,))
            if row.action == "buy":
                held = self._items.getValue((row.item,))
                self._items.updateValue((row.item,), (1 if held is None else held[0] + 1,))
            else:
                self._items.removeKey((row.item,))
            history = list(self._history.get())
            if len(history) > 5:
                self._history.put(history[-2:])
            if self._poison and take_marker(self._poison):
                os.kill(os.getpid(), signal.SIGKILL)
        count, amount = self._account.get() or (0, 0)
        yield Row(
            user=key[0],
            count=count,
            amount=amount,
            history=",".join(str(element[0]) for element in self._history.get()),
            items=",".join(f"{item[0]}={value[0]}" for item, value in sorted(self._items.iterator())),
        )

    def close(self) -> None:
        pass


class Salted(StatefulProcessor):
    """Adds to each user's total what a file says when the rows are handled: not deterministic on purpose."""

    def __init__(self, salt: str) -> None:
        self._salt = salt

    def init(self, handle: Any) -> None:
        self._total = handle.getValueState("total", "total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (total,) = self._total.get() or (0,)
        total += int(Path(self._salt).read_text()) * sum(1 for _ in rows)
        self._total.update((total,))
        yield Row(user=key[0], total=total)

    def close(self) -> None:
        pass


# ---- Jobs ----


@dataclass(frozen=True)
class Job:
    """A query's folders: input, one file per batch; Spark's checkpoint; output, one file per batch."""

    root: Path
    uid: str | None = None
    location: str | None = None
    input_folder: Path | None = None
    mount: Mount | None = None
    """By which Spark gets to the checkpoint's folder; None for its path."""

    @property
    def input(self) -> Path:
        return self.input_folder or self.root / "input"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def checkpoint_location(self) -> str:
        """The checkpoint's folder as Spark and statelog get it."""
        return str(self.checkpoint) if self.mount is None else self.mount.of(self.checkpoint)

    @property
    def output(self) -> Path:
        return self.root / "output"

    @property
    def state(self) -> Path:
        """The location of the query's state."""
        return Path(self.location) if self.location else self.checkpoint / "statelog"

    def add(self, batches: list[list[Order]]) -> Job:
        """Add input, a file per batch."""
        add_json(self.input, batches)
        return self

    def batches(self) -> list[list[Order]]:
        """All input."""
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(self.input.iterdir())]

    def batches_of_spark(self) -> list[list[Order]]:
        """The input by batch, for a query that has read all of it."""
        ends = self.ends()
        assert ends[max(ends)] == len(self.batches()), "Spark has not read all input"
        return self.batches_up_to(ends)

    def ends(self) -> dict[int, int]:
        """The number of files read up to each batch that Spark's offset log has.

        After a rewind, or after a death between two of its logs, Spark reads several files in one batch.
        """
        names = (self.checkpoint / "offsets").glob("[0-9]*")
        return {int(name.name): json.loads(name.read_text().splitlines()[2])["logOffset"] + 1 for name in names}

    def batches_up_to(self, ends: Mapping[int, int]) -> list[list[Order]]:
        """The input by batch; `ends` are the numbers of files read up to each batch from 0."""
        files, bounds = self.batches(), [0, *[ends[batch] for batch in range(len(ends))]]
        return [[row for rows in files[first:end] for row in rows] for first, end in pairwise(bounds)]

    def read(self, session: SparkSession, schema: str = ORDERS) -> DataFrame:
        """The input as a stream, one file per batch."""
        return session.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(self.input))

    def ledger(
        self,
        session: SparkSession,
        parallelism: int,
        options: Options | None = None,
        processor: StatefulProcessor | None = None,
        *,
        keys: tuple[str, ...] = ("user",),
        output: str = LEDGER,
    ) -> DataFrame:
        """The operator's output."""
        return statelog.key_by(
            self.read(session), *keys, uid=self.uid, location=self.location, parallelism=parallelism, options=options
        ).transformWithState(processor or Ledger(), output, "update", "None")

    def start(self, df: DataFrame, for_each_batch: ForEachBatch | None = None) -> StreamingQuery:
        """Start a query over all input that is there."""
        return (
            df.writeStream.outputMode("update")
            .foreachBatch(for_each_batch or self.save)
            .option("checkpointLocation", self.checkpoint_location)
            .trigger(availableNow=True)
            .start()
        )

    def run(self, df: DataFrame, for_each_batch: ForEachBatch | None = None) -> None:
        """Run a query over all input that is there."""
        self.start(df, for_each_batch).awaitTermination()

    def fail(self, df: DataFrame, for_each_batch: ForEachBatch | None = None) -> str:
        """Run a query that must fail, and return its whole error text."""
        query = self.start(df, for_each_batch)
        with pytest.raises(StreamingQueryException) as failure:
            query.awaitTermination()
        return str(failure.value)

    def save(self, df: DataFrame, batch: int) -> None:
        """Write the output of a batch; a repetition replaces it."""
        self.write_output(batch, sorted([list(row) for row in df.collect()]))

    def write_output(self, batch: int, rows: Answer) -> None:
        """Write the output of a batch at once."""
        self.output.mkdir(exist_ok=True)
        temporary = self.root / f"{batch}.tmp"
        temporary.write_text(json.dumps(rows))
        temporary.rename(self.output / f"{batch}.json")

    def results(self) -> dict[int, Answer]:
        """What the sink got, by batch."""
        paths = sorted(self.output.iterdir(), key=lambda path: int(path.stem))
        return {int(path.stem): json.loads(path.read_text()) for path in paths}

    def require_exact(self, hint: str = "") -> None:
        """Every batch's output is what the model says, and none is missing."""
        expected, found = ledger_model(self.batches_of_spark()), self.results()
        assert sorted(found) == sorted(expected), hint
        for batch, answer in expected.items():
            assert found[batch] == answer, f"batch {batch} {hint}"

    def elsewhere(self, name: str) -> Job:
        """A job on the same input with its own checkpoint and output."""
        root = self.root / name
        root.mkdir()
        return replace(self, root=root, input_folder=self.input)


# ---- Drivers in processes of their own ----


@dataclass(frozen=True)
class Driver:
    """A driver program that runs in its own process, and the JVM that it started."""

    process: subprocess.Popen[bytes]
    log: Path
    jvm_pid_file: Path

    def wait(self, timeout_s: float = 240) -> int:
        """Wait until the driver and its JVM are gone; return the driver's exit code."""
        try:
            code = self.process.wait(timeout_s)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._end_jvm()
        return code

    def _end_jvm(self) -> None:
        if not self.jvm_pid_file.exists():
            return
        pid = int(self.jvm_pid_file.read_text())
        try:
            # A JVM whose driver is gone ends by itself.
            wait_until(lambda: not is_alive(pid), "the end of the JVM", 20)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)

    @property
    def text(self) -> str:
        """Everything it said."""
        return self.log.read_text(errors="replace")

    @property
    def end(self) -> str:
        """The last of it, without Java's stack."""
        lines = [line for line in self.text.splitlines() if not line.startswith("\tat ")]
        return "\n".join(lines[-60:])


def start_driver(module: str, root: Path, arguments: dict[str, Any], env: dict[str, str] | None = None) -> Driver:
    """Start ``tests.spark.jobs.<module>`` with arguments."""
    number = len(list(root.glob("driver-*.log")))
    log, pid_file = root / f"driver-{number}.log", root / f"jvm-{number}.pid"
    arguments = {"root": str(root), "jvm_pid_file": str(pid_file), **arguments}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", f"tests.spark.jobs.{module}", json.dumps(arguments)],
            cwd=REPOSITORY,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    return Driver(process, log, pid_file)


def start_until_idle(writer: DataStreamWriter) -> StreamingQuery:
    """Start a query that ends when it has nothing to do: by ``availableNow``, or on older Sparks by a thread."""
    if not IS_ONE_BATCH:
        return writer.trigger(availableNow=True).start()
    query = writer.start()

    def end() -> None:
        with suppress(StreamingQueryException):  # for who awaits the query
            query.processAllAvailable()
        query.stop()

    threading.Thread(target=end, daemon=True).start()
    return query


def await_end(query: StreamingQuery, timeout_s: int = 120) -> None:
    """Wait for the end of a query; if it does not come, fail with what the query, its tasks and all threads do."""
    if query.awaitTermination(timeout_s):
        return
    faulthandler.dump_traceback()
    session = SparkSession.getActiveSession()
    assert session is not None
    tracker = session.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    assert session.sparkContext._jvm is not None
    threads = session.sparkContext._jvm.java.lang.Thread.getAllStackTraces()
    working = {
        thread.getName(): [frame.toString() for frame in frames][:25]
        for thread, frames in threads.items()
        if any(word in thread.getName() for word in ("task launch", "stream execution", "exchange", "Python"))
    }
    pytest.fail(
        f"the query does not end: {query.status}, last {query.lastProgress}, stages {stages},"
        f" threads {json.dumps(working, indent=1)}"
    )


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
"""Settings by which Spark compiles plans, as it does by default."""
_INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


def make_session(master: str = "local[2]", settings: Mapping[str, str] | None = None) -> SparkSession:
    """A small session, in which Spark starts few processes for its own files of a checkpointLocation.

    It interprets plans: for a few rows that takes a fifth less processor time than to compile them first. Tests on
    other Sparks compile, and so do those of examples and documentation.
    """
    modes = COMPILED if os.environ.get("STATELOG_TEST_SPARK") else _INTERPRETED
    fast = {
        name: value
        for name, value in statelog.spark_conf(local_checkpoints=True).items()
        if name not in statelog.spark_conf()
    }
    return (
        SparkSession.builder.config(map={**modes, **fast, **(settings or {})})
        .master(master)
        .appName("statelog-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.log.level", "ERROR")
        .config("spark.python.daemon.module", "tests.spark.daemon")
        .config("spark.sql.artifact.isolation.enabled", "false")
        .getOrCreate()
    )
