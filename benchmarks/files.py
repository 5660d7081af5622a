"""Files that a windowed word count creates and deletes: merged in every way, and those of Spark's own state store."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.child import run_in_child
from benchmarks.files_side import SPARK
from benchmarks.frame import Benchmark, Result, Target, alternate, scratch

__all__ = ["BENCHMARK", "run"]

_MERGING: Final = ("off", "within", "across")
_FILE_BYTES: Final = 32 << 20


def run(*, rows_per_batch: int, words: int, batches: int, parallelism: int, directory: Path | None) -> Result:
    """Measure; the parameters are the options of the command."""
    with scratch(directory) as place:
        sides: dict[str, Callable[[], dict[str, Any]]] = {
            side: partial(_run_side, side, rows_per_batch, words, batches, parallelism, place)
            for side in (*_MERGING, SPARK)
        }
        measured = alternate(sides, 1)
    figures = {side: _figures(rounds[0], batches) for side, rounds in measured.items()}
    across = figures["across"]
    return Result(
        figures={"sides": figures},
        targets=[
            Target(
                "within: files created per checkpoint, without the claim",
                (figures["within"]["files_created"] - 1) / batches,
                1,
                "at_most",
            ),
            Target(
                "across: files created per 32 MiB written, rounded up",
                across["files_created"] / (-(-across["bytes_created"] // _FILE_BYTES)),
                1,
                "at_most",
            ),
        ],
        header=[
            "files merged",
            "created / 100 checkpoints",
            "deleted / 100 checkpoints",
            "MB written",
            "live at the end",
            "MB live",
        ],
        rows=[_row(side, each) for side, each in figures.items()],
        remarks=[
            f"{batches} checkpoints of {parallelism} subtasks, {rows_per_batch:,} rows of {words:,} words each,"
            " tumbling windows of ten batches. Files of the state only, looked at four times a second.",
            "All windows had all of their rows. Spark keeps the files of 100 batches before it deletes any.",
        ],
    )


def _run_side(
    side: str, rows_per_batch: int, words: int, batches: int, parallelism: int, place: Path
) -> dict[str, Any]:
    directory = place / uuid.uuid4().hex
    directory.mkdir()
    arguments = {
        "side": side,
        "rows_per_batch": rows_per_batch,
        "words": words,
        "batches": batches,
        "parallelism": parallelism,
        "directory": str(directory),
    }
    return run_in_child("benchmarks.files_side:run", arguments, directory)


def _figures(measured: dict[str, Any], batches: int) -> dict[str, Any]:
    created, live = measured["files_seen"], measured["files_live"]
    return {
        "files_created": created,
        "files_deleted": created - live,
        "created_per_100": 100 * created / batches,
        "deleted_per_100": 100 * (created - live) / batches,
        "bytes_created": measured["bytes_seen"],
        "files_live": live,
        "bytes_live": measured["bytes_live"],
        "windows": measured["windows"],
    }


def _row(side: str, figures: dict[str, Any]) -> list[str]:
    return [
        side,
        f"{figures['created_per_100']:,.0f}",
        f"{figures['deleted_per_100']:,.0f}",
        f"{figures['bytes_created'] / 1e6:,.1f}",
        f"{figures['files_live']:,}",
        f"{figures['bytes_live'] / 1e6:,.1f}",
    ]


_AT_LEAST_1: Final = click.IntRange(min=1)

BENCHMARK: Final = Benchmark(
    name="files",
    description="Files created and deleted by a windowed word count: merged in every way, and Spark's own.",
    options=[
        click.Option(["--rows-per-batch"], type=_AT_LEAST_1, default=5_000, help="Rows of a batch."),
        click.Option(["--words"], type=click.IntRange(2, 10**8), default=5_000, help="Number of possible words."),
        click.Option(["--batches"], type=click.IntRange(min=40), default=100, help="Checkpoints."),
        click.Option(["--parallelism"], type=_AT_LEAST_1, default=4, help="Subtasks and state partitions."),
        click.Option(
            ["--directory"],
            type=click.Path(file_okay=False, path_type=Path),
            help="For checkpoints and scratch files; by default one in the repository.",
        ),
    ],
    run=run,
)
