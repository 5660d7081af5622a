"""The fixed cost of statelog per batch, above a stateless query with the same shuffle, and that of an idle query."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.chain import STATELESS, ChainSide
from benchmarks.figures import shown_shape, summary
from benchmarks.frame import NOT_NEGATIVE, POSITIVE, POSSIBLE_KEYS, Result, Target, alternate, option, require_measured
from benchmarks.processors import OUTPUT
from benchmarks.query import (
    BatchSide,
    Checks,
    Recorder,
    compare,
    count_checks,
    ended_s,
    rate_source,
    row_keys,
    start,
)
from benchmarks.requests import PUT, CountingStore, count, noted
from benchmarks.skew import SKEW_HELP, SKEWS, UNIFORM, ZIPF, skewed_key
from benchmarks.usage import Usage

STATELOG: Final = "statelog"

_TARGET_MS: Final = 25
_TARGET_SHAPE: Final = (2, 1)
_PARTS: Final = {"planning_ms": "queryPlanning", "add_batch_ms": "addBatch"}
"""The durations of Spark's progress that statelog can change: planning, and the batch itself."""
_SCHEME: Final = "counted"
_MINUTE_S: Final = 60
_LOOK_S: Final = 5.0
"""Seconds between two looks at the processes of an idle query."""
_IDLE_FILES: Final = 5
_IDLE_ROWS: Final = 1_000


@dataclass(frozen=True)
class Settings:
    rows_per_batch: int = option(1_000, "Of both sides.")
    subtasks: tuple[int, ...] = option((2, 16, 64), "Subtasks of each operator; may be repeated.")
    operators: tuple[int, ...] = option((1, 5), "Operators one after the other; may be repeated.")
    cores: int = option(2, "Of Spark; subtasks take turns on them.")
    keys: int = option(100_000, "Number of possible keys.", POSSIBLE_KEYS)
    skew: str = option(UNIFORM, SKEW_HELP, SKEWS)
    batches: int = option(80, "Of both sides.")
    warm_up: int = option(40, "First batches to leave out; the JVM still gets faster in them.", NOT_NEGATIVE)
    rounds: int = option(1, "How often both sides run.")
    idle_s: float = option(60.0, "Seconds without data that are measured.", POSITIVE)
    settling_s: float = option(10.0, "Seconds without data before them.", click.FloatRange(0))
    part: str = option(
        "both", "batches: their fixed cost; idle: queries without data.", click.Choice(["batches", "idle", "both"])
    )


QUICK: Final = [
    Settings(skew=ZIPF, subtasks=(2,), operators=(2,), keys=1_000, batches=5, warm_up=2, idle_s=2.0, settling_s=1.0)
]


@dataclass(frozen=True, kw_only=True)
class CoresSide(ChainSide):
    """A chain whose subtasks take turns on some cores."""

    cores: int

    def session(self, directory: Path, more: Any = None) -> SparkSession:
        return super().session(directory, {"spark.master": f"local[{self.cores}]", **(more or {})})


@dataclass(frozen=True, kw_only=True)
class FloorSide(CoresSide, BatchSide):
    """Small batches."""

    keys: int
    skew: str

    def source(self, session: SparkSession) -> DataFrame:
        return rate_source(session, self.rows_per_batch, self.cores)

    def output(self, source: DataFrame, recorder: Recorder) -> DataFrame:
        rows = source.select(skewed_key(self.keys, F.col("value"), self.skew), F.lit(1).cast("long").alias("n"))
        return self.chain(rows, statelog.Options(observer=recorder))

    def expected(self, session: SparkSession) -> Iterable[Checks]:
        keys = row_keys(session, self.ranges, skewed_key(self.keys, F.col("id"), self.skew))
        return self.expected_chain(keys, self.keys)

    def figures(self, rounds: Sequence[dict[str, Any]], warm_up: int) -> dict[str, Any]:
        """Those of every side, and the planning and the batch itself."""
        measured = [[batch for batch in one["batches"] if batch["batch"] >= warm_up] for one in rounds]
        return {
            **super().figures(rounds, warm_up),
            **{name: summary(batch[part] for one in measured for batch in one) for name, part in _PARTS.items()},
            "fixed_ms_by_round": [
                statistics.median(sum(batch[part] for part in _PARTS.values()) for batch in one) for one in measured
            ],
        }


@dataclass(frozen=True, kw_only=True)
class IdleSide(CoresSide):
    """A query with a trigger of a second, whose rows are all there before it starts."""

    idle_s: float
    settling_s: float

    def measure(self, directory: Path) -> dict[str, Any]:
        """CPU seconds, bytes written to disks and requests of statelog's store while no data come, per minute.

        And the objects that were written for a batch before that.
        """
        location, notes, rows = (directory / name for name in ("location", "notes", "input"))
        for folder in (notes, rows):
            folder.mkdir()
        for number in range(_IDLE_FILES):
            table = pa.table({"key": np.arange(_IDLE_ROWS) + number, "n": np.ones(_IDLE_ROWS, np.int64)})
            pq.write_table(table, rows / f"{number}.parquet")
        session = self.session(directory)
        statelog.register_store(_SCHEME, partial(_counting_store, str(notes)))
        source = session.readStream.schema(OUTPUT).option("maxFilesPerTrigger", 1).parquet(str(rows))
        output = self.chain(source, statelog.Options(), f"{_SCHEME}:{location}")
        query = start(output, count_checks(), directory, every_s=1)
        query.processAllAvailable()
        # The first batch is left out: the query's start writes too.
        ends_s = [ended_s(json.loads(each.json)) for each in query.recentProgress][:_IDLE_FILES]
        in_batches = count(noted(notes), ends_s[0], ends_s[-1]).get("", Counter())
        time.sleep(self.settling_s)
        used, from_s = Usage(os.getsid(0)), time.time()
        while (left_s := from_s + self.idle_s - time.time()) > 0:
            time.sleep(min(left_s, _LOOK_S))
            used.look()
        to_s = time.time()
        requests = count(noted(notes), from_s, to_s).get("", Counter())
        query.stop()
        if error := query.exception():
            raise RuntimeError(f"the query failed: {error}")
        session.stop()
        minutes = (to_s - from_s) / _MINUTE_S
        per_minute = {name: amount / minutes for name, amount in used.total().items()}
        return {
            **per_minute,
            "requests": requests.total() / minutes,
            "puts_per_batch": in_batches[PUT] / (len(ends_s) - 1),
        }


