"""Flink's ValueState workload: checkpoints with the changelog on and off, and Spark's, while mostly new keys come."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import statelog
from benchmarks.frame import Result, option
from benchmarks.processors import OUTPUT, CountInPayload
from benchmarks.query import Checks, check_of, counted
from benchmarks.skew import ZIPF
from benchmarks.workload import EventBatch, WorkloadSide
from benchmarks.workload_figures import WorkloadSettings, run_workload

_QUICK: Final = {"rate": 5_000.0, "spark_rate": 500.0, "keys": 200_000}


@dataclass(frozen=True, kw_only=True)
class Settings(WorkloadSettings):
    spark: str = option(
        "processor",
        "What keeps Spark's state: the same processor, or an aggregation in the JVM, which gets statelog's rate.",
        click.Choice(["processor", "aggregation"]),
    )


QUICK: Final = [Settings(quick=True, side=("on", "spark-on"), skew=ZIPF), Settings(quick=True, side=("s3-on",))]


@dataclass(frozen=True, kw_only=True)
class ValueStateSide(WorkloadSide):
    """Keeps the last payload of each key, with the number of its events in it."""

    spark: str

    def output(self, events: DataFrame, options: statelog.Options, location: str | None) -> DataFrame:
        if self.is_spark and self.spark == "aggregation":
            # The sink gets the payload too, or it would not be kept.
            return events.groupBy("key").agg(F.count(F.lit(1)).alias("n"), F.last("payload"))
        return self.transform(events, CountInPayload(), OUTPUT, options, location=location)

    def expected(self, batches: Sequence[EventBatch]) -> Iterator[Checks]:
        for keys, _, counts in counted(map(self.keys_of, batches), self.keys):
            yield check_of(keys, counts)


def run(settings: Settings, place: Path) -> Result:
    if settings.spark == "aggregation":
        settings = dataclasses.replace(settings, spark_rate=settings.rate)
    return run_workload(settings, _QUICK, ValueStateSide.of, place)
