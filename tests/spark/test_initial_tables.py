"""DataFrames that are loaded as states before a query's first batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import ArrayType, DoubleType, LongType, StructField, StructType, TimestampNTZType

import statelog
from statelog import ConfigurationError, Options, Tuning
from tests.spark.inputs import add_json
from tests.spark.support import LEDGER, Answer, Job, Ledger, ledger_model, make_orders

pytestmark = pytest.mark.spark

BEFORE = 4


def held_after(answers: dict[int, Answer]) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of the ledger's states after some batches, by state."""
    newest = {row[0]: row for batch in sorted(answers) for row in answers[batch]}
    held: dict[str, list[tuple[Any, ...]]] = {"account": [], "history": [], "items": []}
    for user, count, amount, history, items in newest.values():
        if count:
            held["account"].append((user, count, amount))
        held["history"] += [(user, place, int(one)) for place, one in enumerate(history.split(",")) if one]
        held["items"] += [(user, *pair.split("=")) for pair in items.split(",") if pair]
    return held


def tables_of(spark: SparkSession, held: Mapping[str, list[tuple[Any, ...]]]) -> dict[str, DataFrame]:
    """The same as DataFrames, in any order and with types that need a cast."""
    columns = {
        "account": "key_user string, value_count int, value_amount long",
        "history": "key_user string, position int, value_amount int",
        "items": "key_user string, mapkey_item string, value_count string",
    }
    frames = {name: spark.createDataFrame(rows[::-1], columns[name]) for name, rows in held.items()}
    return frames | {"items": frames["items"].selectExpr("int(value_count) value_count", "mapkey_item", "key_user")}


def ledger(job: Job, spark: SparkSession, tables: Mapping[str, DataFrame], parallelism: int = 2) -> DataFrame:
    return statelog.key_by(job.read(spark), "user", parallelism=parallelism).transformWithState(
        Ledger(), LEDGER, "update", "None", initialState=tables
    )


@pytest.mark.parametrize("changelog", [True, False])
def test_every_kind_is_loaded_once_whatever_happens_to_the_first_batch(
    spark: SparkSession, tmp_path: Path, changelog: bool
) -> None:
    orders = make_orders(8, seed=7)
    answers = ledger_model(orders)
    expected = {batch - BEFORE: answer for batch, answer in answers.items() if batch >= BEFORE}
    tables = tables_of(spark, held_after({batch: answers[batch] for batch in range(BEFORE)}))
    job = Job(tmp_path).add(orders[BEFORE:6])

    def break_down(frame: DataFrame, batch: int) -> None:
        frame.collect()
        raise RuntimeError("the sink is broken")

    wrong = {"account": tables["account"].selectExpr("key_user", "value_count + 1 value_count", "value_amount")}
    job.fail(ledger(job, spark, wrong), break_down)
    frame = statelog.key_by(
        job.read(spark), "user", parallelism=3, options=Options(tuning=Tuning(changelog=changelog))
    ).transformWithState(Ledger(), LEDGER, "update", "None", initialState=tables)
    job.run(frame)
    job.add(orders[6:])
    job.run(ledger(job, spark, tables, parallelism=2))
    assert job.results() == expected, "the tables of a later start are not loaded"
    saved = statelog.savepoint(job.checkpoint, tmp_path / "savepoint")
    assert saved.batch == 3


