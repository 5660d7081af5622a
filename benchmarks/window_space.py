"""How much more space a checkpoint of sliding windows takes with the changelog: the materialized state and the log."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.child import run_in_child
from benchmarks.distribution import Distribution
from benchmarks.frame import Benchmark, Result, Target, alternate, scratch
from benchmarks.window_space_side import CHANGELOG_OFF, CHANGELOG_ON
from statelog.options import Options

__all__ = ["BENCHMARK", "figures_of", "run", "targets_of"]

_LIMIT: Final = 1.5


def run(
    *,
    rows_per_batch: int,
    keys: int,
    value_bytes: int,
    window_batches: int,
    slide_batches: int,
    batches: int,
    warm_up: int,
    max_log_to_base: float,
    parallelism: int,
    directory: Path | None,
) -> Result:
    """Measure; the parameters are the options of the command."""
    if batches <= warm_up:
        raise click.UsageError(f"{batches} batches leave nothing after {warm_up} to warm up.")
    if warm_up <= window_batches:
        raise click.UsageError(f"After {warm_up} batches no window of {window_batches} batches has been removed.")
    arguments = {
        "rows_per_batch": rows_per_batch,
        "keys": keys,
        "value_bytes": value_bytes,
        "window_batches": window_batches,
        "slide_batches": slide_batches,
        "batches": batches,
        "max_log_to_base": max_log_to_base,
        "parallelism": parallelism,
    }
    with scratch(directory) as place:
        sides: dict[str, Callable[[], dict[str, Any]]] = {
            side: partial(_run_side, side, arguments, place) for side in (CHANGELOG_ON, CHANGELOG_OFF)
        }
        measured = alternate(sides, 1)
    figures = {side: figures_of(rounds[0], warm_up) for side, rounds in measured.items()}
    return Result(
        figures={"sides": figures},
        targets=targets_of(figures),
        header=["side", "full MB", "of it log MB", "new MB", "stored MB", "on disk MB", "materialized", "batch ms"],
        rows=[_row(side, each) for side, each in figures.items()],
        remarks=_remarks(arguments, batches - warm_up, figures[CHANGELOG_ON]),
    )


def figures_of(measured: dict[str, Any], warm_up: int) -> dict[str, Any]:
    """Figures of a side.

    Parameters
    ----------
    measured : dict
        What :func:`benchmarks.window_space_side.run` returned.
    warm_up : int
        How many batches to leave out.
    """
    taken = [each for each in measured["checkpoints"] if each["batch"] >= warm_up]
    return {
        "full_bytes": Distribution.of(each["base_bytes"] + each["log_bytes"] for each in taken).to_json(),
        "log_bytes": Distribution.of(each["log_bytes"] for each in taken).to_json(),
        "new_bytes": Distribution.of(each["changed_bytes"] + each["materialized_bytes"] for each in taken).to_json(),
        "stored_bytes": Distribution.of(each["stored_bytes"] for each in taken).to_json(),
        "bytes_live": measured["bytes_live"],
        "materializations": sum(each["materialized"] for each in taken),
        "batch_ms": Distribution.of(
            each["triggerExecution"] for each in measured["batches"] if each["batch"] >= warm_up
        ).to_json(),
        "run": measured,
    }


def targets_of(figures: dict[str, dict[str, Any]]) -> list[Target]:
    """How many times as large a full checkpoint may be with the changelog: in the middle, and at worst."""
    on, off = (figures[side]["full_bytes"] for side in (CHANGELOG_ON, CHANGELOG_OFF))
    return [
        Target(f"full checkpoint, changelog on / off: {name}", on[measure] / off[measure], _LIMIT, "at_most")
        for name, measure in (("medians", "median"), ("maxima", "max"))
    ]


def _run_side(side: str, arguments: dict[str, Any], place: Path) -> dict[str, Any]:
    directory = place / uuid.uuid4().hex
    directory.mkdir()
    return run_in_child(
        "benchmarks.window_space_side:run", {**arguments, "side": side, "directory": str(directory)}, directory
    )


def _row(side: str, figures: dict[str, Any]) -> list[str]:
    return [
        side,
        _shown_mb(figures["full_bytes"]),
        _shown_mb(figures["log_bytes"]),
        _shown_mb(figures["new_bytes"]),
        _shown_mb(figures["stored_bytes"]),
        f"{figures['bytes_live'] / 1e6:,.1f}",
        f"{figures['materializations']}",
        f"{figures['batch_ms']['median']:,.0f}",
    ]


def _shown_mb(sizes: dict[str, Any]) -> str:
    return f"{sizes['median'] / 1e6:,.1f} (max {sizes['max'] / 1e6:,.1f})"


def _remarks(arguments: dict[str, Any], checkpoints: int, on: dict[str, Any]) -> list[str]:
    rows, size, slide = (arguments[name] for name in ("rows_per_batch", "window_batches", "slide_batches"))
    lines = [
        f"{rows:,} rows of {arguments['value_bytes']:,} bytes and {arguments['keys']:,} keys per batch; windows of"
        f" {size} batches, one every {slide}, so a row is in {size / slide:g} windows. Medians of {checkpoints}"
        " checkpoints.",
        "full: what a restart would read, materialized state and log. new: stored for one checkpoint. stored: the files"
        " of materialized state that the retained checkpoints need. Every batch's output was checked.",
    ]
    if on["materializations"] < arguments["parallelism"]:
        lines.append("The state was not materialized while it was measured: run more batches.")
    return lines


_AT_LEAST_1: Final = click.IntRange(min=1)

BENCHMARK: Final = Benchmark(
    name="window-space",
    description="The size of a full checkpoint of sliding windows, with and without the changelog.",
    options=[
        click.Option(["--rows-per-batch"], type=_AT_LEAST_1, default=1_000, help="Rows of a batch."),
        click.Option(["--keys"], type=click.IntRange(2, 10**8), default=200, help="Number of possible keys."),
        click.Option(["--value-bytes"], type=_AT_LEAST_1, default=500, help="Size of a row's payload."),
        click.Option(["--window-batches"], type=_AT_LEAST_1, default=20, help="Length of a window."),
        click.Option(["--slide-batches"], type=_AT_LEAST_1, default=1, help="Distance of the windows' starts."),
        click.Option(["--batches"], type=_AT_LEAST_1, default=100, help="Checkpoints."),
        click.Option(["--warm-up"], type=click.IntRange(min=0), default=40, help="First batches to leave out."),
        click.Option(
            ["--max-log-to-base"],
            type=click.FloatRange(min=0),
            default=Options().max_log_to_base,
            help="As in Options.",
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
