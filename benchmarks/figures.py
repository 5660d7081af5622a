"""What may be said about measurements: percentiles, rates and ratios of sides that ran in the same rounds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

_PERCENTILES: Final = {
    "p50": (0.5, 1),
    "p90": (0.9, 30),
    "p95": (0.95, 60),
    "p99": (0.99, 300),
    "p99.9": (0.999, 10_000),
}
"""Fractions, and from how many samples on they are given; with fewer, the maximum and their number say as much."""
_TAIL: Final = ("p99", "p99.9")
_FILES: Final = ("files_live", "bytes_live", "files_seen", "bytes_seen")


@dataclass(frozen=True)
class Distribution:
    """Measurements of one quantity, ascending; at least one."""

    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Iterable[float]) -> Distribution:
        """The distribution of samples in any order."""
        return cls(tuple(sorted(samples)))

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def maximum(self) -> float:
        """The largest sample."""
        return self.samples[-1]

    def percentile(self, name: str) -> float | None:
        """A percentile by nearest rank, so one of the samples; None if there are too few of them."""
        fraction, least = _PERCENTILES[name]
        if len(self.samples) < least:
            return None
        return self.samples[math.ceil(round(fraction * len(self.samples), 6)) - 1]

    def percentiles(self, names: Iterable[str] = tuple(_PERCENTILES)) -> dict[str, float]:
        """Those of some percentiles for which there are enough samples."""
        return {name: value for name in names if (value := self.percentile(name)) is not None}

    def to_json(self) -> dict[str, Any]:
        """The number of samples, the median, the high percentiles that are allowed, and the maximum."""
        return {
            "samples": len(self.samples),
            "median": self.median,
            **self.percentiles(_TAIL),
            "max": self.maximum,
        }


def batch_figures(rounds: list[dict[str, Any]], rows_per_batch: int, warm_up: int) -> dict[str, Any]:
    """A side's rate by round and its durations over all rounds, without the first batches of each round.

    `rounds` are what :meth:`benchmarks.query.BatchSide.measure` returned.
    """
    batches_ms = [
        [batch["triggerExecution"] for batch in one["batches"] if batch["batch"] >= warm_up] for one in rounds
    ]
    rates = [rows_per_batch * 1000 / statistics.median(durations) for durations in batches_ms]
    return {
        "rows_per_batch": rows_per_batch,
        "batches_left_out": warm_up,
        "rows_per_s": statistics.median(rates),
        "rows_per_s_by_round": rates,
        "batch_ms": Distribution.of(chain.from_iterable(batches_ms)).to_json(),
        **{name: rounds[-1][name] for name in _FILES},
        "by_round": rounds,
    }


def checkpoint_figures(rounds: list[dict[str, Any]], parallelism: int, warm_up: int) -> dict[str, Any]:
    """Figures of a side's checkpoints, in the same way; empty if it has none."""
    checkpoints = [each for one in rounds for each in one["checkpoints"] if each["batch"] >= warm_up]
    if not checkpoints:
        return {}
    parts = {"subtask_ms": ("subtask_s",), "commit_ms": ("commit_s",), "checkpoint_ms": ("subtask_s", "commit_s")}
    return {
        "changed_keys_per_subtask": statistics.median(each["changes"] / parallelism for each in checkpoints),
        "changed_bytes_per_subtask": statistics.median(each["changed_bytes"] / parallelism for each in checkpoints),
        **{
            name: Distribution.of(1000 * sum(each[part] for part in of) for each in checkpoints).to_json()
            for name, of in parts.items()
        },
    }


def ratio(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The rate of a side divided by that of another: the median of the ratios of the rounds."""
    return median_ratio(one["rows_per_s_by_round"], other["rows_per_s_by_round"])


def median_ratio(one: Iterable[float], other: Iterable[float]) -> float:
    """The median of the ratios of pairs."""
    return statistics.median(float(first) / float(second) for first, second in zip(one, other, strict=True))


def samples_of(figures: Iterable[tuple[str, dict[str, Any]]], warm_up: int) -> str:
    """A remark on the number of batches that were measured, by side."""
    samples: Counter[str] = Counter()
    for name, each in figures:
        samples[name] += each["batch_ms"]["samples"]
    shown = ", ".join(f"{name} {count}" for name, count in samples.items())
    return f"The first {warm_up} batches of every run are left out; measured batches: {shown}. All were checked."


def rate_row(name: str, figures: dict[str, Any]) -> dict[str, str]:
    """A side's row of a table: rates, durations and files."""
    return {
        "side": name,
        "rows per batch": f"{figures['rows_per_batch']:,}",
        "rows/s": f"{figures['rows_per_s']:,.0f}",
        "batch ms": shown(figures["batch_ms"]),
        "checkpoint ms": shown(figures.get("checkpoint_ms")),
        "commit ms": shown(figures.get("commit_ms")),
        "state files": f"{figures['files_live']:,}" if figures["files_live"] else "",
        "MB": f"{figures['bytes_live'] / 1e6:,.1f}" if figures["files_live"] else "",
    }


def shown(durations: dict[str, Any] | None, digits: int = 1) -> str:
    """Durations as a cell of a table."""
    if durations is None:
        return ""
    percentiles = [f"{name} {value:.{digits}f}" for name, value in durations.items() if name.startswith("p")]
    return ", ".join([f"{durations['median']:.{digits}f}", *percentiles, f"max {durations['max']:.1f}"])
