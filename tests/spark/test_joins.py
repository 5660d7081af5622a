"""Joins in Spark: against Spark's own joins of the same rows, with restarts, readers of state, mistakes."""

from __future__ import annotations

import datetime
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F

import statelog
from statelog import ConfigurationError, Options, Watermark
from tests.spark.faults import wait_until
from tests.spark.inputs import add_json

pytestmark = pytest.mark.spark

CLICKS = "user string, at timestamp, n long"
BUYS = "who string, at timestamp, n long"
START = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)


def _add(root: Path, *, seed: int, batches: range) -> None:
    """Rows of some users on both sides, 40 seconds a batch, up to 20 seconds out of order."""
    rng = random.Random(seed)
    for batch in batches:
        for folder, key in (("clicks", "user"), ("buys", "who")):
            rows = [
                {
                    key: rng.choice([*"abcdefgh", None]),
                    "at": (START + datetime.timedelta(seconds=round(batch * 40 + rng.uniform(-20, 40), 3))).isoformat(),
                    "n": rng.randrange(1_000_000),
                }
                for _ in range(30)
            ]
            add_json(root / folder, [rows])


def _sides(spark: SparkSession, root: Path) -> tuple[DataFrame, DataFrame]:
    """The clicks and the buys, as streams."""
    reader = spark.readStream.option("maxFilesPerTrigger", 1)
    return reader.schema(CLICKS).json(str(root / "clicks")), reader.schema(BUYS).json(str(root / "buys"))


def _joined(spark: SparkSession, root: Path, how: str, **own: Any) -> DataFrame:
    clicks, buys = _sides(spark, root)
    left = statelog.key_by(clicks, "user", watermark=Watermark("at", "60 seconds"), **own)
    right = statelog.key_by(buys, "who", watermark=Watermark("at", "90 seconds"))
    return left.join_interval(right, lower="-5 seconds", upper="20 seconds", how=how)


