"""What the tests of :mod:`tests.core.test_stopwatch` and others share."""

from __future__ import annotations


class SetClock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.at_s = 10.0

    def now_s(self) -> float:
        return self.at_s

    def monotonic_s(self) -> float:
        return self.at_s

    def run(self, seconds: float) -> float:
        self.at_s += seconds
        return seconds
