"""Sides that are compared in several cases, such as batch sizes: their targets and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import median_ratio, samples_of, shown
from benchmarks.frame import Result, Target
from benchmarks.query import BatchSide, compare


@dataclass(frozen=True)
class Ratio:
    """The least that the rate of a side must be, divided by that of another one."""

    side: str
    other: str
    least: float
    is_cpu: bool = False
    """Whether it is that of rows per second of CPU time, of all processes."""

    @property
    def rates(self) -> str:
        """The name of the figures whose ratio it is."""
        return "rows_per_cpu_s_by_round" if self.is_cpu else "rows_per_s_by_round"


def compare_cases(
    cases: Mapping[str, Mapping[str, BatchSide]],
    ratios: Sequence[Ratio],
    place: Path,
    rounds: int,
    warm_up: int,
    remarks: Sequence[str] = (),
) -> Result:
    """Measure the sides of each case in turn; each has all the ratios whose sides it has."""
    figures: dict[str, dict[str, Any]] = {}
    targets: list[Target] = []
    rows: list[dict[str, str]] = []
    for case, sides in cases.items():
        measured = figures[case] = compare(sides, place, rounds, warm_up)
        targets += [
            Target(
                f"{case}: {each.side} / {each.other}{', by CPU time' if each.is_cpu else ''}",
                median_ratio(measured[each.side][each.rates], measured[each.other][each.rates]),
                each.least,
                "at_least",
            )
            for each in ratios
            if {each.side, each.other} <= measured.keys()
        ]
        rows += [_row(case, name, each) for name, each in measured.items()]
    samples = [(name, each) for sides in figures.values() for name, each in sides.items()]
    return Result(figures, targets, rows, [samples_of(samples, warm_up), *remarks])


def _row(case: str, name: str, figures: dict[str, Any]) -> dict[str, str]:
    return {
        "case": case,
        "side": name,
        "rows/s": f"{figures['rows_per_s']:,.0f}",
        **({"rows/CPU s": f"{figures['rows_per_cpu_s']:,.0f}"} if "rows_per_cpu_s" in figures else {}),
        "batch ms": shown(figures["batch_ms"]),
        "checkpoint ms": shown(figures.get("checkpoint_ms")),
    }
