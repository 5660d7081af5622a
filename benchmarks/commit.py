"""The coordinator, the log and the store without Spark: what a checkpoint costs on the driver."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.child import run_in_child
from benchmarks.distribution import Distribution
from benchmarks.frame import Benchmark, Result, Target, alternate, require_space, scratch

__all__ = ["BENCHMARK", "run"]

_TENTH: Final = 0.1


def run(
    *,
    store: str,
    file_merging: str,
    checkpoints: int,
    subtasks: tuple[int, ...],
    changeset_bytes: int,
    total_bytes: int,
    calls: str,
    fresh_every: int,
    directory: Path | None,
) -> Result:
    """Measure; the parameters are the options of the command."""
    per_location = min(fresh_every or checkpoints, checkpoints)
    if store == "s3" and file_merging == "across":
        file_merging = "within"
    sizes = {count: max(1, total_bytes // count) if total_bytes else changeset_bytes for count in subtasks}
    figures: dict[str, Any] = {}
    with scratch(directory) as place, _server(store) as location:
        require_space(
            place,
            per_location * max(count * size for count, size in sizes.items()),
            "Give another --directory, fewer --checkpoints, or --fresh-every 1000: a fresh location every"
            " 1,000 checkpoints, the old one deleted.",
        )
        sides = {
            f"{count} subtasks": partial(
                _run_side,
                place,
                location,
                file_merging=file_merging,
                checkpoints=checkpoints,
                subtasks=count,
                changeset_bytes=size,
                calls=calls,
                per_location=per_location,
            )
            for count, size in sizes.items()
        }
        for name, (measured,) in alternate(sides, 1).items():
            figures[name] = _figures(measured, per_location)
    return Result(
        figures={"store": store, "file_merging": file_merging, "runs": figures},
        targets=_targets(figures) if total_bytes else [],
        header=["run", "commit ms", "first 10%", "last 10%", "checkpoints/s", "files", "MB", "driver memory"],
        rows=[_row(name, each) for name, each in figures.items()],
        remarks=_remarks(file_merging, calls, checkpoints, per_location, figures),
    )


@contextmanager
def _server(store: str) -> Iterator[str | None]:
    """The location of logs: None for a directory of the side, else a folder in a bucket of a server of its own."""
    if store == "local":
        yield None
        return
    # Not at the top: the other benchmarks do without the server.
    from tests.s3.server import RadosGateway, missing_programs

    if missing := missing_programs():
        raise click.ClickException(f"{', '.join(missing)} not found; ./dev s3 installs an S3 server")
    with RadosGateway() as server:
        server.create_bucket("commit")
        before = dict(os.environ)
        os.environ.update(server.environment)
        try:
            yield "s3://commit/bench"
        finally:
            os.environ.clear()
            os.environ.update(before)


def _targets(figures: dict[str, Any]) -> list[Target]:
    """With the same number of bytes, the number of subtasks must not matter much."""
    medians = [each["commit_ms"]["median"] for each in figures.values()]
    return [Target("median commit: slowest / fastest number of subtasks", max(medians) / min(medians), 1.5, "at_most")]


def _run_side(place: Path, location: str | None, **arguments: Any) -> dict[str, Any]:
    name = uuid.uuid4().hex
    directory = place / name
    directory.mkdir()
    base = str(directory / "logs") if location is None else f"{location}/{name}"
    return run_in_child("benchmarks.commit_side:run", {**arguments, "base": base}, directory)


def _figures(measured: dict[str, Any], per_location: int) -> dict[str, Any]:
    """Distributions in place of the samples.

    The first and last tenth are those of a location's checkpoints, of all locations together.
    """
    commits_ms = [1000 * each for each in measured.pop("commit_s")]
    own_ms = [1000 * each for each in measured.pop("coordinator_commit_s")]
    tenth = max(1, int(per_location * _TENTH))
    first = [each for index, each in enumerate(commits_ms) if index % per_location < tenth]
    last = [each for index, each in enumerate(commits_ms) if index % per_location >= per_location - tenth]
    figures = {
        **measured,
        "commit_ms": Distribution.of(commits_ms).to_json(),
        "coordinator_commit_ms": Distribution.of(own_ms).to_json(),
        "first_tenth_median_ms": Distribution.of(first).median,
        "last_tenth_median_ms": Distribution.of(last or first).median,
    }
    before, after = measured["rss_before_bytes"], measured["rss_after_bytes"]
    if before is not None and after is not None:
        figures["rss_growth_bytes"] = after - before
    return figures


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    commit = figures["commit_ms"]
    percentiles = [f"{key} {value:.2f}" for key, value in commit.items() if key.startswith("p")]
    growth = figures.get("rss_growth_bytes")
    return [
        name,
        ", ".join([f"{commit['median']:.2f}", *percentiles, f"max {commit['max']:.1f}"]),
        f"{figures['first_tenth_median_ms']:.2f}",
        f"{figures['last_tenth_median_ms']:.2f}",
        f"{figures['checkpoints_per_s']:.0f}",
        f"{figures['files']:,}",
        f"{figures['bytes'] / 1e6:,.0f}",
        "unknown" if growth is None else f"{growth / 1e6:+,.0f} MB",
    ]


def _remarks(file_merging: str, calls: str, checkpoints: int, per_location: int, figures: dict[str, Any]) -> list[str]:
    path = "over the real RPC" if calls == "rpc" else "called directly"
    place = (
        "all in one location"
        if per_location == checkpoints
        else f"in a fresh location every {per_location:,} checkpoints, the old one deleted; the tenths are those of"
        " a location, files and bytes those of the last one"
    )
    reads = ", ".join(f"{name} {each['log_read_s']:.2f} s" for name, each in figures.items())
    return [
        f"{checkpoints:,} checkpoints per run, files merged {file_merging} checkpoints, coordinator {path}, {place}.",
        "commit: from the last subtask's ack to its answer, medians and percentiles in ms. Every log was read back"
        f" afterwards and its changesets checked; reading its entries took: {reads}.",
    ]


BENCHMARK: Final = Benchmark(
    name="commit",
    description="Commit checkpoints without Spark: the coordinator, the log and the store alone.",
    options=[
        click.Option(
            ["--store"],
            type=click.Choice(["local", "s3"]),
            default="local",
            help="A directory, or an S3 server on this machine.",
        ),
        click.Option(
            ["--file-merging"],
            type=click.Choice(["across", "within"]),
            default="across",
            help="Append the checkpoints to a file, or write an object for each.",
        ),
        click.Option(["--checkpoints"], type=click.IntRange(min=1), default=10_000, help="Per run."),
        click.Option(
            ["--subtasks"],
            type=click.IntRange(1, 32_768),
            default=(2, 64),
            multiple=True,
            help="One run for each number of subtasks.",
        ),
        click.Option(["--changeset-bytes"], type=click.IntRange(min=1), default=10_000, help="Of every subtask."),
        click.Option(
            ["--total-bytes"],
            type=click.IntRange(min=0),
            default=0,
            help="Of all subtasks together, instead; 0 is not.",
        ),
        click.Option(
            ["--calls"],
            type=click.Choice(["rpc", "direct"]),
            default="rpc",
            help="Call over TCP, as tasks do, or directly.",
        ),
        click.Option(
            ["--fresh-every"],
            type=click.IntRange(min=0),
            default=0,
            help="Use a fresh location every so many checkpoints and delete the old one; 0 is never.",
        ),
        click.Option(
            ["--directory"],
            type=click.Path(file_okay=False, path_type=Path),
            help="For the logs; by default one in the repository.",
        ),
    ],
    run=run,
)
