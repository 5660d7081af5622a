"""The same counting processor on statelog and on Spark's own transformWithState."""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.child import run_in_child
from benchmarks.frame import Benchmark, Result, Target, alternate, scratch
from benchmarks.sides import batch_figures, checkpoint_figures, ratio, shown

__all__ = ["BENCHMARK", "CEILING", "SPARK", "STATELOG", "changed_keys", "rows_for_changed_keys", "run"]

STATELOG: Final = "statelog"
SPARK: Final = "Spark transformWithState"
CEILING: Final = "stateless ceiling"

_TARGET_KEYS: Final = 45_000
_TARGET_KEYS_TOLERANCE: Final = 0.05
_CHECKPOINT_RUN: Final = f"statelog, {_TARGET_KEYS // 1000}k keys changed"


@dataclasses.dataclass(frozen=True)
class _Side:
    """What one side is run with."""

    side: str
    rows_per_batch: int
    batches: int


def run(
    *,
    rows_per_batch: int,
    keys: int,
    batches: int,
    spark_rows_per_batch: int,
    spark_batches: int,
    parallelism: int,
    warm_up: int,
    rounds: int,
    directory: Path | None,
) -> Result:
    """Measure; the parameters are the options of the command."""
    if min(batches, spark_batches) <= warm_up:
        raise click.UsageError(f"{min(batches, spark_batches)} batches leave nothing after {warm_up} to warm up.")
    target_rows = rows_for_changed_keys(_TARGET_KEYS * parallelism, keys)
    sides = {
        CEILING: _Side(CEILING, rows_per_batch, batches),
        STATELOG: _Side(STATELOG, rows_per_batch, batches),
        _CHECKPOINT_RUN: _Side(STATELOG, target_rows or rows_per_batch, batches),
        SPARK: _Side(SPARK, spark_rows_per_batch, spark_batches),
    }
    if target_rows is None:
        del sides[_CHECKPOINT_RUN]
    with scratch(directory) as place:
        runs: dict[str, Callable[[], dict[str, Any]]] = {
            name: partial(_run_side, side, keys, parallelism, place) for name, side in sides.items()
        }
        measured = alternate(runs, rounds)
    figures = {name: _figures(side, measured[name], warm_up, parallelism, keys) for name, side in sides.items()}
    speedup = ratio(figures[STATELOG], figures[SPARK])
    of_ceiling = ratio(figures[STATELOG], figures[CEILING])
    return Result(
        figures={
            "sides": figures,
            "statelog_to_spark_rows_per_s": speedup,
            "statelog_to_ceiling_rows_per_s": of_ceiling,
        },
        targets=[
            Target("statelog / Spark transformWithState, rows/s", speedup, 25, "at_least"),
            Target(
                "subtask's part plus commit time, median ms",
                _target_ms(figures.get(_CHECKPOINT_RUN)),
                50,
                "at_most",
            ),
        ],
        header=["side", "rows per batch", "rows/s", "batch ms", "checkpoint ms", "commit ms", "state files", "MB"],
        rows=[_row(name, side, figures[name]) for name, side in sides.items()],
        remarks=_remarks(warm_up, speedup, of_ceiling, figures),
    )


def changed_keys(rows: int, keys: int) -> float:
    """Expected number of distinct keys among rows whose keys are uniformly random."""
    return -keys * math.expm1(rows * math.log1p(-1 / keys))


def rows_for_changed_keys(changed: int, keys: int) -> int | None:
    """How many rows have about `changed` distinct keys; None if there are not enough keys for it."""
    if changed >= keys:
        return None
    return math.ceil(math.log1p(-changed / keys) / math.log1p(-1 / keys))


def _run_side(side: _Side, keys: int, parallelism: int, place: Path) -> dict[str, Any]:
    directory = place / uuid.uuid4().hex
    directory.mkdir()
    arguments = {
        **dataclasses.asdict(side),
        "keys": keys,
        "parallelism": parallelism,
        "directory": str(directory),
    }
    return run_in_child("benchmarks.count_side:run", arguments, directory)


def _figures(side: _Side, rounds: list[dict[str, Any]], warm_up: int, parallelism: int, keys: int) -> dict[str, Any]:
    """What is known of a side."""
    return {
        **batch_figures(rounds, side.rows_per_batch, warm_up),
        **checkpoint_figures(rounds, parallelism, warm_up),
        "batches": side.batches,
        "expected_changed_keys_per_subtask": changed_keys(side.rows_per_batch, keys) / parallelism,
    }


def _target_ms(figures: dict[str, Any] | None) -> float | None:
    """The median of the checkpoint run, if it changed as many keys as the target is meant for."""
    if figures is None or figures["changed_keys_per_subtask"] < _TARGET_KEYS * (1 - _TARGET_KEYS_TOLERANCE):
        return None
    value: float = figures["checkpoint_ms"]["median"]
    return value


def _row(name: str, side: _Side, figures: dict[str, Any]) -> list[str]:
    return [
        name,
        f"{side.rows_per_batch:,}",
        f"{figures['rows_per_s']:,.0f}",
        shown(figures["batch_ms"]),
        shown(figures.get("checkpoint_ms")),
        shown(figures.get("commit_ms")),
        f"{figures['files_live']:,}" if side.side != CEILING else "",
        f"{figures['bytes_live'] / 1e6:,.1f}" if side.side != CEILING else "",
    ]


def _remarks(warm_up: int, speedup: float, of_ceiling: float, figures: dict[str, Any]) -> list[str]:
    counts = ", ".join(f"{name} {each['batch_ms']['samples']}" for name, each in figures.items())
    lines = [
        f"rows/s: rows per batch / median batch. The first {warm_up} batches of every run are left out; measured"
        f" batches: {counts}.",
        "checkpoint: the slowest subtask's part and the commit. Every batch's output was checked.",
        f"statelog / Spark transformWithState: {speedup:.1f}; statelog / stateless ceiling: {of_ceiling:.2f}",
    ]
    for name, each in figures.items():
        if "changed_keys_per_subtask" in each:
            lines.append(
                f"{name}: {each['changed_keys_per_subtask']:,.0f} keys and"
                f" {each['changed_bytes_per_subtask'] / 1e6:.2f} MB changed per subtask and batch (medians)"
            )
    return lines


_AT_LEAST_1: Final = click.IntRange(min=1)

BENCHMARK: Final = Benchmark(
    name="count",
    description="Count rows by key: statelog, Spark's own transformWithState, and the stateless ceiling.",
    options=[
        click.Option(["--rows-per-batch"], type=_AT_LEAST_1, default=200_000, help="Of statelog and the ceiling."),
        click.Option(["--keys"], type=click.IntRange(2, 10**8), default=1_000_000, help="Number of possible keys."),
        click.Option(["--batches"], type=_AT_LEAST_1, default=20, help="Of statelog and the ceiling."),
        click.Option(["--spark-rows-per-batch"], type=_AT_LEAST_1, default=20_000, help="Of Spark's own."),
        click.Option(["--spark-batches"], type=_AT_LEAST_1, default=4, help="Of Spark's own."),
        click.Option(["--parallelism"], type=_AT_LEAST_1, default=2, help="Subtasks, state partitions and cores."),
        click.Option(["--warm-up"], type=click.IntRange(min=0), default=2, help="First batches to leave out."),
        click.Option(["--rounds"], type=_AT_LEAST_1, default=1, help="How often every side runs."),
        click.Option(
            ["--directory"],
            type=click.Path(file_okay=False, path_type=Path),
            help="For checkpoints and scratch files; by default one in the repository.",
        ),
    ],
    run=run,
)
