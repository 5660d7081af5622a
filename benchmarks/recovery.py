"""Restarts after kill -9: how long until the first batch is done, and which part of it is spent on the state."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.child import kill_child_when, run_in_child
from benchmarks.frame import Benchmark, Result, Target, alternate, require_space, scratch
from benchmarks.recovery_side import BUILT_FILE, CHANGELOG_OFF, CHANGELOG_ON, DEDUPLICATION, PROCESSOR
from statelog.checkpoint.history import History
from statelog.checkpoint.query_operators import operators_of
from statelog.clock import SystemClock
from statelog.log.open import open_log
from statelog.options import Options
from statelog.storage import LocalStore

__all__ = ["BENCHMARK", "Variant", "run", "targets_of", "variants_of"]

_SPARK_SIDES: Final = {"deduplication": DEDUPLICATION, "processor": PROCESSOR}
_BUILD_TIMEOUT_S: Final = 3600
_LOCAL_COPY: Final = "with local copy"
_FROM_OTHER: Final = "from other parallelism"
_TO_OTHER: Final = "to other parallelism"
_PARTS: Final = ("total_s", "start_up_s", "log_s", "restore_s", "processing_s", "later_batch_s")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to restart.

    Parameters
    ----------
    side : str
        What runs.
    built_parallelism, parallelism : int
        Number of subtasks before the restart and after it.
    keeps_local : bool
        Whether the local copies are still there.
    """

    side: str
    built_parallelism: int
    parallelism: int
    keeps_local: bool = False

    @property
    def state(self) -> str:
        """What it starts from."""
        return f"{self.side}, {self.built_parallelism} subtasks"


def run(
    *,
    keys: int,
    value_bytes: int,
    build_batches: int,
    rows_per_batch: int,
    small_batches: int,
    batches: int,
    parallelism: int,
    other_parallelism: int,
    spark: str,
    rounds: int,
    directory: Path | None,
) -> Result:
    """Measure; the parameters are the options of the command."""
    variants = variants_of(_SPARK_SIDES[spark], parallelism, other_parallelism)
    sizes = {"keys": keys, "value_bytes": value_bytes, "rows_per_batch": rows_per_batch}
    with scratch(directory) as place:
        require_space(place, 14 * keys * (value_bytes + 100), "Give another --directory, or fewer --keys.")
        built: dict[str, Any] = {}
        for variant in {each.state: each for each in variants.values()}.values():
            click.echo(f"building the state: {variant.state} ...", err=True)
            built[variant.state] = _build(place, variant, build_batches, small_batches, sizes)
        runs: dict[str, Callable[[], dict[str, Any]]] = {
            name: partial(_restart, place, variant, {**sizes, "batches": batches}) for name, variant in variants.items()
        }
        measured = alternate(runs, rounds)
    figures = {name: _figures(each) for name, each in measured.items()}
    return Result(
        figures={"built": built, "restarts": figures},
        targets=targets_of(measured, variants, built[variants[CHANGELOG_ON].state]),
        header=["restart", "total s", "start-up", "log", "restore", "processing", "later batch", "MB fetched"],
        rows=[_row(name, each) for name, each in figures.items()],
        remarks=_remarks(keys, value_bytes, batches, rounds, built[variants[CHANGELOG_ON].state], figures),
    )


def variants_of(spark: str, parallelism: int, other_parallelism: int) -> dict[str, Variant]:
    """The restarts that are measured, by name."""
    return {
        CHANGELOG_ON: Variant(CHANGELOG_ON, parallelism, parallelism),
        CHANGELOG_OFF: Variant(CHANGELOG_OFF, parallelism, parallelism),
        _LOCAL_COPY: Variant(CHANGELOG_ON, parallelism, parallelism, keeps_local=True),
        _FROM_OTHER: Variant(CHANGELOG_ON, other_parallelism, parallelism),
        _TO_OTHER: Variant(CHANGELOG_ON, parallelism, other_parallelism),
        spark: Variant(spark, parallelism, parallelism),
    }


def targets_of(
    measured: dict[str, list[dict[str, Any]]], variants: dict[str, Variant], built: dict[str, Any]
) -> list[Target]:
    """What the restore parts are held against; ratios are those of one round.

    Parameters
    ----------
    measured : dict of str to list of dict
        What :func:`benchmarks.recovery_side.restart` returned, by variant and round.
    variants : dict of str to Variant
        The variants.
    built : dict
        What is stored of the state with the changelog.
    """
    [spark] = [name for name, variant in variants.items() if variant.side in _SPARK_SIDES.values()]

    def ratio(one: str, other: str) -> float:
        pairs = zip(measured[one], measured[other], strict=True)
        ratios: list[float] = [first["restore_s"] / second["restore_s"] for first, second in pairs]
        return statistics.median(ratios)

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


def _build(
    place: Path, variant: Variant, build_batches: int, small_batches: int, sizes: dict[str, Any]
) -> dict[str, Any]:
    """Have a state built, kill the process, and keep what it leaves behind."""
    side = variant.side
    work = _fresh(place / "work")
    checkpoint = work / "checkpoint"

    def is_over() -> bool:
        try:
            first = int((work / BUILT_FILE).read_text() or 0)
        except FileNotFoundError:
            return False
        is_done = (checkpoint / "commits" / str(first + small_batches)).exists()
        return is_done and (side not in _SPARK_SIDES.values() or _snapshot_version(checkpoint) > build_batches)

    asked = {
        **sizes,
        "side": side,
        "parallelism": variant.built_parallelism,
        "build_batches": build_batches,
        "directory": str(work),
        "local_directory": str(work / "local"),
    }
    started_s = time.monotonic()
    kill_child_when(is_over, "benchmarks.recovery_side:build", asked, work, _environment(work), _BUILD_TIMEOUT_S)
    built = {"build_s": time.monotonic() - started_s, **_stored(side, checkpoint)}
    saved = _saved(place, variant)
    saved.mkdir()
    for name in ("checkpoint", "local"):
        if (work / name).exists():
            (work / name).rename(saved / name)
    return built


