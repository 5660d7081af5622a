"""Spark's generated code: a batch uses the code of those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

import statelog
from tests.spark.faults import wait_until
from tests.spark.support import COMPILED

pytestmark = pytest.mark.spark

_WARM = 3
_MEASURED = 6


class Counted(StatefulProcessor):
    """Counts the rows of each key."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Any]:
        (count,) = self._count.get() or (0,)
        count += sum(1 for _ in rows)
        self._count.update((count,))
        yield key[0], count

    def close(self) -> None:
        pass


def _rows(source: DataFrame) -> DataFrame:
    return source.select(F.col("timestamp").alias("at"), (F.col("value") % 7).alias("key"))


def _processor(time_mode: str) -> Callable[[DataFrame], DataFrame]:
    def plan(source: DataFrame) -> DataFrame:
        rows = _rows(source).withWatermark("at", "10 seconds") if time_mode == "EventTime" else _rows(source)
        return statelog.key_by(rows, "key", parallelism=2).transformWithState(
            Counted(), "key long, n long", "update", time_mode
        )

    return plan


def _aggregates(source: DataFrame) -> DataFrame:
    return statelog.key_by(_rows(source), "key", parallelism=2).agg(n=statelog.Count(), combine=True)


PLANS = {
    "no times": _processor("None"),
    "event time": _processor("EventTime"),
    "processing time": _processor("ProcessingTime"),
    "aggregates": _aggregates,
}


@pytest.mark.parametrize("plan", PLANS)
def test_no_code_is_generated_for_a_later_batch(
    spark: SparkSession, configured: Callable[[str, str], None], tmp_path: Path, plan: str
) -> None:
    for name, value in COMPILED.items():
        configured(name, value)
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20).option("numPartitions", 2)
    output = PLANS[plan](source.option("advanceMillisPerBatch", 1000).load())
    writer = output.writeStream.format("noop").outputMode("update").option("checkpointLocation", str(tmp_path))
    compiled: dict[int, int] = {}
    query = writer.start()
    try:
        wait_until(lambda: _last_batch(query) >= _WARM, "the first batches")
        compiled[0] = _compiled(spark)
        first = _last_batch(query)
        wait_until(lambda: _last_batch(query) >= first + _MEASURED, "the batches to measure")
        compiled[1] = _compiled(spark)
    finally:
        query.stop()
    assert compiled[1] == compiled[0] > 0


def _last_batch(query: Any) -> int:
    assert query.exception() is None
    return int(query.lastProgress.batchId) if query.lastProgress else -1


def _compiled(spark: SparkSession) -> int:
    """How often Spark has compiled generated code so far."""
    jvm: Any = spark._jvm
    return int(jvm.org.apache.spark.metrics.source.CodegenMetrics.METRIC_COMPILATION_TIME().getCount())
