"""Cuts a long series into few bins, so that a chart stays small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

BINS: Final = 90
"""Bars of a chart, at most."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Bin:
    """Some neighbours of a series."""

    first: int
    """Their places in the series, both included."""
    last: int
    values: tuple[float | None, ...]
    """For each measure the largest one; None if there is none."""


def binned(series: Sequence[_T], measures: Sequence[Callable[[_T], float | None]], bins: int = BINS) -> list[Bin]:
    """Cut a series into at most `bins` bins of nearly equal size; each has the element with the largest sum.

    So the measures of a bin are those of one element, and may be stacked.
    """
    count = min(bins, len(series))
    found: list[Bin] = []
    for number in range(count):
        first, end = number * len(series) // count, (number + 1) * len(series) // count
        held = [tuple(measure(one) for measure in measures) for one in series[first:end]]
        found.append(Bin(first, end - 1, max(held, key=_total)))
    return found


def _total(values: Sequence[float | None]) -> tuple[bool, float]:
    known = [value for value in values if value is not None]
    return bool(known), sum(known)
