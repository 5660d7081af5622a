"""Three executors, of which some are killed: where subtasks run, what they fetch, and that nothing is lost.

Spark's network encryption is on.

One application tells the whole story (``tests/spark/jobs/executors.py``), because executors take long to start; the
tests read what happened. What a session without executors can show is tested in the shared one.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog import Count, Options, TumblingWindows, Watermark
from tests.spark.faults import wait_until
from tests.spark.jobs.executors import EXECUTORS, ORDERS_PER_BATCH, PARALLELISM, Numbers
from tests.spark.support import Job, is_alive, ledger_model, make_orders, start_driver

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1600)]


@dataclass(frozen=True)
class Told:
    """What happened, as the driver program wrote it down."""

    job: Job
    text: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.text["numbers"][name]

    def places(self, batch: int) -> dict[int, int]:
        """The executor of each subtask's last attempt in a batch."""
        return dict(self.text["places"][str(batch)])

    def fetches(self, first: int, end: int) -> int:
        """How often state was fetched in some batches."""
        return sum(self.text["fetches"][str(batch)] for batch in range(first, end))

    def acks(self, batch: int) -> list[list[Any]]:
        """Subtask, attempt and refusal of each ack of a batch."""
        return [ack[1:] for ack in self.text["acks"] if ack[0] == batch]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    root = tmp_path_factory.mktemp("executors")
    driver = start_driver("executors", root, {})
    assert driver.wait(1500) == 0, driver.end
    text = json.loads((root / "story.json").read_text())
    for executor in text["executors"]:
        wait_until(partial(has_ended, executor), "the end of an executor", 30)
    return Told(Job(root / "ledger"), text)


def has_ended(pid: int) -> bool:
    return not is_alive(pid)


def test_the_state_is_exact_after_all_of_it(told: Told) -> None:
    told.job.require_exact()


def test_subtasks_stay_where_their_files_are(told: Told) -> None:
    first, end = told["sticky"]

    assert (end - first) * PARALLELISM == 100
    assert set(told.places(0)) == set(range(PARALLELISM))
    assert Counter(Counter(told.places(0).values()).values()) == {1: 2, 2: 1}, "4 subtasks on 3 executors"
    assert told.fetches(first, end) <= 1
    moves = sum(
        told.places(batch)[subtask] != told.places(batch - 1)[subtask]
        for batch in range(first, end)
        for subtask in range(PARALLELISM)
    )
    assert moves <= 1


def test_only_the_subtasks_of_a_killed_executor_move(told: Told) -> None:
    batch, victim = told["killed between"]
    before, after = told.places(batch - 1), told.places(batch)

    lost = {subtask for subtask, executor in before.items() if executor == victim}
    assert lost
    assert {subtask for subtask in before if before[subtask] != after[subtask]} == lost
    assert Counter(Counter(after.values()).values()) == {2: 2}, "4 subtasks on 2 executors"
    assert told.fetches(batch, batch + 1) == len(lost)


@pytest.mark.parametrize("came", ["added", "replaced"])
def test_an_executor_that_comes_gets_subtasks_that_stay(told: Told, came: str) -> None:
    # One that replaces a lost executor may come while the batch is repeated that lost it.
    earlier = {"added": told["killed between"][0], "replaced": told["killed within"]["batch"] - 1}[came]
    first, end = told[came]
    new = set(told.places(first).values()) - set(told.places(earlier).values())

    assert len(set(told.places(first).values())) == EXECUTORS
    assert new
    assert all(told.places(batch) == told.places(first) for batch in range(first, end))
    assert told.fetches(first + 1, end) == 0


def test_an_executor_killed_within_a_batch_is_replaced_in_it(told: Told) -> None:
    held = told["killed within"]
    places = told.text["places"][str(held["batch"])]

    assert [held["subtask"], held["executor"]] in places
    assert told.places(held["batch"])[held["subtask"]] != held["executor"]


def test_the_late_ack_of_a_lost_executors_task_is_refused(told: Told) -> None:
    zombie = told["zombie"]
    acks = [ack for ack in told.acks(zombie["batch"]) if ack[0] == zombie["subtask"]]

    refused = [attempt for _, attempt, refusal in acks if refusal == "stale-batch"]
    taken = [attempt for _, attempt, refusal in acks if not refusal]
    assert len(refused) == 1
    assert taken
    assert refused[0] < min(taken)


def test_a_killed_worker_leaves_its_files(told: Told) -> None:
    """Spark may repeat its task elsewhere; only then is anything fetched."""
    batch = told["worker killed"]
    before, after = told.places(batch - 1), told.places(batch)

    assert len(told.text["places"][str(batch)]) > PARALLELISM, "no task was repeated"
    moved = [subtask for subtask in before if before[subtask] != after[subtask]]
    assert len(moved) <= 1
    assert told.fetches(batch, batch + 1) == len(moved)


def test_workers_that_spark_ends_when_they_are_idle_leave_their_files(told: Told) -> None:
    batch, same_workers = told["idle"]

    assert same_workers == 0
    assert told.places(batch) == told.places(batch - 1)
    assert told.fetches(batch, batch + 1) == 0


def test_a_restart_with_another_parallelism_fetches_once(told: Told) -> None:
    batch = told["restarted"]

    assert set(told.places(batch)) == {0, 1}
    assert told.fetches(batch, batch + 1) == 2
    assert told.fetches(batch + 1, batch + 2) == 0


def test_the_placement_table_is_cached_while_the_query_runs(told: Told) -> None:
    assert told["cached while running"] == 1


