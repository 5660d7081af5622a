"""What the tests of :mod:`tests.storage.test_retry` and others share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from statelog.clock import SystemClock
from statelog.errors import ErrorKind, StorageError
from statelog.metrics import Measurements
from statelog.storage.hedging import Races
from statelog.storage.retry import RetryingStore, RetryPolicy
from statelog.storage.store import ObjectInfo, Store
from statelog.testing.query import ManualClock

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """What one call of :class:`ScriptedStore` does: it takes time, and has its effect unless it fails before that."""

    takes_s: float = 0.0
    error: ErrorKind | None = None
    has_effect: bool = True


OK = Step()


class ScriptedStore(Store):
    """Objects in a dictionary; calls follow a script, in the order in which they start, and later ones succeed."""

    def __init__(self, clock: ManualClock, *script: Step) -> None:
        self.clock = clock
        self.script = list(script)
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, float]] = []

    def times_of(self, operation: str) -> list[float]:
        return [time_s for name, time_s in self.calls if name == operation]

    @property
    def can_append(self) -> bool:
        return False

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self._follow("read", lambda: self._get(name))

    def size_bytes(self, name: str) -> int:
        return self._follow("size_bytes", lambda: len(self._get(name)))

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._follow("put", lambda: self.objects.update({name: bytes(data)}))

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        def write_unless_there() -> bool:
            is_new = name not in self.objects
            self.objects.setdefault(name, bytes(data))
            return is_new

        return self._follow("put_if_absent", write_unless_there)

    def append(self, name: str, parts: list[bytes | memoryview], *, at: int) -> None:
        self._follow("append", lambda: None)

    def sync(self, name: str, *, start: int, end: int) -> None:
        self._follow("sync", lambda: None)

    def delete(self, names: list[str]) -> None:
        self._follow("delete", lambda: [self.objects.pop(name, None) for name in names])

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self._follow("list", lambda: [ObjectInfo(name, 0, 1.0) for name in sorted(self.objects)])

    def _get(self, name: str) -> bytes:
        if name not in self.objects:
            raise StorageError(f"{name} is missing.", kind=ErrorKind.OBJECT_MISSING)
        return self.objects[name]

    def _follow(self, operation: str, effect: Callable[[], T]) -> T:
        step = self.script.pop(0) if self.script else OK
        self.calls.append((operation, self.clock.monotonic_s()))
        results = [effect()] if step.has_effect else []
        self.clock.advance(step.takes_s)
        if step.error is not None:
            raise StorageError(f"{operation} failed.", kind=step.error)
        return results[0]


class BlockingStore(ScriptedStore):
    """The first writes of chosen objects wait until they are released; all time is real."""

    def __init__(self, *blocked: str) -> None:
        super().__init__(ManualClock())
        self.blocked = set(blocked)
        self.release = threading.Event()
        self.late: list[str] = []
        self.threads: list[threading.Thread] = []

    def put(self, name: str, data: bytes | memoryview) -> None:
        self.threads.append(threading.current_thread())
        if name in self.blocked:
            self.blocked.remove(name)
            assert self.release.wait(60)
            super().put(name, data)
            self.late.append(name)
        else:
            super().put(name, data)

    def finish(self) -> None:
        """Release what waits, and wait for its end."""
        self.release.set()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(60)
                assert not thread.is_alive()


def threaded(inner: Store, *, timeout_s: float = 0.001, threads: int = 64, idle_s: float = 0.02) -> RetryingStore:
    policy = RetryPolicy(attempts=2, timeout_s=timeout_s)
    races = Races(threads, idle_s=idle_s)
    return RetryingStore(inner, policy, clock=SystemClock(), recorder=Measurements(), new_races=lambda: races)