def test_the_tables_of_a_savepoint_can_be_changed_and_loaded(spark: SparkSession, tmp_path: Path) -> None:
    orders = make_orders(6, seed=8)
    job = Job(tmp_path).add(orders[:BEFORE])
    job.run(job.ledger(spark, 2))
    statelog.savepoint(job.checkpoint, tmp_path / "savepoint")
    states = tmp_path / "savepoint" / "operators" / "main" / "states"
    tables = {name: spark.read.parquet(str(states / name)) for name in ("account", "history", "items")}
    # Their own amounts are doubled, so what comes out is more by as much as there was.
    tables["account"] = tables["account"].withColumn("value_amount", tables["account"].value_amount * 2)
    other = Job(tmp_path / "other").add(orders[BEFORE:])
    other.run(ledger(other, spark, tables, 3))
    answers = ledger_model(orders)
    before = {row[0]: row[2] for batch in range(BEFORE) for row in answers[batch]}
    closed = {order["user"] for batch in orders[BEFORE:] for order in batch if order["action"] == "close"}
    found = other.results()
    compared = 0
    for batch in range(2):
        for row, answer in zip(found[batch], answers[batch + BEFORE], strict=True):
            if row[0] not in closed:
                assert row == [*answer[:2], answer[2] + before.get(row[0], 0), *answer[3:]]
                compared += 1
    assert compared


