from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from statelog.clock import SystemClock
from statelog.errors import ErrorKind
from statelog.metrics import Measurements
from statelog.storage import LocalStore, Store
from statelog.storage.hedging import Ended, Race, Races
from statelog.storage.links import LinkedStore
from statelog.storage.retry import RetryingStore, RetryPolicy
from statelog.testing.contracts import StoreContract
from statelog.testing.faults import FaultPlan, FaultStore
from statelog.testing.query import ManualClock
from tests.stores import WholeObjects


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "new" / "root")


class TestFaultStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FaultStore(LocalStore(tmp_path), FaultPlan())


class TestLinkedStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LinkedStore(LocalStore(tmp_path), LocalStore)


class TestRetryingStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return RetryingStore(LocalStore(tmp_path), RetryPolicy(), clock=SystemClock(), recorder=Measurements())


@pytest.mark.parametrize("kind", [ErrorKind.STORE_UNAVAILABLE, ErrorKind.STORE_BUSY])
class TestRetryingStoreWithFaults(StoreContract):
    """Failures for a moment, before and after the effect, do not show."""

    @pytest.fixture
    def store(self, tmp_path: Path, kind: ErrorKind) -> Store:
        inner = FaultStore(LocalStore(tmp_path), FaultPlan.seeded(20, rate=0.2, kind=kind))
        policy = RetryPolicy(attempts=12, timeout_s=None, delay_s=0.0001, max_delay_s=0.001)
        return RetryingStore(inner, policy, clock=SystemClock(), recorder=Measurements())


class TestHedgedStore(StoreContract):
    """The first write of every test is hedged, both attempts take effect, and the second one's answer comes first."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        clock = ManualClock()
        return RetryingStore(
            WholeObjects(LocalStore(tmp_path)),
            RetryPolicy(attempts=2, timeout_s=1.0),
            clock=clock,
            recorder=Measurements(),
            new_races=lambda: _LateAnswers(clock),
        )


class _LateAnswers(Races):
    """Races in which an attempt takes effect at once, and its answer comes after that of a hedge if there is one."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def side_by_side(self) -> Race[Any]:
        return _LateAnswer(self._clock)


class _LateAnswer(Race[Any]):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__(None, clock.advance)
        self._clock = clock
        self._answers: list[Ended[Any]] = []
        self._has_waited = False

    def start(self, attempt: Callable[[], Any]) -> bool:
        self.started += 1
        self.under_way += 1
        self._answers.append(Ended(self.started, attempt(), None))
        return True

    def wait(self, timeout_s: float | None) -> Ended[Any] | None:
        if timeout_s is not None and not self._has_waited:
            self._clock.advance(timeout_s)
            self._has_waited = True
            return None
        self.under_way -= 1
        return self._answers.pop()
