"""What the tests of :mod:`tests.reading.test_pins` and others share."""

from __future__ import annotations

from collections.abc import Callable

from statelog import StorageError
from statelog.storage.store import StoreWrapper
from statelog.testing.faults import Call, Fault, FaultPlan


class Stop(FaultPlan):
    """Calls a function before the n-th request, from 1."""

    def __init__(self, number: int, then: Callable[[], None]) -> None:
        self._number = number
        self._then = then
        self.requests = 0

    def fault(self, call: Call) -> Fault | None:
        self.requests += 1
        if self.requests != self._number:
            return None
        return Fault(action=self._then)


class ReadOnly(StoreWrapper):
    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        raise StorageError(f"{name}: access denied.")
