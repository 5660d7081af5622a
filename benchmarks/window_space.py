"""How much more space a checkpoint of sliding windows takes with the changelog: the materialized state and the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.figures import summary
from benchmarks.frame import NOT_NEGATIVE, POSSIBLE_KEYS, Result, Target, option, require_measured
from benchmarks.processors import CountWindowRows
from benchmarks.query import BatchSide, Checks, Recorder, payload, row_keys, run_once
from benchmarks.skew import HOT, SKEW_HELP, SKEWS, UNIFORM, skewed_key

CHANGELOG_ON: Final = "changelog on"
CHANGELOG_OFF: Final = "changelog off"
_LIMIT: Final = 1.5


@dataclass(frozen=True)
class Settings:
    rows_per_batch: int = option(1_000, "Rows of a batch.")
    keys: int = option(200, "Number of possible keys.", POSSIBLE_KEYS)
    skew: str = option(UNIFORM, SKEW_HELP, SKEWS)
    value_bytes: int = option(500, "Size of a row's payload.")
    window_batches: int = option(20, "Length of a window.")
    slide_batches: int = option(1, "Distance of the windows' starts.")
    batches: int = option(100, "Checkpoints.")
    warm_up: int = option(40, "First batches to leave out.", NOT_NEGATIVE)
    max_log_to_base: float = option(statelog.Options().tuning.max_log_to_base, "As in Options.", click.FloatRange(0))
    parallelism: int = option(2, "Subtasks and cores.")


QUICK: Final = [Settings(skew=HOT, rows_per_batch=200, window_batches=2, batches=6, warm_up=3)]


@dataclass(frozen=True, kw_only=True)
class WindowSide(BatchSide):
    """Gives the rows of sliding windows to a processor, a second of event time per batch."""

    keys: int
    skew: str
    value_bytes: int
    window_batches: int
    slide_batches: int
    max_log_to_base: float
    output_mode = "append"

    def output(self, source: DataFrame, recorder: Recorder) -> DataFrame:
        source = source.withWatermark("timestamp", "0 seconds")
        key = skewed_key(self.keys, F.col("value"), self.skew)
        rows = source.select("timestamp", key, payload("value", self.value_bytes))
        options = statelog.Options(
            observer=recorder,
            tuning=statelog.Tuning(changelog=self.side == CHANGELOG_ON, max_log_to_base=self.max_log_to_base),
        )
        windows = statelog.SlidingWindows(self.window_batches * 1000, self.slide_batches * 1000)
        return (
            statelog.key_by(rows, "key", parallelism=self.parallelism, options=options)
            .window(windows)
            .process(CountWindowRows(), "key long, n long, bytes long")
        )

    def checks(self) -> list[Column]:
        weighted = F.sum(F.col("key") * F.col("n")).alias("weighted")
        return [F.sum("n").alias("n"), F.sum("bytes").alias("bytes"), weighted]

    def expected(self, session: SparkSession) -> Iterator[Checks]:
        keys = row_keys(session, self.ranges, skewed_key(self.keys, F.col("id"), self.skew))
        return self.expected_windows([int(each.sum()) for each in keys])

    def expected_windows(self, sums: list[int]) -> Iterator[Checks]:
        """What the batches return, from the sum of the keys of each batch.

        Batch N is at second N, and its watermark, the time of the batch before, ends windows.
        """
        for batch in range(len(sums)):
            end = batch - 1
            is_end = (end - self.window_batches) % self.slide_batches == 0
            held = range(max(0, end - self.window_batches), max(0, end)) if is_end else range(0)
            n = self.rows_per_batch * len(held)
            yield {"n": n, "bytes": n * self.value_bytes, "weighted": sum(sums[number] for number in held)}


def run(settings: Settings, place: Path) -> Result:
    require_measured(settings.batches, settings.warm_up)
    if settings.warm_up <= settings.window_batches:
        raise click.UsageError(
            f"After {settings.warm_up} batches no window of {settings.window_batches} batches has been removed."
        )
    both = (CHANGELOG_ON, CHANGELOG_OFF)
    measured = run_once([WindowSide.of(settings, side=name) for name in both], place)
    figures = {name: _figures(one, settings.warm_up) for name, one in measured.items()}
    size, slide = settings.window_batches, settings.slide_batches
    remarks = [
        f"{settings.rows_per_batch:,} rows of {settings.value_bytes:,} bytes and {settings.keys:,} keys per batch; a"
        f" row is in {size / slide:g} windows. Medians of {settings.batches - settings.warm_up} checkpoints.",
    ]
    if figures[CHANGELOG_ON]["materializations"] < settings.parallelism:
        remarks.append("The state was not materialized while it was measured: run more batches.")
    on, off = (figures[name]["full_bytes"] for name in both)
    return Result(
        figures={"sides": figures},
        targets=[
            Target(f"full checkpoint, changelog on / off: {name}", on[measure] / off[measure], _LIMIT, "at_most")
            for name, measure in (("medians", "median"), ("maxima", "max"))
        ],
        rows=[_row(name, each) for name, each in figures.items()],
        remarks=remarks,
    )


def _figures(measured: dict[str, Any], warm_up: int) -> dict[str, Any]:
    checkpoints = [each for each in measured["checkpoints"] if each["batch"] >= warm_up]
    sizes = {
        "full_bytes": ("base_bytes", "log_bytes"),
        "log_bytes": ("log_bytes",),
        "new_bytes": ("changed_bytes", "materialized_bytes"),
        "stored_bytes": ("stored_bytes",),
    }
    return {
        **{name: summary(sum(each[part] for part in parts) for each in checkpoints) for name, parts in sizes.items()},
        "bytes_live": measured["bytes_live"],
        "materializations": sum(each["materialized"] for each in checkpoints),
        "batch_ms": summary(each["triggerExecution"] for each in measured["batches"] if each["batch"] >= warm_up),
        "run": measured,
    }


def _row(name: str, figures: dict[str, Any]) -> dict[str, str]:
    sizes = {"full MB": "full_bytes", "of it log MB": "log_bytes", "new MB": "new_bytes", "stored MB": "stored_bytes"}
    return {
        "side": name,
        **{
            column: f"{figures[size]['median'] / 1e6:,.1f} (max {figures[size]['max'] / 1e6:,.1f})"
            for column, size in sizes.items()
        },
        "on disk MB": f"{figures['bytes_live'] / 1e6:,.1f}",
        "materialized": f"{figures['materializations']}",
        "batch ms": f"{figures['batch_ms']['median']:,.0f}",
    }
