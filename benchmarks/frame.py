"""What all benchmarks share: options, results, targets, alternating sides, and the command line."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import tempfile
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import click

from benchmarks import machine

_BUILD: Final = Path(__file__).resolve().parents[1] / "build"
_WIDTH: Final = 132
_T = TypeVar("_T")


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """A field of a benchmark's settings that is an option of its command.

    Its type says which kind: a number, by default at least 1, a text, a flag, or a tuple of these, which may be
    repeated.
    """
    least = 1 if least is None and above is None else least
    return field(default=default, metadata=dict(help=help, least=least, most=most, above=above, choices=choices))


@dataclass(frozen=True)
class Target:
    """A limit that a measured value is held against; a value that could not be measured counts as missed."""

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
        return {**dataclasses.asdict(self), "met": self.met}

    def __str__(self) -> str:
        shown = "not measured" if self.value is None else f"{self.value:.4g}"
        verdict = "met" if self.met else "MISSED"
        return f"{verdict}: {self.name}: {shown} ({self.sense.replace('_', ' ')} {self.limit:g})"


@dataclass(frozen=True)
class Result:
    """What a benchmark found: all figures for the JSON file (units end the names), and what is printed of them."""

    figures: dict[str, Any]
    targets: list[Target]
    rows: list[dict[str, str]]
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Benchmark:
    """A command: `run` gets the settings, a dataclass of :func:`option` fields, and an empty directory."""

    name: str
    description: str
    settings: type[Any]
    run: Callable[[Any, Path], Result]

    @classmethod
    def of(cls, module: Any) -> Benchmark:
        """The benchmark of a module with `Settings` and `run`; the first line of its docstring is the description."""
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        return cls(name, module.__doc__.splitlines()[0], module.Settings, module.run)


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
    def invoke(directory: Path | None, json_file: Path | None, **parameters: Any) -> None:
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise click.BadParameter(f"{json_file.parent} is not a directory", param_hint="--json")
        about = machine.describe()
        with scratch(directory) as place:
            result = benchmark.run(benchmark.settings(**parameters), place)
        _print(benchmark, about, result)
        if json_file is not None:
            report = {
                "benchmark": benchmark.name,
                "machine": about,
                "parameters": {**parameters, "directory": directory},
                "figures": result.figures,
                "targets": [target.to_json() for target in result.targets],
            }
            json_file.write_text(json.dumps(report, indent=1, default=str) + "\n")

    types = typing.get_type_hints(benchmark.settings)
    options: list[click.Parameter] = [
        _option(each, types[each.name]) for each in dataclasses.fields(benchmark.settings)
    ]
    folder = click.Path(file_okay=False, path_type=Path)
    folder_help = "For checkpoints and scratch files; by default one in the repository."
    file = click.Path(dir_okay=False, writable=True, path_type=Path)
    options.append(click.Option(["--directory"], type=folder, help=folder_help))
    options.append(click.Option(["--json", "json_file"], type=file, help="Write everything measured here."))
    return click.Command(benchmark.name, callback=invoke, params=options, help=benchmark.description)


def _option(described: dataclasses.Field[Any], kind: Any) -> click.Option:
    about = described.metadata
    multiple = typing.get_origin(kind) is tuple
    element = typing.get_args(kind)[0] if multiple else kind
    value_type: Any = element
    if about["choices"]:
        value_type = click.Choice(about["choices"])
    elif element is int:
        value_type = click.IntRange(about["least"], about["most"])
    elif element is float:
        is_open = about["above"] is not None
        value_type = click.FloatRange(about["above"] if is_open else about["least"], about["most"], min_open=is_open)
    return click.Option(
        [f"--{described.name.replace('_', '-')}"],
        type=value_type,
        default=described.default,
        multiple=multiple,
        is_flag=element is bool,
        help=about["help"],
        show_default=True,
    )


def _print(benchmark: Benchmark, about: dict[str, Any], result: Result) -> None:
    # Not at the top: the processes of sides do without it.
    from rich.console import Console
    from rich.table import Table

    console = Console(width=_WIDTH, highlight=False, markup=False, emoji=False)
    console.print(f"{benchmark.name}: {benchmark.description}")
    console.print(f"{machine.one_line(about)}\nbenchmarks/README.md explains the figures.")
    table = Table(*result.rows[0])
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result.rows:
        table.add_row(*row.values())
    console.print(table)
    for line in (*result.remarks, *map(str, result.targets)):
        console.print(line)


def alternate(sides: Mapping[str, Callable[[], _T]], rounds: int = 1) -> dict[str, list[_T]]:
    """Run every side once per round, one after the other; after the first round in a random order, always the same one.

    So a machine that slows down or speeds up during the run does not favour a side, and none always finds what the same
    other one has left behind: the system may give memory that was just freed faster.
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
    """An empty directory that is removed in the end; by default in the repository, which is never in memory."""
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
    """Refuse to start what would fill the disk: click.ClickException if not this and a quarter more is free."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes * 1.25:
        raise click.ClickException(
            f"{directory} has {free / 1e9:.1f} GB free, and this run needs {needed_bytes * 1.25 / 1e9:.1f} GB. {hint}"
        )


def require_measured(batches: int, warm_up: int) -> None:
    """Refuse a run without a measured batch."""
    if batches <= warm_up:
        raise click.UsageError(f"{batches} batches leave nothing after {warm_up} to warm up.")
