"""A micro-batch that runs more than once: the later attempt counts, and equal ones count once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from pyspark.sql import DataFrame, SparkSession

import statelog
from statelog import CheckpointMetrics, Observer, Options
from tests.spark.faults import make_marker, wait_until
from tests.spark.support import Job, Salted, make_orders, start_driver

pytestmark = pytest.mark.spark

TOTALS = "user string, total long"


@dataclass(frozen=True)
class Noted(Observer):
    """Writes down the checkpoints, a line each."""

    path: str

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        with open(self.path, "a") as sink:
            sink.write(f"{metrics.batch}.{metrics.revision}\n")


def test_equal_actions_on_one_batch_count_once(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(4, seed=71))
    noted = tmp_path / "checkpoints"

    def save(df: DataFrame, batch: int) -> None:
        first, second = df.collect(), df.collect()
        assert sorted(first) == sorted(second)
        job.save(df, batch)

    job.run(job.ledger(spark, 2, Options(observer=Noted(str(noted)))), save)
    job.require_exact()
    assert noted.read_text().split() == ["0.0", "1.0", "2.0", "3.0"]


@pytest.mark.parametrize("inline_bytes", [8 << 20, 0], ids=["inline", "uploaded"])
def test_of_two_different_actions_the_later_is_the_state(
    spark: SparkSession, tmp_path: Path, inline_bytes: int
) -> None:
    job = Job(tmp_path).add(make_orders(4, seed=72))
    salt = tmp_path / "salt"
    options = Options(inline_budget_bytes=inline_bytes)

    def save(df: DataFrame, batch: int) -> None:
        for factor in (7, 1000):
            salt.write_text(str(factor))
            job.save(df, batch)
        if batch % 2:
            salt.write_text("1")
            job.save(df, batch)

    job.run(job.ledger(spark, 2, options, Salted(str(salt)), output=TOTALS), save)
    job.add(make_orders(2, seed=73))
    job.run(job.ledger(spark, 3, options, Salted(str(salt)), output=TOTALS), save)

    totals: dict[str, int] = {}
    for batch, orders in enumerate(job.batches()):
        for order in orders:
            totals[order["user"]] = totals.get(order["user"], 0) + (1 if batch % 2 else 1000)
        expected = sorted([user, totals[user]] for user in {order["user"] for order in orders})
        assert job.results()[batch] == expected, f"batch {batch}"
    if inline_bytes == 0:
        # Uploads that no longer count go, the last ones soon after the end: one per subtask and batch is left.
        left = 4 * 2 + 2 * 3
        wait_until(lambda: len(list(job.state.glob("*/changes/**/*.run"))) <= left, "uploads to be removed", 60)
        assert len(list(job.state.glob("*/changes/**/*.run"))) == left


def test_the_state_follows_the_attempt_whose_output_spark_kept(spark: SparkSession, tmp_path: Path) -> None:
    """A task fails after its ack, in the last batch of a run; Spark keeps the second attempt's output."""
    batches = make_orders(3, seed=74)
    job = Job(tmp_path).add(batches[:1])
    arguments = {"master": "local[2,4]", "parallelism": 3, "options": {}, "marker": str(tmp_path / "fail")}
    make_marker(tmp_path / "fail")
    driver = start_driver("retries", tmp_path, arguments)
    assert driver.wait() == 0, driver.end
    assert "is not deterministic; the later attempt counts" in driver.text
    kept = {user: total for user, total in job.results()[0]}
    assert set(kept.values()) == {1, 1000}

    job.add([batches[0]])
    (tmp_path / "salt").write_text("0")
    job.run(job.ledger(spark, 2, processor=Salted(str(tmp_path / "salt")), output=TOTALS))

    assert dict(job.results()[1]) == kept


def test_a_batch_repeated_after_a_failure_of_the_sink_counts_once(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(4, seed=75))

    def save(df: DataFrame, batch: int) -> None:
        job.save(df, batch)
        if batch == 2:
            raise RuntimeError("the sink is full")

    for parallelism in (2, 2, 3):
        assert "the sink is full" in job.fail(job.ledger(spark, parallelism), save)
    job.run(job.ledger(spark, 2))

    job.require_exact()


def test_a_sink_that_has_a_repeated_batch_may_leave_it_out(spark: SparkSession, tmp_path: Path) -> None:
    """The driver dies between the sink's commit and Spark's, of the last batch. Spark's file sink does the same."""
    job = Job(tmp_path).add(make_orders(2, seed=76))
    job.run(job.ledger(spark, 2))
    for name in ("1", ".1.crc"):
        (job.checkpoint / "commits" / name).unlink()

    left_out: list[int] = []
    again = job.start(job.ledger(spark, 3), lambda df, batch: left_out.append(batch))
    again.awaitTermination()
    assert (left_out, statelog.error_of(again)) == ([1], None)
    job.add(make_orders(1, seed=78))
    job.run(job.ledger(spark, 1))
    job.require_exact()


@pytest.mark.parametrize("table", ["runs", "memory", "rocksdb"])
def test_an_operator_that_runs_twice_in_every_batch_counts_once(
    spark: SparkSession, tmp_path: Path, table: Literal["runs", "memory", "rocksdb"]
) -> None:
    """Both branches of a union run it if exchanges are not reused, at the same time or one after the other."""
    session = spark.newSession()
    session.conf.set("spark.sql.exchange.reuse", "false")
    job = Job(tmp_path)

    def save(df: DataFrame, batch: int) -> None:
        rows = sorted(list(row) for row in df.collect())
        assert rows[::2] == rows[1::2]
        job.write_output(batch, rows[::2])

    for parallelism in (2, 3):
        job.add(make_orders(2, seed=77))
        ledger = job.ledger(session, parallelism, Options(table=table))
        job.run(ledger.repartition(2).union(ledger.repartition(2)), save)

    job.require_exact()
