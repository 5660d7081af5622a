"""How much memory the Python processes of a query take while its state is much larger than that."""

from __future__ import annotations

import re
import statistics
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from benchmarks.child import processes_of, run_in_child
from benchmarks.frame import Benchmark, Result, Target, require_space, scratch
from statelog.options import TABLES

__all__ = ["BENCHMARK", "Sampler", "run"]

_LIMIT_BYTES: Final = 1e9
_MEASURES: Final = ("RssAnon", "RssShmem", "RssFile")


class Sampler:
    """Watches the memory of the Python processes of a session; Linux only.

    Attributes
    ----------
    samples : int
        How often it has looked.
    driver_bytes, worker_bytes : int
        Anonymous memory of the driver and of all Python workers when the sum was largest.
    processes : int
        Number of Python processes then.
    largest_worker_bytes : int
        The most anonymous memory that one worker had at any time.
    shared_bytes, file_bytes : int
        The largest sums of what is in shared memory, which counts as anonymous too where it is not a file's, and of
        what is mapped from files, at any time.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self.samples = 0
        self.driver_bytes = self.worker_bytes = self.processes = 0
        self.largest_worker_bytes = 0
        self.shared_bytes = self.file_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """The largest sum of anonymous memory of all processes."""
        return self.driver_bytes + self.worker_bytes

    def look(self, session: int) -> None:
        """Look once; `session` is the process id of the driver."""
        found = {process: held for process in processes_of(session) if (held := self._memory(process)) is not None}
        self.samples += 1
        anonymous = {process: held["RssAnon"] + held["RssShmem"] for process, held in found.items()}
        workers = [held for process, held in anonymous.items() if process != session]
        self.largest_worker_bytes = max([self.largest_worker_bytes, *workers])
        self.shared_bytes = max(self.shared_bytes, sum(held["RssShmem"] for held in found.values()))
        self.file_bytes = max(self.file_bytes, sum(held["RssFile"] for held in found.values()))
        if sum(anonymous.values()) > self.peak_bytes:
            self.driver_bytes, self.worker_bytes = anonymous.get(session, 0), sum(workers)
            self.processes = len(anonymous)

    def _memory(self, process: int) -> dict[str, int] | None:
        """Memory of a Python process by kind, in bytes; None for others."""
        with suppress(OSError):  # it has ended
            folder = self._proc / str(process)
            if (folder / "exe").readlink().name.startswith("python"):
                status = (folder / "status").read_text()
                found = dict(re.findall(r"^(Rss\w+):\s*(\d+) kB$", status, re.MULTILINE))
                return {name: 1024 * int(found[name]) for name in _MEASURES}
        return None


def run(
    *,
    keys: int,
    value_bytes: int,
    rows_per_batch: int,
    updates: int,
    parallelism: int,
    table: str,
    directory: Path | None,
) -> Result:
    """Measure; the parameters are the options of the command."""
    batches = -(-keys // rows_per_batch) + -(-updates // rows_per_batch)
    sampler = Sampler()
    with scratch(directory) as place:
        needed = 8 * (keys + updates) * (value_bytes + 60)
        require_space(place, needed, "Give another --directory, or fewer --keys.")
        sizes = {"keys": keys, "value_bytes": value_bytes, "parallelism": parallelism, "directory": str(place)}
        asked = {**sizes, "rows_per_batch": rows_per_batch, "batches": batches, "table": table}
        click.echo(f"{batches} batches ...", err=True)
        measured = run_in_child("benchmarks.memory_side:run", asked, place, watch=sampler.look)
        local_bytes = sum(file.stat().st_size for file in (place / "local").rglob("*") if file.is_file())
        click.echo("checking the output ...", err=True)
        run_in_child("benchmarks.memory_side:check", {**sizes, "progress": measured["progress"]}, place)
    progress, checkpoints = measured["progress"], measured["checkpoints"]
    batch_s = [each["durationMs"]["triggerExecution"] / 1000 for each in progress]
    figures = {
        "peak_bytes": sampler.peak_bytes,
        "driver_bytes": sampler.driver_bytes,
        "worker_bytes": sampler.worker_bytes,
        "processes": sampler.processes,
        "largest_worker_bytes": sampler.largest_worker_bytes,
        "shared_bytes": sampler.shared_bytes,
        "file_bytes": sampler.file_bytes,
        "samples": sampler.samples,
        "local_bytes": local_bytes,
        "batch_s": batch_s,
        "rows_per_s": sum(each["numInputRows"] for each in progress) / sum(batch_s),
        "materialized": sum(each["materialized"] for each in checkpoints),
        "checkpoints": checkpoints,
    }
    name = f"Python processes of {keys:,} keys of {value_bytes} bytes: anonymous memory, bytes"
    return Result(
        figures=figures,
        targets=[Target(name, sampler.peak_bytes, _LIMIT_BYTES, "at_most")],
        header=["keys", "local runs MB", "most anonymous MB", "driver", "workers", "largest worker", "rows/s"],
        rows=[
            [
                f"{keys:,}",
                *(
                    f"{size / 1e6:,.0f}"
                    for size in (
                        local_bytes,
                        sampler.peak_bytes,
                        sampler.driver_bytes,
                        sampler.worker_bytes,
                        sampler.largest_worker_bytes,
                    )
                ),
                f"{figures['rows_per_s']:,.0f}",
            ]
        ],
        remarks=[
            f"{batches} batches of {rows_per_batch:,} rows, median {statistics.median(batch_s):.1f} s; the last"
            f" {-(-updates // rows_per_batch)} of them change random keys. A subtask was materialized"
            f" {figures['materialized']} times. Every batch's output was checked.",
            f"{sampler.samples:,} samples, at the largest of {sampler.processes} Python processes. Beside it at most"
            f" {sampler.file_bytes / 1e6:,.0f} MB mapped from files.",
        ],
    )


_AT_LEAST_1: Final = click.IntRange(min=1)

BENCHMARK: Final = Benchmark(
    name="memory",
    description="A state larger than the memory: what the Python processes of its query take.",
    options=[
        click.Option(["--keys"], type=click.IntRange(100, 10**8), default=1_000_000, help="Number of keys."),
        click.Option(["--value-bytes"], type=_AT_LEAST_1, default=100, help="Size of a key's value."),
        click.Option(["--rows-per-batch"], type=_AT_LEAST_1, default=200_000, help="Of every batch."),
        click.Option(["--updates"], type=_AT_LEAST_1, default=4_000_000, help="Rows of random keys after the first."),
        click.Option(["--parallelism"], type=_AT_LEAST_1, default=2, help="Subtasks and cores."),
        click.Option(["--table"], type=click.Choice(TABLES), default="runs", help="What the state is read from."),
        click.Option(
            ["--directory"],
            type=click.Path(file_okay=False, path_type=Path),
            help="For checkpoints and scratch files; by default one in the repository.",
        ),
    ],
    run=run,
)
