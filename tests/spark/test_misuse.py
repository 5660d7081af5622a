"""What a query can do wrong with the operator: the right result, or an error that says what to do.

After every error the remedy is applied, and then nothing is missing and nothing is counted twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark import InheritableThread
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import statelog
from statelog import ConfigurationError, ErrorKind, StateMissingError
from tests.spark.faults import wait_until
from tests.spark.support import LEDGER, Job, Ledger, ledger_model, make_orders

pytestmark = pytest.mark.spark


def limit(df: DataFrame) -> None:
    df.limit(1).collect()


def take(df: DataFrame) -> None:
    df.take(2)


def no_action(df: DataFrame) -> None:
    pass


# ---- Actions that do not read everything ----


@pytest.mark.parametrize("action", [limit, take, no_action])
def test_an_action_that_reads_a_part_stops_the_next_batch(
    spark: SparkSession, tmp_path: Path, action: Callable[[DataFrame], None]
) -> None:
    job = Job(tmp_path).add(make_orders(5, seed=21))

    def save(df: DataFrame, batch: int) -> None:
        action(df) if batch == 2 else job.save(df, batch)

    text = job.fail(job.ledger(spark, 3), save)
    assert "[checkpoint-incomplete]" in text
    assert "operator 'main'" in text
    assert "checkpoint 2 does not exist" in text
    assert "statelog.rewind(checkpointLocation)" in text

    # Starting it again does not help, and says so.
    text = job.fail(job.ledger(spark, 3))
    assert "[checkpoint-missing]" in text
    assert "batch 3, which needs checkpoint 2" in text

    rewound = statelog.rewind(job.checkpoint)
    assert (rewound.next_batch, rewound.taken_back) == (2, [2])
    job.run(job.ledger(spark, 2))
    job.require_exact()
    assert statelog.rewind(job.checkpoint).taken_back == []


def test_a_look_before_the_action_that_reads_everything_is_right(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(3, seed=20))

    def save(df: DataFrame, batch: int) -> None:
        if not df.isEmpty() and df.first() and df.limit(1).collect():
            job.save(df, batch)
        df.take(1)

    job.run(job.ledger(spark, 3), save)
    job.require_exact()


def test_a_limit_in_the_first_batch_can_be_taken_back(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(3, seed=22))

    def save(df: DataFrame, batch: int) -> None:
        limit(df) if batch == 0 else job.save(df, batch)

    text = job.fail(job.ledger(spark, 3), save)
    assert "[checkpoint-incomplete]" in text
    assert "checkpoint 0 does not exist" in text
    assert "statelog.rewind" in text
    time.sleep(2)  # until the driver has closed the location
    assert statelog.rewind(job.checkpoint).next_batch == 0
    job.run(job.ledger(spark, 3))

    job.require_exact()


def test_no_action_in_the_first_batch_is_an_error_that_says_how_to_start_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    job = Job(tmp_path).add(make_orders(3, seed=25))

    def save(df: DataFrame, batch: int) -> None:
        no_action(df) if batch == 0 else job.save(df, batch)

    text = job.fail(job.ledger(spark, 2), save)
    assert "batch 1, which needs checkpoint 0, but there is no checkpoint" in text
    assert "start with a new checkpointLocation" in text
    anew = job.elsewhere("anew")
    anew.run(anew.ledger(spark, 2))

    anew.require_exact()


def test_a_job_group_of_the_users_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(2, seed=26))

    def save(df: DataFrame, batch: int) -> None:
        if batch == 1:
            spark.sparkContext.setJobGroup("load", "the batch's load")
        job.save(df, batch)

    text = job.fail(job.ledger(spark, 2), save)
    assert "[no-batch-id]" in text
    assert "ran in the job group 'load'" in text
    assert "addJobTag" in text
    job.run(job.ledger(spark, 2))
    job.require_exact()


@pytest.mark.parametrize(
    ("action", "what"),
    [(limit, "these subtasks of batch 2 did not run"), (no_action, "no subtask of operator 'main' ran")],
)
def test_a_last_batch_that_was_not_read_is_told_at_the_end_and_stops_the_next_start(
    spark: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    action: Callable[[DataFrame], None],
    what: str,
) -> None:
    job = Job(tmp_path).add(make_orders(3, seed=23))

    def save(df: DataFrame, batch: int) -> None:
        action(df) if batch == 2 else job.save(df, batch)

    query = job.start(job.ledger(spark, 3), save)
    query.awaitTermination()
    error = statelog.error_of(query)
    assert isinstance(error, StateMissingError)
    assert error.kind is ErrorKind.CHECKPOINT_INCOMPLETE
    assert "checkpoint 2 does not exist" in error.message
    assert what in error.message
    assert "statelog.rewind(checkpointLocation)" in error.hint
    wait_until(lambda: "has ended, and cannot continue" in caplog.text, "the driver's log", 10)
    assert str(error) in caplog.text

    job.add(make_orders(1, seed=24))
    again = job.start(job.ledger(spark, 3))
    with pytest.raises(StreamingQueryException):
        again.awaitTermination()
    refusal = statelog.error_of(again)
    assert isinstance(refusal, StateMissingError)
    assert "batch 3, which needs checkpoint 2, but the newest is checkpoint 1" in refusal.message
    assert "statelog.rewind" in refusal.hint
    statelog.rewind(job.checkpoint)
    job.run(job.ledger(spark, 3))

    job.require_exact()


def test_a_run_in_which_no_subtask_ran_has_an_incomplete_end(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(2, seed=28))
    first = job.start(job.ledger(spark, 2))
    first.awaitTermination()
    job.add(make_orders(1, seed=29))
    unread = job.start(job.ledger(spark, 2), lambda df, batch: no_action(df))
    unread.awaitTermination()
    error = statelog.error_of(unread)
    assert isinstance(error, StateMissingError)
    assert "checkpoint 2 does not exist: no subtask of operator 'main' ran in batch 2" in error.message
    assert statelog.error_of(first) is None

    statelog.rewind(job.checkpoint)
    last = job.start(job.ledger(spark, 2))
    last.awaitTermination()
    job.require_exact()
    idle = job.start(job.ledger(spark, 2))
    idle.awaitTermination()
    assert [statelog.error_of(query) for query in (last, idle)] == [None, None]


# ---- Partitions that Spark renumbers ----


def plain_rows(job: Job, session: SparkSession) -> DataFrame:
    """As many columns as the ledger has, from the same stream, without state."""
    return job.read(session).selectExpr("user", "seq AS count", "amount", "'plain' AS history", "action AS items")


@pytest.mark.parametrize("shape", ["coalesce", "union after", "two unions"])
def test_renumbered_partitions_are_refused_and_a_repartition_helps(
    spark: SparkSession, tmp_path: Path, shape: str
) -> None:
    job = Job(tmp_path).add(make_orders(3, seed=26))

    def plan(*, is_mended: bool) -> DataFrame:
        ledger = job.ledger(spark, 3)
        if is_mended:
            ledger = ledger.repartition(2)
        if shape == "coalesce":
            return ledger.coalesce(1)
        if shape == "union after":
            return plain_rows(job, spark).union(ledger)
        return plain_rows(job, spark).union(ledger).union(plain_rows(job, spark))

    def save(df: DataFrame, batch: int) -> None:
        job.write_output(batch, sorted(list(row) for row in df.collect() if row.history != "plain"))

    text = job.fail(plan(is_mended=False), save)
    assert "[partitions-renumbered]" in text
    assert "Put a repartition between the operator and the coalesce or union" in text
    job.run(plan(is_mended=True), save)

    job.require_exact()


def test_a_union_after_the_operator_s_partitions_is_right(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(3, seed=27))

    def save(df: DataFrame, batch: int) -> None:
        job.write_output(batch, sorted(list(row) for row in df.collect() if row.history != "plain"))

    job.run(job.ledger(spark, 3).union(plain_rows(job, spark)), save)

    job.require_exact()


# ---- Several sources and operators ----


def test_a_union_of_two_sources_with_data_in_one(spark: SparkSession, tmp_path: Path) -> None:
    first, second = Job(tmp_path / "first"), Job(tmp_path / "second")
    batches = make_orders(6, seed=28)
    first.add(batches[:1])
    second.add(batches[:1])

    def plan(parallelism: int) -> DataFrame:
        stream = statelog.key_by(first.read(spark).union(second.read(spark)), "user", parallelism=parallelism)
        return stream.transformWithState(Ledger(), LEDGER, "update", "None")

    expected = [batches[0] + batches[0]]
    for parallelism, (job, batch) in enumerate([(first, 1), (second, 2), (second, 3), (first, 4)], 1):
        first.run(plan(parallelism))
        job.add([batches[batch]])
        expected.append(batches[batch])
    first.run(plan(2))

    assert first.results() == ledger_model(expected)


def test_two_operators_whose_sources_have_data_by_turns(spark: SparkSession, tmp_path: Path) -> None:
    jobs = {name: Job(tmp_path / name, uid=name) for name in ("left", "right")}
    batches = make_orders(6, seed=29)
    expected: dict[str, list[Any]] = {"left": [], "right": []}

    def plan(left: int, right: int) -> DataFrame:
        return (
            jobs["left"]
            .ledger(spark, left)
            .selectExpr("'left' AS side", "*")
            .repartition(1)
            .unionAll(jobs["right"].ledger(spark, right).selectExpr("'right' AS side", "*").repartition(1))
        )

    def save(df: DataFrame, batch: int) -> None:
        rows = [list(row) for row in df.collect()]
        for name, job in jobs.items():
            job.write_output(batch, sorted(row[1:] for row in rows if row[0] == name))

    for name in jobs:
        jobs[name].add(batches[:1])
        expected[name].append(batches[0])
    turns = ["left", "right", "right", "left", "left"]
    for number, name in enumerate(turns):
        jobs["left"].run(plan(1 + number % 3, 2 + number % 2), save)
        jobs[name].add([batches[number + 1]])
        for each in jobs:
            expected[each].append(batches[number + 1] if each == name else [])
    jobs["left"].run(plan(2, 3), save)

    for name, job in jobs.items():
        assert job.results() == ledger_model(expected[name]), name


def test_two_operators_need_different_uids(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(2, seed=30))

    def plan(uid: str | None) -> DataFrame:
        first = job.ledger(spark, 2)
        second = statelog.key_by(job.read(spark), "user", uid=uid, parallelism=2).transformWithState(
            Ledger(), LEDGER, "update", "None"
        )
        return first.repartition(1).union(second.repartition(1))

    def save(df: DataFrame, batch: int) -> None:
        rows = sorted(list(row) for row in df.collect())
        assert rows[::2] == rows[1::2]
        job.write_output(batch, rows[::2])

    with pytest.raises(AnalysisException, match=r"metric name is not unique: .*statelog\.main"):
        plan(None)
    with pytest.raises(ConfigurationError, match="another operator named 'main'") as caught:
        statelog.key_by(job.ledger(spark, 2), "user").transformWithState(Ledger(), LEDGER, "update", "None")
    assert caught.value.kind is ErrorKind.UID_REQUIRED
    job.run(plan("second"), save)

    job.require_exact()


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            {},
            {"options": statelog.Options(retained_checkpoints=5)},
            ["'first' and 'second'", "retained_checkpoints: 10 and 5"],
        ),
        (
            {},
            {"options": statelog.Options(tuning=statelog.Tuning(max_file_bytes=5))},
            ["'first' and 'second'", "max_file_bytes: 33554432 and 5"],
        ),
        ({"location": "/one"}, {"location": "/other"}, ["operator 'first' /one", "operator 'second' /other"]),
    ],
)
def test_operators_of_a_query_share_the_options_of_its_log(
    spark: SparkSession, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], words: list[str]
) -> None:
    job = Job(tmp_path).add(make_orders(2, seed=31))
    own = statelog.key_by(job.read(spark), "user", uid="first", **first).agg(statelog.Last("item").alias("item"))
    both = statelog.key_by(own, "user", uid="second", **second).agg(statelog.Last("item").alias("item"))
    text = job.fail(both)
    for word in [*words, "[invalid-option]"]:
        assert word in text


def test_one_dataframe_as_two_queries_is_two_states(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(4, seed=31))
    twin = job.elsewhere("twin")
    df = job.ledger(spark, 2)

    queries = [job.start(df), twin.start(df)]
    for query in queries:
        query.awaitTermination()
    job.require_exact()
    twin.require_exact()

    job.add(make_orders(1, seed=32))
    twin.run(job.ledger(spark, 3))
    twin.require_exact()


# ---- DataFrames and threads of foreachBatch ----


def test_an_action_in_a_plain_thread_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(3, seed=33))
    failures: list[str] = []

    def in_thread(df: DataFrame, batch: int) -> None:
        def act() -> None:
            try:
                job.save(df, batch)
            except Exception as error:
                failures.append(str(error))

        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    text = job.fail(job.ledger(spark, 2), lambda df, batch: in_thread(df, batch) if batch == 1 else job.save(df, batch))
    assert "[no-batch-id]" in failures[0]
    assert "on the thread that Spark calls foreachBatch on" in failures[0]
    # The thread has kept its failure to itself, but the next batch finds out.
    assert "no subtask of operator 'main' ran in batch 1" in text
    statelog.rewind(job.checkpoint)
    job.run(job.ledger(spark, 2))

    job.require_exact()


def test_an_action_in_an_inheritable_thread_is_right(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(3, seed=34))

    def in_thread(df: DataFrame, batch: int) -> None:
        thread = InheritableThread(target=lambda: job.save(df, batch))
        thread.start()
        thread.join()

    job.run(job.ledger(spark, 2), in_thread)
    job.require_exact()


@pytest.mark.parametrize("when", ["before", "after", "instead"])
def test_a_dataframe_kept_from_an_earlier_batch_is_refused(spark: SparkSession, tmp_path: Path, when: str) -> None:
    job = Job(tmp_path).add(make_orders(4, seed=35))
    kept: list[DataFrame] = []

    def save(df: DataFrame, batch: int) -> None:
        kept.append(df)
        if batch == 2 and when != "after":
            kept[0].collect()
        if batch != 2 or when != "instead":
            job.save(df, batch)
        if batch == 2 and when == "after":
            kept[0].collect()

    text = job.fail(job.ledger(spark, 2), save)
    assert "[stale-dataframe]" in text
    assert "use each batch's DataFrame only in its own foreachBatch call" in text
    job.run(job.ledger(spark, 3))

    job.require_exact()


def test_a_kept_dataframe_with_rows_of_few_subtasks_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Its empty partitions carry no time; they must not pass as the later batch's."""
    batches = make_orders(3, seed=36)
    batches[0] = batches[0][:1]
    job = Job(tmp_path).add(batches)
    kept: list[DataFrame] = []

    def save(df: DataFrame, batch: int) -> None:
        kept.append(df)
        job.save(df, batch)
        if batch == 1:
            kept[0].collect()

    text = job.fail(job.ledger(spark, 8), save)
    assert "[stale-dataframe]" in text
    job.run(job.ledger(spark, 3))

    job.require_exact()


