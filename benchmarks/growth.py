"""Whether a checkpoint gets dearer with the state it belongs to, or while the state is materialized."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import statelog
from benchmarks.events import mix
from benchmarks.figures import summary
from benchmarks.frame import NOT_NEGATIVE, STORED_KEYS, Result, Target, option, require_space
from benchmarks.processors import OUTPUT, Count
from benchmarks.query import (
    Numbers,
    Recorder,
    Side,
    check_of,
    count_checks,
    last_progress,
    require,
    run_once,
    start,
)
from benchmarks.skew import SKEWS, UNIFORM, ZIPF, skewed_keys
from statelog.local.policy import MergePolicy
from statelog.local.runs import JOB_FOLDER

RUNNING: Final = "materialization running"
NOT_RUNNING: Final = "not running"

_MEASURES: Final = {"commit_s": "commit time", "subtask_s": "the subtasks' part", "batch_s": "batch"}
_MIN_PAIRS: Final = 5
_POLL_S: Final = 0.005
_BUILD_ROWS: Final = 1_000_000
_SETTLING_BATCHES: Final = 60
_JOBS: Final = f"local/statelog/*/*/*/{JOB_FOLDER}/job.msgpack"
# Queries without new rows should leave the processor to the one that has some.
_SPARK: Final = {"spark.sql.streaming.pollingDelay": "100ms"}

_Batches = list[dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    keys: tuple[int, ...] = option((100_000, 1_000_000, 10_000_000), "One state for each number of keys.", STORED_KEYS)
    rows_per_batch: int = option(10_000, "Keys that a batch changes; with a skew, its rows.")
    skew: str = option(UNIFORM, "How often rows have each key; uniform rows have other keys in every batch.", SKEWS)
    rounds: int = option(40, "Batches of each state.")
    warm_up: int = option(2, "Batches before them.", NOT_NEGATIVE)
    materialization_keys: int = option(1_000_000, "Keys of the two states of which one is materialized.", STORED_KEYS)
    parallelism: int = option(2, "Subtasks and cores.")


QUICK: Final = [
    Settings(skew=ZIPF, keys=(1_000, 10_000), rows_per_batch=500, rounds=4, warm_up=1, materialization_keys=1_000)
]


def run(settings: Settings, place: Path) -> Result:
    sizes, rounds, rows_per_batch = sorted(set(settings.keys)), settings.rounds, settings.rows_per_batch
    if rows_per_batch > min(*sizes, settings.materialization_keys):
        raise click.UsageError(f"{rows_per_batch} rows per batch are more than the fewest keys.")
    needed = 150 * (sum(sizes) + 2 * settings.materialization_keys)
    require_space(place, needed, "Give another --directory, or fewer keys.")
    off = {"tuning": {"materialization": False}}
    state = {"keys": settings.materialization_keys, "built_with": off}
    by_part: dict[str, dict[str, Any]] = {
        "sizes": {f"{count:,} keys": {"keys": count, "built_with": {}, "options": None} for count in sizes},
        "materialization": {
            RUNNING: {**state, "options": {"materialization_interval_s": 0.0}},
            NOT_RUNNING: {**state, "options": off},
        },
    }
    batches = run_once([GrowthSide.of(settings, side=part, queries=each) for part, each in by_part.items()], place)
    growing, by_option = batches["sizes"], batches["materialization"]
    pairs = [pair for pair in zip(by_option[RUNNING], by_option[NOT_RUNNING], strict=True) if pair[0]["has_job"]]
    materializing = {RUNNING: [pair[0] for pair in pairs], NOT_RUNNING: [pair[1] for pair in pairs]}
    figures: dict[str, Any] = {
        "sizes": {name: _figures(batches) for name, batches in growing.items()},
        "materialization": {name: _figures(batches) for name, batches in materializing.items() if batches},
        "longest_extra_batch_s": max(
            (one["batch_s"] - other["batch_s"] for one, other in pairs if one["has_slice"]), default=None
        ),
        "batches": batches,
    }
    return Result(
        figures=figures,
        targets=targets_of(growing, materializing),
        rows=[_row(name, each) for part in ("sizes", "materialization") for name, each in figures[part].items()],
        remarks=[
            f"Medians (and maxima) of {rounds} batches that change {rows_per_batch:,} keys each. All were checked.",
            f"A materialization ran in {len(pairs)} of {rounds} batches of {settings.materialization_keys:,} keys; only"
            " these and those of the same rounds without count.",
        ],
    )


def growth(one: Sequence[float], other: Sequence[float]) -> float:
    """How many times as large as `one` its pair `other` is: by the median of the differences."""
    return 1 + longer_s(one, other) / statistics.median(one)


def longer_s(one: Sequence[float], other: Sequence[float]) -> float:
    """By how much the pairs `other` are larger than `one`: the median."""
    return statistics.median(second - first for first, second in zip(one, other, strict=True))


def targets_of(growing: dict[str, _Batches], materializing: dict[str, _Batches]) -> list[Target]:
    """The targets of batches with more state (the smallest first), and of batches with a materialization."""
    (smallest, base), *larger = growing.items()
    targets = [
        Target(
            f"{shown}: {name} / {smallest}", growth(_values(base, measure), _values(batches, measure)), 1.3, "at_most"
        )
        for name, batches in larger
        for measure, shown in _MEASURES.items()
    ]
    running, not_running = materializing[RUNNING], materializing[NOT_RUNNING]
    commit = longer = None
    if len(running) >= _MIN_PAIRS:
        commit = growth(_values(not_running, "commit_s"), _values(running, "commit_s"))
    with_slice = [number for number, batch in enumerate(running) if batch["has_slice"]]
    if len(with_slice) >= _MIN_PAIRS:
        pairs = [[batches[number] for number in with_slice] for batches in (not_running, running)]
        longer = 1000 * longer_s(*(_values(batches, "batch_s") for batches in pairs))
    slice_ms = 1000 * MergePolicy().slice_s
    return [
        *targets,
        Target("commit time: with a materialization / without", commit, 1.2, "at_most"),
        Target("batch: longer with a slice of a materialization, ms", longer, slice_ms, "at_most"),
    ]


def _values(batches: _Batches, measure: str) -> list[float]:
    return [batch[measure] for batch in batches]


def _figures(batches: _Batches) -> dict[str, Any]:
    figures: dict[str, Any] = {
        f"{measure.removesuffix('_s')}_ms": summary(1000 * batch[measure] for batch in batches)
        for measure in (*_MEASURES, "restore_s")
    }
    figures["changes"] = statistics.median(_values(batches, "changes"))
    figures["with_maintenance"] = statistics.mean(_values(batches, "has_slice"))
    return figures


def _row(name: str, figures: dict[str, Any]) -> dict[str, str]:
    durations = {"commit ms": "commit_ms", "subtasks' part ms": "subtask_ms", "batch ms": "batch_ms"}
    return {
        "state": name,
        "batches": str(figures["batch_ms"]["samples"]),
        **{column: f"{figures[each]['median']:.1f} ({figures[each]['max']:.1f})" for column, each in durations.items()},
        "changes": f"{figures['changes']:,.0f}",
        "with maintenance": f"{figures['with_maintenance']:.0%}",
    }


@dataclass(frozen=True, kw_only=True)
class GrowthSide(Side):
    """Queries in one session that have their batches in turn.

    Each has a number of `keys`, options with which it is `built_with`, and `options` afterwards; None to continue.
    """

    queries: dict[str, dict[str, Any]]
    rows_per_batch: int
    skew: str
    rounds: int
    warm_up: int

    def measure(self, directory: Path) -> dict[str, _Batches]:
        """Build the states, let maintenance come to its end, and measure batches."""
        session = self.session(directory, _SPARK)
        fed = {
            name: _Fed(session, directory / str(number), query["keys"], self)
            for number, (name, query) in enumerate(self.queries.items())
        }
        for name, query in self.queries.items():
            fed[name].start(query["built_with"])
            fed[name].build()
        for one in fed.values():
            one.settle()
        for name, query in self.queries.items():
            if query["options"] is not None:
                fed[name].query.stop()
                fed[name].start(query["options"])
        names = list(self.queries)
        measured: dict[str, _Batches] = {name: [] for name in names}
        for number in range(self.warm_up + self.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                measured[name].append(fed[name].batch())
        for one in fed.values():
            one.query.stop()
        session.stop()
        return {name: batches[self.warm_up :] for name, batches in measured.items()}


class _Fed:
    """A query that counts rows by key, and has a batch whenever it is given a file."""

    query: StreamingQuery
    _recorder: Recorder

    def __init__(self, session: SparkSession, directory: Path, keys: int, side: GrowthSide) -> None:
        self._session = session
        self._directory = directory
        self._rows = side.rows_per_batch
        self._side = side
        self._counts = np.zeros(keys, np.int64)
        self._files = 0
        self._had_job = False
        for folder in ("input", "unfinished"):
            (directory / folder).mkdir(parents=True)

    def start(self, options: dict[str, Any]) -> None:
        """Start it, for the first time or again."""
        self._recorder = Recorder()
        local_directory = str(self._directory / "local")
        source = self._session.readStream.schema("key long").option("maxFilesPerTrigger", 1)
        rows = source.parquet(str(self._directory / "input"))
        given = {**options, "tuning": statelog.Tuning(**options.get("tuning", {}))}
        all_options = statelog.Options(**given, local_directory=local_directory, observer=self._recorder)
        counts = self._side.transform(rows, Count(), OUTPUT, all_options)
        self.query = start(counts, count_checks(), self._directory)

    def build(self) -> None:
        """Give every key its first row."""
        for first in range(0, len(self._counts), _BUILD_ROWS):
            self._feed(np.arange(first, min(first + _BUILD_ROWS, len(self._counts))))

    def settle(self) -> None:
        """Run batches until no materialization or large merge continues in them."""
        quiet = 0
        for _ in range(_SETTLING_BATCHES):
            quiet = 0 if self.batch()["has_slice"] else quiet + 1
            if quiet == 2:
                return

    def batch(self) -> dict[str, Any]:
        """Change as many keys as always, evenly spread and other ones every time; with a skew, those of random rows."""
        keys, rows, skew = len(self._counts), np.arange(self._rows), self._side.skew
        if skew == UNIFORM:
            stride = keys // self._rows
            return self._feed(rows * stride + self._files % stride)
        words = mix((rows + self._files * self._rows).astype(np.uint64))
        return self._feed(skewed_keys(keys, words, (mix(words) % np.uint64(keys)).astype(np.int64), skew))

    def _feed(self, keys: Numbers) -> dict[str, Any]:
        number, self._files = self._files, self._files + 1
        started_s = time.time()
        file = self._directory / "unfinished" / f"{number}.parquet"
        pq.write_table(pa.table({"key": keys}), file)
        file.rename(self._directory / "input" / file.name)
        progress = self._wait(number)
        np.add.at(self._counts, keys, 1)
        changed = np.unique(keys)
        require("the query", [progress], [check_of(changed, self._counts[changed])], number)
        jobs = list(self._directory.glob(_JOBS))
        had_job, self._had_job = self._had_job, bool(jobs)
        checkpoint = self._recorder.checkpoints[-1]
        if checkpoint.batch != number:
            raise RuntimeError(f"the newest checkpoint is {checkpoint.batch} after batch {number}")
        return {
            "batch_s": progress["durationMs"]["triggerExecution"] / 1000,
            "commit_s": checkpoint.commit_s,
            "subtask_s": checkpoint.subtask_s,
            "restore_s": checkpoint.restore_s,
            "changes": checkpoint.changes,
            # Whether one was in progress before or after the batch, and whether it continued in the batch.
            "has_job": had_job or self._had_job,
            "has_slice": any(job.stat().st_mtime >= started_s for job in jobs),
        }

    def _wait(self, number: int) -> dict[str, Any]:
        while self.query.isActive:
            last = last_progress(self.query)
            if last.get("batchId") == number and last["numInputRows"]:
                return last
            time.sleep(_POLL_S)
        raise RuntimeError(f"the query failed: {self.query.exception()}")
