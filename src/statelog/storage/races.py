"""Attempts at one request, one after the other or side by side; the first to end is heard first."""

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
    """How an attempt ended.

    Parameters
    ----------
    number : int
        Which attempt of the race, from 1.
    value : object
        What it returned; None if it failed.
    error : BaseException or None
        What it raised.
    """

    number: int
    value: _T | None
    error: BaseException | None

    def result(self) -> _T:
        """Return or raise what the attempt did."""
        if self.error is not None:
            raise self.error
        return cast(_T, self.value)


class Race(Protocol[_T]):
    """The attempts of one request."""

    def start(self, attempt: Callable[[], _T]) -> bool:
        """Start an attempt; False if it cannot be started beside those that are under way."""
        ...

    def wait(self, timeout_s: float | None) -> Ended[_T] | None:
        """Wait for the next attempt to end; None if none has ended in time."""
        ...


class Races(Protocol):
    """Makes the race of each request, and with it decides how attempts run and how time passes."""

    def in_line(self) -> Race[_T]:
        """A race whose attempts run in the caller's thread, so one after the other."""
        ...

    def side_by_side(self) -> Race[_T]:
        """A race whose attempts run beside each other while the caller waits."""
        ...

    def close(self) -> None:
        """Release what is not in use."""
        ...


class ThreadedRaces:
    """Races whose attempts run in daemon threads, at most so many at a time in all races together.

    Threads are started when they are needed, and end when they have had nothing to do for a while. An attempt that
    nobody waits for any more runs to its end, and cannot keep the process from ending. If all threads are taken, for
    example by requests that hang, a first attempt runs in its caller's thread, as it would without a race.

    Parameters
    ----------
    threads : int
        How many there may be.
    sleep : callable
        Waits for some seconds.
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
    """Daemon threads that wait for some time for more work.

    The pool of the standard library keeps the process until all its work is done.

    Parameters
    ----------
    threads : int
        How many there may be.
    """

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._lock = threading.Lock()
        self._threads = 0
        # Threads that wait, less those that a job in the queue is meant for.
        self._idle = 0
        # Not a SimpleQueue: CPython 3.11's waits for ever if its thread is held up until the timeout has passed.
        self._jobs: Queue[_Job | None] = Queue()

    def start(self, work: Callable[[], _T], tell: Callable[[_T], None]) -> bool:
        """Do some work and tell its result, in a thread; False if all of them are taken."""
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
        # Not as an argument of a new thread, which would keep it for as long as it lives.
        self._jobs.put((work, tell))
        return True

    def close(self) -> None:
        """End the threads that wait."""
        with self._lock:
            waiting, self._idle = self._idle, 0
            self._threads -= waiting
        for _ in range(waiting):
            self._jobs.put(None)

    def _start_thread(self) -> bool:
        """Start a thread that was counted already; False, and it is not, if the system has no more."""
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
                # First, so that who is told finds the thread free.
                self._idle += 1
            tell(result)
            # Nothing is kept alive by a thread that waits.
            del job, work, tell, result
            job = self._next()

    def _next(self) -> _Job | None:
        """Wait for a job; None if the thread is to end."""
        while True:
            try:
                return self._jobs.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._idle:
                        self._idle -= 1
                        self._threads -= 1
                        return None
                # All that wait are meant for jobs that are being put into the queue now.


def _try(number: int, attempt: Callable[[], _T]) -> Ended[_T]:
    try:
        return Ended(number, attempt(), None)
    except BaseException as error:  # a panic of a native library too: somebody waits
        return Ended(number, None, error)
