"""The same count by key on statelog, Spark, Bytewax, Pathway and PyFlink, from files, with a kill in the middle."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.frame import POSITIVE, POSSIBLE_KEYS, Result, Unavailable, alternate, option
from benchmarks.peers.files import Counts, Lines, Verdict, covered_rows
from benchmarks.peers.programs import BYTEWAX, PEERS, ROWS, SIDES, SLOW, Program, Sample, live, program_of
from benchmarks.restarts import fresh
from benchmarks.skew import SKEW_HELP, SKEWS, UNIFORM, ZIPF

_WARM_UP: Final = 1 / 8
_KILLED: Final = 5 / 8
"""After which parts of the rows the measured time begins, and the program is killed."""
_RESTORED: Final = 1 / 10
"""The least part of the returned rows that a restart has to restore: others start from nothing, or nearly."""
_MEDIANS: Final = ("rows_per_s", "rows_per_cpu_s", "restart_s")


@dataclass(frozen=True)
class Settings:
    rows: int = option(8_000_000, "Of the input.")
    slow_rows: int = option(4_000_000, f"Of the input of {' and '.join(SLOW)}.")
    keys: int = option(1_000_000, "Number of possible keys.", POSSIBLE_KEYS)
    skew: str = option(UNIFORM, SKEW_HELP, SKEWS)
    sides: tuple[str, ...] = option(SIDES, "May be repeated.", click.Choice(SIDES))
    rows_per_batch: int = option(200_000, "Of statelog and Spark, which make a checkpoint in every batch.")
    checkpoint_s: float = option(5.0, "The interval of the others' checkpoints.", POSITIVE)
    parallelism: int = option(2, "Subtasks, workers, cores.")
    rounds: int = option(1, "How often every side runs.")


QUICK: Final = [
    Settings(rows=400_000, keys=10_000, skew=ZIPF, sides=(ROWS, BYTEWAX), rows_per_batch=20_000, checkpoint_s=0.2)
]


def run(settings: Settings, place: Path) -> Result:
    files_per_batch = settings.parallelism
    programs = [
        program_of(side, settings.parallelism, files_per_batch, settings.checkpoint_s) for side in settings.sides
    ]
    missing = [each.side for each in programs if not each.is_installed]
    how = f"{'; '.join(missing)}: not installed; ./dev peers installs all of them."
    if missing and PEERS.isdisjoint({*settings.sides} - {*missing}):
        raise Unavailable(how)
    all_lines = Lines(settings.rows, settings.rows_per_batch // files_per_batch, settings.keys, settings.skew)
    all_lines.write(place / "input")
    fewer_lines = all_lines.first(settings.slow_rows)
    runs = {
        each.side: partial(_measure, place, fewer_lines if each.side in SLOW else all_lines, each)
        for each in programs
        if each.is_installed
    }
    figures = {side: _figures(rounds) for side, rounds in alternate(runs, settings.rounds).items()}
    return Result(
        figures={"sides": figures},
        targets=[],
        rows=[table_row(side, each) for side, each in figures.items()],
        remarks=[
            f"Every side was killed after {_KILLED:.1%} of its rows; the rates leave out the first {_WARM_UP:.1%}."
            " After the restart the last count of every key was right.",
            *([f"Left out: {how}"] if missing else []),
        ],
    )


def _measure(place: Path, lines: Lines, program: Program) -> dict[str, Any]:
    """Run a program until it is killed, and again to the end of the input, and check its counts."""
    work = fresh(place / "work")
    lines.link(place / "input", work / "input")
    before, after = (Counts(work / name, lines.keys, program.numbers_per_line) for name in ("before", "after"))

    def is_halfway(silent_s: float) -> bool:
        return before.rows >= lines.rows * _KILLED

    def is_at_end(silent_s: float) -> bool:
        is_settled = program.settled_s is not None and silent_s > program.settled_s
        return is_settled and covered_rows(before, after) >= lines.rows

    first = live(program, work, before, is_halfway)
    if not first.was_killed or before.rows >= lines.rows:
        raise click.ClickException(
            f"{program.side} was at the end of its input before it was killed; give it more rows."
        )
    second = live(program, work, after, is_at_end)
    verdict = Verdict.of(lines.counts(), before, after)
    if not verdict.is_exact:
        raise click.ClickException(f"{program.side} has returned wrong counts: {verdict}")
    if verdict.restored_rows < before.rows * _RESTORED:
        raise click.ClickException(f"{program.side} had no recent checkpoint when it was killed; give it more rows.")
    measured = {
        "rows": lines.rows,
        **rates(first.samples, lines.rows * _WARM_UP),
        "killed_rows": before.rows,
        "restart_s": second.samples[0].s,
        "second_life_s": second.samples[-1].s,
        **dataclasses.asdict(verdict),
        "samples": [dataclasses.astuple(each) for each in first.samples],
    }
    click.echo(f"    {measured['rows_per_cpu_s']:,.0f} rows per second of CPU time", err=True)
    return measured


def rates(samples: Sequence[Sample], warm_up_rows: float) -> dict[str, float]:
    """Rows per second, and per second of CPU time, from the first sample after so many rows to the last one."""
    measured = [each for each in samples if each.rows >= warm_up_rows]
    first, last = measured[0], measured[-1]
    rows, cpu_s = last.rows - first.rows, last.cpu_s - first.cpu_s
    if rows == 0 or cpu_s == 0:
        raise click.ClickException("Too many counts came at once to have a rate; there must be more rows.")
    return {
        "measured_rows": rows,
        "rows_per_s": rows / (last.s - first.s),
        "rows_per_cpu_s": rows / cpu_s,
    }


def _figures(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    medians = {name: statistics.median(each[name] for each in rounds) for name in _MEDIANS}
    last = {name: value for name, value in rounds[-1].items() if name != "samples"}
    return {**last, **medians, "by_round": list(rounds)}


def table_row(side: str, figures: dict[str, Any]) -> dict[str, str]:
    """The figures of a side as a row of the table."""
    return {
        "side": side,
        "rows": f"{figures['rows']:,}",
        "rows/s": f"{figures['rows_per_s']:,.0f}",
        "rows/CPU s": f"{figures['rows_per_cpu_s']:,.0f}",
        "restart s": f"{figures['restart_s']:.1f}",
        "rows restored": f"{figures['restored_rows']:,}",
        "keys after restart": f"{figures['keys_after']:,}",
        "wrong": f"{figures['wrong'] + figures['missing']:,}",
    }
