"""A store that fails on purpose, for tests of the code that uses stores."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from statelog.errors import ErrorKind, StorageError
from statelog.storage.store import Store, StoreWrapper

When = Literal["before", "after"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a store method."""

    operation: str
    """Name of the method."""
    name: str
    """The object, the listed prefix, or the first deleted object."""
    number: int
    """How many calls of this method there have been, from 1."""
    position: int
    """How many calls of any method there have been, from 1."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The failure of a call."""

    when: When = "before"
    """Before the effect of the call, or after it, so that only the answer is lost."""
    torn_bytes: int | None = None
    """For ``append``, ``put`` and ``put_if_absent``: write only this many bytes, then fail."""
    action: Callable[[], None] | None = None
    """Called in place of a failure; it may raise an error of its own."""
    reason: str = ""
    """The end of the error's message, for example the seed."""
    kind: ErrorKind = ErrorKind.STORE_FAILED
    """Kind of the error; some kinds are retried."""


class FaultPlan:
    """Decides for each call of a store whether it fails; with this base class, no call fails.

    The store asks :meth:`fault` before each call takes effect.
    """

    def fault(self, call: Call) -> Fault | None:
        """Return the fault of a call; None if it succeeds."""
        return None

    @staticmethod
    def at(
        operation: str | None = None,
        *,
        call: int = 1,
        when: When = "before",
        torn_bytes: int | None = None,
        action: Callable[[], None] | None = None,
        kind: ErrorKind = ErrorKind.STORE_FAILED,
    ) -> FaultPlan:
        """A plan with one fault, at the given call (from 1) of an operation, or of any operation if None."""
        return _OneFault(operation, call, Fault(when, torn_bytes, action, f"{operation} {call} {when}", kind))

    @staticmethod
    def seeded(seed: int, *, rate: float, kind: ErrorKind = ErrorKind.STORE_FAILED) -> FaultPlan:
        """A plan of random faults in a share `rate` of all calls: before or after the effect, or as torn appends."""
        return _SeededFaults(seed, rate, kind)


class _OneFault(FaultPlan):
    def __init__(self, operation: str | None, number: int, fault: Fault) -> None:
        self._operation = operation
        self._number = number
        self._fault = fault

    def fault(self, call: Call) -> Fault | None:
        if self._operation is None:
            return self._fault if call.position == self._number else None
        return self._fault if (call.operation, call.number) == (self._operation, self._number) else None


class _SeededFaults(FaultPlan):
    def __init__(self, seed: int, rate: float, kind: ErrorKind) -> None:
        self._random = random.Random(seed)
        self._rate = rate
        self._kind = kind
        self._reason = f"seed {seed}"

    def fault(self, call: Call) -> Fault | None:
        if self._random.random() >= self._rate:
            return None
        if call.operation == "append" and self._random.random() < 0.4:
            return Fault(torn_bytes=self._random.randrange(200), reason=self._reason, kind=self._kind)
        return Fault(self._random.choice(("before", "after")), reason=self._reason, kind=self._kind)


class FaultStore(StoreWrapper):
    """Forwards requests to another store, with the faults of a plan. Closing and removing leftovers never fail."""

    def __init__(self, inner: Store, plan: FaultPlan) -> None:
        super().__init__(inner)
        self._plan = plan
        self._calls: Counter[str] = Counter()

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self._calls.total()

    def put(self, name: str, data: bytes | memoryview) -> None:
        inner = self._inner
        self._call("put", name, lambda: inner.put(name, data), lambda n: inner.put(name, data[:n]))

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        put = self._inner.put_if_absent
        return self._call("put_if_absent", name, lambda: put(name, data), lambda n: put(name, data[:n]))

    def append(self, name: str, parts: list[bytes | memoryview], *, at: int) -> None:
        append = self._inner.append
        self._call(
            "append",
            name,
            lambda: append(name, parts, at=at),
            lambda n: append(name, [b"".join(parts)[:n]], at=at),
        )

    def remove_unfinished(self, prefix: str, before_s: float) -> None:
        self._inner.remove_unfinished(prefix, before_s)

    def _call(
        self,
        operation: str,
        name: str,
        effect: Callable[[], _T],
        torn_effect: Callable[[int], object] | None = None,
    ) -> _T:
        self._calls[operation] += 1
        fault = self._plan.fault(Call(operation, name, self._calls[operation], self.calls))
        if fault is None:
            return effect()
        if fault.torn_bytes is not None and torn_effect is not None:
            torn_effect(fault.torn_bytes)
        elif fault.when == "after":
            result = effect()
            if fault.action is not None:
                fault.action()
                return result
        elif fault.action is not None:
            fault.action()
            return effect()
        raise StorageError(f"{operation} {name} failed: injected fault ({fault.reason}).", kind=fault.kind)