def _stored(side: str, checkpoint: Path) -> dict[str, Any]:
    """What the killed process has stored."""
    if side in _SPARK_SIDES.values():
        folder = checkpoint / "state"
        files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        return {"snapshot_version": _snapshot_version(checkpoint), "files": len(files), "bytes": sum(files)}
    store = LocalStore(str(checkpoint / "statelog"))
    [operator] = operators_of(store)
    history = History(open_log(store, operator, Options(), SystemClock()).read())
    latest = history.latest_record
    base_map = latest.base_map if latest else None
    if latest is None or base_map is None:
        raise click.ClickException(f"{side}: the killed process has left no checkpoint behind")
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


def _restart(place: Path, variant: Variant, arguments: dict[str, Any]) -> dict[str, Any]:
    work = _fresh(place / "work")
    saved = _saved(place, variant)
    shutil.copytree(saved / "checkpoint", work / "checkpoint")
    if variant.keeps_local:
        shutil.copytree(saved / "local", work / "local")
    asked = {
        **arguments,
        "side": variant.side,
        "parallelism": variant.parallelism,
        "directory": str(work),
        "local_directory": str(work / "local"),
        "started_s": time.time(),
    }
    return run_in_child("benchmarks.recovery_side:restart", asked, work, _environment(work))


def _saved(place: Path, variant: Variant) -> Path:
    return place / re.sub(r"\W+", "-", variant.state)


def _fresh(work: Path) -> Path:
    shutil.rmtree(work, ignore_errors=True)
    (work / "tmp").mkdir(parents=True)
    return work


def _environment(work: Path) -> dict[str, str]:
    """A process that is killed leaves its temporary files behind, so they are made here."""
    return {
        "TMPDIR": str(work / "tmp"),
        "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={work / 'tmp'} -XX:-UsePerfData",
    }


def _figures(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {name: statistics.median(each[name] for each in rounds) for name in _PARTS}
    return {**medians, "restored_bytes": rounds[-1].get("restored_bytes"), "by_round": rounds}


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    fetched = figures["restored_bytes"]
    return [
        name,
        *(f"{figures[part]:.3f}" if part in ("log_s", "restore_s") else f"{figures[part]:.2f}" for part in _PARTS),
        "" if fetched is None else f"{fetched / 1e6:,.1f}",
    ]


def _remarks(
    keys: int, value_bytes: int, batches: int, rounds: int, on: dict[str, Any], figures: dict[str, Any]
) -> list[str]:
    lines = [
        f"{keys:,} keys with {value_bytes} bytes each; seconds from the start of the process to the end of its first"
        f" batch, medians of {rounds} restarts. Later batch: median of the {batches - 1} batches after it.",
        f"changelog on: {on['base_bytes'] / 1e6:,.1f} MB of {on['base_through'] + 1} batches are materialized, then"
        f" follow {on['changes_bytes'] / 1e6:,.1f} MB of changes of {on['batch'] - on['base_through']} batches.",
        "restore: statelog's slowest subtask from begin until its state could be read; Spark's time to load its state"
        " store, mean of the partitions. Every batch's output was checked.",
    ]
    for each in figures.values():
        last = each["by_round"][-1]
        if "changelogs" in last:
            lines.append(
                f"Spark, last round: {last['changelogs']:.0f} changelogs after its snapshot took"
                f" {last['replay_s']:.3f} s of it."
            )
    return lines


_AT_LEAST_1: Final = click.IntRange(min=1)

BENCHMARK: Final = Benchmark(
    name="recovery",
    description="Restart after kill -9: the time to the first batch, with and without changelog, and Spark's own.",
    options=[
        click.Option(["--keys"], type=click.IntRange(100, 10**8), default=200_000, help="Number of keys."),
        click.Option(["--value-bytes"], type=_AT_LEAST_1, default=100, help="Size of a key's value."),
        click.Option(["--build-batches"], type=_AT_LEAST_1, default=10, help="Batches that build the state."),
        click.Option(["--rows-per-batch"], type=_AT_LEAST_1, default=2_000, help="Of all other batches."),
        click.Option(["--small-batches"], type=_AT_LEAST_1, default=10, help="Before the process is killed."),
        click.Option(["--batches"], type=click.IntRange(min=2), default=5, help="After the restart."),
        click.Option(["--parallelism"], type=_AT_LEAST_1, default=2, help="Subtasks, state partitions and cores."),
        click.Option(
            ["--other-parallelism"],
            type=_AT_LEAST_1,
            default=3,
            help="Subtasks before or after some restarts.",
        ),
        click.Option(
            ["--spark"],
            type=click.Choice(list(_SPARK_SIDES)),
            default="deduplication",
            help="What keeps Spark's state: a deduplication, or the same processor, which takes long to build it.",
        ),
        click.Option(["--rounds"], type=_AT_LEAST_1, default=3, help="How often to restart in every way."),
        click.Option(
            ["--directory"],
            type=click.Path(file_okay=False, path_type=Path),
            help="For checkpoints and scratch files; by default one in the repository.",
        ),
    ],
    run=run,
)
