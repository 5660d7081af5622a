"""The common part of all benchmarks: options, results, targets, alternating sides, and the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
import re
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import click
import psutil

NOT_NEGATIVE: Final = click.IntRange(0)
POSITIVE: Final = click.FloatRange(0, min_open=True)
POSSIBLE_KEYS: Final = click.IntRange(2, 10**8)
STORED_KEYS: Final = click.IntRange(100, 10**8)
QUICK_JVM: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of a JVM that starts fast and is slow."""

_BUILD: Final = Path(__file__).resolve().parents[1] / "build"
_WIDTH: Final = 132
_FOLDER: Final = click.Path(file_okay=False, path_type=Path)
_Name = TypeVar("_Name", bound=Hashable)
_T = TypeVar("_T")


class Unavailable(click.ClickException):
    """The machine lacks something that a benchmark needs."""


def option(default: Any, help: str, kind: click.ParamType[Any] | None = None) -> Any:
    """A field of a benchmark's settings that is an option of its command; a tuple's may be repeated.

    Its kind is by default that of the default value, and whole numbers are at least 1.
    """
    example = default[0] if isinstance(default, tuple) and default else default
    if kind is None and type(example) is int:
        kind = click.IntRange(1)
    return field(default=default, metadata={"type": kind, "help": help})


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
class Plot:
    """Lines of a plot: points by label."""

    name: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]]
    is_logarithmic: bool = False
    """Of y."""


@dataclass(frozen=True)
class Result:
    """The findings of a benchmark: all figures for the JSON file (units end the names), and those to be printed."""

    figures: dict[str, Any]
    targets: list[Target]
    rows: list[dict[str, str]]
    remarks: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)


