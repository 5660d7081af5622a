"""Restarts after kill -9: how long until the first batch is done, and which part of it is spent on the state."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import statelog
from benchmarks.child import kill_child_when, run_in_child
from benchmarks.figures import median_ratio
from benchmarks.frame import STORED_KEYS, Result, Target, alternate, option, require_space
from benchmarks.query import (
    PayloadSide,
    Recorder,
    count_checks,
    last_progress,
    rate_source,
    require,
    start,
    stop_when,
)
from benchmarks.restarts import fresh, load_rocksdb, own_temporary_files, restart_parts
from benchmarks.skew import SKEWS, UNIFORM, ZIPF
from statelog.history.query_history import read_history
from statelog.log.open import STATE_FOLDER
from statelog.storage import LocalStore

CHANGELOG_ON: Final = "changelog on"
CHANGELOG_OFF: Final = "changelog off"
DEDUPLICATION: Final = "Spark deduplication"
PROCESSOR: Final = "Spark transformWithState"

_SPARK_SIDES: Final = {"deduplication": DEDUPLICATION, "processor": PROCESSOR}
_LOCAL_COPY: Final = "with local copy"
_FROM_OTHER: Final = "from other parallelism"
_TO_OTHER: Final = "to other parallelism"
_PARTS: Final = {
    "total_s": "total s",
    "start_up_s": "start-up",
    "log_s": "log",
    "restore_s": "restore",
    "processing_s": "processing",
    "later_batch_s": "later batch",
}
_BUILD_TIMEOUT_S: Final = 3600
_POLL_S: Final = 0.05
_BUILT_FILE: Final = "built"
"""Holds the first batch after the state is built."""
# So that a snapshot is there when the process is killed soon; by default the interval is a minute.
_SPARK: Final = {"spark.sql.streaming.stateStore.maintenanceInterval": "1s"}


@dataclass(frozen=True)
class Settings:
    keys: int = option(200_000, "Number of keys.", STORED_KEYS)
    value_bytes: int = option(100, "Size of a key's value.")
    skew: str = option(UNIFORM, "How often rows have each key, once the state is built.", SKEWS)
    build_batches: int = option(10, "Batches that build the state.")
    rows_per_batch: int = option(2_000, "Of all other batches.")
    small_batches: int = option(10, "Before the process is killed.")
    batches: int = option(5, "After the restart.", click.IntRange(2))
    parallelism: int = option(2, "Subtasks, state partitions and cores.")
    other_parallelism: int = option(3, "Subtasks before or after some restarts.")
    spark: str = option(
        "deduplication",
        "What keeps Spark's state: a deduplication, or the same processor, which takes long to build it.",
        click.Choice(list(_SPARK_SIDES)),
    )
    rounds: int = option(3, "How often to restart in every way.")


QUICK: Final = [
    Settings(skew=ZIPF, keys=2_000, build_batches=2, rows_per_batch=200, small_batches=2, batches=2, rounds=1)
]


@dataclass(frozen=True, kw_only=True)
class RecoverySide(PayloadSide):
    """A query that is built with some subtasks and killed, and continues with others, with or without local copies."""

    build_batches: int
    small_batches: int
    batches: int
    built_parallelism: int
    keeps_local: bool

    @property
    def state(self) -> str:
        """The name of the state that it starts from."""
        return f"{self.side}, {self.built_parallelism} subtasks"

    def build(self, directory: Path) -> None:
        """Give each key its first row in a few large batches, then continue with small ones until killed."""
        session = self.session(directory, _SPARK)
        built = directory / _BUILT_FILE

        def has_all_keys(query: StreamingQuery) -> bool:
            last = last_progress(query)
            return bool(last) and _offset(last, "endOffset") >= self.keys

        def write_first_batch(query: StreamingQuery) -> bool:
            if (last := last_progress(query)) and not built.exists():
                built.write_text(str(last["batchId"]))
            return False

        self._batches(session, -(-self.keys // self.build_batches), Recorder(), directory, has_all_keys)
        self._batches(session, self.rows_per_batch, Recorder(), directory, write_first_batch)

    def measure(self, directory: Path, started_s: float = 0.0) -> dict[str, Any]:
        """Go on for some batches; the process was started at `started_s`."""
        session = self.session(directory, _SPARK)
        if self.is_spark:
            load_rocksdb(session)
        recorder = Recorder()
        progress = self._batches(
            session, self.rows_per_batch, recorder, directory, lambda query: len(query.recentProgress) >= self.batches
        )[: self.batches]
        self._check(session, progress)
        session.stop()
        return restart_parts(progress, recorder, started_s)

    def _batches(
        self,
        session: SparkSession,
        rows_per_batch: int,
        recorder: Recorder,
        directory: Path,
        is_over: Callable[[StreamingQuery], bool],
    ) -> list[dict[str, Any]]:
        source = rate_source(session, rows_per_batch, self.parallelism)
        local = f"{directory}/local"
        options = statelog.Options(
            local_directory=local, observer=recorder, tuning=statelog.Tuning(changelog=self.side == CHANGELOG_ON)
        )
        if self.side == DEDUPLICATION:
            new = self.rows(source).dropDuplicates(["key", "payload"])
            output = new.select("key", F.lit(1).alias("n"), F.length("payload").alias("found"))
        else:
            output = self.output(source, options)
        return stop_when(start(output, count_checks("found"), directory), is_over, _POLL_S)

    def _check(self, session: SparkSession, progress: list[dict[str, Any]]) -> None:
        ranges = [(_offset(entry, "startOffset"), _offset(entry, "endOffset")) for entry in progress]
        _, *expected = self.expected(session, [(0, ranges[0][0]), *ranges])
        if self.side == DEDUPLICATION:  # all keys had a row before
            expected = [dict.fromkeys(each, 0) for each in expected]
        require(self.side, progress, expected, progress[0]["batchId"])


def _offset(progress: Any, name: str) -> int:
    """How many rows a query has read before or after a batch, since its first start."""
    [source] = progress["sources"]
    return 0 if source[name] is None else int(source[name]["offset"])


def run(settings: Settings, place: Path) -> Result:
    keys, value_bytes = settings.keys, settings.value_bytes
    variants = variants_of(settings)
    require_space(place, 14 * keys * (value_bytes + 100), "Give another --directory, or fewer --keys.")
    built: dict[str, Any] = {}
    for variant in {each.state: each for each in variants.values()}.values():
        click.echo(f"building the state: {variant.state} ...", err=True)
        built[variant.state] = _build(place, variant)
    restarts = {name: partial(_restart, place, variant) for name, variant in variants.items()}
    measured = alternate(restarts, settings.rounds)
    figures = {name: _figures(each) for name, each in measured.items()}
    on = built[variants[CHANGELOG_ON].state]
    return Result(
        figures={"built": built, "restarts": figures},
        targets=targets_of(measured, variants, on),
        rows=[_row(name, each) for name, each in figures.items()],
        remarks=[
            f"{keys:,} keys with {value_bytes} bytes each; seconds, medians of {settings.rounds} restarts. Later batch:"
            f" median of the {settings.batches - 1} batches after the first. Every batch's output was checked.",
            f"changelog on: {on['base_bytes'] / 1e6:,.1f} MB of {on['base_through'] + 1} batches are materialized, then"
            f" follow {on['changes_bytes'] / 1e6:,.1f} MB of changes of {on['batch'] - on['base_through']} batches.",
            *(
                f"{name}, last round: {last['changelogs']:.0f} changelogs after the snapshot: {last['replay_s']:.3f} s"
                for name, (*_, last) in measured.items()
                if "changelogs" in last
            ),
        ],
    )


def variants_of(settings: Settings) -> dict[str, RecoverySide]:
    """The restarts that are measured, by name."""
    other, spark = settings.other_parallelism, _SPARK_SIDES[settings.spark]
    on = RecoverySide.of(settings, side=CHANGELOG_ON, built_parallelism=settings.parallelism, keeps_local=False)
    return {
        CHANGELOG_ON: on,
        CHANGELOG_OFF: dataclasses.replace(on, side=CHANGELOG_OFF),
        _LOCAL_COPY: dataclasses.replace(on, keeps_local=True),
        _FROM_OTHER: dataclasses.replace(on, built_parallelism=other),
        _TO_OTHER: dataclasses.replace(on, parallelism=other),
        spark: dataclasses.replace(on, side=spark),
    }


def targets_of(
    measured: dict[str, list[dict[str, Any]]], variants: dict[str, RecoverySide], built: dict[str, Any]
) -> list[Target]:
    """The targets of the restore parts, given by variant and round; `built` is the state with the changelog."""
    *_, spark = variants

    def ratio(one: str, other: str) -> float:
        return median_ratio(*((each["restore_s"] for each in measured[name]) for name in (one, other)))

    has_both = built["base_bytes"] > 0 and built["changes_bytes"] > 0
    targets = [
        Target("restore: changelog on / off", ratio(CHANGELOG_ON, CHANGELOG_OFF) if has_both else None, 1.2, "at_most"),
        Target(f"restore: {spark} / statelog", ratio(spark, CHANGELOG_ON), 2, "at_least"),
        Target("restore: with a local copy / without", ratio(_LOCAL_COPY, CHANGELOG_ON), 0.1, "at_most"),
        Target("restore: from another parallelism / the same", ratio(_FROM_OTHER, CHANGELOG_ON), 1.2, "at_most"),
    ]
    if variants[_TO_OTHER].parallelism <= (os.cpu_count() or 1):
        # With fewer cores it would measure how subtasks share one.
        to_other = ratio(_TO_OTHER, CHANGELOG_ON)
        targets.append(Target("restore: to another parallelism / the same", to_other, 1.2, "at_most"))
    return targets


def _build(place: Path, side: RecoverySide) -> dict[str, Any]:
    """Have a state built, kill the process, and keep what it leaves behind."""
    work = fresh(place / "work")
    checkpoint = work / "checkpoint"

    def is_over() -> bool:
        try:
            first = int((work / _BUILT_FILE).read_text() or 0)
        except FileNotFoundError:
            return False
        is_done = (checkpoint / "commits" / str(first + side.small_batches)).exists()
        return is_done and (not side.is_spark or _snapshot_version(checkpoint) > side.build_batches)

    started_s = time.monotonic()
    builder = dataclasses.replace(side, parallelism=side.built_parallelism)
    kill_child_when(is_over, partial(builder.build, work), work, own_temporary_files(work), _BUILD_TIMEOUT_S)
    built = {"build_s": time.monotonic() - started_s, **stored(side, checkpoint)}
    saved = _saved(place, side)
    saved.mkdir()
    for name in ("checkpoint", "local"):
        if (work / name).exists():
            (work / name).rename(saved / name)
    return built


def stored(side: RecoverySide, checkpoint: Path) -> dict[str, Any]:
    """The extent of the state that the killed process has stored."""
    if side.is_spark:
        sizes = [path.stat().st_size for path in (checkpoint / "state").rglob("*") if path.is_file()]
        return {"snapshot_version": _snapshot_version(checkpoint), "files": len(sizes), "bytes": sum(sizes)}
    histories = read_history(LocalStore(str(checkpoint / STATE_FOLDER))).histories
    history = next(iter(histories.values()), None)
    latest = history.latest_record if history else None
    base_map = latest.base_map if latest else None
    if history is None or latest is None or base_map is None:
        raise click.ClickException(f"{side.side}: the killed process has left no checkpoint behind")
    later = list(history.between(base_map.through + 1, latest.batch))
    return {
        "batch": latest.batch,
        "base_through": base_map.through,
        "base_bytes": sum(base_range.base.length for base_range in base_map.ranges),
        "changes_bytes": sum(segment.length for checkpoint in later for segment in checkpoint.segments),
    }


def _snapshot_version(checkpoint: Path) -> int:
    """The newest version of Spark's state that all partitions have a snapshot of; -1 if there is none."""
    versions = [
        max((int(path.stem.partition("_")[0]) for path in partition.rglob("*.zip")), default=-1)
        for partition in (checkpoint / "state" / "0").glob("[0-9]*")
    ]
    return min(versions, default=-1)


def _restart(place: Path, side: RecoverySide) -> dict[str, Any]:
    work = fresh(place / "work")
    saved = _saved(place, side)
    shutil.copytree(saved / "checkpoint", work / "checkpoint")
    if side.keeps_local:
        shutil.copytree(saved / "local", work / "local")
    return run_in_child(partial(side.measure, work, time.time()), work, own_temporary_files(work))


def _saved(place: Path, side: RecoverySide) -> Path:
    return place / re.sub(r"\W+", "-", side.state)


def _figures(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {name: statistics.median(each[name] for each in rounds) for name in _PARTS}
    return {**medians, "restored_bytes": rounds[-1].get("restored_bytes"), "by_round": rounds}


def _row(name: str, figures: dict[str, Any]) -> dict[str, str]:
    fetched = figures["restored_bytes"]
    return {
        "restart": name,
        **{
            column: f"{figures[part]:.{3 if part in ('log_s', 'restore_s') else 2}f}" for part, column in _PARTS.items()
        },
        "MB fetched": "" if fetched is None else f"{fetched / 1e6:,.1f}",
    }
