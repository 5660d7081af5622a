"""A store that repeats requests after transient failures, and hedges slow writes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from statelog.clock import Clock, SystemClock
from statelog.errors import StorageError
from statelog.metrics import Measurements, Metric, Recorder
from statelog.storage.attempts import Conditions, Request, Upload
from statelog.storage.hedging import Hedging
from statelog.storage.races import Races, ThreadedRaces
from statelog.storage.retry_policy import RetryPolicy
from statelog.storage.store import Store
from statelog.storage.wrapper import StoreWrapper

_T = TypeVar("_T")


class RetryingStore(StoreWrapper):
    """Forwards every call to another store, as often as its policy allows.

    A call whose failure is transient (:attr:`statelog.errors.StorageError.is_transient`) is repeated after an
    exponential delay with full jitter; any other error is raised at once. ``put`` and ``put_if_absent`` are also
    hedged: while an attempt takes long another one starts, and the first to succeed counts. A failed attempt does not
    fail the call while another one is under way. Stores that can append are not hedged, because a late attempt would
    undo later appends.

    All attempts at a write have the same name and the same bytes, so it does not matter which of them takes effect.
    ``put_if_absent`` reads the object back to find out whether it conflicts with an earlier attempt of its own. An
    attempt that nobody waits for any more can write its object even after a deletion; whoever deletes objects must look
    for such orphans later.

    The calls of `inner` should end by themselves: one that hangs is hedged, but never cut off. `new_random` (the source
    of delays) and `new_races` are called once in each process. A pickled store carries the inner store and the policy.
    Where it is unpickled it starts with no recorded durations, the machine's clock, and a recorder that nobody reads.
    """

    def __init__(
        self,
        inner: Store,
        policy: RetryPolicy,
        *,
        clock: Clock,
        recorder: Recorder,
        new_random: Callable[[], random.Random] = random.Random,
        new_races: Callable[[], Races] = ThreadedRaces,
    ) -> None:
        super().__init__(inner)
        self._policy = policy
        self._clock = clock
        self._recorder = recorder
        self._new_random = new_random
        self._new_races = new_races
        self._conditions: dict[int, Conditions] = {}

    def __repr__(self) -> str:
        return f"RetryingStore({self._inner!r}, {self._policy!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickled, (self._inner, self._policy))

    def put(self, name: str, data: bytes | memoryview) -> None:
        # A copy: an attempt may still read it after the call has returned.
        kept = bytes(data)
        with Upload(self._here(), lambda: self._inner.put(name, kept), len(kept)) as upload:
            upload.run()

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        kept = bytes(data)
        with Upload(self._here(), lambda: self._inner.put_if_absent(name, kept), len(kept)) as upload:
            is_ours = self._settle(upload, name, kept)
            if not is_ours:
                upload.give_up()
        return is_ours

    def close(self) -> None:
        if conditions := self._conditions.get(os.getpid()):
            conditions.races.close()
        self._inner.close()

    def _call(self, operation: str, name: str, effect: Callable[[], _T]) -> _T:
        # Appends are not hedged: the later of two attempts could cut off bytes appended after the first.
        retries = Metric.UPLOAD_RETRIES if operation == "append" else Metric.READ_RETRIES
        return Request(self._here(), effect, retries).run()

    def _settle(self, upload: Upload[bool], name: str, data: bytes) -> bool:
        """Write an object unless its name exists; True if the object of that name is ours in the end."""
        try:
            is_new = upload.run()
        except StorageError as error:
            if error.is_transient:
                # No answer came, but the object may be there. If it is not, the failure stands.
                with suppress(StorageError):
                    return self.read(name) == data
            raise
        if is_new or upload.started == 1:
            return is_new
        try:
            return self.read(name) == data
        except StorageError as error:
            raise StorageError(
                f"put_if_absent {name}: whether it was written is unknown. Attempt {upload.winner} of {upload.started}"
                " found an object of that name, perhaps made by another attempt, and it cannot be read back.",
                hint="Look at the object before writing it again; something may delete objects that are in use.",
            ) from error

    def _here(self) -> Conditions:
        """The conditions of this process: threads and locks do not survive a fork, and delays must differ after it."""
        pid = os.getpid()
        return self._conditions.get(pid) or self._conditions.setdefault(pid, self._new_conditions())

    def _new_conditions(self) -> Conditions:
        # No hedges for a store that can append: a late attempt would undo an append.
        timeout_s = None if self._inner.can_append else self._policy.timeout_s
        return Conditions(
            policy=self._policy,
            clock=self._clock,
            recorder=self._recorder,
            random=self._new_random(),
            races=self._new_races(),
            hedging=Hedging(timeout_s, self._clock),
        )


def _unpickled(inner: Store, policy: RetryPolicy) -> RetryingStore:
    return RetryingStore(inner, policy, clock=SystemClock(), recorder=Measurements())
