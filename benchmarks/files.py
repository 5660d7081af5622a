"""Files that a windowed word count creates and deletes: merged in every way, and those of Spark's own state store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.frame import POSITIVE, POSSIBLE_KEYS, Result, Target, option
from benchmarks.query import BatchSide, Checks, Recorder, run_once
from benchmarks.skew import HOT, SKEWS, UNIFORM, skewed_key

_SPARK: Final = "Spark"
_MERGING: Final = ("off", "within", "across")
_FILE_BYTES: Final = 32 << 20
_WINDOW_BATCHES: Final = 10
"""Length of a window; a batch has rows of one second."""


@dataclass(frozen=True)
class Settings:
    rows_per_batch: int = option(5_000, "Rows of a batch.")
    words: int = option(5_000, "Number of possible words.", POSSIBLE_KEYS)
    skew: str = option(UNIFORM, "How often rows have each word.", SKEWS)
    batches: int = option(300, "Checkpoints.", click.IntRange(40))
    materialization_s: float = option(10.0, "How often state is materialized, after which the log is cut.", POSITIVE)
    parallelism: int = option(4, "Subtasks and state partitions.")


QUICK: Final = [Settings(skew=HOT, rows_per_batch=500, words=100, batches=40, materialization_s=1.0, parallelism=2)]


@dataclass(frozen=True, kw_only=True)
class FilesSide(BatchSide):
    """Counts words in tumbling windows; its name is how files are merged."""

    words: int
    skew: str
    materialization_s: float
    output_mode = "append"

    def output(self, source: DataFrame, recorder: Recorder) -> DataFrame:
        rows = source.select("timestamp", skewed_key(self.words, F.col("value"), self.skew).alias("word"))
        rows = rows.withWatermark("timestamp", "0 seconds")
        if self.is_spark:
            window = F.window("timestamp", f"{_WINDOW_BATCHES} seconds")
            return rows.groupBy(window, "word").agg(F.count(F.lit(1)).alias("n"))
        options = statelog.Options(
            file_merging=self.side, materialization_interval_s=self.materialization_s, observer=recorder
        )
        keyed = statelog.key_by(rows, "word", parallelism=self.parallelism, options=options)
        return keyed.window(statelog.TumblingWindows(_WINDOW_BATCHES * 1000)).agg(statelog.Count().alias("n"))

    def checks(self) -> list[Column]:
        return [F.sum("n").alias("rows")]

    def expected(self, session: SparkSession) -> Iterator[Checks]:
        for batch in range(self.batches):
            # The watermark is the time of the batch before.
            is_end = batch > 1 and (batch - 1) % _WINDOW_BATCHES == 0
            yield {"rows": _WINDOW_BATCHES * self.rows_per_batch if is_end else 0}


def run(settings: Settings, place: Path) -> Result:
    batches, rows_per_batch, words = settings.batches, settings.rows_per_batch, settings.words
    measured = run_once([FilesSide.of(settings, side=name) for name in (*_MERGING, _SPARK)], place)
    figures = {name: _figures(one, batches) for name, one in measured.items()}
    across = figures["across"]
    per_checkpoint = figures["within"]["files_created"] / batches
    per_size = across["files_created"] / (-(-across["bytes_created"] // _FILE_BYTES))
    return Result(
        figures={"sides": figures},
        targets=[
            Target(
                "within: files created per checkpoint, with those of materialization", per_checkpoint, 1.1, "at_most"
            ),
            Target("across: files created per 32 MiB written, rounded up", per_size, 1, "at_most"),
        ],
        rows=[_row(name, each) for name, each in figures.items()],
        remarks=[
            f"{batches} checkpoints of {settings.parallelism} subtasks, {rows_per_batch:,} rows of {words:,} words"
            " each, tumbling windows of ten batches. All windows had all of their rows.",
        ],
    )


def _figures(measured: dict[str, Any], batches: int) -> dict[str, Any]:
    created, live = measured["files_seen"], measured["files_live"]
    return {
        "files_created": created,
        "files_deleted": created - live,
        "created_per_100": 100 * created / batches,
        "deleted_per_100": 100 * (created - live) / batches,
        "bytes_created": measured["bytes_seen"],
        "files_live": live,
        "bytes_live": measured["bytes_live"],
        "windows": (batches - 2) // _WINDOW_BATCHES,
    }


def _row(name: str, figures: dict[str, Any]) -> dict[str, str]:
    return {
        "files merged": name,
        "created / 100 checkpoints": f"{figures['created_per_100']:,.0f}",
        "deleted / 100 checkpoints": f"{figures['deleted_per_100']:,.0f}",
        "MB written": f"{figures['bytes_created'] / 1e6:,.1f}",
        "live at the end": f"{figures['files_live']:,}",
        "MB live": f"{figures['bytes_live'] / 1e6:,.1f}",
    }
