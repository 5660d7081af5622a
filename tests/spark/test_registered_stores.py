"""A query whose state is in a store of the user's own, which only the driver's program has registered."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

import statelog
from statelog import ConfigurationError, FencedError, Options, StorageError, Tuning
from statelog.clock import SystemClock
from statelog.log.entry import Claim
from statelog.log.open import open_log
from statelog.spark.worker.worker import with_stores
from statelog.storage import LocalStore, open_store
from tests.spark.support import Job, ledger_model, make_orders
from tests.stores import KeptStore

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def kept() -> None:
    statelog.register_store("kept", KeptStore)


def test_a_query_goes_on_from_a_registered_location(spark: SparkSession, tmp_path: Path) -> None:
    job = replace(Job(tmp_path), location=f"kept:{tmp_path}/state").add(make_orders(2, seed=91))
    job.run(job.ledger(spark, 2))
    older = tmp_path / "older"
    shutil.copytree(tmp_path / "state", older)
    job.add(make_orders(2, seed=92))
    job.run(job.ledger(spark, 3))
    job.require_exact()
    assert not (job.checkpoint / "statelog").exists()

    # An older copy of the state: Spark is ahead of it, until it is rewound.
    shutil.rmtree(tmp_path / "state")
    older.rename(tmp_path / "state")
    assert statelog.rewind(job.checkpoint, location=job.location).taken_back == [2, 3]
    job.run(job.ledger(spark, 2))
    job.require_exact()
    assert job.location is not None
    assert statelog.list_orphans(job.location) == []


def test_a_savepoint_in_a_registered_store(spark: SparkSession, tmp_path: Path) -> None:
    orders = make_orders(3, seed=93)
    job = replace(Job(tmp_path), location=f"kept:{tmp_path}/state").add(orders[:2])
    job.run(job.ledger(spark, 2))
    target, other = f"kept:{tmp_path}/savepoint", job.elsewhere("other")
    statelog.savepoint(job.checkpoint, target, location=job.location)
    with pytest.raises(ConfigurationError, match="is within"):
        statelog.restore(target, other.checkpoint, location=f"{target}/state")
    other = replace(other, location=f"kept:{tmp_path}/restored")
    statelog.restore(target, other.checkpoint, location=other.location, claim=True)
    assert open_store(target).list() == []
    job.add(orders[2:])
    other.run(other.ledger(spark, 3))
    assert other.results() == {2: ledger_model(orders)[2]}


class LostAnswers(KeptStore):
    """The answer to the first claim that is stored in it is lost."""

    lost = 0

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        is_absent = super().put_if_absent(name, data)
        if name.startswith("log/") and not LostAnswers.lost:
            LostAnswers.lost += 1
            raise StorageError("the answer was lost")
        return is_absent


@pytest.mark.parametrize("is_newer", [False, True], ids=["alone", "superseded"])
def test_a_start_whose_first_task_could_not_claim_remembers_that_it_tried(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_newer: bool
) -> None:
    """It must not take the location from a start that has claimed it since."""
    monkeypatch.setattr(LostAnswers, "lost", 0)
    statelog.register_store("unanswered", LostAnswers)
    location = f"unanswered:{tmp_path}/state"
    job = replace(Job(tmp_path), location=location).add(make_orders(1, seed=94))
    options = Options(tuning=Tuning(upload_attempts=1))

    def save(df: DataFrame, batch: int) -> None:
        with pytest.raises(Exception, match="the answer was lost"):
            df.collect()
        if is_newer:
            log = open_log(KeptStore(location), Options(), SystemClock())
            log.claim(lambda epoch: Claim(epoch, "query", "run", bytes(16), 0))
        job.save(df, batch)

    query = job.start(job.ledger(spark, 1, options), save)
    if not is_newer:
        query.awaitTermination()
        job.require_exact()
        return
    with pytest.raises(StreamingQueryException):
        query.awaitTermination()
    error = statelog.error_of(query)
    assert isinstance(error, FencedError), error
    assert "since this run first tried to" in error.message


class Count(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.seen = handle.getValueState("seen", "n long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.seen.update((initialState.n,))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n = (self.seen.get() or (0,))[0] + sum(1 for _ in rows)
        self.seen.update((n,))
        yield Row(user=key[0], n=n)

    def close(self) -> None:
        pass


def test_an_initial_state_and_other_jobs_find_the_registered_store(spark: SparkSession, tmp_path: Path) -> None:
    """Made by a class of the program itself, which the workers cannot import."""

    class Own(KeptStore):
        pass

    Own.__module__ = "__main__"
    scheme = "own"
    statelog.register_store(scheme, lambda location: Own(location.replace("own:", "kept:")))
    location = f"own:{tmp_path}/state"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"user": "ann"}\n{"user": "bob"}\n{"user": "ann"}\n')
    events = spark.readStream.schema("user string").json(str(tmp_path / "in"))
    initial = statelog.key_by(spark.createDataFrame([("ann", 40), ("eve", 7)], "user string, n long"), "user")
    result = statelog.key_by(events, "user", location=location, parallelism=2).transformWithState(
        Count(), "user string, n long", "update", "None", initialState=initial
    )
    answers: list[Row] = []
    query = (
        result.writeStream.outputMode("update")
        .foreachBatch(lambda rows, batch: answers.extend(rows.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert sorted(map(tuple, answers)) == [("ann", 42), ("bob", 1)]

    LocalStore(tmp_path / "state").put("x", b"found")

    def read(place: str) -> bytes:
        return open_store(place).read("x")

    found = spark.sparkContext.parallelize([location, location], 2).map(with_stores(read)).collect()
    assert found == [b"found"] * 2
