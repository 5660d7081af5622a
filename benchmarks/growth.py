"""Whether a checkpoint gets dearer with the state it belongs to, or while the state is materialized."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.child import run_in_child
from benchmarks.distribution import Distribution
from benchmarks.frame import Benchmark, Result, Target, require_space, scratch
from statelog.local.policy import MergePolicy

__all__ = ["BENCHMARK", "NOT_RUNNING", "RUNNING", "growth", "longer_s", "run", "targets_of"]

RUNNING: Final = "materialization running"
NOT_RUNNING: Final = "not running"
_MEASURES: Final = {"commit_s": "commit time", "subtask_s": "the subtasks' part", "batch_s": "batch"}
_MIN_PAIRS: Final = 5


def run(
    *,
    keys: tuple[int, ...],
    rows_per_batch: int,
    rounds: int,
    warm_up: int,
    materialization_keys: int,
    parallelism: int,
    directory: Path | None,
) -> Result:
    """Measure; the parameters are the options of the command."""
    if rows_per_batch > min(*keys, materialization_keys):
        raise click.UsageError(f"{rows_per_batch} rows per batch are more than the fewest keys.")
    sizes = sorted(set(keys))
    by_size: dict[str, dict[str, Any]] = {
        f"{count:,} keys": {"keys": count, "built_with": {}, "options": None} for count in sizes
    }
    off = {"materialization": False}
    by_state: dict[str, dict[str, Any]] = {
        RUNNING: {"keys": materialization_keys, "built_with": off, "options": {"materialization_interval_s": 0.0}},
        NOT_RUNNING: {"keys": materialization_keys, "built_with": off, "options": off},
    }
    with scratch(directory) as place:
        require_space(place, 150 * (sum(sizes) + 2 * materialization_keys), "Give another --directory, or fewer keys.")
        measure = partial(_measure, place, rows_per_batch, rounds, warm_up, parallelism)
        click.echo("states of different sizes ...", err=True)
        growing = measure(by_size)
        click.echo("with and without a materialization ...", err=True)
        upkeep = measure(by_state)
    pairs = [pair for pair in zip(upkeep[RUNNING], upkeep[NOT_RUNNING], strict=True) if pair[0]["has_job"]]
    materializing = {RUNNING: [pair[0] for pair in pairs], NOT_RUNNING: [pair[1] for pair in pairs]}
    figures: dict[str, Any] = {
        "sizes": {name: _figures(batches) for name, batches in growing.items()},
        "materialization": {name: _figures(batches) for name, batches in materializing.items() if batches},
        "longest_extra_batch_s": max(
            (one["batch_s"] - other["batch_s"] for one, other in pairs if one["has_slice"]), default=None
        ),
        "batches": {"sizes": growing, "materialization": upkeep},
    }
    return Result(
        figures=figures,
        targets=targets_of(growing, materializing),
        header=["state", "batches", "commit ms", "subtasks' part ms", "batch ms", "changes", "with upkeep"],
        rows=[_row(name, each) for part in ("sizes", "materialization") for name, each in figures[part].items()],
        remarks=[
            f"Medians (and maxima) of {rounds} batches, each of which changes {rows_per_batch:,} keys; the queries have"
            " their batches in turn. The ratios are made of medians of paired differences.",
            f"A materialization ran in {len(pairs)} of {rounds} batches of {materialization_keys:,} keys; only these"
            " and those of the same rounds without count. With upkeep: share of the batches with a slice of a"
            " materialization or of a large merge. Every batch's output was checked.",
        ],
    )


def growth(one: Sequence[float], other: Sequence[float]) -> float:
    """How many times as large as `one` its pair `other` is: by the median of the differences."""
    differences = [second - first for first, second in zip(one, other, strict=True)]
    return 1 + statistics.median(differences) / statistics.median(one)


def longer_s(one: Sequence[float], other: Sequence[float]) -> float:
    """By how much the pairs `other` are larger than `one`: the median."""
    return statistics.median(second - first for first, second in zip(one, other, strict=True))


def targets_of(
    growing: dict[str, list[dict[str, Any]]], materializing: dict[str, list[dict[str, Any]]]
) -> list[Target]:
    """What batches with more state, and with a materialization, are held against.

    Parameters
    ----------
    growing : dict of str to list of dict
        The batches by size, the smallest first.
    materializing : dict of str to list of dict
        The batches with and without a materialization.
    """
    (smallest, base), *larger = growing.items()
    targets = []
    for name, batches in larger:
        for measure, shown in _MEASURES.items():
            ratio = growth(_values(base, measure), _values(batches, measure))
            targets.append(Target(f"{shown}: {name} / {smallest}", ratio, 1.3, "at_most"))
    running, not_running = materializing[RUNNING], materializing[NOT_RUNNING]
    commit = longer = None
    if len(running) >= _MIN_PAIRS:
        commit = growth(_values(not_running, "commit_s"), _values(running, "commit_s"))
    with_slice = [number for number, batch in enumerate(running) if batch["has_slice"]]
    if len(with_slice) >= _MIN_PAIRS:
        pairs = [[batches[number] for number in with_slice] for batches in (not_running, running)]
        longer = 1000 * longer_s(*(_values(batches, "batch_s") for batches in pairs))
    return [
        *targets,
        Target("commit time: with a materialization / without", commit, 1.2, "at_most"),
        Target("batch: longer with a slice of a materialization, ms", longer, 1000 * MergePolicy().slice_s, "at_most"),
    ]


def _measure(
    place: Path, rows_per_batch: int, rounds: int, warm_up: int, parallelism: int, queries: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    directory = place / uuid.uuid4().hex
    directory.mkdir()
    arguments = {
        "queries": queries,
        "rows_per_batch": rows_per_batch,
        "rounds": rounds,
        "warm_up": warm_up,
        "parallelism": parallelism,
        "directory": str(directory),
    }
    return run_in_child("benchmarks.growth_side:run", arguments, directory)


def _values(batches: Sequence[dict[str, Any]], measure: str) -> list[float]:
    return [batch[measure] for batch in batches]


def _figures(batches: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **{
            f"{measure.removesuffix('_s')}_ms": Distribution.of(
                1000 * each for each in _values(batches, measure)
            ).to_json()
            for measure in (*_MEASURES, "restore_s")
        },
        "changes": statistics.median(_values(batches, "changes")),
        "with_upkeep": statistics.mean(_values(batches, "has_slice")),
    }


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    return [
        name,
        str(figures["batch_ms"]["samples"]),
        *(
            f"{figures[measure]['median']:.1f} ({figures[measure]['max']:.1f})"
            for measure in ("commit_ms", "subtask_ms", "batch_ms")
        ),
        f"{figures['changes']:,.0f}",
        f"{figures['with_upkeep']:.0%}",
    ]


_AT_LEAST_1: Final = click.IntRange(min=1)

BENCHMARK: Final = Benchmark(
    name="growth",
    description="The same changes to states of different sizes, and with a materialization running.",
    options=[
        click.Option(
            ["--keys"],
            type=click.IntRange(100, 10**8),
            default=(100_000, 1_000_000, 10_000_000),
            multiple=True,
            help="One state for each number of keys.",
        ),
        click.Option(["--rows-per-batch"], type=_AT_LEAST_1, default=10_000, help="Keys that a batch changes."),
        click.Option(["--rounds"], type=_AT_LEAST_1, default=40, help="Batches of each state."),
        click.Option(["--warm-up"], type=click.IntRange(min=0), default=2, help="Batches before them."),
        click.Option(
            ["--materialization-keys"],
            type=click.IntRange(100, 10**8),
            default=1_000_000,
            help="Keys of the two states of which one is materialized.",
        ),
        click.Option(["--parallelism"], type=_AT_LEAST_1, default=2, help="Subtasks and cores."),
        click.Option(
            ["--directory"],
            type=click.Path(file_okay=False, path_type=Path),
            help="For checkpoints and scratch files; by default one in the repository.",
        ),
    ],
    run=run,
)
