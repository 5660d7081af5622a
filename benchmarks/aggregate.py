"""Count and two sums per key: statelog's aggregates, Spark's groupBy().agg(), and no state at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.cases import Ratio, compare_cases
from benchmarks.frame import NOT_NEGATIVE, POSSIBLE_KEYS, Result, option, require_measured
from benchmarks.processors import count_batches
from benchmarks.query import BatchSide, Checks, Recorder
from benchmarks.skew import SKEWS, UNIFORM, ZIPF, skewed_key
from benchmarks.sliding import SPARK_WINDOWS, SlidingSide

STATELOG: Final = "statelog"
COMBINING: Final = "statelog, combine=True"
SPARK: Final = "Spark groupBy"
CEILING: Final = "stateless ceiling"

_VALUES: Final = 1000


@dataclass(frozen=True)
class Settings:
    rows_per_batch: tuple[int, ...] = option((200_000, 2_000_000), "Of all sides; may be repeated.")
    skew: tuple[str, ...] = option((UNIFORM, ZIPF), "How keys are distributed; may be repeated.", SKEWS)
    keys: int = option(1_000_000, "Number of possible keys.", POSSIBLE_KEYS)
    batches: int = option(12, "Of statelog's sides and the ceiling.")
    spark_batches: int = option(4, "Of Spark's own.")
    parallelism: int = option(2, "Subtasks, state partitions and cores.")
    warm_up: int = option(2, "First batches to leave out.", NOT_NEGATIVE)
    rounds: int = option(1, "How often every side runs.")
    windows: bool = option(False, "Of each key's sliding windows, 10 s long, one every second.")


_SMALL: Final = Settings(rows_per_batch=(5_000,), skew=(ZIPF,), keys=1_000, batches=3, spark_batches=3, warm_up=1)
QUICK: Final = [_SMALL, dataclasses.replace(_SMALL, windows=True, batches=5, spark_batches=5)]


@dataclass(frozen=True, kw_only=True)
class AggregateSide(BatchSide):
    """Aggregates rows by key, or only reads them."""

    keys: int
    skew: str

    def output(self, source: DataFrame, recorder: Recorder) -> DataFrame:
        rows = source.select(*self._columns(F.col("value")))
        if self.side == CEILING:
            return rows.repartition(self.parallelism, "key").mapInArrow(count_batches, "n long")
        if self.is_spark:
            return rows.groupBy("key").agg(F.count("*").alias("n"), F.sum("x").alias("x"), F.sum("y").alias("y"))
        return statelog.key_by(rows, "key", parallelism=self.parallelism, **self.stored(recorder)).agg(
            n=statelog.Count(),
            x=statelog.Sum("x"),
            y=statelog.Sum("y"),
            combine=self.side == COMBINING,
        )

    def checks(self) -> list[Column]:
        if self.side == CEILING:
            return [F.sum("n").alias("total")]
        weighted = F.sum((F.col("key") + 1) * F.col("x")).alias("weighted")
        sums = [F.sum(name).cast("long").alias(name) for name in ("n", "x", "y")]
        return [F.count(F.lit(1)).alias("keys"), *sums, weighted]

    def expected(self, session: SparkSession) -> Iterable[Checks]:
        if self.side == CEILING:
            return [{"total": self.rows_per_batch}] * self.batches
        return self._aggregated(session)

    def _aggregated(self, session: SparkSession) -> Iterator[Checks]:
        counts, sums = np.zeros(self.keys, np.int64), np.zeros((2, self.keys), np.int64)
        for first, end in self.ranges:
            rows = session.range(first, end).select(*self._columns(F.col("id"))).toArrow()
            keys, x, y = (rows.column(name).to_numpy() for name in ("key", "x", "y"))
            np.add.at(counts, keys, 1)
            np.add.at(sums[0], keys, x)
            np.add.at(sums[1], keys, y.astype(np.int64))
            changed = np.unique(keys)
            yield {
                "keys": len(changed),
                "n": int(counts[changed].sum()),
                "x": int(sums[0][changed].sum()),
                "y": int(sums[1][changed].sum()),
                "weighted": int(((changed + 1) * sums[0][changed]).sum()),
            }

    def _columns(self, number: Column) -> list[Column]:
        """A key, a long and a double, which is whole so that its sum is exact in any order."""
        key = skewed_key(self.keys, number, self.skew)
        return [key, (number % _VALUES).alias("x"), (number % 7).cast("double").alias("y")]


def run(settings: Settings, place: Path) -> Result:
    require_measured(min(settings.batches, settings.spark_batches), settings.warm_up)
    names = (STATELOG, SPARK_WINDOWS) if settings.windows else (CEILING, STATELOG, COMBINING, SPARK)
    side = SlidingSide if settings.windows else AggregateSide
    cases = {
        f"{size:,} rows, {skew}": {
            name: side.of(
                settings,
                side=name,
                skew=skew,
                rows_per_batch=size,
                batches=settings.spark_batches if name in (SPARK, SPARK_WINDOWS) else settings.batches,
            )
            for name in names
        }
        for size in settings.rows_per_batch
        for skew in settings.skew
    }
    ratios = [Ratio(STATELOG, SPARK, 3), Ratio(STATELOG, CEILING, 0.6), Ratio(STATELOG, SPARK_WINDOWS, 3)]
    return compare_cases(cases, ratios, place, settings.rounds, settings.warm_up)
