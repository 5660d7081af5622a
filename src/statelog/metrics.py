"""Measurements of the storage path: recorded where they occur, sent with the ack, and added up on the driver.

The metrics have the meaning of those in Flink's ``ChangelogStorage`` group.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

_KEPT: Final = 1000


class Metric(StrEnum):
    """The metrics. Those with a unit or ``per`` in their name are distributions, the others are counters."""

    STATE_FETCHES = "state_fetches"
    """Tasks that fetched state, because their executor had none or not all of it."""
    UPLOAD_REQUESTS = "upload_requests"
    """Objects to be written."""
    UPLOAD_FAILURES = "upload_failures"
    """Objects that could not be written by any attempt."""
    UPLOAD_RETRIES = "upload_retries"
    """Attempts started because the previous one had failed."""
    UPLOAD_HEDGES = "upload_hedges"
    """Attempts started because the previous one took long."""
    SLOW_DOWNS = "slow_downs"
    """Answers in which the store asked for fewer requests."""
    READ_RETRIES = "read_retries"
    """Repeated requests other than writes."""
    ATTEMPTS_PER_UPLOAD = "attempts_per_upload"
    """Number of the attempt that succeeded, from 1."""
    TOTAL_ATTEMPTS_PER_UPLOAD = "total_attempts_per_upload"
    """Number of attempts started, including those that came too late to count."""
    UPLOAD_LATENCY_S = "upload_latency_s"
    """Time from the first attempt to the success."""
    UPLOAD_SIZE_BYTES = "upload_size_bytes"
    """Size of the object."""
    UPLOAD_QUEUE_BYTES = "upload_queue_bytes"
    """Bytes of a subtask that were waiting or being written when an upload was added."""


@dataclass(frozen=True)
class Recorded:
    """The measurements of a period.

    Parameters
    ----------
    counts : dict of str to int
        Counters, by metric.
    samples : dict of str to list of float
        The latest samples of each distribution, at most 1,000.
    """

    counts: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)


class Recorder(Protocol):
    """Takes measurements, from any thread."""

    def count(self, metric: Metric, number: int = 1) -> None:
        """Add to a counter."""
        ...

    def observe(self, metric: Metric, value: float) -> None:
        """Add a sample to a distribution."""
        ...


class Measurements:
    """A recorder that collects measurements until they are taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._samples: dict[str, deque[float]] = {}

    def count(self, metric: Metric, number: int = 1) -> None:
        with self._lock:
            self._counts[str(metric)] += number

    def observe(self, metric: Metric, value: float) -> None:
        with self._lock:
            self._samples.setdefault(str(metric), deque(maxlen=_KEPT)).append(value)

    def add(self, recorded: Recorded) -> None:
        """Add the measurements of another recorder."""
        if not recorded.counts and not recorded.samples:
            return
        with self._lock:
            self._counts.update(recorded.counts)
            for metric, values in recorded.samples.items():
                self._samples.setdefault(metric, deque(maxlen=_KEPT)).extend(values)

    def take(self) -> Recorded:
        """Return the measurements since the last call."""
        with self._lock:
            taken = Recorded(dict(self._counts), {metric: list(held) for metric, held in self._samples.items()})
            self._counts, self._samples = Counter(), {}
            return taken