def _run(df: DataFrame, root: Path, checkpoint: str = "checkpoint") -> list[Row]:
    """Run a query over all input that is there, and return its output."""
    output: list[Row] = []

    def collect(batch: DataFrame, number: int) -> None:
        output.extend(batch.collect())

    writer = df.writeStream.foreachBatch(collect).option("checkpointLocation", str(root / checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()
    return output


def _condition() -> Any:
    near = F.expr("b.at BETWEEN a.at - INTERVAL 5 SECONDS AND a.at + INTERVAL 20 SECONDS")
    return (F.col("a.user") == F.col("b.who")) & near


def _by_spark(left: DataFrame, right: DataFrame, how: str) -> DataFrame:
    pairs = left.alias("a").join(right.alias("b"), _condition(), how)
    return pairs.select(F.coalesce("a.user", "b.who"), "a.at", "a.n", "b.at", "b.n")


@pytest.mark.smoke
def test_an_inner_join_is_that_of_spark(spark: SparkSession, tmp_path: Path) -> None:
    """With a restart that changes the parallelism in the middle of the input."""
    _add(tmp_path, seed=1, batches=range(1, 3))
    output = _run(_joined(spark, tmp_path, "inner", parallelism=2), tmp_path)
    _add(tmp_path, seed=2, batches=range(3, 5))
    output += _run(_joined(spark, tmp_path, "inner", parallelism=3), tmp_path)

    clicks, buys = (
        side.withWatermark("at", delay)
        for side, delay in zip(_sides(spark, tmp_path), ("60 seconds", "90 seconds"), strict=True)
    )
    expected = _run(_by_spark(clicks, buys, "inner"), tmp_path, "spark")
    assert len(output) > 20
    assert Counter(map(tuple, output)) == Counter(map(tuple, expected))
    assert output[0].asDict().keys() == {"user", "at_left", "n_left", "at_right", "n_right"}


@pytest.mark.parametrize("how", ["left", "full"])
def test_outer_joins_return_each_row_without_a_match_once(spark: SparkSession, tmp_path: Path, how: str) -> None:
    _add(tmp_path, seed=3, batches=range(1, 4))
    output = _run(_joined(spark, tmp_path, how, parallelism=2), tmp_path)
    far = (START + datetime.timedelta(seconds=10_000)).isoformat()
    add_json(tmp_path / "clicks", [[{"user": "z", "at": far, "n": 0}]])
    add_json(tmp_path / "buys", [[{"who": "y", "at": far, "n": 0}]])
    output += _run(_joined(spark, tmp_path, how, parallelism=1), tmp_path)
    output += _run(_joined(spark, tmp_path, how, parallelism=1), tmp_path)  # nothing, but on Spark 4.1 (docs/time.md)

    clicks, buys = (
        spark.read.schema(schema).json(str(tmp_path / folder)).where(f"{key} IS NULL OR {key} NOT IN ('y', 'z')")
        for schema, folder, key in ((CLICKS, "clicks", "user"), (BUYS, "buys", "who"))
    )
    expected = Counter(map(tuple, _by_spark(clicks, buys, how).collect()))
    assert Counter(map(tuple, output)) == expected
    assert sum(count for row, count in expected.items() if row[4] is None)
    assert (how == "full") == any(row[2] is None for row in expected)

    # A batch has all rows, so nothing waits: a timeout changes nothing, and needs no heartbeat.
    in_batch = statelog.key_by(clicks, "user", watermark=Watermark("at")).join_interval(
        statelog.key_by(buys, "who", watermark=Watermark("at")),
        lower="-5 seconds",
        upper="20 seconds",
        how=how,
        timeout="1 minute",
    )
    assert Counter(map(tuple, in_batch.collect())) == expected


@pytest.mark.parametrize("how", ["left", "semi", "anti"])
def test_a_condition_is_that_of_a_join_of_spark(spark: SparkSession, tmp_path: Path, how: str) -> None:
    _add(tmp_path, seed=4, batches=range(1, 5))
    clicks, buys = (
        spark.read.schema(schema).json(str(tmp_path / folder))
        for schema, folder in ((CLICKS, "clicks"), (BUYS, "buys"))
    )
    pairs = clicks.alias("a").join(buys.alias("b"), _condition() & F.expr("a.n + 400000 < b.n"), how)
    columns = ["a.user", "a.at", "a.n", *(["b.at", "b.n"] if how == "left" else [])]
    joined = statelog.key_by(clicks, "user", watermark=Watermark("at")).join_interval(
        statelog.key_by(buys, "who", watermark=Watermark("at")),
        lower="-5 seconds",
        upper="20 seconds",
        how=how,
        condition=pc.field("n_left") + 400_000 < pc.field("n_right"),
    )
    expected = Counter(map(tuple, pairs.select(columns).collect()))
    assert len(expected) > 5
    assert Counter(map(tuple, joined.collect())) == expected


def _newest_by_spark(left: DataFrame, right: DataFrame, tolerance: str) -> DataFrame:
    near = F.expr(f"b.at <= a.at AND b.at >= a.at - INTERVAL {tolerance}")
    rows = left.alias("a").join(right.alias("b"), (F.col("a.user") == F.col("b.who")) & near, "left")
    newest = Window.partitionBy("a.user", "a.at", "a.n").orderBy(F.desc("b.at"))
    rows = rows.withColumn("rank", F.row_number().over(newest)).where("rank = 1")
    return rows.select("a.user", "a.at", "a.n", "b.at", "b.n")


def test_an_asof_join_returns_the_newest_row_that_is_not_later(spark: SparkSession, tmp_path: Path) -> None:
    """With a restart that changes the parallelism in the middle of the input."""

    def joined(parallelism: int) -> DataFrame:
        clicks, buys = _sides(spark, tmp_path)
        left = statelog.key_by(clicks, "user", parallelism=parallelism, watermark=Watermark("at", "60 seconds"))
        right = statelog.key_by(buys, "who", watermark=Watermark("at", "90 seconds"))
        return left.join_asof(right, tolerance="15 seconds", how="left")

    _add(tmp_path, seed=7, batches=range(1, 3))
    output = _run(joined(2), tmp_path)
    _add(tmp_path, seed=8, batches=range(3, 5))
    far = (START + datetime.timedelta(seconds=10_000)).isoformat()
    add_json(tmp_path / "clicks", [[{"user": "z", "at": far, "n": 0}]])
    add_json(tmp_path / "buys", [[{"who": "y", "at": far, "n": 0}]])
    output += _run(joined(1), tmp_path)
    output += _run(joined(1), tmp_path)  # nothing, but on Spark 4.1 (docs/time.md)

    clicks, buys = (
        spark.read.schema(schema).json(str(tmp_path / folder)).where(f"{key} IS NULL OR {key} NOT IN ('y', 'z')")
        for schema, folder, key in ((CLICKS, "clicks", "user"), (BUYS, "buys", "who"))
    )
    expected = Counter(map(tuple, _newest_by_spark(clicks, buys, "15 SECONDS").collect()))
    assert Counter(map(tuple, output)) == expected
    assert 20 < sum(count for row, count in expected.items() if row[4] is not None) < expected.total()
    assert output[0].asDict().keys() == {"user", "at_left", "n_left", "at_right", "n_right"}

    for wait in (True, False):
        in_batch = statelog.key_by(clicks, "user", watermark=Watermark("at")).join_asof(
            statelog.key_by(buys, "who", watermark=Watermark("at")), tolerance="15 seconds", how="left", wait=wait
        )
        assert Counter(map(tuple, in_batch.collect())) == expected


def test_an_asof_join_that_does_not_wait_answers_in_the_same_batch(spark: SparkSession, tmp_path: Path) -> None:
    at = [(START + datetime.timedelta(seconds=seconds)).isoformat() for seconds in (0, 5, 10)]
    add_json(tmp_path / "buys", [[{"who": "a", "at": at[0], "n": 1}, {"who": "a", "at": at[1], "n": 2}]])
    add_json(tmp_path / "clicks", [[{"user": "a", "at": at[2], "n": 3}, {"user": "b", "at": at[2], "n": 4}]])
    clicks, buys = _sides(spark, tmp_path)
    joined = _left(clicks).join_asof(_right(buys), wait=False, how="left", suffixes=("", "_of_buy"))
    output = _run(joined, tmp_path)
    assert sorted((row.n, row.n_of_buy) for row in output) == [(3, 2), (4, None)]
    # The watermark is that of the buys, the smaller one: both are up to it, and the newest is kept.
    kept = statelog.read_state(str(tmp_path / "checkpoint"), state="join.right").read_all()
    assert kept["value_n"].to_pylist() == [2]


def test_waiting_rows_are_a_dataframe(spark: SparkSession, tmp_path: Path) -> None:
    _add(tmp_path, seed=4, batches=range(1, 2))
    _run(_joined(spark, tmp_path, "left"), tmp_path)
    rows = statelog.read_state(str(tmp_path / "checkpoint"), state="join.left").read_all()
    clicks = spark.read.schema(CLICKS).json(str(tmp_path / "clicks")).where("user IS NOT NULL")
    # The watermark is the smaller one: 90 seconds behind the newest buy. So all clicks wait.
    assert sorted(rows["value_n"].to_pylist()) == sorted(row.n for row in clicks.collect())
    assert set(rows["value_join_matched"].to_pylist()) == {True, False}
    assert rows["mapkey_time_ms"].to_pylist() == [int(at.timestamp() * 1000) for at in rows["value_at"].to_pylist()]


def test_a_side_that_is_idle_does_not_hold_back_rows_without_a_match(spark: SparkSession, tmp_path: Path) -> None:
    """The buys have had no row at all; batches without data notice their silence."""
    at = [(START + datetime.timedelta(seconds=seconds)).isoformat() for seconds in (0, 5, 100)]
    add_json(tmp_path / "clicks", [[{"user": "a", "at": at[0], "n": 1}, {"user": "b", "at": at[1], "n": 2}]])
    (tmp_path / "buys").mkdir()
    clicks, buys = _sides(spark, tmp_path)
    left = statelog.key_by(clicks, "user", options=Options(heartbeat_s=0.2), watermark=Watermark("at", idle="1 hour"))
    joined = left.join_interval(
        statelog.key_by(buys, "who", watermark=Watermark("at", idle="500 milliseconds")),
        lower=0,
        upper="10 seconds",
        how="anti",
    )
    output: list[Row] = []

    def collect(batch: DataFrame, number: int) -> None:
        output.extend(batch.collect())

    query = joined.writeStream.foreachBatch(collect).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        add_json(tmp_path / "clicks", [[{"user": "c", "at": at[2], "n": 3}]])
        wait_until(lambda: len(output) == 2 or not query.isActive, "two rows", 120)
    finally:
        query.stop()
    assert query.exception() is None
    assert sorted(row.n for row in output) == [1, 2]


def test_a_row_times_out_although_the_other_side_is_silent(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing else happens in the query: batches without data notice that the time is over."""
    at = [(START + datetime.timedelta(seconds=seconds)).isoformat() for seconds in (0, 5)]
    add_json(tmp_path / "clicks", [[{"user": "a", "at": at[0], "n": 1}, {"user": "b", "at": at[1], "n": 2}]])
    (tmp_path / "buys").mkdir()
    clicks, buys = _sides(spark, tmp_path)
    left = statelog.key_by(clicks, "user", options=Options(heartbeat_s=0.2), watermark=Watermark("at"))
    joined = left.join_interval(_right(buys), lower=0, upper="10 seconds", how="left", timeout="1 second")
    output: list[Row] = []

    def collect(batch: DataFrame, number: int) -> None:
        output.extend(batch.collect())

    query = joined.writeStream.foreachBatch(collect).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        wait_until(lambda: len(output) == 2 or not query.isActive, "two rows", 120)
    finally:
        query.stop()
    assert query.exception() is None
    assert sorted((row.n_left, row.n_right) for row in output) == [(1, None), (2, None)]


MISTAKES: dict[str, tuple[Callable[[DataFrame, DataFrame, DataFrame], Any], str]] = {
    "no watermark": (
        lambda a, b, _: statelog.key_by(a, "user").join_interval(_right(b), lower=0, upper=1),
        "the left side has no watermark",
    ),
    "no watermark on the right": (
        lambda a, b, _: _left(a).join_interval(statelog.key_by(b, "who"), lower=0, upper=1),
        "the right side has no watermark",
    ),
    "batch": (
        lambda a, _, batch: _left(a).join_interval(_right(batch), lower=0, upper=1),
        "the right side is a batch DataFrame",
    ),
    "batch on the left": (
        lambda a, b, batch: _left(batch.withColumnRenamed("who", "user")).join_interval(_right(b), lower=0, upper=1),
        "the left side is a batch DataFrame",
    ),
    "options on the right": (
        lambda a, b, _: _left(a).join_interval(
            statelog.key_by(b, "who", uid="b", options=Options(), watermark=Watermark("at")), lower=0, upper=1
        ),
        "the right side has uid, options",
    ),
    "several inputs": (
        lambda a, b, _: _left(a).join_interval(
            statelog.key_by(b, "who", watermark=Watermark("at", 0, inputs=2, input_column="n")), lower=0, upper=1
        ),
        "the watermark of the right side has 2 inputs",
    ),
    "idle without a heartbeat": (
        lambda a, b, _: statelog.key_by(a, "user", watermark=Watermark("at", idle="1 second")).join_interval(
            _right(b), lower=0, upper=1
        ),
        "the watermark has idle, but the query has no heartbeat",
    ),
    "idle of one input": (
        lambda a, b, _: statelog.key_by(
            a, "user", options=Options(heartbeat_s=1.0), watermark=Watermark("at", idle=1000)
        ).dedup(statelog.Ttl("1 hour", time="event")),
        "the watermark has idle but only one input",
    ),
    "timeout without a heartbeat": (
        lambda a, b, _: _left(a).join_interval(_right(b), lower=0, upper=1, how="left", timeout="1 minute"),
        "join_interval has a timeout, but the query has no heartbeat",
    ),
    "max_ahead": (
        lambda a, b, _: _left(a).join_interval(
            statelog.key_by(b, "who", watermark=Watermark("at", max_ahead="1 hour")), lower=0, upper=1
        ),
        "different values of max_ahead",
    ),
    "as of, no watermark": (
        lambda a, b, _: _left(a).join_asof(statelog.key_by(b, "who")),
        "join_asof: the right side has no watermark",
    ),
    "as of, a batch": (
        lambda a, _, batch: _left(a).join_asof(_right(batch)),
        "join_asof: the right side is a batch DataFrame",
    ),
    "as of, a parallelism on the right": (
        lambda a, b, _: _left(a).join_asof(
            statelog.key_by(b, "who", parallelism=2, location="/x", watermark=Watermark("at"))
        ),
        "join_asof: the right side has parallelism, location",
    ),
    "as of, another kind": (
        lambda a, b, _: _left(a).join_asof(_right(b), how="full"),
        "join_asof: how is 'full'",
    ),
    "as of, a DataFrame": (
        lambda a, b, _: _left(a).join_asof(b),  # type: ignore[arg-type]  # the mistake
        "join_asof takes a keyed stream, not DataFrame",
    ),
    "a DataFrame": (
        lambda a, b, _: _left(a).join_interval(b, lower=0, upper=1),  # type: ignore[arg-type]  # the mistake
        "takes a keyed stream, not DataFrame",
    ),
}


def _left(df: DataFrame) -> statelog.KeyedStream:
    return statelog.key_by(df, "user", watermark=Watermark("at"))


def _right(df: DataFrame) -> statelog.KeyedStream:
    return statelog.key_by(df, "who", watermark=Watermark("at"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(spark: SparkSession, tmp_path: Path, mistake: str) -> None:
    call, message = MISTAKES[mistake]
    _add(tmp_path, seed=5, batches=range(1, 2))
    batch = spark.read.schema(BUYS).json(str(tmp_path / "buys"))
    with pytest.raises(ConfigurationError, match=message) as caught:
        call(*_sides(spark, tmp_path), batch)
    assert caught.value.hint


def test_a_keyed_stream_with_a_uid_is_joined_once(spark: SparkSession, tmp_path: Path) -> None:
    _add(tmp_path, seed=6, batches=range(1, 2))
    clicks, buys = _sides(spark, tmp_path)
    left = statelog.key_by(clicks, "user", uid="join", watermark=Watermark("at"))
    left.join_interval(_right(buys), lower=0, upper=1)
    with pytest.raises(ConfigurationError, match="was used for another operator"):
        left.join_interval(_right(buys), lower=0, upper=1)
