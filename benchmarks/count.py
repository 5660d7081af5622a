"""The same counting processor on statelog and on Spark's own transformWithState."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.figures import median_ratio, samples_of, shown
from benchmarks.frame import NOT_NEGATIVE, POSSIBLE_KEYS, Result, Target, option, require_measured
from benchmarks.processors import OUTPUT, Count, Keep, count_batches
from benchmarks.query import BatchSide, Checks, Recorder, compare, expected_counts, pseudo_random
from benchmarks.skew import HOT, SKEW_HELP, SKEWS, UNIFORM, skewed_key

STATELOG: Final = "statelog"
SPARK: Final = "Spark transformWithState"
CEILING: Final = "stateless ceiling"
LONGS: Final = "statelog, longs"
MIXED: Final = "statelog, mixed columns"

_SMALL_BATCH: Final = 20_000
_TARGET_KEYS: Final = 45_000
_TARGET_KEYS_TOLERANCE: Final = 0.05
_CHECKPOINT_TARGET: Final = "subtask's part plus commit time, median ms"
_CHECKPOINTS: Final = f"statelog, {_TARGET_KEYS // 1000}k keys changed"


@dataclass(frozen=True)
class Settings:
    rows_per_batch: tuple[int, ...] = option(
        (20_000, 200_000), "Of all sides; may be repeated. With mixed columns only the largest counts."
    )
    keys: int = option(1_000_000, "Number of possible keys.", POSSIBLE_KEYS)
    skew: str = option(UNIFORM, SKEW_HELP, SKEWS)
    batches: int = option(40, "Of statelog and the ceiling.")
    spark_batches: int = option(40, "Of Spark's own; fewer if they have more than 20,000 rows.")
    parallelism: int = option(2, "Subtasks, state partitions and cores.")
    warm_up: int = option(20, "First batches to leave out; the JVM still gets faster in them.", NOT_NEGATIVE)
    rounds: int = option(1, "How often every side runs.")
    columns: str = option(
        "long",
        "long: statelog beside Spark; mixed: a timestamp, a decimal and an array, beside as many longs.",
        click.Choice(["long", "mixed"]),
    )


QUICK: Final = [Settings(skew=HOT, rows_per_batch=(500, 5_000), keys=10_000, batches=3, spark_batches=3, warm_up=1)]


@dataclass(frozen=True, kw_only=True)
class CountSide(BatchSide):
    """Counts rows by key, or only reads them."""

    keys: int
    skew: str

    def output(self, source: DataFrame, recorder: Recorder) -> DataFrame:
        rows = source.select(skewed_key(self.keys, F.col("value"), self.skew))
        if self.side == CEILING:
            return rows.repartition(self.parallelism, "key").mapInArrow(count_batches, "n long")
        return self.transform(rows, Count(), OUTPUT, **self.stored(recorder))

    def checks(self) -> list[Column]:
        return [F.sum("n").alias("total")] if self.side == CEILING else super().checks()

    def expected(self, session: SparkSession) -> Iterable[Checks]:
        if self.side == CEILING:
            return [{"total": self.rows_per_batch}] * self.batches
        return expected_counts(session, self.ranges, self.keys, self.skew)


_TYPES: Final = {LONGS: ("long", "long", "long"), MIXED: ("decimal(18,2)", "timestamp", "array<long>")}
"""Of the amount, the time and the items in rows and state."""


class KeepSide(CountSide):
    """Counts rows by key, and keeps three columns of them; the input is the same for all types."""

    def output(self, source: DataFrame, recorder: Recorder) -> DataFrame:
        number = F.col("value")
        items = F.sequence(F.lit(1), pseudo_random(5, number, F.lit(2)) + 1)
        columns = {
            "amount": (pseudo_random(10**9, number, F.lit(1)) / 100).cast("decimal(18,2)"),
            "at": F.timestamp_micros(number * 1_000_003 + 1_700_000_000_000_000),
            "items": items,
        }
        if self.side == LONGS:
            columns = {"amount": columns["amount"] * 100, "at": F.unix_micros(columns["at"]), "items": F.size(items)}
        typed = [columns[name].cast(kind).alias(name) for name, kind in zip(columns, _TYPES[self.side], strict=True)]
        rows = source.select(skewed_key(self.keys, number, self.skew), *typed)
        return self.transform(rows, Keep(*_TYPES[self.side]), OUTPUT, **self.stored(recorder))


def run(settings: Settings, place: Path) -> Result:
    if settings.columns == "mixed":
        return _beside_longs(settings, place)
    sizes = sorted(set(settings.rows_per_batch))
    warm_up: dict[str, int] = {}
    sides: dict[str, CountSide] = {}
    for rows in sizes:
        for side in (CEILING, STATELOG, SPARK):
            batches, left_out = _batches_of(settings, side, rows)
            require_measured(batches, left_out)
            name = side_name(side, rows)
            sides[name] = CountSide.of(settings, side=side, rows_per_batch=rows, batches=batches)
            warm_up[name] = left_out
    target_rows = rows_for_changed_keys(_TARGET_KEYS * settings.parallelism, settings.keys)
    if target_rows is not None:
        sides[_CHECKPOINTS] = CountSide.of(settings, side=STATELOG, rows_per_batch=target_rows)
        warm_up[_CHECKPOINTS] = settings.warm_up
    figures = compare(sides, place, settings.rounds, warm_up)
    for each in figures.values() if settings.skew == UNIFORM else ():
        expected = changed_keys(each["rows_per_batch"], settings.keys)
        each["expected_changed_keys_per_subtask"] = expected / settings.parallelism
    rates = {name: each["rows_per_s_by_round"] for name, each in figures.items()}
    to_spark, to_ceiling = (
        {f"{rows:,}": median_ratio(rates[side_name(STATELOG, rows)], rates[side_name(other, rows)]) for rows in sizes}
        for other in (SPARK, CEILING)
    )
    checkpoints = figures.get(_CHECKPOINTS, {})
    # The target is meant for so many keys.
    is_enough = checkpoints.get("changed_keys_per_subtask", 0) >= _TARGET_KEYS * (1 - _TARGET_KEYS_TOLERANCE)
    checkpoint_ms = checkpoints["checkpoint_ms"]["median"] if is_enough else None
    return Result(
        figures={
            "sides": figures,
            "statelog_to_spark_rows_per_s": to_spark,
            "statelog_to_ceiling_rows_per_s": to_ceiling,
        },
        targets=[
            *(
                Target(f"statelog / Spark transformWithState, rows/s, {rows} per batch", ratio, 12, "at_least")
                for rows, ratio in to_spark.items()
            ),
            Target(_CHECKPOINT_TARGET, checkpoint_ms, 50, "at_most"),
        ],
        rows=[_row(name, each) for name, each in figures.items()],
        remarks=[
            samples_of(figures.items(), warm_up),
            *(
                f"{rows} rows per batch: statelog / Spark transformWithState {ratio:.1f};"
                f" statelog / stateless ceiling {to_ceiling[rows]:.2f}"
                for rows, ratio in to_spark.items()
            ),
            *(
                f"{name}: {each['changed_keys_per_subtask']:,.0f} keys and"
                f" {each['changed_bytes_per_subtask'] / 1e6:.2f} MB changed per subtask and batch (medians)"
                for name, each in figures.items()
                if "changed_keys_per_subtask" in each
            ),
        ],
    )


def _batches_of(settings: Settings, side: str, rows_per_batch: int) -> tuple[int, int]:
    """How many batches a side runs, and how many of them warm it up.

    Spark's own needs half a minute for a large batch. So it gets as many rows in large batches as in small ones, and at
    least two batches are measured.
    """
    if side != SPARK:
        return settings.batches, settings.warm_up
    fewer = max(1, rows_per_batch // _SMALL_BATCH)
    warm_up = math.ceil(settings.warm_up / fewer)
    return settings.spark_batches if fewer == 1 else max(settings.spark_batches // fewer, warm_up + 2), warm_up


def side_name(side: str, rows_per_batch: int) -> str:
    """The name of a side with batches of one size."""
    return f"{side}, {rows_per_batch:,} rows"


def _beside_longs(settings: Settings, place: Path) -> Result:
    require_measured(settings.batches, settings.warm_up)
    rows = max(settings.rows_per_batch)
    sides = {name: KeepSide.of(settings, side=name, rows_per_batch=rows) for name in _TYPES}
    figures = compare(sides, place, settings.rounds, settings.warm_up)
    ratio = median_ratio(*(figures[name]["rows_per_s_by_round"] for name in _TYPES))
    return Result(
        figures={"sides": figures, "longs_to_mixed_rows_per_s": ratio},
        targets=[Target("time with mixed columns / with longs", ratio, 1.5, "at_most")],
        rows=[_row(name, each) for name, each in figures.items()],
        remarks=[samples_of(figures.items(), settings.warm_up)],
    )


def _row(name: str, figures: dict[str, Any]) -> dict[str, str]:
    has_state = figures["files_live"] > 0
    return {
        "side": name,
        "rows per batch": f"{figures['rows_per_batch']:,}",
        "rows/s": f"{figures['rows_per_s']:,.0f}",
        "batch ms": shown(figures["batch_ms"]),
        "checkpoint ms": shown(figures.get("checkpoint_ms")),
        "commit ms": shown(figures.get("commit_ms")),
        "state files": f"{figures['files_live']:,}" if has_state else "",
        "MB": f"{figures['bytes_live'] / 1e6:,.1f}" if has_state else "",
    }


def changed_keys(rows: int, keys: int) -> float:
    """Expected number of distinct keys among rows whose keys are uniformly random."""
    return -keys * math.expm1(rows * math.log1p(-1 / keys))


def rows_for_changed_keys(changed: int, keys: int) -> int | None:
    """How many rows have about `changed` distinct keys; None if there are not enough keys for it."""
    if changed >= keys:
        return None
    return math.ceil(math.log1p(-changed / keys) / math.log1p(-1 / keys))
