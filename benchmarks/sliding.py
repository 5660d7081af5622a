"""Count and two sums per key and sliding window, in event time: statelog's windows, and Spark's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.query import BatchSide, Checks, Numbers, Recorder, pseudo_random
from benchmarks.skew import skewed_key

SPARK_WINDOWS: Final = "Spark window groupBy"

_SIZE_S: Final = 10
_SLIDE_S: Final = 1
_BATCH_MS: Final = 5_000
"""The event time of a batch; those of its rows lie in it, so no row is late, and each batch ends some windows."""
_VALUES: Final = 1000


@dataclass(frozen=True, kw_only=True)
class SlidingSide(BatchSide):
    """Aggregates rows by key and window; a window is returned once, when the watermark has reached its end."""

    keys: int
    skew: str
    output_mode = "append"
    start_ms = 1_700_000_000_000
    advance_ms = _BATCH_MS

    def output(self, source: DataFrame, recorder: Recorder) -> DataFrame:
        columns = self._columns(F.col("value"), F.unix_millis("timestamp"))
        rows = source.select(*columns).withColumn("time", F.timestamp_millis("time")).withWatermark("time", "0 seconds")
        if self.is_spark:
            window = F.window("time", f"{_SIZE_S} seconds", f"{_SLIDE_S} seconds")
            sums = [F.count("*").alias("n"), F.sum("x").alias("x"), F.sum("y").alias("y")]
            return rows.groupBy("key", window).agg(*sums).withColumn("window_start", F.col("window.start"))
        keyed = statelog.key_by(rows, "key", parallelism=self.parallelism, **self.stored(recorder))
        windows = keyed.window(statelog.SlidingWindows(1000 * _SIZE_S, 1000 * _SLIDE_S))
        own = [statelog.Count().alias("n"), statelog.Sum("x").alias("x"), statelog.Sum("y").alias("y")]
        return windows.agg(*own)

    def checks(self) -> list[Column]:
        sums = [F.sum(name).cast("long").alias(name) for name in ("n", "x", "y")]
        by_key = F.sum((F.col("key") + 1) * F.col("x")).alias("by_key")
        by_start = F.sum((F.unix_seconds("window_start") - self.start_ms // 1000) * F.col("n")).alias("by_start")
        return [F.count(F.lit(1)).alias("windows"), *sums, by_key, by_start]

    def expected(self, session: SparkSession) -> Iterable[Checks]:
        batches = (
            session.range(first, end).select(*self._columns(F.col("id"), F.lit(self.start_ms + batch * _BATCH_MS)))
            for batch, (first, end) in enumerate(self.ranges)
        )
        return self.expected_windows(batch.toArrow() for batch in batches)

    def expected_windows(self, batches: Iterable[pa.Table]) -> Iterator[Checks]:
        """The windows that end between the watermarks of two batches: the newest times of those before them."""
        panes: dict[int, Numbers] = {}
        newest_s = watermark_s = 0
        for batch in batches:
            key, time_ms, x, y = (column.to_numpy() for column in batch.select(["key", "time", "x", "y"]).columns)
            seconds = time_ms // 1000
            for second in np.unique(seconds).tolist():
                pane = panes.setdefault(second, np.zeros((3, self.keys), np.int64))
                chosen = seconds == second
                for sums, values in zip(pane, (np.ones_like(x), x, y.astype(np.int64)), strict=True):
                    np.add.at(sums, key[chosen], values[chosen])
            before_s, watermark_s = watermark_s, newest_s
            first = max(before_s, min(panes) - 1)
            yield self._windows(panes, range(first + 1, watermark_s + 1))
            for second in [second for second in panes if second + _SIZE_S <= watermark_s]:
                del panes[second]
            newest_s = max(newest_s, int(time_ms.max()) // 1000)

    def _windows(self, panes: dict[int, Numbers], ends_s: range) -> Checks:
        """The windows of all keys with these ends."""
        found = dict.fromkeys(("windows", "n", "x", "y", "by_key", "by_start"), 0)
        for end_s in ends_s:
            start_s = end_s - _SIZE_S
            held = [panes[second] for second in range(start_s, end_s) if second in panes]
            if not held:
                continue
            n, x, y = np.sum(held, axis=0)
            found["windows"] += int(np.count_nonzero(n))
            for name, sums in (("n", n), ("x", x), ("y", y)):
                found[name] += int(sums.sum())
            found["by_key"] += int(((np.arange(self.keys) + 1) * x).sum())
            found["by_start"] += (start_s - self.start_ms // 1000) * int(n.sum())
        return found

    def _columns(self, number: Column, batch_ms: Column) -> list[Column]:
        """Key, time in milliseconds, a long, and a double that is whole, so that its sum is exact in any order."""
        return [
            skewed_key(self.keys, number, self.skew),
            (batch_ms - pseudo_random(_BATCH_MS, number, F.lit(3))).alias("time"),
            (number % _VALUES).alias("x"),
            (number % 7).cast("double").alias("y"),
        ]
