"""Hedging: a second attempt in parallel with a slow write ("The Tail at Scale", Dean and Barroso 2013)."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, Queue
from typing import Any, Final, Generic, TypeVar, cast

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
        # Hedges that were taken and not given back.
        self._hedges = 0
        self._calm_from_s = -math.inf

    @property
    def is_on(self) -> bool:
        """Whether any write is hedged."""
        return self._timeout_s is not None

    def patience_s(self, size_bytes: int) -> float | None:
        """How long to wait for a write before it is hedged; None for no limit."""
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


_T = TypeVar("_T")


# ---- Attempts of a request, in the caller's thread or in parallel: they are reported as they end ----


_THREADS: Final = 64
_IDLE_S: Final = 10.0

_Job = tuple[Callable[[], Any], Callable[[Any], None]]


@dataclass(frozen=True, slots=True)
class Ended(Generic[_T]):
    """The outcome of attempt `number` (from 1) of a race; `error` is None if it succeeded."""

    number: int
    value: _T | None
    error: BaseException | None

    def result(self) -> _T:
        """Return the value or raise the error of the attempt."""
        if self.error is not None:
            raise self.error
        return cast(_T, self.value)


class Race(Generic[_T]):
    """The attempts of one request.

    Each runs in one of the threads. Without threads, or if all are busy, it runs in the caller's thread, as it
    would without a race, but only while no other attempt is under way.
    """

    def __init__(self, threads: Races | None, sleep: Callable[[float], None]) -> None:
        self._threads = threads
        self._sleep = sleep
        self._ended: Queue[Ended[_T]] = Queue()
        self.started = 0
        self.under_way = 0
        """Attempts that :meth:`wait` has not reported yet."""

    def start(self, attempt: Callable[[], _T]) -> bool:
        """Start an attempt; False if it cannot run in parallel with those under way."""
        run = partial(_try, self.started + 1, attempt)
        if self._threads is None or not self._threads.run(run, self._ended.put):
            if self.under_way:
                return False
            self._ended.put(run())
        self.started += 1
        self.under_way += 1
        return True

    def wait(self, timeout_s: float | None) -> Ended[_T] | None:
        """Wait for the next attempt to end; None if none ends in time. Without a timeout there is no limit."""
        if not self.under_way:
            if timeout_s is not None:
                self._sleep(timeout_s)
            return None
        try:
            ended = self._ended.get(timeout=timeout_s)
        except Empty:
            return None
        self.under_way -= 1
        return ended


class Races:
    """Makes the races of a process; together they have at most `threads` daemon threads.

    Threads start when they are needed, and end after `idle_s` without work. The pool of the standard library keeps the
    process alive until all its work is done; here an abandoned attempt runs to its end, but cannot
    keep the process from ending.
    """

    def __init__(
        self, threads: int = _THREADS, *, idle_s: float = _IDLE_S, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._most = threads
        self.idle_s = idle_s
        self._sleep = sleep
        self._lock = threading.Lock()
        self._threads = 0
        # Waiting threads, minus those that a queued job is meant for.
        self._idle = 0
        # Not a SimpleQueue: CPython 3.11's waits forever if its thread is delayed until the timeout has passed.
        self._jobs: Queue[_Job | None] = Queue()

    def in_line(self) -> Race[_T]:
        """A race in the caller's thread, one attempt after the other."""
        return Race(None, self._sleep)

    def side_by_side(self) -> Race[_T]:
        """A race of attempts that run in parallel while the caller waits."""
        return Race(self, self._sleep)

    def run(self, work: Callable[[], _T], tell: Callable[[_T], None]) -> bool:
        """Do some work in a thread and pass its result to `tell`; False if all threads are busy."""
        with self._lock:
            is_waited_for = self._idle > 0
            if is_waited_for:
                self._idle -= 1
            elif self._threads < self._most:
                self._threads += 1
            else:
                return False
        if not is_waited_for and not self._start_thread():
            return False
        # Not an argument of a new thread: the thread would hold it for as long as it lives.
        self._jobs.put((work, tell))
        return True

    def close(self) -> None:
        """End the waiting threads."""
        with self._lock:
            waiting, self._idle = self._idle, 0
            self._threads -= waiting
        for _ in range(waiting):
            self._jobs.put(None)

    def _start_thread(self) -> bool:
        """Start a thread that is already counted; if the system has no more, uncount it and return False."""
        try:
            threading.Thread(target=self._work, name="statelog-request", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._threads -= 1
            return False
        return True

    def _work(self) -> None:
        job = self._next()
        while job is not None:
            work, tell = job
            result = work()
            with self._lock:
                # First, so that the receiver finds the thread free.
                self._idle += 1
            tell(result)
            # A waiting thread keeps nothing alive.
            del job, work, tell, result
            job = self._next()

    def _next(self) -> _Job | None:
        """Wait for a job; None means that the thread ends."""
        while True:
            try:
                return self._jobs.get(timeout=self.idle_s)
            except Empty:
                with self._lock:
                    if self._idle:
                        self._idle -= 1
                        self._threads -= 1
                        return None
                # Every waiting thread is meant for a job that is being put into the queue now.


def _try(number: int, attempt: Callable[[], _T]) -> Ended[_T]:
    try:
        return Ended(number, attempt(), None)
    except BaseException as error:  # even a panic of a native library: the caller waits for the outcome
        return Ended(number, None, error)
