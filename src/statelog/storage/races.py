"""Attempts at one request, one after the other or side by side; the first to end is reported first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, Queue
from typing import Any, Final, Generic, Protocol, TypeVar, cast

_T = TypeVar("_T")

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


class Race(Protocol[_T]):
    """The attempts of one request."""

    def start(self, attempt: Callable[[], _T]) -> bool:
        """Start an attempt; False if it cannot run beside those under way."""
        ...

    def wait(self, timeout_s: float | None) -> Ended[_T] | None:
        """Wait for the next attempt to end; None if none ends in time. Without a timeout there is no limit."""
        ...


class Races(Protocol):
    """Makes the race of each request, and so decides how attempts run and how time passes."""

    def in_line(self) -> Race[_T]:
        """A race that runs attempts in the caller's thread, one after the other."""
        ...

    def side_by_side(self) -> Race[_T]:
        """A race that runs attempts beside each other while the caller waits."""
        ...

    def close(self) -> None:
        """Release whatever is idle."""
        ...


class ThreadedRaces:
    """Runs attempts in daemon threads, at most `threads` at a time in all races together.

    Threads start when they are needed, and end after some time without work. An attempt that nobody waits for any more
    runs to its end, but cannot keep the process from ending. If all threads are busy, for example with requests that
    hang, a first attempt runs in its caller's thread, as it would without a race.
    """

    def __init__(self, threads: int = _THREADS, sleep: Callable[[float], None] = time.sleep) -> None:
        self._pool = _Pool(threads)
        self._sleep = sleep

    def in_line(self) -> Race[_T]:
        return _InLine(self._sleep)

    def side_by_side(self) -> Race[_T]:
        return _SideBySide(self._pool)

    def close(self) -> None:
        self._pool.close()


class _InLine(Generic[_T]):
    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep = sleep
        self._started = 0
        self._ended: deque[Ended[_T]] = deque()

    def start(self, attempt: Callable[[], _T]) -> bool:
        self._started += 1
        self._ended.append(_try(self._started, attempt))
        return True

    def wait(self, timeout_s: float | None) -> Ended[_T] | None:
        if self._ended:
            return self._ended.popleft()
        if timeout_s is not None:
            self._sleep(timeout_s)
        return None


class _SideBySide(Generic[_T]):
    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._started = 0
        self._heard = 0
        self._ended: Queue[Ended[_T]] = Queue()

    def start(self, attempt: Callable[[], _T]) -> bool:
        number = self._started + 1
        is_alone = self._heard == self._started
        if self._pool.start(partial(_try, number, attempt), self._ended.put):
            self._started = number
            return True
        if not is_alone:
            return False
        self._started = number
        self._ended.put(_try(number, attempt))
        return True

    def wait(self, timeout_s: float | None) -> Ended[_T] | None:
        try:
            ended = self._ended.get(timeout=timeout_s)
        except Empty:
            return None
        self._heard += 1
        return ended


class _Pool:
    """At most `threads` daemon threads, which wait some time for more work.

    The pool of the standard library keeps the process alive until all its work is done.
    """

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._lock = threading.Lock()
        self._threads = 0
        # Waiting threads, less those that a queued job is meant for.
        self._idle = 0
        # Not a SimpleQueue: CPython 3.11's waits for ever if its thread is held up until the timeout has passed.
        self._jobs: Queue[_Job | None] = Queue()

    def start(self, work: Callable[[], _T], tell: Callable[[_T], None]) -> bool:
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
            threading.Thread(target=self._run, name="statelog-request", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._threads -= 1
            return False
        return True

    def _run(self) -> None:
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
                return self._jobs.get(timeout=_IDLE_S)
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
    except BaseException as error:  # even a panic of a native library: somebody waits for the outcome
        return Ended(number, None, error)