class Alarm(StatefulProcessor):
    """Tells of every timer that fires."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(key=key.key, at=expiredTimerInfo.getExpiryTimeInMs())

    def close(self) -> None:
        pass


def test_timers_are_loaded(spark: SparkSession, tmp_path: Path) -> None:
    add_json(tmp_path / "input", [[{"key": "x"}]])
    rows = spark.readStream.schema("key string").json(str(tmp_path / "input"))
    timers = spark.createDataFrame([("a", 5), ("b", 7), ("a", 2**60)], "key_key string, time_ms long")
    alarms = statelog.key_by(rows, "key", parallelism=2).transformWithState(
        Alarm(), "key string, at long", "append", "ProcessingTime", initialState={"$timers": timers}
    )
    found: list[tuple[str, int]] = []
    query = alarms.writeStream.foreachBatch(lambda frame, batch: found.extend(map(tuple, frame.collect())))
    query = query.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    assert sorted(found) == [("a", 5), ("b", 7)]


def test_mistakes_are_named(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(1))
    good = tables_of(spark, {"account": [("u", 1, 2)], "history": [("u", 0, 2)], "items": []})
    account = good["account"]
    mistakes = {
        r"not a state of the processor.*account, history, items": {"acount": account},
        r"has no column 'value_amount'.*takes the columns key_user, value_count, value_amount": {
            "account": account.drop("value_amount")
        },
        r"column 'value_count' is array<int>, but the state's is bigint.*Cast it yourself": {
            "account": account.selectExpr("key_user", "array(1) value_count", "value_amount")
        },
        r"has a column 'expires_ms', which the state does not have": {
            "account": account.selectExpr("*", "1L expires_ms")
        },
        r"has no column 'value_count'.*Did you mean 'value_cuont'": {
            "account": account.withColumnRenamed("value_count", "value_cuont")
        },
        r"has two columns 'key_user'": {"account": account.select("key_user", "*")},
        r"column 'key_user' is bigint, but the stream's is string. .*Cast it yourself": {
            "account": account.selectExpr("1L key_user", "value_count", "value_amount")
        },
        r"column 'position' is decimal\(5,0\), but the state's is bigint": {
            "history": good["history"].withColumn("position", F.lit(0).cast("decimal(5,0)"))
        },
        r"column 'mapkey_item' is int, but the state's is string": {
            "items": good["items"].withColumn("mapkey_item", F.lit(0))
        },
        r"is a streaming DataFrame": {"account": job.read(spark)},
    }
    for message, tables in mistakes.items():
        with pytest.raises(ConfigurationError, match=message):
            ledger(job, spark, tables)
    batch = statelog.key_by(spark.createDataFrame([("u",)], "user string"), "user")
    with pytest.raises(ConfigurationError, match="batch query"):
        batch.transformWithState(Ledger(), LEDGER, "update", "None", initialState=good)
    twice = {"account": account.union(account)}
    failure = job.fail(ledger(job, spark, twice))
    assert "key ('u',) has two rows for one entry" in failure
    assert "could not be stored before the first batch" in failure


class Times(StatefulProcessor):
    """Returns what was loaded."""

    def init(self, handle: Any) -> None:
        self._held = handle.getValueState("held", HELD)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        held = self._held.get()
        yield Row(key=str(key[0]), held="none" if held is None else repr(held))

    def close(self) -> None:
        pass


HELD = StructType(
    [
        StructField("local", TimestampNTZType()),
        StructField("pair", StructType([StructField("b", DoubleType()), StructField("a", TimestampNTZType())])),
        StructField("path", ArrayType(LongType(), containsNull=False)),
    ]
)


def test_loaded_values_are_what_spark_casts_them_to(spark: SparkSession, tmp_path: Path) -> None:
    """An array without nulls is read by Spark as one that may have some, so its values decide."""
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    spark.conf.set("spark.sql.ansi.enabled", "false")
    try:
        job = Job(tmp_path)
        add_json(job.input, [[{"key": 1}, {"key": 2}]])

        def frame(*expressions: str) -> DataFrame:
            table = spark.sql(f"SELECT {', '.join(expressions)}")
            return statelog.key_by(job.read(spark, "key int"), "key", parallelism=1).transformWithState(
                Times(), "key string, held string", "update", "None", initialState={"held": table}
            )

        key, local = "1S AS key_key", "date'2024-07-01' AS value_local"
        pair = "named_struct('a', timestamp_ntz'2024-07-01 12:00:00', 'b', float(0.5)) AS value_pair"
        failure = job.fail(frame(key, local, pair, "array(1, null) AS value_path"))
        assert "column 'value_path' holds a null within list" in failure
        for instant in ("timestamp'2024-07-01 12:00:00'", "now()"):
            with pytest.raises(
                ConfigurationError, match=r"'value_local' is timestamp, but the state's is timestamp_ntz"
            ):
                frame(key, f"{instant} AS value_local", pair, "array() AS value_path")
        with pytest.raises(ConfigurationError, match=r"'key_key' is bigint, but the stream's is int"):
            frame("4294967297L AS key_key", local, pair, "array() AS value_path")
        job.run(frame(key, local, pair, "array(1, 2Y) AS value_path"))
        held = "(datetime.datetime(2024, 7, 1, 0, 0), Row(b=0.5, a=datetime.datetime(2024, 7, 1, 12, 0)), [1, 2])"
        assert job.results() == {0: [["1", held], ["2", "none"]]}
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        spark.conf.unset("spark.sql.ansi.enabled")


@pytest.mark.parametrize("kind", ["struct<>", "array<struct<>>", "map<int,struct<>>", "struct<a: struct<>>", "time(9)"])
def test_types_without_a_stored_form_are_refused_where_they_are_declared(spark: SparkSession, kind: str) -> None:
    spark.conf.set("spark.sql.timeType.enabled", "true")
    try:
        df = spark.sql(f"SELECT 1 AS k, cast(null AS {kind}) AS x")
        keyed = statelog.key_by(df, "k")
        with pytest.raises(ConfigurationError, match=r"output column 'x' has type (struct<>|time\(9\))"):
            keyed.transformWithState(Times(), f"x {kind}", "update", "None")
        with pytest.raises(ConfigurationError, match=r"grouping column 'x' has type (struct<>|time\(9\))"):
            statelog.key_by(df, "x")
        with pytest.raises(ConfigurationError, match=r"state 'last', field 'x' has type (struct<>|time\(9\))"):
            keyed.transformWithState(Declares(kind), "k int", "update", "None")
        found = keyed.transformWithState(Times(), "key string, held string", "update", "None").collect()
        assert found == [Row(key="1", held="none")]
    finally:
        spark.conf.unset("spark.sql.timeType.enabled")


class Declares(Times):
    """Declares a state of a type."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def init(self, handle: Any) -> None:
        self._held = handle.getValueState("last", f"x {self._kind}")
