"""What an object store would charge a day for the requests and bytes of a query's state, statelog's and Spark's."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.chain import ChainSide
from benchmarks.frame import POSSIBLE_KEYS, Result, alternate, option
from benchmarks.query import count_checks, ended_s, last_batch, rate_source, require, row_keys, start, stop_when
from benchmarks.requests import GET, LIST, PUT, CountingStore, count, noted, watched
from benchmarks.skew import HOT, SKEW_HELP, SKEWS, UNIFORM, skewed_key

STATELOG: Final = "statelog"
SPARK: Final = "Spark"
LOGS: Final = "Spark's offsets and commits, with either"

# Amazon S3 Standard, us-east-1, list prices in US dollars, from AWS's price list of 2026-09-28. Deletions and what is
# sent to the store cost nothing.
PRICES: Final = {PUT: 0.005 / 1000, LIST: 0.005 / 1000, GET: 0.0004 / 1000}
STORAGE_PRICE: Final = 0.023
"""Of 1e9 bytes for 30 days, in the first tier."""

_DAY_S: Final = 86_400
_SCHEME: Final = "counted"
_MAINTENANCE: Final = "spark.sql.streaming.stateStore.maintenanceInterval"
_MAINTENANCE_S: Final = 60.0
_WARM_UP: Final = 130
"""When this many batches are done Spark deletes old ones regularly: 100 are kept, and 30 deleted together."""
_LATE: Final = 1.1


@dataclass(frozen=True)
class Settings:
    trigger_s: tuple[float, ...] = option((1.0, 10.0), "Seconds between checkpoints.", click.FloatRange(0.1))
    partitions: tuple[int, ...] = option((2, 8), "State partitions, subtasks; two numbers or more.")
    operators: tuple[int, ...] = option((1,), "Operators of statelog's query, one after the other; may be repeated.")
    priced_partitions: tuple[int, ...] = option((2, 200), "Numbers of partitions to give a price for.")
    rate: int = option(1_000, "Events per second.")
    keys: int = option(100_000, "Number of possible keys.", POSSIBLE_KEYS)
    skew: str = option(UNIFORM, SKEW_HELP, SKEWS)
    batch_s: float = option(0.5, "Seconds that a trigger takes here: time runs faster.", click.FloatRange(0.1))
    intervals: int = option(2, "Intervals of maintenance, and of materialization, to measure.")
    quick: bool = option(False, "A smoke test in two minutes, without maintenance.")


QUICK: Final = [Settings(quick=True, skew=HOT, operators=(1, 2))]


@dataclass(frozen=True, kw_only=True)
class MoneySide(ChainSide):
    """Counts rows by key, with all intervals as much shorter as the trigger is.

    Each further operator counts what the one before it returns.
    """

    keys: int
    skew: str
    rows_per_batch: int
    batches: int
    warm_up: int
    batch_s: float
    trigger_s: float

    @property
    def shown(self) -> str:
        """Its name among all."""
        return f"{owner_of(self.side, self.operators)}, {self.parallelism} partitions, every {self.trigger_s:g} s"

    @property
    def speed(self) -> float:
        """How much faster time runs."""
        return self.trigger_s / self.batch_s

    def measure(self, directory: Path) -> dict[str, Any]:
        """The requests of the batches after the first ones, by owner and kind, and the bytes that are stored then."""
        checkpoint, location, notes = (directory / name for name in ("checkpoint", "location", "notes"))
        for folder in (checkpoint, notes):
            folder.mkdir()
        session = self.session(directory, {_MAINTENANCE: f"{round(1000 * _MAINTENANCE_S / self.speed)}ms"})
        source = rate_source(session, self.rows_per_batch, self.parallelism)
        statelog.register_store(_SCHEME, partial(_counting_store, str(notes)))
        with watched(checkpoint) as seen:
            output = self._output(source, directory, f"{_SCHEME}:{location}")
            query = start(output, count_checks(), directory, every_s=self.batch_s)
            progress = stop_when(query, lambda query: last_batch(query) >= self.batches - 1)[: self.batches]
        self._check(session, progress)
        session.stop()
        ends_s = list(map(ended_s, progress))
        from_s, to_s = ends_s[self.warm_up - 1], ends_s[-1]
        by_folder = count(seen, from_s, to_s)
        state = by_folder.get("state", Counter()) if self.is_spark else count(noted(notes), from_s, to_s)[""]
        logs = by_folder.get("offsets", Counter()) + by_folder.get("commits", Counter())
        held = checkpoint / "state" if self.is_spark else location
        return {
            "state": dict(state),
            "logs": dict(logs),
            "batches": self.batches - self.warm_up,
            "took_s": to_s - from_s,
            "bytes": sum(
                file.stat().st_size for file in held.rglob("*") if file.is_file() and not file.name.startswith(".")
            ),
        }

    def _output(self, source: DataFrame, directory: Path, location: str) -> DataFrame:
        rows = source.select(skewed_key(self.keys, F.col("value"), self.skew))
        if self.is_spark:
            return rows.groupBy("key").agg(F.count(F.lit(1)).alias("n"))
        defaults = statelog.Options()
        options = dataclasses.replace(
            defaults,
            materialization_interval_s=defaults.materialization_interval_s / self.speed,
            local_directory=f"{directory}/local",
            tuning=dataclasses.replace(defaults.tuning, log_min_age_s=defaults.tuning.log_min_age_s / self.speed),
        )
        return self.chain(rows, options, location)

    def _check(self, session: SparkSession, progress: Sequence[dict[str, Any]]) -> None:
        ranges = [(number * self.rows_per_batch, (number + 1) * self.rows_per_batch) for number in range(self.batches)]
        keys = row_keys(session, ranges, skewed_key(self.keys, F.col("id"), self.skew))
        require(self.shown, progress, self.expected_chain(keys, self.keys))


def _counting_store(notes: str, location: str) -> CountingStore:
    return CountingStore(location.removeprefix(f"{_SCHEME}:"), notes)


def run(settings: Settings, place: Path) -> Result:
    if settings.quick:
        settings = dataclasses.replace(settings, trigger_s=(1.0,), partitions=(2, 4))
    if len(set(settings.partitions)) < 2:
        raise click.UsageError("A line needs two numbers of --partitions.")
    queries = [*((STATELOG, operators) for operators in settings.operators), (SPARK, 1)]
    sides = [
        _side(name, operators, trigger_s, partitions, settings)
        for trigger_s in settings.trigger_s
        for partitions in settings.partitions
        for name, operators in queries
    ]
    measured = alternate({each.shown: partial(each.run, place) for each in sides})
    runs = [(side, one) for side in sides for one in measured[side.shown]]
    bills = [
        bill(owner, [(side, one) for side, one in runs if side.trigger_s == trigger_s], partitions, operators)
        for partitions in settings.priced_partitions
        for trigger_s in settings.trigger_s
        for owner, operators in [(SPARK, 1), *queries[:-1], (LOGS, settings.operators[0])]
    ]
    late = max(one["took_s"] / one["batches"] / side.batch_s for side, one in runs)
    return Result(
        figures={
            "prices": {**PRICES, "GB-month": STORAGE_PRICE},
            "measured": [{**dataclasses.asdict(side), **one} for side, one in runs],
            "bills": bills,
        },
        targets=[],
        rows=[_row(each) for each in bills],
        remarks=[
            f"Measured with {' and '.join(map(str, settings.partitions))} partitions, {settings.rate:,} events/s, each"
            f" trigger in {settings.batch_s:g} s; other numbers of partitions are on the line through these, with the"
            " same bytes. Deletions cost nothing. Every batch's output was checked.",
            *([f"The machine was too slow: triggers took up to {late:.1f} times as long."] if late > _LATE else []),
        ],
    )


def bill(
    owner: str, runs: Sequence[tuple[MoneySide, dict[str, Any]]], partitions: int, operators: int = 1
) -> dict[str, Any]:
    """The requests and the price of a day, with so many partitions and operators; the runs have a trigger in common.

    Requests are on the straight line that fits the runs best and does not fall, nor go below 0: more partitions
    never make fewer requests, whatever the noise of two runs says. Bytes are the most of any run, because they follow
    from the keys.
    """
    name = STATELOG if owner == LOGS else owner
    own = [(side, one) for side, one in runs if (side.side, side.operators) == (name, operators)]
    requests = "logs" if owner == LOGS else "state"
    [trigger_s] = {side.trigger_s for side, _ in own}

    def at(values: Sequence[float]) -> float:
        slope, intercept = np.polyfit([side.parallelism for side, _ in own], values, 1)
        if slope < 0:
            return float(np.mean(values))
        return max(0.0, float(intercept + slope * partitions))

    per_batch = {kind: at([one[requests].get(kind, 0) / one["batches"] for _, one in own]) for kind in PRICES}
    a_day = {kind: number * _DAY_S / trigger_s for kind, number in per_batch.items()}
    stored = 0 if owner == LOGS else max(one["bytes"] for _, one in own)
    storage = stored / 1e9 * STORAGE_PRICE / 30
    return {
        "owner": owner,
        "operators": operators,
        "trigger_s": trigger_s,
        "partitions": partitions,
        "is_measured": partitions in [side.parallelism for side, _ in own],
        "requests_a_batch": per_batch,
        "requests_a_day": a_day,
        "bytes": stored,
        "dollars_a_day": storage + sum(PRICES[kind] * number for kind, number in a_day.items()),
    }


def owner_of(name: str, operators: int) -> str:
    """The name of a side with so many operators."""
    return name if operators == 1 else f"{name}, {operators} operators"


def _row(figures: dict[str, Any]) -> dict[str, str]:
    requests = figures["requests_a_day"]
    return {
        "partitions": f"{figures['partitions']}" + ("" if figures["is_measured"] else " (by the line)"),
        "trigger": f"{figures['trigger_s']:g} s",
        "requests of": owner_of(figures["owner"], figures["operators"]),
        **{f"{kind} a day": f"{requests[kind]:,.0f}" for kind in PRICES},
        "MB stored": f"{figures['bytes'] / 1e6:,.1f}",
        "$ a day": f"{figures['dollars_a_day']:,.2f}",
    }


def _side(name: str, operators: int, trigger_s: float, partitions: int, settings: Settings) -> MoneySide:
    if settings.quick:
        warm_up, measured = 5, 15
    else:
        interval_s = _MAINTENANCE_S if name == SPARK else statelog.Options().materialization_interval_s
        warm_up = _WARM_UP
        # Not fewer than Spark deletes together.
        measured = max(60, math.ceil(settings.intervals * interval_s / trigger_s))
    return MoneySide(
        side=name,
        operators=operators,
        parallelism=partitions,
        keys=settings.keys,
        skew=settings.skew,
        rows_per_batch=round(settings.rate * trigger_s),
        batches=warm_up + measured,
        warm_up=warm_up,
        batch_s=settings.batch_s,
        trigger_s=trigger_s,
    )
