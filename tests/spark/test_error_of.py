"""The error of a query that has failed: what it says, whichever way it has come."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StreamingQuery

import statelog
from statelog import ConfigurationError, ErrorKind, FencedError, Options, ProcessorError, StatelogError
from statelog.clock import SystemClock
from statelog.log.entry import Claim
from statelog.log.open import open_log
from statelog.rpc.calls import RpcClient
from statelog.storage import LocalStore
from tests.spark.faults import wait_until
from tests.spark.support import Job, Ledger, make_orders

pytestmark = pytest.mark.spark


class Raises(Ledger):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        raise ZeroDivisionError("an account without orders")


class Hangs(Ledger):
    """Loses the connection to the driver."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for found in gc.get_objects():
            if isinstance(found, RpcClient):
                found.close()
        return iter(())


def start(job: Job, spark: SparkSession, processor: Ledger | None = None) -> StreamingQuery:
    return job.start(job.ledger(spark, 2, processor=processor))


def renumbered(job: Job, spark: SparkSession) -> StreamingQuery:
    return job.start(job.ledger(spark, 2).coalesce(1))


def lost(job: Job, spark: SparkSession) -> StreamingQuery:
    job.run(job.ledger(spark, 2))
    job.add(make_orders(1, seed=72))
    (job.checkpoint / "statelog").rename(job.root / "elsewhere")
    return start(job, spark)


def damaged(job: Job, spark: SparkSession) -> StreamingQuery:
    job.run(job.ledger(spark, 2))
    job.add(make_orders(1, seed=73))
    (path,) = (job.state / "log").iterdir()
    path.write_bytes(bytes([*path.read_bytes()[:-1], 0, 1]).replace(b"main", b"nain", 1))
    return start(job, spark)


def no_directory(job: Job, spark: SparkSession) -> StreamingQuery:
    (job.root / "file").touch()
    return start(Job(job.root, location=str(job.root / "file" / "state")), spark)


def fenced(job: Job, spark: SparkSession) -> StreamingQuery:
    def save(df: DataFrame, batch: int) -> None:
        job.save(df, batch)
        log = open_log(LocalStore(job.checkpoint / "statelog"), Options(), SystemClock())
        log.claim(lambda epoch: Claim(epoch, "query", "run", bytes(16), 0))

    return job.start(job.ledger(spark, 2), save)


@pytest.mark.parametrize(
    ("begin", "name", "kind", "message", "hint"),
    [
        (renumbered, "ConfigurationError", ErrorKind.PARTITIONS_RENUMBERED, "ran as partition", "Put a repartition"),
        (
            lambda job, spark: start(job, spark, Raises()),
            "ProcessorError",
            ErrorKind.PROCESSOR_FAILED,
            "ZeroDivisionError: an account without orders",
            "start the query again when the code is fixed",
        ),
        (lost, "StateMissingError", ErrorKind.CHECKPOINT_MISSING, "there is no checkpoint", "start with a new"),
        (fenced, "FencedError", ErrorKind.NEWER_EPOCH, "another run", "only one run"),
        (no_directory, "StorageError", ErrorKind.STORE_FAILED, "failed: File exists", "Check that the directory"),
        (damaged, "CorruptionError", ErrorKind.CHECKSUM, ".log", "Restore"),
        (
            lambda job, spark: start(job, spark, Hangs()),
            "ProtocolError",
            ErrorKind.RPC,
            "cannot be reached",
            "If the driver runs",
        ),
    ],
    ids=["configuration", "processor", "state missing", "fenced", "storage", "corruption", "protocol"],
)
def test_a_failed_query_tells_the_error_of_its_tasks(
    spark: SparkSession,
    tmp_path: Path,
    begin: Callable[[Job, SparkSession], StreamingQuery],
    name: str,
    kind: ErrorKind,
    message: str,
    hint: str,
) -> None:
    query = begin(Job(tmp_path).add(make_orders(2, seed=71)), spark)
    with pytest.raises(StreamingQueryException) as failure:
        query.awaitTermination()
    for failed in (query, failure.value):
        error = statelog.error_of(failed)
        assert error is not None
        assert type(error).__name__ == name
        assert error.kind is kind
        assert message in error.message
        assert hint in error.hint
        assert hint not in error.message
        assert "Traceback" in str(error.__cause__)
        assert "\tat " not in str(error.__cause__)
        if isinstance(error, ProcessorError):
            assert 'raise ZeroDivisionError("an account without orders")' in str(error.__cause__), "the user's line"
            assert str(error.__cause__).endswith("ZeroDivisionError: an account without orders")


