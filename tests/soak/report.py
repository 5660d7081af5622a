"""What is told of a soak: counters, as one line of JSON from time to time, and a failure with what repeats it."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any, TextIO


class Difference(Exception):
    """Something is not as the model has it."""


class Report:
    """Prints the counters regularly.

    Parameters
    ----------
    seed : int
        That of the soak.
    every_s : float
        How often.
    sink : TextIO
        Where to.
    """

    def __init__(self, seed: int, every_s: float = 30.0, sink: TextIO = sys.stdout) -> None:
        self.counts: Counter[str] = Counter()
        self._seed = seed
        self._every_s = every_s
        self._sink = sink
        self._started_s = self._told_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started_s

    def tell_sometimes(self) -> None:
        """Print the counters if it is time."""
        if time.monotonic() - self._told_s >= self._every_s:
            self.tell("running")

    def tell(self, state: str, **more: Any) -> None:
        """Print the counters."""
        self._told_s = time.monotonic()
        kills = sum(count for name, count in self.counts.items() if name.startswith("kills of "))
        line = {"soak": state, "seed": self._seed, "seconds": round(self.elapsed_s), **more, "kills": kills}
        print(json.dumps({**line, **dict(sorted(self.counts.items()))}), file=self._sink, flush=True)
