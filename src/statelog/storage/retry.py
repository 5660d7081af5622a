"""A store that repeats requests after transient failures, and hedges slow writes."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from statelog.clock import Clock, SystemClock
from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.metrics import Measurements, Metric
from statelog.storage.hedging import Hedging, Race, Races
from statelog.storage.store import Store, StoreWrapper

_T = TypeVar("_T")

_MAX_DOUBLINGS: Final = 60


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is attempted, and when; a value out of range raises ConfigurationError."""

    attempts: int = 3
    """Upper bound of attempts at a request, including the first one and hedges."""
    timeout_s: float | None = 1.0
    """A write that takes longer is hedged at once, within a budget; None hedges nothing.

    A write that takes longer than usual is hedged sooner. This is no limit: the store decides how long an attempt may
    take.
    """
    delay_s: float = 0.5
    """Upper end of the random delay (from 0) before the first repetition; it doubles with each further one."""
    max_delay_s: float = 10.0
    """Limit of that upper end."""

    def __post_init__(self) -> None:
        is_whole = isinstance(self.attempts, int) and not isinstance(self.attempts, bool)
        _require(is_whole and self.attempts >= 1, "attempts", self.attempts, "a whole number that is at least 1")
        is_timeout = self.timeout_s is None or (_is_duration(self.timeout_s) and self.timeout_s > 0)
        _require(is_timeout, "timeout_s", self.timeout_s, "None, or a number above 0")
        _require(_is_duration(self.delay_s), "delay_s", self.delay_s, "a number that is at least 0")
        _require(_is_duration(self.max_delay_s), "max_delay_s", self.max_delay_s, "a number that is at least 0")

    @classmethod
    def none(cls) -> RetryPolicy:
        """One attempt, however long it takes."""
        return cls(attempts=1, timeout_s=None)

    def longest_delay_s(self, failures: int) -> float:
        """The longest delay before the next attempt, after `failures` (at least one) failed attempts."""
        return min(self.max_delay_s, self.delay_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))


