"""Every kind of state beside Spark's own transformWithState, and what single operations cost without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks import operations
from benchmarks.child import run_in_child
from benchmarks.figures import median_ratio, samples_of, shown
from benchmarks.frame import NOT_NEGATIVE, POSSIBLE_KEYS, Result, Target, option, require_measured
from benchmarks.processors import OUTPUT, TTL_MS, WINDOW_MS, Append, CountItems, CountWindows, Time, make_count
from benchmarks.query import (
    BatchSide,
    Checks,
    Numbers,
    Recorder,
    check_of,
    compare,
    counted,
    pseudo_random,
)
from benchmarks.skew import SKEW_HELP, SKEWS, UNIFORM, ZIPF, skewed_key

STATELOG: Final = "statelog"
SPARK: Final = "Spark"

_LEAST_RATIO: Final = 10
_ITEMS: Final = 16
"""How many different items there are."""
_SPREAD_MS: Final = 2000
"""How far the event times of a batch lie apart, and the delay of the watermark: so no row is late."""


@dataclass(frozen=True)
class Kind:
    """A kind of state: its processors, for frames or rows, their columns beside the key, their time mode."""

    make: Callable[[bool], Any]
    columns: tuple[str, ...] = ()
    time_mode: str = "None"
    has_few_keys: bool = False
    """Whether keys should meet often, so that each has many entries."""
    takes_frames: bool = True


KINDS: Final = {
    "value": Kind(make_count),
    "list": Kind(Append, ("item", "checks"), has_few_keys=True),
    "map": Kind(CountItems, ("item",), has_few_keys=True),
    "timer": Kind(Time, time_mode="ProcessingTime"),
    "ttl": Kind(partial(make_count, ttl_ms=TTL_MS), time_mode="ProcessingTime"),
    "window": Kind(CountWindows, ("time", "time_ms"), "EventTime", has_few_keys=True, takes_frames=False),
}


@dataclass(frozen=True)
class Settings:
    part: str = option(
        "kinds", "kinds: queries, beside Spark's; ops: inside a subtask, without Spark.", click.Choice(["kinds", "ops"])
    )
    kind: tuple[str, ...] = option((), "May be repeated; by default all.", click.Choice(list(KINDS)))
    mode: str = option("both", "Processors.", click.Choice(["row", "pandas", "both"]))
    rows_per_batch: int = option(100_000, "Of statelog.")
    batches: int = option(8, "Of statelog.")
    spark_rows_per_batch: int = option(5_000, "Of Spark's own.")
    spark_batches: int = option(4, "Of Spark's own.")
    equal_sizes: bool = option(False, "Give statelog Spark's rows per batch.")
    keys: int = option(1_000_000, "Possible keys of value, timer and ttl.", POSSIBLE_KEYS)
    entry_keys: int = option(20_000, "Possible keys of list, map and window.", POSSIBLE_KEYS)
    skew: str = option(UNIFORM, SKEW_HELP, SKEWS)
    parallelism: int = option(2, "Subtasks, state partitions and cores.")
    warm_up: int = option(2, "First batches to leave out.", NOT_NEGATIVE)
    rounds: int = option(1, "How often every side runs.")
    operation_keys: int = option(50_000, "ops: keys of a batch.")
    entries: tuple[int, ...] = option(
        (10, 1_000, 100_000), "ops: sizes of the lists and maps that grow; may be repeated."
    )
    repetitions: int = option(5, "ops: how often each is measured.")


QUICK: Final = [
    Settings(
        skew=ZIPF,
        kind=("value", "window"),
        mode="row",
        rows_per_batch=5_000,
        batches=3,
        spark_rows_per_batch=500,
        spark_batches=3,
        keys=10_000,
        entry_keys=100,
        warm_up=1,
    ),
    Settings(part="ops", operation_keys=100, entries=(10, 100), repetitions=2),
]


@dataclass(frozen=True)
class InputBatch:
    """The input rows of a batch: their keys, their items below `_ITEMS`, and their event times."""

    keys: Numbers
    items: Numbers
    times_ms: Numbers
    checks: bool
    """Whether this is the batch in which lists are read."""


def _counts(batches: Iterable[InputBatch], keys: int) -> Iterator[Checks]:
    """Each key's number of rows so far."""
    for changed, _, counts in counted((batch.keys for batch in batches), keys):
        yield check_of(changed, counts)


