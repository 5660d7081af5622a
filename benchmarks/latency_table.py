"""How long writes to an object store take: the distribution that FLIP-158 measured on Amazon S3."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Final

__all__ = ["latency_of", "latency_s"]

# FLIP-158, "DFS write latency": 500 streams of 5 MB objects, in seconds. The ends are not in its table; they are
# assumed. No lognormal distribution has these quantiles.
_QUANTILES: Final = (
    (0.0, 0.300),
    (0.5, 0.459),
    (0.9, 0.740),
    (0.95, 0.833),
    (0.99, 1.039),
    (0.999, 3.202),
    (1.0, 4.000),
)


def latency_s(share: float) -> float:
    """The latency below which this share of the writes is, interpolated between the logarithms of the quantiles."""
    for (low, low_s), (high, high_s) in pairwise(_QUANTILES):
        if low <= share <= high:
            part = (share - low) / (high - low)
            return math.exp((1 - part) * math.log(low_s) + part * math.log(high_s))
    raise ValueError(f"{share} is not between 0 and 1")


def latency_of(seed: int, name: str, number: int) -> float:
    """The latency of a certain request: of the n-th one for a name.

    Runs that differ in something else see the same latencies.

    Parameters
    ----------
    seed : int
        Chooses the run.
    name : str
        The object.
    number : int
        How many requests there have been for it, from 1.
    """
    return latency_s(random.Random(f"{seed} {name} {number}").random())