class RetryingStore(StoreWrapper):
    """Forwards every call to another store, as often as its policy allows.

    A call whose failure is transient (:attr:`statelog.errors.StorageError.is_transient`) is repeated after an
    exponential delay with full jitter; any other error is raised at once. ``put`` and ``put_if_absent`` are also
    hedged: if an attempt takes long, another one starts, and the first to succeed counts. A failed attempt does not
    fail the call while another one is under way. Stores that can append are not hedged, because a late attempt would
    undo later appends.

    All attempts at a write have the same name and the same bytes, so it does not matter which of them takes effect.
    ``put_if_absent`` reads the object back to find out whether it conflicts with an earlier attempt of its own. An
    abandoned attempt can write its object even after a deletion, so such orphans must be looked for later.

    The calls of `inner` should end by themselves: one that hangs is hedged, but never cut off. `new_random` (the source
    of delays) and `new_races` are called once in each process. A pickled store carries the inner store and the policy.
    Where it is unpickled it starts with no recorded durations, the machine's clock, and a recorder that is not read.
    """

    def __init__(
        self,
        inner: Store,
        policy: RetryPolicy,
        *,
        clock: Clock,
        recorder: Measurements,
        new_random: Callable[[], random.Random] = random.Random,
        new_races: Callable[[], Races] = Races,
    ) -> None:
        super().__init__(inner)
        self._policy = policy
        self._clock = clock
        self._recorder = recorder
        self._new_random = new_random
        self._new_races = new_races
        self._processes: dict[int, _Process] = {}

    def __repr__(self) -> str:
        return f"RetryingStore({self._inner!r}, {self._policy!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickled, (self._inner, self._policy))

    @property
    def hedging(self) -> Hedging:
        """Decides which writes of this process are hedged."""
        return self._here().hedging

    def put(self, name: str, data: bytes | memoryview) -> None:
        # A copy: an attempt may still read it after the call has returned.
        kept = bytes(data)
        upload = _Upload(self._here(), lambda: self._inner.put(name, kept), len(kept))
        with upload.measured():
            upload.run()

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        kept = bytes(data)
        upload = _Upload(self._here(), lambda: self._inner.put_if_absent(name, kept), len(kept))
        with upload.measured():
            is_ours = self._settle(upload, name, kept)
            upload.is_needless = not is_ours
        return is_ours

    def close(self) -> None:
        if process := self._processes.get(os.getpid()):
            process.races.close()
        super().close()

    def _call(self, operation: str, name: str, effect: Callable[[], _T]) -> _T:
        # Appends are not hedged: the later of two attempts could cut off bytes appended after the first.
        retries = Metric.UPLOAD_RETRIES if operation == "append" else Metric.READ_RETRIES
        process = self._here()
        return _Request(process, effect, process.races.in_line(), retries).run()

    def _settle(self, upload: _Upload[bool], name: str, data: bytes) -> bool:
        """Write an object unless its name exists; True if the object of that name is ours in the end."""
        try:
            is_new = upload.run()
        except StorageError as error:
            if error.is_transient:
                # No answer came, but the object may be there. If it is not, the failure stands.
                with suppress(StorageError):
                    return self.read(name) == data
            raise
        attempts = upload.race.started
        if is_new or attempts == 1:
            return is_new
        try:
            return self.read(name) == data
        except StorageError as error:
            raise StorageError(
                f"put_if_absent {name}: it is unknown whether this call wrote it. Attempt {upload.winner} of {attempts}"
                " found an object of that name, perhaps written by another attempt, but it cannot be read back.",
                hint="Inspect the object before you write it again; something may delete objects that are in use.",
            ) from error

    def _here(self) -> _Process:
        """The objects of this process: threads and locks do not survive a fork, and delays must differ after it."""
        pid = os.getpid()
        return self._processes.get(pid) or self._processes.setdefault(pid, self._new_process())

    def _new_process(self) -> _Process:
        # No hedges for a store that can append: a late attempt would undo an append.
        timeout_s = None if self._inner.can_append else self._policy.timeout_s
        hedging = Hedging(timeout_s, self._clock)
        return _Process(self._policy, self._clock, self._recorder, self._new_random(), self._new_races(), hedging)


def _unpickled(inner: Store, policy: RetryPolicy) -> RetryingStore:
    return RetryingStore(inner, policy, clock=SystemClock(), recorder=Measurements())


@dataclass(frozen=True, slots=True)
class _Process:
    """Shared by all requests of a store in one process."""

    policy: RetryPolicy
    clock: Clock
    recorder: Measurements
    random: random.Random
    races: Races
    hedging: Hedging


