"""What may be said about some measurements: percentiles only where there are enough of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["MIN_SAMPLES", "Distribution"]

MIN_SAMPLES: Final = {"p99": 300, "p99.9": 10_000}
"""From how many samples on a percentile is given; with fewer, the maximum and their number say as much."""

_FRACTIONS: Final = {"p99": 0.99, "p99.9": 0.999}


@dataclass(frozen=True)
class Distribution:
    """Measurements of one quantity, at least one.

    Parameters
    ----------
    samples : tuple of float
        The measurements, ascending.
    """

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
        """A percentile by nearest rank, so one of the samples; None if there are too few of them.

        Parameters
        ----------
        name : {"p99", "p99.9"}
            Which one.
        """
        return self.quantile(_FRACTIONS[name]) if len(self.samples) >= MIN_SAMPLES[name] else None

    def quantile(self, fraction: float) -> float:
        """The quantile of a fraction above 0, by nearest rank; whether there are enough samples is up to the caller."""
        return self.samples[math.ceil(round(fraction * len(self.samples), 6)) - 1]

    def to_json(self) -> dict[str, Any]:
        """The number of samples, the median, the percentiles that are allowed, and the maximum."""
        allowed = {name: value for name in MIN_SAMPLES if (value := self.percentile(name)) is not None}
        return {
            "samples": len(self.samples),
            "median": self.median,
            **allowed,
            "max": self.maximum,
        }

    def __str__(self) -> str:
        """The same in one line: ``4.1, p99 9.2, max 30 of 500``."""
        parts = [f"{self.median:.3g}"]
        for name in MIN_SAMPLES:
            value = self.percentile(name)
            if value is not None:
                parts.append(f"{name} {value:.3g}")
        return f"{', '.join(parts)}, max {self.maximum:.3g} of {len(self.samples)}"