def test_operators_without_keys_stay_too(told: Told) -> None:
    results = told["numbers"]

    rows = [2 if batch % 3 else ORDERS_PER_BATCH for batch in range(len(results))]
    for batch, read in enumerate(rows):
        counts = results[str(batch)]
        assert sum(new for _, _, new in counts) == read
        assert sum(count for _, count, _ in counts) == sum(rows[: batch + 1])
    assert sum(told["numbers fetched"].values()) == 0


def test_the_doctor_asks_every_executor(told: Told) -> None:
    found = told.text["findings"]
    assert [one for one in found if one["level"] != "ok"] == []
    reached = {one["where"] for one in found if one["check"] == "driver-port"}
    assert (
        reached
        == {"executor 0", "executor 1", "executor 2"}
        == {one["where"] for one in found if one["check"] == "location" and one["where"] != "driver"}
    )
    assert not (told.job.root.parent / "doctor").exists()


def test_the_calls_of_all_this_were_encrypted(told: Told) -> None:
    assert told["encrypts"], "a server with a certificate takes no calls in clear"
    [found] = [one["found"] for one in told.text["findings"] if one["check"] == "encryption"]
    assert "Tasks call the driver with TLS" in found


# ---- Without executors ----


def test_placed_batches_without_rows_run_every_subtask(spark: SparkSession, tmp_path: Path) -> None:
    """A batch without data follows when the watermark advances; also if the user has adaptive execution see that."""
    batches = [[{"user": f"u{row % 5}", "second": 10 * number + row % 3} for row in range(20)] for number in range(4)]
    job = Job(tmp_path).add(batches)
    rows = job.read(spark, "user string, second long").selectExpr("user", "timestamp_seconds(second) AS at")
    keyed = statelog.key_by(rows, "user", parallelism=3, options=Options(placement="on"), watermark=Watermark("at", 0))
    counts = keyed.window(TumblingWindows(10_000)).agg(Count().alias("rows"))

    def save(df: Any, batch: int) -> None:
        job.save(df, batch)
        df.sparkSession.conf.set("spark.sql.adaptive.streaming.stateless.enabled", "true")

    job.run(counts.selectExpr("user", "unix_seconds(window_start)", "rows"), save)

    expected = [[f"u{user}", 10 * number, 4] for number in range(3) for user in range(5)]
    assert sorted(row for found in job.results().values() for row in found) == sorted(expected)
    offsets = [json.loads(path.read_text().splitlines()[2]) for path in (job.checkpoint / "offsets").glob("[0-9]*")]
    assert len(offsets) > len({offset["logOffset"] for offset in offsets if "logOffset" in offset}), "no empty batch"


def test_rows_and_columns_are_those_of_the_operator_without_placement(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(3, seed=5))
    job.run(job.ledger(spark, 3, Options(placement="on")))
    job.add(make_orders(2, seed=6))
    job.run(job.ledger(spark, 2, Options(placement="off")))
    job.add(make_orders(2, seed=7))
    job.run(job.ledger(spark, 5, Options(placement="on")))

    job.require_exact()
    assert len(ledger_model(job.batches())) == 7


def test_placed_operators_can_follow_each_other(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path, uid="first").add(make_orders(3, seed=9))
    placed = Options(placement="on")
    accounts = job.ledger(spark, 3, placed).selectExpr("count AS seq")
    numbers = statelog.process(
        accounts, Numbers(), "subtask int, count long, new long", uid="second", parallelism=3, options=placed
    )
    job.run(numbers)

    answers = ledger_model(job.batches())
    assert {batch: sum(new for _, _, new in rows) for batch, rows in job.results().items()} == {
        batch: len(answer) for batch, answer in answers.items()
    }


def test_a_failed_query_leaves_no_cached_table(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(2, seed=8))
    context: Any = spark.sparkContext
    earlier = set(context._jsc.getPersistentRDDs().keySet())  # of queries that have just ended

    def cached() -> set[int]:
        return set(context._jsc.getPersistentRDDs().keySet()) - earlier

    def fail(df: Any, batch: int) -> None:
        job.save(df, batch)
        assert cached()
        raise RuntimeError("the sink fails")

    assert "the sink fails" in job.fail(job.ledger(spark, 2, Options(placement="on")), fail)
    wait_until(lambda: not cached(), "the end of the cached table", 30)


@pytest.mark.parametrize("placement", ["on", "off"])
def test_a_batch_is_one_job_without_adaptive_execution(spark: SparkSession, tmp_path: Path, placement: str) -> None:
    """Only the query itself; the user's session stays as it is, and what ``foreachBatch`` does is adaptive."""
    job = Job(tmp_path).add(make_orders(3, seed=4))
    jobs: list[int] = []

    def save(df: Any, batch: int) -> None:
        job.save(df, batch)
        group = str(spark.sparkContext.getLocalProperty("spark.jobGroup.id"))
        jobs.append(len(spark.sparkContext.statusTracker().getJobIdsForGroup(group)))
        counts: Any = df.groupBy("user").count()
        assert "AdaptiveSparkPlan" in str(counts._jdf.queryExecution().executedPlan())

    job.run(job.ledger(spark, 2, Options(placement=placement)), save)

    assert spark.conf.get("spark.sql.adaptive.streaming.stateless.enabled", "true") == "true"
    assert jobs == [1, 2, 3]
    job.require_exact()


def test_settings_that_let_subtasks_move_are_logged(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path).add(make_orders(1))
    with caplog.at_level(logging.WARNING, "statelog"):
        job.ledger(spark, 2)
        assert not caplog.records, "nothing can move in an application with one executor"
        job.ledger(spark, 2, Options(placement="on"))

    (record,) = caplog.records
    assert "spark.shuffle.reduceLocality.enabled is not false" in record.getMessage()
    assert "statelog.spark_conf()" in record.getMessage()
