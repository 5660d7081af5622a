"""Figures made of measurements: percentiles, and ratios of sides that ran in the same rounds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

_PERCENTILES: Final = {
    "p50": (0.5, 1),
    "p90": (0.9, 30),
    "p95": (0.95, 60),
    "p99": (0.99, 300),
    "p99.9": (0.999, 10_000),
}
"""Fractions, and from how many samples on they are given; with fewer, the maximum and their number say as much."""
_CONFIDENCE: Final = 0.95


def percentiles(samples: Iterable[float], names: Iterable[str]) -> dict[str, float]:
    """Percentiles by nearest rank, so each is one of the samples; only those for which there are enough samples."""
    ordered = sorted(samples)
    found = {}
    for name in names:
        fraction, least = _PERCENTILES[name]
        if len(ordered) >= least:
            found[name] = ordered[math.ceil(round(fraction * len(ordered), 6)) - 1]
    return found


def upper_bound(samples: Iterable[float], name: str) -> float | None:
    """A percentile, or the maximum if that is above it with 95 % confidence; None if there are too few samples."""
    ordered = sorted(samples)
    fraction, least = _PERCENTILES[name]
    if len(ordered) >= least:
        return percentiles(ordered, [name])[name]
    # All samples are below the percentile with this probability.
    return ordered[-1] if fraction ** len(ordered) <= 1 - _CONFIDENCE else None


def summary(samples: Iterable[float]) -> dict[str, Any]:
    """The number of samples, at least one, their median, the high percentiles that are allowed, and the maximum."""
    held = list(samples)
    tail = percentiles(held, ("p99", "p99.9"))
    return {"samples": len(held), "median": statistics.median(held), **tail, "max": max(held)}


def median_ratio(one: Iterable[float], other: Iterable[float]) -> float:
    """The median of the ratios of pairs."""
    return statistics.median(float(first) / float(second) for first, second in zip(one, other, strict=True))


def samples_of(figures: Iterable[tuple[str, dict[str, Any]]], warm_up: int | Mapping[str, int]) -> str:
    """A remark on the number of batches that were measured, by side."""
    samples: Counter[str] = Counter()
    for name, each in figures:
        samples[name] += each["batch_ms"]["samples"]
    shown = ", ".join(f"{name} {count}" for name, count in samples.items())
    left_out = warm_up if isinstance(warm_up, int) else " or ".join(map(str, sorted({*warm_up.values()})))
    return f"The first {left_out} batches of every run are left out; measured batches: {shown}. All were checked."


def shown(durations: dict[str, Any] | None, digits: int = 1) -> str:
    """Durations as a cell of a table."""
    if durations is None:
        return ""
    tail = [f"{name} {value:.{digits}f}" for name, value in durations.items() if name.startswith("p")]
    return ", ".join([f"{durations['median']:.{digits}f}", *tail, f"max {durations['max']:.1f}"])


def shown_shape(subtasks: int, operators: int) -> str:
    """The name of a query with so many operators, each of so many subtasks."""
    return f"{subtasks} subtasks, {operators} operator{'s' if operators > 1 else ''}"
