"""Run the job, kill it again and again, and check that its result is right all the same."""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import statelog
from examples.flights.data import DAYS, write_days
from examples.flights.pictures import write_timeline
from examples.flights.report import Report, make_report, print_report
from examples.flights.supervisor import Kill, Run, plan_runs, run_module, supervise
from examples.flights.telemetry import Event
from examples.processes import JobFailedError

_FEWEST_BATCHES: Final = 8  # with fewer, two kills could meet in one batch
_LOG_LINES: Final = 30


class Demo:
    """The demo in a directory of its own.

    Parameters
    ----------
    directory : Path
        An empty directory.
    files_per_batch : int
        How many days a batch reads.
    pictures : Path
        A folder that gets a picture of the runs, and the page of the checkpoints.
    console : Console
        Where the progress is shown.
    """

    def __init__(self, directory: Path, files_per_batch: int, pictures: Path, console: Console) -> None:
        self._directory = directory
        self._pictures = pictures
        self._files_per_batch = files_per_batch
        self._console = console
        self._flights = directory / "flights"
        self._histories = directory / "histories"
        self._checkpoint = directory / "checkpoint"
        self.log = directory / "spark.log"

    def run(self, days: int, runs: list[Run]) -> Report:
        """Write the input, do the runs, and compare.

        Raises
        ------
        JobFailedError
            If the job or the comparison fails by itself.
        """
        flights = write_days(self._flights, days)
        batches = math.ceil(days / self._files_per_batch)
        self._console.print(f"{flights:,} flights of {days} days, {batches} batches", highlight=False)
        for run in runs:
            for kill in run.kills:
                self._console.print(
                    f"  to be killed: {kill.target}, batch {kill.batch}, at {kill.step}", highlight=False
                )
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            for number, run in enumerate(runs, 1):
                self._do_run(number, run, batches, progress)
            task = progress.add_task("comparing with a batch query", total=None)
            aircraft, differences = self._compare()
            progress.update(task, total=1, completed=1)
        self._draw(runs)
        return make_report(
            runs,
            self._checkpoint / "statelog",
            flights=flights,
            batches=batches,
            aircraft=aircraft,
            differences=differences,
        )

    def _do_run(self, number: int, run: Run, batches: int, progress: Progress) -> None:
        telemetry = self._directory / f"telemetry-{number}.jsonl"
        task = progress.add_task(f"run {number}, parallelism {run.parallelism}", total=batches)

        def on_event(event: Event) -> None:
            if event["event"] == "restore":
                progress.update(task, completed=event["batch"])
            elif event["event"] == "checkpoint":
                progress.update(task, completed=event["batch"] + 1)

        def on_kill(kill: Kill) -> None:
            progress.console.print(
                f"[red]killed the {kill.target} in batch {kill.batch}, at {kill.step}", highlight=False
            )
            if kill.ends_run:
                progress.stop_task(task)

        command = ["examples.flights.job", "--flights", self._flights, "--histories", self._histories]
        command += ["--checkpoint", self._checkpoint, "--telemetry", telemetry]
        command += ["--parallelism", run.parallelism, "--files-per-batch", self._files_per_batch]
        supervise(
            run,
            [str(part) for part in command],
            telemetry=telemetry,
            work=self._directory,
            log=self.log,
            on_event=on_event,
            on_kill=on_kill,
        )

    def _draw(self, runs: list[Run]) -> None:
        """Make what can be looked at after the demo, while the query's checkpoint is still there."""
        picture, page = write_timeline(runs, self._pictures), self._pictures / "checkpoints.html"
        statelog.report(self._checkpoint, page)
        for line in (f"picture: {picture}", f"page of the checkpoints: {page}"):
            self._console.print(line, soft_wrap=True, highlight=False)

    def _compare(self) -> tuple[int, list[str]]:
        result = self._directory / "comparison.json"
        command = ["examples.flights.compare", "--flights", self._flights, "--histories", self._histories]
        command += ["--result", result]
        code = run_module([str(part) for part in command], self._directory, self.log)
        if not result.exists():
            raise JobFailedError(f"The comparison ended with exit code {code}.")
        found = json.loads(result.read_text())
        return found["aircraft"], found["differences"]


@click.command()
@click.option("--days", type=click.IntRange(1, DAYS), default=DAYS, show_default=True, help="Days of the year.")
@click.option(
    "--files-per-batch", type=click.IntRange(1), default=5, show_default=True, help="Days that a batch reads."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Varies the batches of the kills.")
@click.option("--no-kill", is_flag=True, help="Let the job run through.")
@click.option(
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the demo makes its directory; the default is the system's place for temporary files.",
)
@click.option(
    "--pictures",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/demo"),
    show_default=True,
    help="Folder that gets the picture and the page.",
)
@click.option("--keep", is_flag=True, help="Do not remove the demo's directory at the end.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON instead of tables.")
def main(
    days: int,
    files_per_batch: int,
    seed: int,
    no_kill: bool,
    work_dir: Path | None,
    pictures: Path,
    keep: bool,
    as_json: bool,
) -> None:
    """Keep the history of every aircraft that left New York in 2013, and kill the job while it does.

    The exit code is 0 if the result is the same as a plain Spark batch query's, row for row.
    """
    batches = math.ceil(days / files_per_batch)
    if not no_kill and batches < _FEWEST_BATCHES:
        raise click.UsageError(f"{batches} batches are too few for the kills; take {_FEWEST_BATCHES}, or --no-kill.")
    runs = [Run(2, [])] if no_kill else plan_runs(batches, seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # children are ended on the way out
    console = Console(stderr=True)
    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="statelog-flights-", dir=work_dir)).resolve()
    demo = Demo(directory, files_per_batch, pictures.resolve(), console)
    try:
        report = demo.run(days, runs)
    except JobFailedError as error:
        console.print(f"[bold red]{error}[/] The end of its log:")
        lines = demo.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        console.print("\n".join(lines), markup=False, highlight=False)
        sys.exit(1)
    finally:
        if keep:
            console.print(f"kept: {directory}", soft_wrap=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        print_report(report, Console())
    sys.exit(1 if report.differences else 0)


if __name__ == "__main__":
    main()
