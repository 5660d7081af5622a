"""Interval joins of two streams: statelog's join_interval and Spark's own stream-stream join."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import numpy as np
import numpy.typing as npt
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.cases import Ratio, compare_cases
from benchmarks.frame import NOT_NEGATIVE, POSSIBLE_KEYS, Result, option, require_measured
from benchmarks.query import BatchSide, Checks, Recorder
from benchmarks.skew import UNIFORM, ZIPF, skewed_key
from statelog import Watermark

STATELOG: Final = "statelog"
SPARK: Final = "Spark join, format 4"
INNER: Final = "inner"
LEFT: Final = "left"

_SPARK_KIND: Final = {INNER: "inner", LEFT: "left_outer"}
_INTERVALS: Final = {UNIFORM: (0, 5), ZIPF: (1, 1)}
"""The bounds in seconds, by the skew: rows of frequent keys would make billions of pairs in a long interval."""
_HELD_BATCHES: Final = 5
_DELAY: Final = "2 seconds"
_SKEWS: Final = click.Choice([UNIFORM, ZIPF])


@dataclass(frozen=True)
class Settings:
    rows_per_batch: tuple[int, ...] = option((200_000,), "Of each of the two streams; may be repeated.")
    skew: tuple[str, ...] = option((UNIFORM,), "How often rows have each key; may be repeated.", _SKEWS)
    keys: int = option(1_000_000, "Number of possible keys.", POSSIBLE_KEYS)
    how: tuple[str, ...] = option((INNER, LEFT), "The kinds of joins; may be repeated.", click.Choice([INNER, LEFT]))
    sides: tuple[str, ...] = option((STATELOG, SPARK), "May be repeated.", click.Choice([STATELOG, SPARK]))
    value_bytes: int = option(100, "Size of a row's value.")
    batches: int = option(14, "Of statelog.")
    spark_batches: int = option(14, "Of Spark's own.")
    parallelism: int = option(2, "Subtasks, state partitions and cores.")
    warm_up: int = option(9, "First batches to leave out: in the others, rows leave the state.", NOT_NEGATIVE)
    rounds: int = option(1, "How often every side runs.")


QUICK: Final = [
    Settings(rows_per_batch=(1_000,), skew=(UNIFORM, ZIPF), keys=1_000, batches=3, spark_batches=3, warm_up=1)
]


@dataclass(frozen=True, kw_only=True)
class JoinSide(BatchSide):
    """Joins each left row with the right one that comes a batch, and a second, later, and with others of its key."""

    how: str
    skew: str
    keys: int
    value_bytes: int
    measures_cpu = True
    output_mode = "append"
    start_ms = 1_000_000_000_000
    """Before any row, Spark's watermark is 1970."""

    def output(self, source: DataFrame, recorder: Recorder) -> DataFrame:
        left, right = self._stream(source, "left", 0), self._stream(source, "right", self.rows_per_batch)
        if self.is_spark:
            source.sparkSession.conf.set("spark.sql.streaming.join.stateFormatVersion", "4")
            left, right = left.withWatermark("left_at", _DELAY), right.withWatermark("right_at", _DELAY)
            first, last = _INTERVALS[self.skew]
            near = f"right_at BETWEEN left_at + INTERVAL {first} SECONDS AND left_at + INTERVAL {last} SECONDS"
            pairs = left.join(right, F.expr(f"left_key = right_key AND {near}"), _SPARK_KIND[self.how])
            return pairs.withColumnRenamed("left_key", "key")
        keyed = statelog.key_by(
            left.withColumnRenamed("left_key", "key"),
            "key",
            parallelism=self.parallelism,
            watermark=Watermark("left_at", _DELAY),
            **self.stored(recorder),
        )
        others = statelog.key_by(right, "right_key", watermark=Watermark("right_at", _DELAY))
        lower, upper = (f"{bound} seconds" for bound in _INTERVALS[self.skew])
        return keyed.join_interval(others, lower=lower, upper=upper, how=self.how)

    def checks(self) -> list[Column]:
        return [F.count(F.lit(1)).alias("rows"), F.sum("key").alias("sum"), F.count("right_value").alias("pairs")]

    def expected(self, session: SparkSession) -> Iterable[Checks]:
        return self._pairs(session)

    def _pairs(self, session: SparkSession) -> Iterator[Checks]:
        """The keys of the right rows of a batch, times the left rows that they meet; each left row meets one."""
        left: list[npt.NDArray[np.int64]] = []
        for first, end in self.ranges:
            before = session.range(first - self.rows_per_batch, end - self.rows_per_batch)
            right, own = (self._counted(rows) for rows in (before, session.range(first, end)))
            left = [*left, own][-_HELD_BATCHES - 1 :]
            # With the times of a Zipf distribution a right row meets the row that has its number, and no other.
            met = right * (sum(left) if self.skew == UNIFORM else int(first > 0))
            pairs = int(met.sum())
            yield {"rows": pairs, "sum": int((met * np.arange(self.keys)).sum()), "pairs": pairs}

    def _counted(self, rows: DataFrame) -> npt.NDArray[np.int64]:
        """How many of some rows have each key."""
        keys = rows.select(skewed_key(self.keys, F.col("id"), self.skew)).toArrow().column(0).to_numpy()
        return np.bincount(keys, minlength=self.keys)

    def _stream(self, source: DataFrame, name: str, behind: int) -> DataFrame:
        number, at = F.col("value") - behind, F.col("timestamp")
        if self.skew == ZIPF:
            at = F.timestamp_micros(F.unix_micros(at) + F.pmod(number, F.lit(self.rows_per_batch)))
        return source.select(
            skewed_key(self.keys, number, self.skew).alias(f"{name}_key"),
            at.alias(f"{name}_at"),
            F.lpad(number.cast("string"), self.value_bytes, "x").alias(f"{name}_value"),
        )


def run(settings: Settings, place: Path) -> Result:
    require_measured(min(settings.batches, settings.spark_batches), settings.warm_up)
    batches = {STATELOG: settings.batches, SPARK: settings.spark_batches}
    cases = {
        f"{size:,} + {size:,} rows, {skew}, {how}": {
            name: JoinSide.of(settings, side=name, how=how, skew=skew, rows_per_batch=size, batches=batches[name])
            for name in settings.sides
        }
        for size in settings.rows_per_batch
        for skew in settings.skew
        for how in settings.how
    }
    ratios = [Ratio(STATELOG, SPARK, 2, is_cpu) for is_cpu in (True, False)]
    return compare_cases(cases, ratios, place, settings.rounds, settings.warm_up)
