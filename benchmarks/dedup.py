"""The first row of each key: statelog's dedup, Spark's dropDuplicates, and no state at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import numpy as np
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.cases import Ratio, compare_cases
from benchmarks.frame import NOT_NEGATIVE, POSSIBLE_KEYS, Result, option, require_measured
from benchmarks.processors import count_batches
from benchmarks.query import BatchSide, Checks, Recorder
from benchmarks.skew import SKEWS, UNIFORM, ZIPF, skewed_key

STATELOG: Final = "statelog"
SPARK: Final = "Spark dropDuplicates"
CEILING: Final = "stateless ceiling"
NEW: Final = "new"
HALF: Final = "half"

_REPEATED: Final = {NEW: 20, HALF: 2}
"""Of so many rows one has a key that comes again and again; the others have keys of their own."""
_MODULUS: Final = 1_000_003


@dataclass(frozen=True)
class Settings:
    rows_per_batch: tuple[int, ...] = option((200_000,), "Of all sides; may be repeated.")
    repeated: tuple[str, ...] = option(
        (NEW, HALF),
        "new: a twentieth of the rows have repeated keys; half: every second one. May be repeated.",
        click.Choice(list(_REPEATED)),
    )
    skew: tuple[str, ...] = option((UNIFORM,), "How often rows have each repeated key; may be repeated.", SKEWS)
    keys: int = option(100_000, "Number of repeated keys.", POSSIBLE_KEYS)
    ttl_s: int = option(
        86_400, "How long statelog remembers a key, in processing time; 0 for good. Spark has no limit.", NOT_NEGATIVE
    )
    batches: int = option(12, "Of statelog and the ceiling.")
    spark_batches: int = option(8, "Of Spark's own.")
    parallelism: int = option(2, "Subtasks, state partitions and cores.")
    warm_up: int = option(4, "First batches to leave out.", NOT_NEGATIVE)
    rounds: int = option(1, "How often every side runs.")


QUICK: Final = [
    Settings(rows_per_batch=(5_000,), repeated=(HALF,), skew=(ZIPF,), keys=1_000, batches=3, spark_batches=3, warm_up=1)
]


@dataclass(frozen=True, kw_only=True)
class DedupSide(BatchSide):
    """Returns the first row of each key, or only reads the rows."""

    keys: int
    skew: str
    repeated: str
    ttl_s: int = 0
    output_mode = "append"

    def output(self, source: DataFrame, recorder: Recorder) -> DataFrame:
        number = F.col("value")
        rows = source.select(F.xxhash64(self._number(number)).alias("key"), number.alias("x"))
        if self.side == CEILING:
            return rows.repartition(self.parallelism, "key").mapInArrow(count_batches, "n long")
        if self.is_spark:
            return rows.dropDuplicates(["key"])
        keyed = statelog.key_by(rows, "key", parallelism=self.parallelism, **self.stored(recorder))
        return keyed.dedup(1000 * self.ttl_s or None)

    def checks(self) -> list[Column]:
        if self.side == CEILING:
            return [F.sum("n").alias("total")]
        return [F.count(F.lit(1)).alias("keys"), F.sum(F.pmod("key", F.lit(_MODULUS))).alias("sum")]

    def expected(self, session: SparkSession) -> Iterable[Checks]:
        if self.side == CEILING:
            return [{"total": self.rows_per_batch}] * self.batches
        return self._first(session)

    def _first(self, session: SparkSession) -> Iterator[Checks]:
        """The keys that no row before has had; each key follows from one number."""
        seen = np.zeros(self.keys + self.batches * self.rows_per_batch, np.bool_)
        number = self._number(F.col("id"))
        for first, end in self.ranges:
            rows = session.range(first, end).select(number.alias("number"), F.pmod(F.xxhash64(number), F.lit(_MODULUS)))
            numbers, remainders = (column.to_numpy() for column in rows.toArrow().columns)
            distinct, places = np.unique(numbers, return_index=True)
            is_new = ~seen[distinct]
            seen[distinct] = True
            yield {"keys": int(is_new.sum()), "sum": int(remainders[places[is_new]].sum())}

    def _number(self, row: Column) -> Column:
        """One of the repeated keys' numbers, or one that only this row has."""
        is_repeated = F.pmod(row, F.lit(_REPEATED[self.repeated])) == 0
        return F.when(is_repeated, skewed_key(self.keys, row, self.skew)).otherwise(row + self.keys)


def run(settings: Settings, place: Path) -> Result:
    require_measured(min(settings.batches, settings.spark_batches), settings.warm_up)
    batches = {CEILING: settings.batches, STATELOG: settings.batches, SPARK: settings.spark_batches}
    cases = {
        f"{size:,} rows, {repeated}, {skew}": {
            name: DedupSide.of(
                settings, side=name, repeated=repeated, skew=skew, rows_per_batch=size, batches=batches[name]
            )
            for name in batches
        }
        for size in settings.rows_per_batch
        for repeated in settings.repeated
        for skew in settings.skew
    }
    return compare_cases(cases, [Ratio(STATELOG, SPARK, 3)], place, settings.rounds, settings.warm_up)