# ---- Settings that statelog cannot honour ----


def test_encryption_of_local_files_is_refused_unless_plain_ones_are_accepted(
    spark: SparkSession, tmp_path: Path
) -> None:
    job = Job(tmp_path).add(make_orders(1))
    conf = spark.sparkContext._conf
    conf.set("spark.io.encryption.enabled", "true")
    try:
        with pytest.raises(ConfigurationError, match=r"spark.io.encryption.enabled is on.*plain_local_files=True"):
            job.ledger(spark, 2)
        job.ledger(spark, 2, statelog.Options(plain_local_files=True))
    finally:
        conf.set("spark.io.encryption.enabled", "false")


# ---- Settings under which batches would not be repeatable ----


@pytest.mark.parametrize("value", ["true", "TRUE"])
def test_speculation_is_refused(spark: SparkSession, tmp_path: Path, value: str) -> None:
    job = Job(tmp_path).add(make_orders(1))
    conf = spark.sparkContext._conf
    conf.set("spark.speculation", value)
    try:
        with pytest.raises(ConfigurationError, match="speculation is on") as error:
            job.ledger(spark, 2)
    finally:
        conf.set("spark.speculation", "false")
    assert "[unsupported-setting]" in str(error.value)
    job.run(job.ledger(spark, 2))

    job.require_exact()
