"""The figures of a demo, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from examples.flights.supervisor import Kill, Run

__all__ = ["Recovery", "Report", "Spread", "make_report", "print_report"]

_DIFFERENCES_SHOWN: Final = 20


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
    """How the job came back after a kill; or, for comparison, how it started first.

    Parameters
    ----------
    killed : str or None
        What was killed; None for the first start.
    batch : int or None
        In which batch.
    step : str or None
        Where in the batch.
    parallelism : int
        Number of subtasks afterwards.
    checkpoint_s : float
        Until the next completed checkpoint: from the new process's start, or from the kill of a worker.
    log_s : float or None
        statelog's part on the driver: claiming and reading the log. None if the driver went on.
    state_s : float or None
        statelog's part on the tasks: from then until the last subtask had its state.
    """

    killed: str | None
    batch: int | None
    step: str | None
    parallelism: int
    checkpoint_s: float
    log_s: float | None
    state_s: float | None


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
        The first start, and then one per kill.
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
    found = [_start(runs[0], None)]
    for index, run in enumerate(runs):
        for kill, killed_s in run.killed_s.items():
            if kill.ends_run:
                found.append(_start(runs[index + 1], kill))
            else:
                back_s = _next_checkpoint_s(run, killed_s)
                found.append(Recovery(kill.target, kill.batch, kill.step, run.parallelism, back_s, None, None))
    return found


def _start(run: Run, after: Kill | None) -> Recovery:
    (restore,) = run.events_of("restore")
    restored = [event["at_s"] for event in run.events_of("restored") if event["batch"] == restore["batch"]]
    return Recovery(
        killed=after.target if after else None,
        batch=after.batch if after else None,
        step=after.step if after else None,
        parallelism=run.parallelism,
        checkpoint_s=_next_checkpoint_s(run, run.started_s),
        log_s=restore["log_s"],
        state_s=max(restored) - restore["at_s"],
    )


def _next_checkpoint_s(run: Run, since_s: float) -> float:
    times_s: Iterator[float] = (event["at_s"] for event in run.events_of("checkpoint"))
    return next(at_s - since_s for at_s in times_s if at_s > since_s)


def print_report(report: Report, console: Console) -> None:
    """Print the tables, and how the comparison came out."""
    console.print(_times(report), _recovery_table(report.recoveries), _totals(report))
    if not report.differences:
        console.print(
            f"[bold green]{report.aircraft:,} aircraft compared with a plain Spark batch query: all equal",
            highlight=False,
        )
        return
    console.print(f"[bold red]{len(report.differences):,} rows differ from the plain Spark batch query:")
    for line in report.differences[:_DIFFERENCES_SHOWN]:
        console.print(line, markup=False, highlight=False)
    if len(report.differences) > _DIFFERENCES_SHOWN:
        console.print("...")


def _times(report: Report) -> Table:
    table = _table(f"{report.checkpoints} checkpoints", "median ms", "max ms")
    for label, spread in (
        ("commit: last ack received to entry durable", report.commit),
        ("slowest subtask: user code done to ack sent", report.subtask),
        ("beside them, the whole batch in Spark", report.batch),
    ):
        table.add_row(label, f"{spread.median_s * 1000:,.1f}", f"{spread.max_s * 1000:,.1f}")
    return table


def _recovery_table(recoveries: list[Recovery]) -> Table:
    columns = ("in batch", "at", "subtasks", "recovery s", "log ms", "state ms")
    table = _table("killed", *columns)
    for one in recoveries:
        table.add_row(
            one.killed or "(first start)",
            "" if one.batch is None else f"{one.batch}",
            one.step,
            f"{one.parallelism}",
            f"{one.checkpoint_s:.1f}",
            _milliseconds(one.log_s),
            _milliseconds(one.state_s),
        )
    table.caption = (
        "subtasks: afterwards; recovery: process start (for a worker: its kill) to the next checkpoint, the start"
        " of Spark included; log: claimed and read; state: until all subtasks had theirs"
    )
    table.caption_justify = "left"
    return table


def _totals(report: Report) -> Table:
    table = _table("in total", "")
    table.add_row("flights", f"{report.flights:,}")
    table.add_row("batches", f"{report.batches:,}")
    table.add_row("starts of the job", f"{report.runs}")
    table.add_row("kills survived", f"{sum(one.killed is not None for one in report.recoveries)}")
    table.add_row("bytes changed", f"{report.changed_bytes:,}")
    table.add_row("files written", f"{report.files:,}")
    table.add_row("their bytes", f"{report.file_bytes:,}")
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:,.0f}"
