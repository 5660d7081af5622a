"""What all benchmarks share: results, targets, alternating sides, and the command line."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import click
from rich.console import Console
from rich.table import Table

from benchmarks import machine

__all__ = ["Benchmark", "Result", "Target", "alternate", "command_line", "require_space", "scratch"]

_BUILD: Final = Path(__file__).resolve().parents[1] / "build"
_WIDTH: Final = 132
_T = TypeVar("_T")


@dataclass(frozen=True)
class Target:
    """A limit that a measured value is held against.

    Parameters
    ----------
    name : str
        What was measured, with its unit.
    value : float or None
        The measurement; None if the run did not have what the target is defined for. That counts as missed.
    limit : float
        The limit.
    sense : {"at_least", "at_most"}
        On which side of the limit the value should be.
    """

    name: str
    value: float | None
    limit: float
    sense: Literal["at_least", "at_most"]

    @property
    def met(self) -> bool:
        """Whether the value was measured and is on the right side of the limit."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.sense == "at_least" else self.value <= self.limit

    def to_json(self) -> dict[str, Any]:
        """The target as an object of the benchmark's JSON."""
        return {
            "name": self.name,
            "value": self.value,
            "limit": self.limit,
            "sense": self.sense,
            "met": self.met,
        }

    def __str__(self) -> str:
        shown = "not measured" if self.value is None else f"{self.value:.4g}"
        verdict = "met" if self.met else "MISSED"
        return f"{verdict}: {self.name}: {shown} ({self.sense.replace('_', ' ')} {self.limit:g})"


@dataclass(frozen=True)
class Result:
    """What a benchmark found.

    Parameters
    ----------
    figures : dict
        Everything measured, for the JSON file; units end the names.
    targets : list of Target
        The targets.
    header, rows : list
        The same as a table to print.
    remarks : list of str
        Lines to print below it.
    """

    figures: dict[str, Any]
    targets: list[Target]
    header: list[str]
    rows: list[list[str]]
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that the command line offers.

    Parameters
    ----------
    name : str
        Its command.
    description : str
        One line.
    options : list of click.Option
        Its options; their values are the arguments of `run`.
    run : callable
        Measures and returns a result; raises click.ClickException if it cannot.
    """

    name: str
    description: str
    options: Sequence[click.Option]
    run: Callable[..., Result]


def command_line(benchmarks: Sequence[Benchmark]) -> click.Group:
    """Make the command line of some benchmarks."""

    def show_list(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            for benchmark in benchmarks:
                click.echo(f"{benchmark.name:12} {benchmark.description}")
            context.exit()

    listing = click.Option(
        ["--list"], is_flag=True, is_eager=True, expose_value=False, callback=show_list, help="Name them."
    )
    group = click.Group("bench", help="Measure statelog.", params=[listing], no_args_is_help=True)
    for benchmark in benchmarks:
        group.add_command(_command(benchmark))
    return group


def _command(benchmark: Benchmark) -> click.Command:
    path = click.Path(dir_okay=False, writable=True, path_type=Path)
    json_option = click.Option(["--json", "json_file"], type=path, help="Write everything measured here.")

    def invoke(json_file: Path | None, **parameters: Any) -> None:
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise click.BadParameter(f"{json_file.parent} is not a directory", param_hint="--json")
        about = machine.describe()
        result = benchmark.run(**parameters)
        _print(benchmark, about, result)
        if json_file is not None:
            report = {
                "benchmark": benchmark.name,
                "machine": about,
                "parameters": parameters,
                "figures": result.figures,
                "targets": [target.to_json() for target in result.targets],
            }
            json_file.write_text(json.dumps(report, indent=1, default=str) + "\n")

    options = [_with_default_shown(option) for option in benchmark.options]
    return click.Command(benchmark.name, callback=invoke, params=[*options, json_option], help=benchmark.description)


def _with_default_shown(option: click.Option) -> click.Option:
    option.show_default = True
    return option


def _print(benchmark: Benchmark, about: dict[str, Any], result: Result) -> None:
    console = Console(width=_WIDTH, highlight=False, markup=False, emoji=False)
    console.print(f"{benchmark.name}: {benchmark.description}")
    console.print(machine.one_line(about))
    table = Table(*result.header)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result.rows:
        table.add_row(*row)
    console.print(table)
    for line in (*result.remarks, *map(str, result.targets)):
        console.print(line)


def alternate(sides: Mapping[str, Callable[[], _T]], rounds: int) -> dict[str, list[_T]]:
    """Run every side once per round, one after the other; after the first round in a random order, always the same one.

    So a machine that slows down or speeds up during the run does not favour a side, and none always finds what the same
    other one has left behind: the system may give memory that was just freed faster.

    Returns
    -------
    dict of str to list
        What each side returned, a value per round.
    """
    results: dict[str, list[_T]] = {name: [] for name in sides}
    for number in range(1, rounds + 1):
        order = list(sides)
        if number > 1:
            random.Random(number).shuffle(order)
        for name in order:
            click.echo(f"round {number} of {rounds}: {name} ...", err=True)
            results[name].append(sides[name]())
    return results


@contextmanager
def scratch(directory: Path | None) -> Iterator[Path]:
    """An empty directory that is removed in the end.

    Parameters
    ----------
    directory : Path or None
        Where to make it; None is the repository's own file system, which unlike the system's directory
        for temporary files is never in memory.
    """
    base = _BUILD if directory is None else directory
    base.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="bench-", dir=base))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if directory is None:
            with suppress(OSError):  # it holds something else
                base.rmdir()


def require_space(directory: Path, needed_bytes: int, hint: str) -> None:
    """Refuse to start what would fill the disk.

    Parameters
    ----------
    directory : Path
        A directory of the file system.
    needed_bytes : int
        What will be written there.
    hint : str
        What to do if there is too little.

    Raises
    ------
    click.ClickException
        If less than that, and a quarter more, is free.
    """
    free = shutil.disk_usage(directory).free
    if free < needed_bytes * 1.25:
        raise click.ClickException(
            f"{directory} has {free / 1e9:.1f} GB free, and this run needs {needed_bytes * 1.25 / 1e9:.1f} GB. {hint}"
        )
