"""The attempts at one request: when the next one starts, and when the request has failed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from statelog.clock import Clock
from statelog.errors import ErrorKind, StorageError
from statelog.metrics import Metric, Recorder
from statelog.storage.hedging import Hedging
from statelog.storage.races import Race, Races
from statelog.storage.retry_policy import RetryPolicy

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Shared by all requests of a store in one process."""

    policy: RetryPolicy
    clock: Clock
    recorder: Recorder
    random: random.Random
    races: Races
    hedging: Hedging


class Request(Generic[_T]):
    """Attempts one request until it succeeds or the policy allows no further attempt.

    Attempts run in the caller's thread, one after the other. `retries` is the metric that counts repetitions.
    """

    def __init__(self, conditions: Conditions, attempt: Callable[[], _T], retries: Metric) -> None:
        self._conditions = conditions
        self._attempt = attempt
        self._retries = retries
        self._race: Race[_T] = conditions.races.in_line()
        self._active = 0
        self._failures = 0
        self._failure: BaseException | None = None
        # When the next attempt starts; None if none is planned.
        self._due_s: float | None = None
        self._due_is_hedge = False
        self.started = 0
        """Attempts started so far."""
        self.winner = 0
        """Number of the attempt that succeeded, from 1; 0 while none is known to have succeeded."""

    def run(self) -> _T:
        """Return the result of the first attempt to succeed.

        If none succeeds, the first error that is not transient is raised, else the last error.
        """
        self._due_s = self._conditions.clock.monotonic_s()
        while True:
            left_s = self._left_s()
            if left_s == 0:
                self._start_next()
                left_s = self._left_s()
            ended = self._race.wait(left_s)
            if ended is None:
                continue
            self._active -= 1
            if ended.error is None:
                self.winner = ended.number
                return ended.result()
            self._fail(ended.error)
            if self._active == 0 and self._due_s is None and self._failure is not None:
                raise self._failure

    def _make_attempt(self) -> _T:
        """Make one attempt; called on any thread."""
        try:
            return self._attempt()
        except StorageError as error:
            # Counted here, because nobody may wait for this attempt any more.
            if error.kind == ErrorKind.STORE_BUSY:
                self._conditions.recorder.count(Metric.SLOW_DOWNS)
                self._conditions.hedging.slow_down()
            raise

    def _patience_s(self) -> float | None:
        """How long an attempt may take before another one starts beside it; None is for ever."""
        return None

    def _start_next(self) -> None:
        """Start the due attempt; if no hedge or no thread is available, put it off by the policy's timeout."""
        conditions, is_hedge = self._conditions, self._due_is_hedge
        if is_hedge and not conditions.hedging.take_hedge():
            self._plan(conditions.policy.timeout_s, is_hedge=True)
            return
        if not self._race.start(self._make_attempt):
            if is_hedge:
                conditions.hedging.give_back_hedge()
            self._plan(conditions.policy.timeout_s, is_hedge=is_hedge)
            return
        self._active += 1
        self.started += 1
        if self.started > 1:
            conditions.recorder.count(Metric.UPLOAD_HEDGES if is_hedge else self._retries)
        self._plan(self._patience_s(), is_hedge=True)

    def _fail(self, error: BaseException) -> None:
        """Record a failed attempt, and plan another one unless the failure is permanent."""
        conditions = self._conditions
        self._failures += 1
        if self._failure is None or _is_transient(self._failure):
            self._failure = error
        if _is_transient(self._failure):
            longest_s = conditions.policy.longest_delay_s(self._failures)
            self._plan(conditions.random.uniform(0, longest_s), is_hedge=False)
        else:
            self._due_s = None

    def _plan(self, after_s: float | None, *, is_hedge: bool) -> None:
        """Plan the next attempt, unless `after_s` is None or the policy allows no more attempts."""
        self._due_is_hedge = is_hedge
        if after_s is None or self.started >= self._conditions.policy.attempts:
            self._due_s = None
        else:
            self._due_s = self._conditions.clock.monotonic_s() + after_s

    def _left_s(self) -> float | None:
        """Seconds until the next attempt is due; None if none is planned."""
        return None if self._due_s is None else max(self._due_s - self._conditions.clock.monotonic_s(), 0.0)


class Upload(Request[_T]):
    """Writes an object of `size_bytes`: hedged if the policy says so, and measured.

    As a context manager it measures its body; an exception counts as a failed upload.
    """

    def __init__(self, conditions: Conditions, attempt: Callable[[], _T], size_bytes: int) -> None:
        super().__init__(conditions, attempt, Metric.UPLOAD_RETRIES)
        if conditions.hedging.is_on:
            self._race = conditions.races.side_by_side()
        self._size_bytes = size_bytes
        self._is_needless = False
        self._started_s = conditions.clock.monotonic_s()

    def __enter__(self) -> Self:
        self._conditions.recorder.count(Metric.UPLOAD_REQUESTS)
        self._conditions.hedging.add_request()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder = self._conditions.recorder
        if error is not None:
            recorder.count(Metric.UPLOAD_FAILURES)
        elif not self._is_needless:
            if self.winner:  # else its answer was lost
                recorder.observe(Metric.ATTEMPTS_PER_UPLOAD, self.winner)
            recorder.observe(Metric.TOTAL_ATTEMPTS_PER_UPLOAD, self.started)
            recorder.observe(Metric.UPLOAD_LATENCY_S, self._conditions.clock.monotonic_s() - self._started_s)
            recorder.observe(Metric.UPLOAD_SIZE_BYTES, self._size_bytes)

    def give_up(self) -> None:
        """Count the upload neither as success nor as failure: another object has its name."""
        self._is_needless = True

    def _make_attempt(self) -> _T:
        clock = self._conditions.clock
        started_s = clock.monotonic_s()
        result = super()._make_attempt()
        self._conditions.hedging.add_latency(self._size_bytes, clock.monotonic_s() - started_s)
        return result

    def _patience_s(self) -> float | None:
        return self._conditions.hedging.patience_s(self._size_bytes)


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, StorageError) and error.is_transient
