"""Interval joins of two streams: statelog's join_interval and Spark's own stream-stream join."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.cases import Ratio, compare_cases
from benchmarks.frame import NOT_NEGATIVE, Result, option, require_measured
from benchmarks.query import BatchSide, Checks, Recorder
from statelog import Watermark

STATELOG: Final = "statelog"
SPARK: Final = "Spark join, format 4"
INNER: Final = "inner"
LEFT: Final = "left"

_SPARK_KIND: Final = {INNER: "inner", LEFT: "left_outer"}
_MODULUS: Final = 1_000_003
_NEAR: Final = "right_at BETWEEN left_at AND left_at + INTERVAL 5 SECONDS"
_DELAY: Final = "2 seconds"


@dataclass(frozen=True)
class Settings:
    rows_per_batch: tuple[int, ...] = option((100_000,), "Of each of the two streams; may be repeated.")
    how: tuple[str, ...] = option((INNER, LEFT), "The kinds of joins; may be repeated.", click.Choice([INNER, LEFT]))
    value_bytes: int = option(100, "Size of a row's value.")
    batches: int = option(14, "Of statelog.")
    spark_batches: int = option(14, "Of Spark's own.")
    parallelism: int = option(2, "Subtasks, state partitions and cores.")
    warm_up: int = option(9, "First batches to leave out: in the others, rows leave the state.", NOT_NEGATIVE)
    rounds: int = option(1, "How often every side runs.")


QUICK: Final = [Settings(rows_per_batch=(5_000,), batches=3, spark_batches=3, warm_up=1)]


@dataclass(frozen=True, kw_only=True)
class JoinSide(BatchSide):
    """Joins each row with the one of the other stream that comes a batch, and a second, later."""

    how: str
    value_bytes: int
    output_mode = "append"
    start_ms = 1_000_000_000_000
    """Before any row, Spark's watermark is 1970."""

    def output(self, source: DataFrame, recorder: Recorder) -> DataFrame:
        left, right = self._stream(source, "left", 0), self._stream(source, "right", self.rows_per_batch)
        if self.is_spark:
            source.sparkSession.conf.set("spark.sql.streaming.join.stateFormatVersion", "4")
            left, right = left.withWatermark("left_at", _DELAY), right.withWatermark("right_at", _DELAY)
            pairs = left.join(right, F.expr(f"left_key = right_key AND {_NEAR}"), _SPARK_KIND[self.how])
            return pairs.withColumnRenamed("left_key", "key")
        keyed = statelog.key_by(
            left.withColumnRenamed("left_key", "key"),
            "key",
            parallelism=self.parallelism,
            watermark=Watermark("left_at", _DELAY),
            **self.stored(recorder),
        )
        others = statelog.key_by(right, "right_key", watermark=Watermark("right_at", _DELAY))
        return keyed.join_interval(others, lower=0, upper="5 seconds", how=self.how)

    def checks(self) -> list[Column]:
        keys = F.sum(F.pmod("key", F.lit(_MODULUS))).alias("sum")
        return [F.count(F.lit(1)).alias("rows"), keys, F.count("right_value").alias("pairs")]

    def expected(self, session: SparkSession) -> Iterable[Checks]:
        return self._pairs(session)

    def _pairs(self, session: SparkSession) -> Iterator[Checks]:
        """Each row of a stream meets one of the other stream's next batch, so none is without a match."""
        yield {"rows": 0, "sum": 0, "pairs": 0}
        for first, end in self.ranges[:-1]:
            keys = session.range(first, end).select(F.sum(F.pmod(F.xxhash64("id"), F.lit(_MODULUS))))
            yield {"rows": end - first, "sum": int(keys.collect()[0][0]), "pairs": end - first}

    def _stream(self, source: DataFrame, name: str, behind: int) -> DataFrame:
        number = F.col("value") - behind
        return source.select(
            F.xxhash64(number).alias(f"{name}_key"),
            F.col("timestamp").alias(f"{name}_at"),
            F.lpad(number.cast("string"), self.value_bytes, "x").alias(f"{name}_value"),
        )


def run(settings: Settings, place: Path) -> Result:
    require_measured(min(settings.batches, settings.spark_batches), settings.warm_up)
    batches = {STATELOG: settings.batches, SPARK: settings.spark_batches}
    cases = {
        f"{size:,} + {size:,} rows, {how}": {
            name: JoinSide.of(settings, side=name, how=how, rows_per_batch=size, batches=batches[name])
            for name in batches
        }
        for size in settings.rows_per_batch
        for how in settings.how
    }
    return compare_cases(cases, [Ratio(STATELOG, SPARK, 2)], place, settings.rounds, settings.warm_up)
