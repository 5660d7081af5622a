"""What the tests of :mod:`tests.queries.test_savepoint_faults` and others share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest

from statelog.queries import load, save, save_restore
from statelog.spark.checkpoint import location as checkpoint_location
from statelog.storage import LocalStore, Store
from statelog.testing.faults import FaultStore
from tests.coordinator.crash_points_support import KillAt, Killed, When


def deaths(
    monkeypatch: pytest.MonkeyPatch,
    when: When,
    do: Callable[[], object],
    check: Callable[[], None],
    modules: Sequence[ModuleType] = (load, save, save_restore, checkpoint_location),
) -> int:
    """Do it, with a death at each operation in turn, until there are no more; return how many there were.

    `modules` open the stores.
    """
    for number in range(1, 1000):
        plan = KillAt(number, when)

        def opened(location: str, plan: KillAt = plan) -> Store:
            return FaultStore(LocalStore(location), plan)

        with monkeypatch.context() as patched:
            for module in modules:
                patched.setattr(module, "open_location", opened)
            try:
                do()
                if not plan.killed_at:
                    return number - 1
            except Killed:
                pass
        check()
    raise AssertionError("it never ends")
