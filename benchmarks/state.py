"""Every kind of state beside Spark's own transformWithState, and what single operations cost without Spark."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from benchmarks import operations
from benchmarks.child import run_in_child
from benchmarks.frame import Benchmark, Result, Target, alternate, scratch
from benchmarks.sides import batch_figures, checkpoint_figures, ratio, shown
from benchmarks.state_kinds import KINDS

__all__ = ["BENCHMARK", "SPARK", "STATELOG", "run"]

STATELOG: Final = "statelog"
SPARK: Final = "Spark"

_LEAST_RATIO: Final = 10


@dataclasses.dataclass(frozen=True)
class _Side:
    """What one side of one kind is run with."""

    side: str
    kind: str
    mode: str
    rows_per_batch: int
    keys: int
    batches: int


def run(
    *,
    part: str,
    kind: tuple[str, ...],
    mode: str,
    rows_per_batch: int,
    batches: int,
    spark_rows_per_batch: int,
    spark_batches: int,
    equal_sizes: bool,
    keys: int,
    entry_keys: int,
    parallelism: int,
    warm_up: int,
    rounds: int,
    operation_keys: int,
    entries: tuple[int, ...],
    repetitions: int,
    directory: Path | None,
) -> Result:
    """Measure; the parameters are the options of the command."""
    if part == "ops":
        arguments = {"keys": operation_keys, "entries": sorted(set(entries)), "repetitions": repetitions}
        with scratch(directory) as place:
            return operations.as_result(run_in_child("benchmarks.operations:measure", arguments, place))
    if min(batches, spark_batches) <= warm_up:
        raise click.UsageError(f"{min(batches, spark_batches)} batches leave nothing after {warm_up} to warm up.")
    own_rows = spark_rows_per_batch if equal_sizes else rows_per_batch
    pairs = _pairs(kind or tuple(KINDS), mode)
    if not pairs:
        raise click.UsageError("There is nothing to measure: a window takes rows only.")
    sides = {
        (one, how, side): _Side(side, one, how, rows, entry_keys if KINDS[one].has_few_keys else keys, count)
        for one, how in pairs
        for side, rows, count in ((STATELOG, own_rows, batches), (SPARK, spark_rows_per_batch, spark_batches))
    }
    with scratch(directory) as place:
        runs: dict[str, Callable[[], dict[str, Any]]] = {
            ", ".join(name): partial(_run_side, side, parallelism, warm_up, place) for name, side in sides.items()
        }
        measured = alternate(runs, rounds)
    figures = {
        name: {
            **dataclasses.asdict(side),
            **batch_figures(measured[", ".join(name)], side.rows_per_batch, warm_up),
            **checkpoint_figures(measured[", ".join(name)], parallelism, warm_up),
        }
        for name, side in sides.items()
    }
    ratios = {(one, how): ratio(figures[one, how, STATELOG], figures[one, how, SPARK]) for one, how in pairs}
    return Result(
        figures={
            "sides": {", ".join(name): each for name, each in figures.items()},
            "statelog_to_spark_rows_per_s": {", ".join(pair): value for pair, value in ratios.items()},
        },
        targets=[
            Target(f"{one}, {how}: statelog / Spark, rows/s", value, _LEAST_RATIO, "at_least")
            for (one, how), value in ratios.items()
        ],
        header=["state", "mode", "side", "rows per batch", "keys", "rows/s", "ratio", "batch ms", "checkpoint ms"],
        rows=[_row(side, figures[name], ratios) for name, side in sides.items()],
        remarks=_remarks(warm_up, own_rows, spark_rows_per_batch, figures),
    )


def _pairs(kinds: Sequence[str], mode: str) -> list[tuple[str, str]]:
    """The kinds and modes to measure, in the order of the kinds."""
    modes = ("row", "pandas") if mode == "both" else (mode,)
    return [
        (one, how)
        for one, what in KINDS.items()
        if one in kinds
        for how in modes
        if how == "row" or what.takes_frames is not None
    ]


def _run_side(side: _Side, parallelism: int, warm_up: int, place: Path) -> dict[str, Any]:
    directory = place / uuid.uuid4().hex
    directory.mkdir()
    arguments = {**dataclasses.asdict(side), "parallelism": parallelism, "directory": str(directory)}
    measured = run_in_child("benchmarks.state_side:run", arguments, directory)
    # All sides together take long; whoever has to stop the benchmark has seen something.
    rate = batch_figures([measured], side.rows_per_batch, warm_up)["rows_per_s"]
    click.echo(f"    {rate:,.0f} rows/s", err=True)
    return measured


def _row(side: _Side, figures: dict[str, Any], ratios: dict[tuple[str, str], float]) -> list[str]:
    return [
        side.kind,
        side.mode,
        side.side,
        f"{side.rows_per_batch:,}",
        f"{side.keys:,}",
        f"{figures['rows_per_s']:,.0f}",
        f"{ratios[side.kind, side.mode]:.1f}" if side.side == STATELOG else "",
        shown(figures["batch_ms"]),
        shown(figures.get("checkpoint_ms")),
    ]


def _remarks(warm_up: int, own_rows: int, spark_rows: int, figures: dict[Any, dict[str, Any]]) -> list[str]:
    samples = dict.fromkeys((STATELOG, SPARK), 0)
    for (_, _, side), each in figures.items():
        samples[side] += each["batch_ms"]["samples"]
    lines = [
        f"rows/s: rows per batch / median batch. The first {warm_up} batches of every run are left out; measured"
        f" batches of all kinds: statelog {samples[STATELOG]}, Spark {samples[SPARK]}.",
        "Every batch's output was checked.",
    ]
    if own_rows == spark_rows:
        lines.append("Both sides have batches of the same size; a batch's fixed cost in Spark is in both.")
    else:
        lines.append(
            f"Spark has batches of {spark_rows:,} rows and statelog of {own_rows:,}: the fixed cost of a batch weighs"
            " more on Spark's side. --equal-sizes gives statelog Spark's."
        )
    if any(name[0] == "window" for name in figures):
        lines.append("window: statelog's windows API beside a processor for Spark with a map and a timer per window.")
    return lines


_AT_LEAST_1: Final = click.IntRange(min=1)
_KEYS: Final = click.IntRange(2, 10**8)

BENCHMARK: Final = Benchmark(
    name="state",
    description="Every kind of state beside Spark's own transformWithState; costs of single operations.",
    options=[
        click.Option(
            ["--part"],
            type=click.Choice(["kinds", "ops"]),
            default="kinds",
            help="kinds: queries, beside Spark's; ops: inside a subtask, without Spark.",
        ),
        click.Option(
            ["--kind"], type=click.Choice(list(KINDS)), multiple=True, help="May be repeated; by default all."
        ),
        click.Option(["--mode"], type=click.Choice(["row", "pandas", "both"]), default="both", help="Processors."),
        click.Option(["--rows-per-batch"], type=_AT_LEAST_1, default=100_000, help="Of statelog."),
        click.Option(["--batches"], type=_AT_LEAST_1, default=8, help="Of statelog."),
        click.Option(["--spark-rows-per-batch"], type=_AT_LEAST_1, default=5_000, help="Of Spark's own."),
        click.Option(["--spark-batches"], type=_AT_LEAST_1, default=4, help="Of Spark's own."),
        click.Option(["--equal-sizes"], is_flag=True, help="Give statelog Spark's rows per batch."),
        click.Option(["--keys"], type=_KEYS, default=1_000_000, help="Possible keys of value, timer and ttl."),
        click.Option(["--entry-keys"], type=_KEYS, default=20_000, help="Possible keys of list, map and window."),
        click.Option(["--parallelism"], type=_AT_LEAST_1, default=2, help="Subtasks, state partitions and cores."),
        click.Option(["--warm-up"], type=click.IntRange(min=0), default=2, help="First batches to leave out."),
        click.Option(["--rounds"], type=_AT_LEAST_1, default=1, help="How often every side runs."),
        click.Option(["--operation-keys"], type=_AT_LEAST_1, default=50_000, help="ops: keys of a batch."),
        click.Option(
            ["--entries"],
            type=_AT_LEAST_1,
            multiple=True,
            default=(10, 1_000, 100_000),
            help="ops: sizes of the lists and maps that grow; may be repeated.",
        ),
        click.Option(["--repetitions"], type=_AT_LEAST_1, default=5, help="ops: how often each is measured."),
        click.Option(
            ["--directory"],
            type=click.Path(file_okay=False, path_type=Path),
            help="For checkpoints and scratch files; by default one in the repository.",
        ),
    ],
    run=run,
)