def _lists(batches: Iterable[InputBatch], keys: int) -> Iterator[Checks]:
    """Each key's number of rows in this batch; where lists are read, their lengths."""
    held = list(batches)
    for batch, (changed, rows, lengths) in zip(held, counted((each.keys for each in held), keys), strict=True):
        yield check_of(changed, lengths if batch.checks else rows)


def _entries(batches: Iterable[InputBatch], keys: int) -> Iterator[Checks]:
    """For each key the sum, over its rows, of how many rows its item has had up to there."""
    for pairs, rows, after in counted((batch.keys * _ITEMS + batch.items for batch in batches), keys * _ITEMS):
        # The counts of an item's rows are consecutive numbers, the last of which is the new count.
        sums = rows * (after - rows) + rows * (rows + 1) // 2
        changed, own = np.unique(pairs // _ITEMS, return_inverse=True)
        yield check_of(changed, np.bincount(own, sums).astype(np.int64))


def _timers(batches: Iterable[InputBatch], keys: int) -> Iterator[Checks]:
    """One timer for each key of the batch."""
    for batch in batches:
        changed = np.unique(batch.keys)
        yield check_of(changed, np.ones(len(changed), np.int64))


def _windows(batches: Iterable[InputBatch], _: int) -> Iterator[Checks]:
    """The windows that the watermark of the batches before has come to, with their counts. No row is late."""
    keys, starts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    watermark_ms = 0
    for batch in batches:
        keys = np.concatenate([keys, batch.keys])
        starts = np.concatenate([starts, batch.times_ms - batch.times_ms % WINDOW_MS])
        is_closed = starts + WINDOW_MS <= watermark_ms
        closed, rows = np.unique(np.stack([keys[is_closed], starts[is_closed]]), axis=1, return_counts=True)
        yield check_of(closed[0], rows)
        keys, starts = keys[~is_closed], starts[~is_closed]
        watermark_ms = max(int(batch.times_ms.max()) - _SPREAD_MS, watermark_ms)


EXPECTED: Final = {
    "value": _counts,
    "ttl": _counts,
    "list": _lists,
    "map": _entries,
    "timer": _timers,
    "window": _windows,
}
"""By kind, the function that makes the checks of successive batches; their keys are below a limit."""


@dataclass(frozen=True, kw_only=True)
class StateSide(BatchSide):
    """Runs the processor of a kind, and for lists one more batch in which they are read."""

    kind: str
    mode: str
    keys: int
    skew: str
    start_ms = 1_700_000_000_000

    @property
    def batches_to_check(self) -> int:
        return self.batches + ("checks" in KINDS[self.kind].columns)

    def output(self, source: DataFrame, recorder: Recorder) -> DataFrame:
        what = KINDS[self.kind]
        is_check = F.col("value") >= self.rows_per_batch * self.batches
        columns = self._columns(F.col("value"), F.unix_millis("timestamp"), is_check)
        rows = source.select([columns[name].alias(name) for name in ("key", *what.columns)])
        if "time" in what.columns:
            rows = rows.withWatermark("time", f"{_SPREAD_MS} milliseconds")
        options = statelog.Options(observer=recorder)
        if self.kind == "window" and not self.is_spark:
            keyed = statelog.key_by(rows, "key", parallelism=self.parallelism, options=options)
            return keyed.window(statelog.TumblingWindows(WINDOW_MS)).agg(statelog.Count().alias("n"))
        uses_frames = self.mode == "pandas"
        processor = what.make(uses_frames)
        return self.transform(rows, processor, OUTPUT, options, time_mode=what.time_mode, uses_frames=uses_frames)

    def expected(self, session: SparkSession) -> Iterator[Checks]:
        return EXPECTED[self.kind](self._input(session), self.keys)

    def _input(self, session: SparkSession) -> Iterator[InputBatch]:
        """The same input, batch by batch."""
        for batch, (first, end) in enumerate(self.ranges):
            is_check = batch >= self.batches
            columns = self._columns(F.col("id"), F.lit(self.start_ms + batch * 1000), F.lit(is_check))
            names = ("key", "item", "time_ms")
            rows = session.range(first, end).select(*(columns[name].alias(name) for name in names)).toArrow()
            key, item, time_ms = (column.to_numpy() for column in rows.columns)
            yield InputBatch(key, item, time_ms, is_check)

    def _columns(self, number: Column, batch_ms: Column, checks: Column) -> dict[str, Column]:
        """The input columns, from the number of a row and the time of its batch."""
        time_ms = batch_ms - pseudo_random(_SPREAD_MS, number, F.lit(2))
        return {
            "key": skewed_key(self.keys, number, self.skew),
            "item": pseudo_random(_ITEMS, number, F.lit(1)),
            "time": F.timestamp_millis(time_ms),
            "time_ms": time_ms,
            "checks": checks,
        }


def run(settings: Settings, place: Path) -> Result:
    if settings.part == "ops":
        entries = sorted(set(settings.entries))
        measure = partial(operations.measure, settings.operation_keys, entries, settings.repetitions)
        return operations.as_result(run_in_child(measure, place))
    warm_up, spark_rows = settings.warm_up, settings.spark_rows_per_batch
    require_measured(min(settings.batches, settings.spark_batches), warm_up)
    modes = ("row", "pandas") if settings.mode == "both" else (settings.mode,)
    pairs = [
        (kind, mode)
        for kind, what in KINDS.items()
        if kind in (settings.kind or KINDS)
        for mode in modes
        if mode == "row" or what.takes_frames
    ]
    if not pairs:
        raise click.UsageError("There is nothing to measure: a window takes rows only.")
    own_rows = spark_rows if settings.equal_sizes else settings.rows_per_batch
    sizes = {STATELOG: (own_rows, settings.batches), SPARK: (spark_rows, settings.spark_batches)}
    sides: dict[tuple[str, ...], StateSide] = {}
    for kind, mode in pairs:
        keys = settings.entry_keys if KINDS[kind].has_few_keys else settings.keys
        for side, (rows, batches) in sizes.items():
            sides[kind, mode, side] = StateSide.of(
                settings, side=side, kind=kind, mode=mode, keys=keys, rows_per_batch=rows, batches=batches
            )
    by_name = compare({", ".join(name): side for name, side in sides.items()}, place, settings.rounds, warm_up)
    figures = dict(zip(sides, by_name.values(), strict=True))
    ratios = {
        pair: median_ratio(*(figures[*pair, side]["rows_per_s_by_round"] for side in (STATELOG, SPARK)))
        for pair in pairs
    }
    return Result(
        figures={
            "sides": by_name,
            "statelog_rows_per_s": {
                mode: {kind: figures[kind, mode, STATELOG]["rows_per_s"] for kind, of in pairs if of == mode}
                for mode in modes
            },
            "statelog_to_spark_rows_per_s": {
                mode: {kind: ratio for (kind, of), ratio in ratios.items() if of == mode} for mode in modes
            },
        },
        targets=[
            Target(f"{kind}, {mode}: statelog / Spark, rows/s", value, _LEAST_RATIO, "at_least")
            for (kind, mode), value in ratios.items()
        ],
        rows=[_row(side, figures[name], ratios) for name, side in sides.items()],
        remarks=[
            samples_of(((side, each) for (_, _, side), each in figures.items()), warm_up),
            f"Spark has batches of {spark_rows:,} rows and statelog of {own_rows:,}; a batch's fixed cost is in both.",
        ],
    )


def _row(side: StateSide, figures: dict[str, Any], ratios: dict[tuple[str, str], float]) -> dict[str, str]:
    return {
        "state": side.kind,
        "mode": side.mode,
        "side": side.side,
        "rows per batch": f"{side.rows_per_batch:,}",
        "keys": f"{side.keys:,}",
        "rows/s": f"{figures['rows_per_s']:,.0f}",
        "ratio": f"{ratios[side.kind, side.mode]:.1f}" if side.side == STATELOG else "",
        "batch ms": shown(figures["batch_ms"]),
        "checkpoint ms": shown(figures.get("checkpoint_ms")),
    }
