"""What the tests of :mod:`tests.coordinator.test_crash_points` and others share."""

from __future__ import annotations

from typing import Literal, NoReturn

from statelog import Step
from statelog.history.query_history import QueryHistory
from statelog.storage import LocalStore
from statelog.testing.faults import Call, Fault, FaultPlan
from statelog.testing.query import Crash, LocalQuery

When = Literal["before", "after"]


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


class KillAt(FaultPlan):
    """Kills driver and tasks, or only the task, at an operation; whatever is left of them can do nothing."""

    def __init__(self, number: int, when: When, *, only_tasks: bool = False) -> None:
        self._number = number
        self._when = when
        self._only_tasks = only_tasks
        self._calls = 0
        self.is_dead = False
        self.killed_at = ""

    def fault(self, call: Call) -> Fault | None:
        if self.is_dead:
            raise Killed
        is_drivers = call.name.startswith("log/")
        is_of_task = call.operation in ("put", "read", "size_bytes") and not is_drivers
        if self._only_tasks and not is_of_task:
            return None
        self._calls += 1
        if self._calls != self._number:
            return None
        self.killed_at = f"{call.operation} {call.name}"
        return Fault(self._when, action=self._die) if self._when == "after" else self._die()

    def disarm(self) -> None:
        """Kill nothing from here on."""
        self._number = 0

    def _die(self) -> NoReturn:
        if self._only_tasks:
            raise Crash(Step.ACKING)
        self.is_dead = True
        raise Killed


def leftovers(query: LocalQuery) -> set[str]:
    """Objects that no checkpoint names and that are not part of the log."""
    store = LocalStore(query.location)
    history = QueryHistory(query.open_log(store).read())
    start = history.entries[0].log_start
    names = {info.name for info in store.list()} - history.object_names()
    return {name for name in names if not name.startswith("log/") or int(name[-24:-4]) < start}
