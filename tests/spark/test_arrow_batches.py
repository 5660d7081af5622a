"""Spark's limit of the bytes of an Arrow batch: it is lifted only where no batch can reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

import statelog
from statelog.convert.ddl import parse_ddl
from statelog.spark.driver import internals
from statelog.spark.driver.query_session import stay_below
from tests.spark.faults import wait_until

pytestmark = pytest.mark.spark

LIMIT = "spark.sql.execution.arrow.maxBytesPerBatch"
LIFTED = "2147483647"
UNSET = "1"


def _schema(text: str) -> StructType:
    schema = parse_ddl(text)
    assert isinstance(schema, StructType)
    return schema


@pytest.mark.parametrize(
    ("columns", "is_below"),
    [
        ("a long, b decimal(38,2), c timestamp, d date, e boolean, f struct<x: double, y: float>", True),
        ("a long, b string", False),
        ("a long, b binary", False),
        ("a array<long>", False),
        ("a map<long, long>", False),
        ("a struct<x: long, y: struct<z: string>>", False),
        ("a variant", False),
    ],
)
def test_rows_of_fixed_size_stay_below_the_limit(columns: str, is_below: bool) -> None:
    narrow = _schema("a long")

    assert stay_below([narrow, _schema(columns)], 10_000, 64 << 20) is is_below


def test_many_rows_or_columns_may_reach_the_limit() -> None:
    wide = _schema(", ".join(f"c{number} long" for number in range(100)))

    assert stay_below([wide], 10_000, 18_000_000)
    assert not stay_below([wide], 10_000, 17_000_000)
    assert not stay_below([wide], 20_000, 18_000_000)


def _writer(output: DataFrame, place: Path) -> DataStreamWriter:
    return output.writeStream.format("noop").outputMode("update").option("checkpointLocation", str(place))


@contextmanager
def _running(writer: DataStreamWriter) -> Iterator[StreamingQuery]:
    query = writer.start()
    try:
        wait_until(lambda: query.lastProgress is not None or query.exception() is not None, "the first batch")
        assert query.exception() is None
        yield query
    finally:
        query.stop()


def _numbers(spark: SparkSession) -> DataFrame:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).option("numPartitions", 1).load()
    return rows.select((F.col("value") % 3).alias("key"), F.col("value").alias("n"), "timestamp")


def _doubled(spark: SparkSession) -> DataFrame:
    doubled = F.udf(lambda number: number * 2, "long")
    return _numbers(spark).withColumn("n", doubled("n"))


INPUTS: dict[str, tuple[Callable[[SparkSession], DataFrame], str]] = {
    "fixed size": (_numbers, LIFTED),
    "texts": (lambda spark: _numbers(spark).withColumn("text", F.col("n").cast("string")), UNSET),
    "another function": (_doubled, UNSET),
}


@pytest.mark.parametrize("name", INPUTS)
def test_a_query_keeps_the_limit_unless_its_rows_are_of_fixed_size(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    source, expected = INPUTS[name]
    counts = statelog.key_by(source(spark), "key").agg(n=statelog.Count(), parallelism=1)
    with _running(_writer(counts, tmp_path)) as query:
        assert internals.own(query, LIMIT, UNSET) == expected
    assert spark.conf.get(LIMIT, UNSET) == UNSET, "only the query's own session changes"


def test_a_function_of_each_batch_keeps_the_limit(spark: SparkSession, tmp_path: Path) -> None:
    """It runs in the query's session."""
    limits: list[str] = []

    def note(batch: DataFrame, _: int) -> None:
        limits.append(batch.sparkSession.conf.get(LIMIT, UNSET) or "")

    counts = statelog.key_by(_numbers(spark), "key").agg(n=statelog.Count(), parallelism=1)
    writer = counts.writeStream.outputMode("update").foreachBatch(note)
    with _running(writer.option("checkpointLocation", str(tmp_path))):
        assert limits[0] == UNSET


class _Nowhere(DataSource):
    """A sink in Python."""

    @classmethod
    def name(cls) -> str:
        return "nowhere"

    def streamWriter(self, schema: StructType, overwrite: bool) -> _NowhereWriter:
        return _NowhereWriter()


class _NowhereWriter(DataSourceStreamWriter):
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


def test_a_sink_in_python_keeps_the_limit(spark: SparkSession, tmp_path: Path) -> None:
    spark.dataSource.register(_Nowhere)
    firsts = statelog.key_by(_numbers(spark), "key").dedup(parallelism=1)
    with _running(_writer(firsts, tmp_path).format("nowhere").outputMode("append")) as query:
        assert internals.own(query, LIMIT, UNSET) == UNSET


def test_a_limit_that_the_user_has_set_stays(spark: SparkSession, tmp_path: Path) -> None:
    spark.conf.set(LIMIT, "1000000")
    try:
        counts = statelog.key_by(_numbers(spark), "key").agg(n=statelog.Count(), parallelism=1)
        with _running(_writer(counts, tmp_path)) as query:
            assert internals.own(query, LIMIT, UNSET) == "1000000"
    finally:
        spark.conf.unset(LIMIT)