class _Request(Generic[_T]):
    """A request, attempted until it succeeds or the policy allows no further attempt; `retries` counts repetitions."""

    def __init__(self, process: _Process, attempt: Callable[[], _T], race: Race[_T], retries: Metric) -> None:
        self._process = process
        self._attempt = attempt
        self._retries = retries
        self.race = race
        self._failures = 0
        self._failure: BaseException | None = None
        # When the next attempt starts; None if none is planned.
        self._due_s: float | None = None
        self._due_is_hedge = False
        self.winner = 0
        """Number of the attempt that succeeded, from 1; 0 while none is known to have succeeded."""

    def run(self) -> _T:
        """Return the result of the first attempt to succeed.

        If none succeeds, the first error that is not transient is raised or, if all were transient, the last one.
        """
        self._plan(0.0, is_hedge=False)
        while True:
            if self._left_s() == 0:
                self._start_next()
            ended = self.race.wait(self._left_s())
            if ended is None:
                continue
            if ended.error is None:
                self.winner = ended.number
                return ended.result()
            self._fail(ended.error)
            if not self.race.under_way and self._due_s is None and self._failure is not None:
                raise self._failure

    def _make_attempt(self) -> _T:
        """Make one attempt; called on any thread."""
        try:
            return self._attempt()
        except StorageError as error:
            # Counted here, because no caller may be waiting for this attempt any more.
            if error.kind == ErrorKind.STORE_BUSY:
                self._process.recorder.count(Metric.SLOW_DOWNS)
                self._process.hedging.slow_down()
            raise

    def _patience_s(self) -> float | None:
        """How long an attempt may take before another one starts in parallel; None for no limit."""
        return None

    def _start_next(self) -> None:
        """Start the due attempt; if no hedge or no thread is available, postpone it by the policy's timeout."""
        process, is_hedge = self._process, self._due_is_hedge
        if is_hedge and not process.hedging.take_hedge():
            self._plan(process.policy.timeout_s, is_hedge=True)
            return
        if not self.race.start(self._make_attempt):
            if is_hedge:
                process.hedging.give_back_hedge()
            self._plan(process.policy.timeout_s, is_hedge=is_hedge)
            return
        if self.race.started > 1:
            process.recorder.count(Metric.UPLOAD_HEDGES if is_hedge else self._retries)
        self._plan(self._patience_s(), is_hedge=True)

    def _fail(self, error: BaseException) -> None:
        """Record a failed attempt, and plan another one unless the failure is permanent."""
        self._failures += 1
        if self._failure is None or _is_transient(self._failure):
            self._failure = error
        if _is_transient(self._failure):
            longest_s = self._process.policy.longest_delay_s(self._failures)
            self._plan(self._process.random.uniform(0, longest_s), is_hedge=False)
        else:
            self._due_s = None

    def _plan(self, after_s: float | None, *, is_hedge: bool) -> None:
        """Plan the next attempt, unless `after_s` is None or the policy allows no more attempts."""
        self._due_is_hedge = is_hedge
        if after_s is None or self.race.started >= self._process.policy.attempts:
            self._due_s = None
        else:
            self._due_s = self._process.clock.monotonic_s() + after_s

    def _left_s(self) -> float | None:
        """Seconds until the next attempt is due; None if none is planned."""
        return None if self._due_s is None else max(self._due_s - self._process.clock.monotonic_s(), 0.0)


class _Upload(_Request[_T]):
    """The write of an object of `size_bytes`: hedged if the policy says so."""

    def __init__(self, process: _Process, attempt: Callable[[], _T], size_bytes: int) -> None:
        race: Race[_T] = process.races.side_by_side() if process.hedging.is_on else process.races.in_line()
        super().__init__(process, attempt, race, Metric.UPLOAD_RETRIES)
        self._size_bytes = size_bytes
        self.is_needless = False
        """Whether another object has the name; then the write counts neither as success nor as failure."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the body as the write; an exception is its failure."""
        recorder, clock = self._process.recorder, self._process.clock
        started_s = clock.monotonic_s()
        recorder.count(Metric.UPLOAD_REQUESTS)
        self._process.hedging.add_request()
        try:
            yield
        except BaseException:
            recorder.count(Metric.UPLOAD_FAILURES)
            raise
        if self.is_needless:
            return
        if self.winner:  # else its answer was lost
            recorder.observe(Metric.ATTEMPTS_PER_UPLOAD, self.winner)
        recorder.observe(Metric.TOTAL_ATTEMPTS_PER_UPLOAD, self.race.started)
        recorder.observe(Metric.UPLOAD_LATENCY_S, clock.monotonic_s() - started_s)
        recorder.observe(Metric.UPLOAD_SIZE_BYTES, self._size_bytes)

    def _make_attempt(self) -> _T:
        clock = self._process.clock
        started_s = clock.monotonic_s()
        result = super()._make_attempt()
        self._process.hedging.add_latency(self._size_bytes, clock.monotonic_s() - started_s)
        return result

    def _patience_s(self) -> float | None:
        return self._process.hedging.patience_s(self._size_bytes)


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, StorageError) and error.is_transient


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _require(is_valid: bool, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise ConfigurationError(f"{name} of the retry policy is {value!r}.", hint=f"It must be {expected}.")
