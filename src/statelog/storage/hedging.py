"""Hedging: a second attempt beside a slow write ("The Tail at Scale", Dean and Barroso 2013)."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, insort
from collections import deque
from typing import Final

from statelog.clock import Clock

HEDGED_SHARE: Final = 0.05
"""Upper bound of hedges per request."""

_QUANTILE: Final = 0.97
_KEPT: Final = 500
_NEEDED: Final = 100
_SAVED_HEDGES: Final = 10
_CALM_AFTER_S: Final = 30.0


class Hedging:
    """Decides which writes of a process are hedged, by their usual duration and a budget. Used from any thread.

    A write is hedged once it has taken longer than the 97th percentile of the latest 500 writes of about its size (as
    soon as there are 100 of them), and at the latest after `timeout_s`. If that is None, nothing is hedged.

    The budget is a token bucket: a request adds 0.05 tokens, a hedge takes one, and at most 10 are saved. So a store
    that becomes slow as a whole does not get a burst of hedges saved up in calm times. The first hedge may go into
    debt, because the first requests of a process can hang like any others. So there are never more than max(1, 5 % of
    the requests) hedges. For 30 seconds after the store has asked for fewer requests there are none.
    """

    def __init__(self, timeout_s: float | None, clock: Clock) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: dict[int, _Recent] = {}
        self._tokens = 0.0
        # Taken, and not given back.
        self._hedges = 0
        self._calm_from_s = -math.inf

    @property
    def is_on(self) -> bool:
        """Whether any write is hedged."""
        return self._timeout_s is not None

    def patience_s(self, size_bytes: int) -> float | None:
        """How long to wait for a write before it is hedged; None is for ever."""
        if self._timeout_s is None:
            return None
        with self._lock:
            recent = self._recent.get(_size_class(size_bytes))
            usual_s = None if recent is None else recent.quantile()
        return self._timeout_s if usual_s is None else min(self._timeout_s, usual_s)

    def add_request(self) -> None:
        """Count a request that may be hedged."""
        with self._lock:
            self._tokens = min(self._tokens + HEDGED_SHARE, _SAVED_HEDGES)

    def add_latency(self, size_bytes: int, latency_s: float) -> None:
        """Record the duration of a write that succeeded.

        Writes that lost a race must be recorded too: without the slowest writes the percentile would fall, and with
        more hedges it would fall further.
        """
        with self._lock:
            self._recent.setdefault(_size_class(size_bytes), _Recent()).add(latency_s)

    def slow_down(self) -> None:
        """Stop hedging for a while, because the store asks for fewer requests."""
        with self._lock:
            self._calm_from_s = self._clock.monotonic_s() + _CALM_AFTER_S

    def take_hedge(self) -> bool:
        """Take a hedge from the budget; False if none may start now."""
        with self._lock:
            is_calm = self._clock.monotonic_s() >= self._calm_from_s
            # The sum of many 0.05 is not exact.
            if not is_calm or (self._hedges and self._tokens < 1 - 1e-9):
                return False
            self._tokens -= 1
            self._hedges += 1
            return True

    def give_back_hedge(self) -> None:
        """Return a hedge that could not be started to the budget."""
        with self._lock:
            self._tokens += 1
            self._hedges -= 1


class _Recent:
    """The latest samples of a quantity, in order of time and in order of size."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, sample: float) -> None:
        self._latest.append(sample)
        insort(self._ordered, sample)
        if len(self._latest) > _KEPT:
            del self._ordered[bisect_left(self._ordered, self._latest.popleft())]

    def quantile(self) -> float | None:
        """The 97th percentile; None while there are too few samples."""
        count = len(self._ordered)
        return self._ordered[math.ceil(_QUANTILE * count) - 1] if count >= _NEEDED else None


def _size_class(size_bytes: int) -> int:
    """The class of a size; each class spans a factor of four."""
    return size_bytes.bit_length() // 2
