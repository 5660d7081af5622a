"""Flink's window workload: checkpoints of sliding windows in processing time, which keep all of their events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import click
import numpy as np
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

import statelog
from benchmarks.frame import POSITIVE, POSSIBLE_KEYS, Result, option
from benchmarks.processors import CountSlidingRows, CountWindowRows
from benchmarks.query import Checks
from benchmarks.skew import ZIPF
from benchmarks.workload import EventBatch, WorkloadSide
from benchmarks.workload_figures import WorkloadSettings, run_workload

_QUICK: Final = {"rate": 1_000.0, "spark_rate": 100.0, "keys": 200}


@dataclass(frozen=True, kw_only=True)
class Settings(WorkloadSettings):
    rate: float = option(4_000.0, "Events per second of statelog's sides.", POSITIVE)
    spark_rate: float = option(200.0, "Events per second of Spark's sides.", POSITIVE)
    keys: int = option(1_000, "Number of possible keys.", POSSIBLE_KEYS)
    value_bytes: int = option(400, "Size of an event's payload.", click.IntRange(8))
    window_ms: int = option(10_000, "Length of a window.")
    slide_ms: int = option(1_000, "Distance of the windows' starts.")


QUICK: Final = [Settings(quick=True, side=("on", "spark-on"), skew=ZIPF)]


@dataclass(frozen=True, kw_only=True)
class WindowSide(WorkloadSide):
    """Goes through all events of a window when that is over."""

    window_ms: int
    slide_ms: int

    def output(self, events: DataFrame, options: statelog.Options, location: str | None) -> DataFrame:
        output = "key long, n long, bytes long"
        if self.is_spark:
            processor = CountSlidingRows(self.window_ms, self.slide_ms)
            return self.transform(events, processor, output, options, time_mode="ProcessingTime")
        sliding = statelog.SlidingWindows(self.window_ms, self.slide_ms)
        keyed = statelog.key_by(events, "key", parallelism=self.parallelism, options=options, location=location)
        return keyed.window(sliding, timeMode="ProcessingTime").process(CountWindowRows(), output)

    @property
    def output_mode(self) -> str:
        return "update" if self.is_spark else "append"

    def checks(self) -> list[Column]:
        weighted = F.sum(F.col("key") * F.col("n")).alias("weighted")
        return [F.sum("n").alias("n"), F.sum("bytes").alias("bytes"), weighted]

    def expected(self, batches: Sequence[EventBatch]) -> Iterator[Checks]:
        key_sums = [int(self.keys_of(batch).sum()) for batch in batches]
        yield from expected_windows(batches, key_sums, self.window_ms, self.slide_ms, self.value_bytes)


def expected_windows(
    batches: Sequence[EventBatch], key_sums: Sequence[int], size_ms: int, slide_ms: int, value_bytes: int
) -> Iterator[Checks]:
    """What the batches return, from the sum of the keys of each: the windows that have ended since the batch before.

    Both sums are linear, so keys need not be told apart.
    """
    times_ms = [batch.time_ms for batch in batches]
    events = [0, *accumulate(batch.end - batch.first for batch in batches)]
    keys = [0, *accumulate(key_sums)]
    before_ms = 0
    for batch in batches:
        first_ms = max(before_ms, times_ms[0]) // slide_ms * slide_ms + slide_ms
        ends = np.arange(first_ms, batch.time_ms + 1, slide_ms)
        lows, highs = np.searchsorted(times_ms, ends - size_ms), np.searchsorted(times_ms, ends)
        pairs = list(zip(lows.tolist(), highs.tolist(), strict=True))
        n = sum(events[high] - events[low] for low, high in pairs)
        weighted = sum(keys[high] - keys[low] for low, high in pairs)
        yield {"n": n, "bytes": n * value_bytes, "weighted": weighted}
        before_ms = batch.time_ms


def run(settings: Settings, place: Path) -> Result:
    return run_workload(settings, _QUICK, WindowSide.of, place)
