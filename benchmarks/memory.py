"""How much memory the Python processes of a query take while its state is much larger than that."""

from __future__ import annotations

import dataclasses
import re
import statistics
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

import statelog
from benchmarks.child import processes_of, run_in_child
from benchmarks.frame import STORED_KEYS, Result, Target, option, require_space
from benchmarks.query import PayloadSide, Recorder, count_checks, last_batch, rate_source, require, start, stop_when
from benchmarks.skew import HOT, SKEWS, UNIFORM
from statelog.options import TABLES

_LIMIT_BYTES: Final = 1e9
_MEASURES: Final = ("RssAnon", "RssShmem", "RssFile")


@dataclass(frozen=True)
class Settings:
    keys: int = option(1_000_000, "Number of keys.", STORED_KEYS)
    value_bytes: int = option(100, "Size of a key's value.")
    skew: str = option(UNIFORM, "How often the rows after the first have each key.", SKEWS)
    rows_per_batch: int = option(200_000, "Of every batch.")
    updates: int = option(4_000_000, "Rows of random keys after the first.")
    parallelism: int = option(2, "Subtasks and cores.")
    table: str = option("runs", "What the state is read from.", click.Choice(TABLES))


QUICK: Final = [Settings(skew=HOT, keys=10_000, rows_per_batch=5_000, updates=10_000)]


@dataclass(frozen=True, kw_only=True)
class MemorySide(PayloadSide):
    """Gives each key its first row, batch by batch, and continues with rows of random keys."""

    batches: int
    table: str

    def measure(self, directory: Path) -> dict[str, Any]:
        """Spark's progress by batch, unchecked, and the metrics of the checkpoints."""
        session = self.session(directory)
        recorder = Recorder()
        options = statelog.Options(table=self.table, local_directory=f"{directory}/local", observer=recorder)
        source = rate_source(session, self.rows_per_batch, self.parallelism)
        query = start(self.output(source, options), count_checks("found"), directory)
        progress = stop_when(query, lambda query: last_batch(query) >= self.batches - 1)[: self.batches]
        session.stop()
        return {"progress": progress, "checkpoints": [dataclasses.asdict(each) for each in recorder.checkpoints]}

    def check(self, directory: Path, progress: list[dict[str, Any]]) -> None:
        """Compare every batch's output with numbers made without any state, whose memory must not count."""
        session = self.session(directory)
        ranges = [(batch * self.rows_per_batch, (batch + 1) * self.rows_per_batch) for batch in range(self.batches)]
        require(self.side, progress, self.expected(session, ranges))
        session.stop()


class Sampler:
    """Watches the memory of the Python processes of a session; Linux only.

    Anonymous memory of the driver and of all workers is that when the sum was largest; all else are maxima.
    """

    def __init__(self) -> None:
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
        held = {process: memory for process in processes_of(session) if (memory := _memory(process)) is not None}
        self.samples += 1
        # Shared memory counts as anonymous too where it is not a file's.
        anonymous = {process: memory["RssAnon"] + memory["RssShmem"] for process, memory in held.items()}
        workers = [size for process, size in anonymous.items() if process != session]
        self.largest_worker_bytes = max([self.largest_worker_bytes, *workers])
        self.shared_bytes = max(self.shared_bytes, sum(memory["RssShmem"] for memory in held.values()))
        self.file_bytes = max(self.file_bytes, sum(memory["RssFile"] for memory in held.values()))
        if sum(anonymous.values()) > self.peak_bytes:
            self.driver_bytes, self.worker_bytes = anonymous.get(session, 0), sum(workers)
            self.processes = len(anonymous)

    def to_json(self) -> dict[str, int]:
        """All figures."""
        return {"peak_bytes": self.peak_bytes, **vars(self)}


def _memory(process: int) -> dict[str, int] | None:
    """Memory of a Python process by kind, in bytes; None for others."""
    with suppress(OSError):  # it has ended
        folder = Path("/proc") / str(process)
        if (folder / "exe").readlink().name.startswith("python"):
            return memory_of((folder / "status").read_text())
    return None


def memory_of(status: str) -> dict[str, int] | None:
    """Memory by kind, in bytes, of a process with this ``/proc/<id>/status``; None if it has just ended."""
    sizes = dict(re.findall(r"^(Rss\w+):\s*(\d+) kB$", status, re.MULTILINE))
    return {name: 1024 * int(sizes[name]) for name in _MEASURES} if sizes else None


def run(settings: Settings, place: Path) -> Result:
    keys, value_bytes, rows, updates = settings.keys, settings.value_bytes, settings.rows_per_batch, settings.updates
    require_space(place, 8 * (keys + updates) * (value_bytes + 60), "Give another --directory, or fewer --keys.")
    batches = -(-keys // rows) + -(-updates // rows)
    side = MemorySide.of(settings, side="statelog", batches=batches)
    sampler = Sampler()
    click.echo(f"{batches} batches ...", err=True)
    measured = run_in_child(partial(side.measure, place), place, watch=sampler.look)
    progress, checkpoints = measured["progress"], measured["checkpoints"]
    local_bytes = sum(file.stat().st_size for file in (place / "local").rglob("*") if file.is_file())
    click.echo("checking the output ...", err=True)
    run_in_child(partial(side.check, place, progress), place)
    batch_s = [each["durationMs"]["triggerExecution"] / 1000 for each in progress]
    figures = {
        **sampler.to_json(),
        "local_bytes": local_bytes,
        "batch_s": batch_s,
        "rows_per_s": sum(each["numInputRows"] for each in progress) / sum(batch_s),
        "materialized": sum(each["materialized"] for each in checkpoints),
        "checkpoints": checkpoints,
    }
    sizes = {
        "local runs MB": "local_bytes",
        "most anonymous MB": "peak_bytes",
        "driver": "driver_bytes",
        "workers": "worker_bytes",
        "largest worker": "largest_worker_bytes",
    }
    row = {column: f"{figures[size] / 1e6:,.0f}" for column, size in sizes.items()}
    name = f"Python processes of {keys:,} keys of {value_bytes} bytes: anonymous memory, bytes"
    return Result(
        figures=figures,
        targets=[Target(name, sampler.peak_bytes, _LIMIT_BYTES, "at_most")],
        rows=[{"keys": f"{keys:,}", **row, "rows/s": f"{figures['rows_per_s']:,.0f}"}],
        remarks=[
            f"{batches} batches of {rows:,} rows, median {statistics.median(batch_s):.1f} s; the last"
            f" {-(-updates // rows)} of them change random keys. A subtask was materialized"
            f" {figures['materialized']} times. Every batch's output was checked.",
            f"{sampler.samples:,} samples, at the largest of {sampler.processes} Python processes. Beside it at most"
            f" {sampler.file_bytes / 1e6:,.0f} MB mapped from files.",
        ],
    )