def command_line(benchmarks: Sequence[Any]) -> click.Group:
    """Make the command line of some benchmarks.

    A benchmark is a module with `Settings`, a dataclass of :func:`option` fields, and `run`, which takes them and an
    empty directory. The first line of its docstring describes it. `QUICK` are settings, one or more, with which it
    shows in a minute or two that it works. The command ``all`` runs all benchmarks.
    """

    def show_list(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            for command in group.commands.values():
                click.echo(f"{command.name:12} {command.help}")
            context.exit()

    listing = click.Option(
        ["--list"], is_flag=True, is_eager=True, expose_value=False, callback=show_list, help="Name them."
    )
    group = click.Group("bench", help="Measure statelog.", params=[listing], no_args_is_help=True)
    for benchmark in benchmarks:
        group.add_command(_command(benchmark))
    group.add_command(_all(benchmarks))
    return group


def _command(benchmark: Any) -> click.Command:
    name, description = _name(benchmark), _description(benchmark)

    def invoke(directory: Path | None, json_file: Path | None, report: Path | None, **parameters: Any) -> None:
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise click.BadParameter(f"{json_file.parent} is not a directory", param_hint="--json")
        about = _machine()
        with scratch(directory) as place:
            result = benchmark.run(benchmark.Settings(**parameters), place)
        heading = [f"{name}: {description}", *_shown_machine(about)]
        _print(heading, result)
        if report is not None:
            # Not at the top: the processes of sides do without it.
            from benchmarks.report import write_report

            write_report(report, name, heading, result)
        if json_file is not None:
            _write_json(json_file, benchmark, about, {**parameters, "directory": directory}, result)

    options: list[click.Parameter] = [
        click.Option(
            [f"--{each.name.replace('_', '-')}"],
            default=each.default,
            multiple=isinstance(each.default, tuple),
            is_flag=isinstance(each.default, bool),
            show_default=True,
            **each.metadata,
        )
        for each in dataclasses.fields(benchmark.Settings)
    ]
    file = click.Path(dir_okay=False, writable=True, path_type=Path)
    options.append(_directory_option())
    options.append(click.Option(["--json", "json_file"], type=file, help="Write everything measured here."))
    options.append(click.Option(["--report", "report"], type=_FOLDER, help="Write a page with plots into this folder."))
    return click.Command(name, callback=invoke, params=options, help=description)


def _all(benchmarks: Sequence[Any]) -> click.Command:
    """The command that runs all benchmarks, and fails if one of them has failed."""

    def invoke(quick: bool, directory: Path | None, json_folder: Path | None) -> None:
        about = _machine()
        if json_folder is not None:
            json_folder.mkdir(parents=True, exist_ok=True)
        if quick:
            os.environ.setdefault("JDK_JAVA_OPTIONS", QUICK_JVM)
        rows: list[dict[str, str]] = []
        for name, benchmark in ((_name(each), each) for each in benchmarks):
            for number, settings in enumerate(benchmark.QUICK if quick else [benchmark.Settings()], 1):
                started_s = time.monotonic()
                outcome = "works"
                try:
                    with scratch(directory) as place:
                        result = benchmark.run(settings, place)
                    _print([f"{name}: {_description(benchmark)}"], result)
                    if json_folder is not None:
                        file = json_folder / f"{name}{number if number > 1 else ''}.json"
                        _write_json(file, benchmark, about, dataclasses.asdict(settings), result)
                except Unavailable as error:
                    outcome = f"skipped: {error.message}"
                except Exception as error:
                    # The others may work.
                    traceback.print_exception(error)
                    outcome = "FAILED"
                rows.append({"benchmark": name, "s": f"{time.monotonic() - started_s:.0f}", "outcome": outcome})
                click.echo(" ".join(rows[-1].values()), err=True)
        failed = [row["benchmark"] for row in rows if row["outcome"] == "FAILED"]
        _print(["all", *_shown_machine(about)], Result({}, [], rows))
        if failed:
            raise click.ClickException(f"{', '.join(failed)} failed; see above.")

    options: list[click.Parameter] = [
        click.Option(
            ["--quick"], is_flag=True, help="Only show that each works: small settings, figures without meaning."
        ),
        _directory_option(),
        click.Option(["--json", "json_folder"], type=_FOLDER, help="Write a file for each into this folder."),
    ]
    return click.Command("all", callback=invoke, params=options, help="Run all benchmarks, one after the other.")


def _name(benchmark: Any) -> str:
    name: str = benchmark.__name__.rpartition(".")[2]
    return name.replace("_", "-")


def _description(benchmark: Any) -> str:
    description: str = benchmark.__doc__.splitlines()[0]
    return description


def _directory_option() -> click.Option:
    text = "For checkpoints and scratch files; by default one in the repository."
    return click.Option(["--directory"], type=_FOLDER, help=text)


def _write_json(file: Path, benchmark: Any, about: dict[str, Any], parameters: dict[str, Any], result: Result) -> None:
    content = {
        "benchmark": _name(benchmark),
        "machine": about,
        "parameters": parameters,
        "defaults": dataclasses.asdict(benchmark.Settings()),
        "figures": result.figures,
        "targets": [target.to_json() for target in result.targets],
    }
    file.write_text(json.dumps(content, indent=1, default=str) + "\n")


def _machine() -> dict[str, Any]:
    """Cores, CPU model, memory, and the versions of Python, Java and Spark."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": _cpu_model(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "java": _java_version(),
        "spark": metadata.version("pyspark"),
        "pyarrow": metadata.version("pyarrow"),
    }


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except FileNotFoundError:
        found = None
    return found[1].strip() if found else platform.processor() or "unknown"


def _java_version() -> str:
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if java is None:
        return "none"
    shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "([^"]+)"', shown)
    return found[1] if found else "unknown"


def _shown_machine(about: dict[str, Any]) -> list[str]:
    return [
        f"{about['cores']} cores ({about['cpu']}), {about['memory_bytes'] / 2**30:.0f} GiB, {about['system']},"
        f" Python {about['python']}, Java {about['java']}, Spark {about['spark']}, PyArrow {about['pyarrow']}",
        "benchmarks/README.md explains the figures.",
    ]


def _print(heading: list[str], result: Result) -> None:
    # Not at the top: the processes of sides do without it.
    from rich.console import Console
    from rich.table import Table

    console = Console(width=_WIDTH, highlight=False, markup=False, emoji=False)
    console.print(*heading, sep="\n")
    table = Table(*result.rows[0])
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result.rows:
        table.add_row(*row.values())
    console.print(table)
    for line in (*result.remarks, *map(str, result.targets)):
        console.print(line)


def alternate(sides: Mapping[_Name, Callable[[], _T]], rounds: int = 1) -> dict[_Name, list[_T]]:
    """Run every side once per round, one after the other; after the first round in a random order, always the same one.

    So a machine that slows down or speeds up during the run does not favour a side, and none always finds what the same
    other one has left behind: the system may give memory that was just freed faster.
    """
    results: dict[_Name, list[_T]] = {name: [] for name in sides}
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
