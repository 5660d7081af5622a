"""The figures of a demo, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.flights.supervisor import Run

__all__ = ["Recovery", "Report", "Spread", "make_report", "print_report"]


@dataclass(frozen=True)
class Spread:
    """Median and maximum of a measure in seconds."""

    median_s: float
    max_s: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of some values."""
        held = list(values)
        return cls(median(held), max(held)) if held else cls(0.0, 0.0)


@dataclass(frozen=True)
class Recovery:
    """How the job came back after a kill.

    Parameters
    ----------
    killed : str
        What was killed.
    batch : int
        In which batch.
    step : str
        Where in the batch.
    parallelism : int
        Number of subtasks afterwards.
    checkpoint_s : float
        Until the next completed checkpoint: from the new process's start, or from the kill of a worker.
    log_s : float or None
        The part of statelog's driver: claiming and reading the log. None if the job went on.
    restore_s : float or None
        From then until the last subtask had its state.
    """

    killed: str
    batch: int
    step: str
    parallelism: int
    checkpoint_s: float
    log_s: float | None
    restore_s: float | None


@dataclass(frozen=True)
class Report:
    """What a demo measured.

    Parameters
    ----------
    flights, batches, runs : int
        How much was done.
    checkpoints : int
        Checkpoints completed; more than batches if one was repeated.
    commit : Spread
        Last ack received to entry durable.
    subtask : Spread
        User code done to ack sent, the slowest subtask of each checkpoint.
    batch : Spread
        Spark's batches, beginning to end.
    changed_bytes : int
        Bytes of all changesets.
    files, file_bytes : int
        Files at statelog's location at the end, and their size.
    recoveries : list of Recovery
        One per kill.
    aircraft : int
        Rows compared with the batch query's.
    differences : list of str
        Rows that differ.
    """

    flights: int
    batches: int
    runs: int
    checkpoints: int
    commit: Spread
    subtask: Spread
    batch: Spread
    changed_bytes: int
    files: int
    file_bytes: int
    recoveries: list[Recovery]
    aircraft: int
    differences: list[str]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)


def make_report(
    runs: list[Run], state: Path, *, flights: int, batches: int, aircraft: int, differences: list[str]
) -> Report:
    """Gather the figures from the runs' telemetry and the files at statelog's location."""
    checkpoints = [event for run in runs for event in run.events_of("checkpoint")]
    files = [path for path in state.rglob("*") if path.is_file()]
    return Report(
        flights=flights,
        batches=batches,
        runs=len(runs),
        checkpoints=len(checkpoints),
        commit=Spread.of(event["commit_s"] for event in checkpoints),
        subtask=Spread.of(event["subtask_s"] for event in checkpoints),
        batch=Spread.of(event["batch_s"] for run in runs for event in run.events_of("batch")),
        changed_bytes=sum(event["changed_bytes"] for event in checkpoints),
        files=len(files),
        file_bytes=sum(path.stat().st_size for path in files),
        recoveries=_recoveries(runs),
        aircraft=aircraft,
        differences=differences,
    )


def _recoveries(runs: list[Run]) -> list[Recovery]:
    found = []
    for index, run in enumerate(runs):
        for kill, killed_s in run.killed_s.items():
            after = runs[index + 1] if kill.ends_run else run
            start_s = after.started_s if kill.ends_run else killed_s
            next_s = next(event["at_s"] for event in after.events_of("checkpoint") if event["at_s"] > start_s)
            log_s = restore_s = None
            if kill.ends_run:
                (restore,) = after.events_of("restore")
                log_s = restore["log_s"]
                restore_s = max(_restored_at_s(after, restore["batch"])) - restore["at_s"]
            found.append(
                Recovery(kill.target, kill.batch, kill.step, after.parallelism, next_s - start_s, log_s, restore_s)
            )
    return found


def _restored_at_s(run: Run, batch: int) -> list[float]:
    return [event["at_s"] for event in run.events_of("restored") if event["batch"] == batch]


def print_report(report: Report, console: Console) -> None:
    """Print the tables, and how the comparison came out."""
    console.print(_times(report), _totals(report))
    if report.recoveries:
        console.print(_recovery_table(report.recoveries))
    if report.differences:
        console.print(f"[bold red]{len(report.differences)} rows differ from the plain Spark batch query:")
        for line in report.differences:
            console.print(line, markup=False, highlight=False)
    else:
        console.print(
            f"[bold green]{report.aircraft:,} aircraft compared with a plain Spark batch query: all equal",
            highlight=False,
        )


def _times(report: Report) -> Table:
    table = Table("per checkpoint", title=f"{report.checkpoints} checkpoints", title_justify="left")
    table.add_column("median ms", justify="right")
    table.add_column("max ms", justify="right")
    for label, spread in (
        ("commit: last ack received to entry durable", report.commit),
        ("slowest subtask: user code done to ack sent", report.subtask),
        ("the whole batch in Spark", report.batch),
    ):
        table.add_row(label, f"{spread.median_s * 1000:,.1f}", f"{spread.max_s * 1000:,.1f}")
    return table


def _totals(report: Report) -> Table:
    table = Table("in total", "", title_justify="left")
    table.columns[1].justify = "right"
    table.add_row("flights", f"{report.flights:,}")
    table.add_row("batches", f"{report.batches:,}")
    table.add_row("starts of the job", f"{report.runs}")
    table.add_row("kills survived", f"{len(report.recoveries)}")
    table.add_row("bytes changed", f"{report.changed_bytes:,}")
    table.add_row("files written", f"{report.files:,}")
    table.add_row("their bytes", f"{report.file_bytes:,}")
    return table


def _recovery_table(recoveries: list[Recovery]) -> Table:
    table = Table("killed with SIGKILL", "at", title="recoveries", title_justify="left")
    for column in ("parallelism after", "next checkpoint s", "of that: log ms", "state ms"):
        table.add_column(column, justify="right")
    for one in recoveries:
        table.add_row(
            one.killed,
            f"batch {one.batch}, {one.step}",
            f"{one.parallelism}",
            f"{one.checkpoint_s:.1f}",
            _milliseconds(one.log_s),
            _milliseconds(one.restore_s),
        )
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.0f}"