def test_a_run_that_spark_has_stopped_for_another_one_is_an_error_with_a_remedy(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark looks at its own log before any task can ask who owns the state."""
    job = Job(tmp_path).add(make_orders(2, seed=74))

    def save(df: DataFrame, batch: int) -> None:
        job.save(df, batch)
        offsets = job.checkpoint / "offsets"
        shutil.copyfile(offsets / str(batch), offsets / str(batch + 1))

    query = job.start(job.ledger(spark, 2), save)
    with pytest.raises(StreamingQueryException) as failure:
        query.awaitTermination()
    for failed in (query, failure.value):
        error = statelog.error_of(failed)
        assert isinstance(error, FencedError)
        assert error.kind is ErrorKind.CONCURRENT_RUN


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Waits for lines of the driver's log, and returns all it has."""
    logger = logging.getLogger("statelog.spark.driver.endpoint")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.ERROR, logger.name)

    def lines(awaited: int) -> list[str]:
        def found() -> list[str]:
            return [record.getMessage() for record in caplog.records if record.name == logger.name]

        wait_until(lambda: len(found()) >= awaited, "the line in the log", 30)
        return found()

    return lines


def test_the_cause_is_logged_in_one_line(
    spark: SparkSession, tmp_path: Path, logged: Callable[[int], list[str]]
) -> None:
    job = Job(tmp_path).add(make_orders(2, seed=71))
    query = start(job, spark, Raises())
    with pytest.raises(StreamingQueryException) as failure:
        query.awaitTermination()
    [line] = logged(1)
    assert line == (
        f"query {query.id} has failed: ProcessorError: " + " ".join(str(statelog.error_of(failure.value)).split())
    )
    assert "ZeroDivisionError: an account without orders" in line


def test_the_users_own_error_is_logged_if_the_query_has_an_operator(
    spark: SparkSession, tmp_path: Path, logged: Callable[[int], list[str]]
) -> None:
    def fail(df: DataFrame, batch: int) -> None:
        raise ValueError("the sink is full")

    jobs = [Job(tmp_path / name).add(make_orders(1, seed=75)) for name in ("before", "without", "with")]
    ids = []
    for job, rows in [(job, job.ledger(spark, 2)) for job in jobs]:
        query = job.start(job.read(spark) if job is jobs[1] else rows, fail)
        with pytest.raises(StreamingQueryException):
            query.awaitTermination()
        ids.append(query.id)
    assert logged(2) == [f"query {ids[n]} has failed: ValueError: the sink is full" for n in (0, 2)]


def test_a_query_that_runs_or_ended_well_or_failed_elsewhere_has_no_error(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(1, seed=74))
    found: list[StatelogError | None] = []

    def save(df: DataFrame, batch: int) -> None:
        job.save(df, batch)
        found.append(statelog.error_of(query))

    query = job.start(job.ledger(spark, 2), save)
    query.awaitTermination()
    assert [*found, statelog.error_of(query)] == [None, None]

    def fail(df: DataFrame, batch: int) -> None:
        raise ValueError("the sink is full")

    job.add(make_orders(1, seed=75))
    query = job.start(job.ledger(spark, 2), fail)
    with pytest.raises(StreamingQueryException) as failure:
        query.awaitTermination()
    assert statelog.error_of(query) is statelog.error_of(failure.value) is None


def test_the_error_of_a_batch_query_and_of_the_driver(spark: SparkSession) -> None:
    orders = spark.createDataFrame(
        [(1, "ann", "a", 5, "buy")], "seq long, user string, item string, amount long, action string"
    )
    with pytest.raises(ConfigurationError) as refused:
        statelog.key_by(orders, "user").transformWithState(Raises(), "user string", "update", "Sometimes")
    assert statelog.error_of(refused.value) is refused.value
    with pytest.raises(Exception, match="an account without orders") as failure:
        statelog.key_by(orders, "user").transformWithState(Raises(), "user string", "update", "None").collect()
    assert isinstance(statelog.error_of(failure.value), ProcessorError)
    with pytest.raises(ConfigurationError, match="a query or an exception, not DataFrame"):
        statelog.error_of(orders)  # type: ignore[arg-type]  # a user's mistake