def _counting_store(notes: str, location: str) -> CountingStore:
    return CountingStore(location.removeprefix(f"{_SCHEME}:"), notes)


def run(settings: Settings, place: Path) -> Result:
    require_measured(settings.batches, settings.warm_up)
    batches = {} if settings.part == "idle" else _batches(settings, place)
    idle = {} if settings.part == "batches" else _idle(settings, place)
    shapes = [(subtasks, operators) for subtasks in settings.subtasks for operators in settings.operators]
    above = {shape: _above(batches[shape]) for shape in shapes if shape in batches}
    targets = [
        Target(
            f"planning and batch of {settings.rows_per_batch:,} rows, {shown_shape(*shape)}: statelog - stateless, ms",
            above[shape],
            _TARGET_MS,
            "at_most",
        )
        for shape in above
        if shape == _TARGET_SHAPE
    ] + [
        Target(f"{shown_shape(*shape)}: PUTs per batch", sides[STATELOG]["puts_per_batch"], 1, "at_most")
        for shape, sides in idle.items()
    ]
    rows = [
        _batch_row(shape, name, each, above[shape]) for shape, sides in batches.items() for name, each in sides.items()
    ]
    shown_idle = [_idle_row(shape, name, each) for shape, sides in idle.items() for name, each in sides.items()]
    return Result(
        figures={
            "batches": {shown_shape(*shape): sides for shape, sides in batches.items()},
            "above_stateless_ms": {shown_shape(*shape): value for shape, value in above.items()},
            "idle_per_minute": {shown_shape(*shape): sides for shape, sides in idle.items()},
        },
        targets=targets,
        rows=rows or shown_idle,
        remarks=[
            f"{settings.cores} cores. Medians of all batches after the first {settings.warm_up} of each run;"
            " 'above stateless' of the rounds' differences. Every batch's output was checked.",
            *([f"Idle, {', '.join(f'{name} {value}' for name, value in row.items())}" for row in shown_idle if rows]),
        ],
    )


def _batches(settings: Settings, place: Path) -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    measured = {}
    for subtasks in settings.subtasks:
        for operators in settings.operators:
            click.echo(f"{shown_shape(subtasks, operators)}:", err=True)
            sides = {
                name: FloorSide.of(settings, side=name, parallelism=subtasks, operators=operators)
                for name in (STATELESS, STATELOG)
            }
            measured[subtasks, operators] = compare(sides, place, settings.rounds, settings.warm_up)
    return measured


def _idle(settings: Settings, place: Path) -> dict[tuple[int, int], dict[str, dict[str, float]]]:
    """By shape and side, with the first number of subtasks; medians of the rounds."""
    sides = {
        (settings.subtasks[0], operators, name): IdleSide.of(
            settings, side=name, parallelism=settings.subtasks[0], operators=operators
        )
        for operators in settings.operators
        for name in (STATELESS, STATELOG)
    }
    runs = {(f"idle, {shown_shape(*shape)}, {name}"): side for (*shape, name), side in sides.items()}
    measured = alternate({name: partial(side.run, place) for name, side in runs.items()}, settings.rounds)
    found: dict[tuple[int, int], dict[str, dict[str, float]]] = {}
    for (subtasks, operators, name), rounds in zip(sides, measured.values(), strict=True):
        medians = {what: statistics.median(one[what] for one in rounds) for what in rounds[0]}
        found.setdefault((subtasks, operators), {})[name] = medians
    return found


def _above(sides: dict[str, dict[str, Any]]) -> float:
    """The median over the rounds of what statelog's batches take longer."""
    pairs = zip(sides[STATELOG]["fixed_ms_by_round"], sides[STATELESS]["fixed_ms_by_round"], strict=True)
    return statistics.median(float(one - other) for one, other in pairs)


def _batch_row(shape: tuple[int, int], name: str, figures: dict[str, Any], above_ms: float) -> dict[str, str]:
    return {
        "shape": shown_shape(*shape),
        "side": name,
        "planning ms": f"{figures['planning_ms']['median']:,.0f}",
        "batch ms": f"{figures['add_batch_ms']['median']:,.0f}",
        "planning and batch ms": f"{statistics.median(figures['fixed_ms_by_round']):,.1f}",
        "above stateless ms": f"{above_ms:,.1f}" if name == STATELOG else "",
        "trigger ms": f"{figures['batch_ms']['median']:,.0f}",
    }


def _idle_row(shape: tuple[int, int], name: str, figures: dict[str, float]) -> dict[str, str]:
    return {
        "shape": shown_shape(*shape),
        "side": name,
        "CPU s/minute": f"{figures['cpu_s']:.2f}",
        "KB written/minute": f"{figures['written_bytes'] / 1e3:,.0f}",
        "requests/minute": f"{figures['requests']:,.1f}",
        "PUTs/batch": f"{figures['puts_per_batch']:.2f}",
    }
