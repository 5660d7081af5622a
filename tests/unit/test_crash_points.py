"""Every store operation of a query's life in turn: the process dies before it or after it, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NoReturn

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from statelog import OperatorContext, OperatorHandle, OperatorProcessor, Options, Step, Tuning
from statelog.history.query_history import QueryHistory
from statelog.runs.byte_slices import Budget
from statelog.storage import LocalStore
from statelog.testing import Harness
from statelog.testing.faults import Call, Fault, FaultPlan
from statelog.testing.harness import parts_of
from statelog.testing.keyed import LocalKeyedOperator
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


class Total(StatefulProcessor):
    """A sum in a value state, the numbers in a list state, and a timer that doubles the sum."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._sum = handle.getValueState("sum", "n long")
        self._all = handle.getListState("all", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._sum.update(((self._sum.get() or (0,))[0] + row.n,))
            self._all.appendValue((row.n,))
            if row.n % 5 == 0:
                self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs())
        yield Row(k=key[0], n=self._sum.get()[0])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self._sum.update((2 * self._sum.get()[0],))
        yield Row(k=key[0], n=self._sum.get()[0])

    def close(self) -> None:
        pass


class Kept(OperatorProcessor):
    """Keeps its rows in list state."""

    def init(self, handle: OperatorHandle) -> None:
        self._rows = handle.getListState("rows", "k long, n long")

    def process(self, rows: Iterator[Row], context: OperatorContext) -> Iterator[Row]:
        for row in rows:
            self._rows.add((row.k, row.n))
        yield Row(k=context.subtaskIndex, n=len(list(self._rows.get())))


BATCHES = [[(key, 7 * batch + key) for key in range(5)] for batch in range(4)]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine."""
    for target in ("os.fsync", "statelog.storage.local.sync_data", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


def options(merging: str) -> Options:
    return Options(
        file_merging=merging,
        inline_budget_bytes=400,
        retained_checkpoints=2,
        tuning=Tuning(max_file_bytes=3000, upload_part_bytes=1, upload_threads=1, log_min_age_s=0, orphan_min_age_s=0),
    )


def keyed(merging: str, plan: FaultPlan) -> Harness:
    harness = Harness(
        Total(),
        input="k long, n long",
        output="k long, n long",
        keys=["k"],
        timeMode="ProcessingTime",
        options=options(merging),
        storeFaults=plan,
    )
    # Two keys at a time, so that a changeset has parts.
    operator = parts_of(harness).query.operator
    assert isinstance(operator, LocalKeyedOperator)
    parts_of(harness).query.operator = operator.with_budget(Budget(window_keys=2))
    return harness


def unkeyed(merging: str, plan: FaultPlan) -> Harness:
    return Harness(Kept(), input="k long, n long", output="k long, n long", options=options(merging), storeFaults=plan)


def run(harness: Harness, plan: KillAt) -> list[Any]:
    """The batches, with a restart in the middle; a process that died is started again, and its batch is repeated."""
    output: list[Any] = []
    for number, rows in enumerate(BATCHES):
        is_done = False
        while not is_done:
            try:
                if number == 2 and len(output) == 2 and harness.parallelism == 2:
                    harness.restart(3)
                output = [*output[:number], sorted(harness.push(rows, 1000 + number))]
                is_done = True
            except Killed:
                plan.is_dead = False
                harness.restart(harness.parallelism, keepLocal=plan.killed_at.startswith("put"))
    return output


def leftovers(query: LocalQuery) -> set[str]:
    """Objects that no checkpoint names and that are no part of the log."""
    store = LocalStore(query.location)
    history = QueryHistory(query.open_log(store).read())
    start = history.entries[0].log_start
    names = {info.name for info in store.list()} - history.object_names()
    return {name for name in names if not name.startswith("log/") or int(name[-24:-4]) < start}


@pytest.mark.parametrize(
    ("merging", "only_tasks"),
    [("across", False), ("within", False), ("off", False), ("off", True)],
    ids=["across", "within", "off", "off, only tasks"],
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", [keyed, unkeyed])
def test_a_process_dies_at_every_store_operation(merging: str, when: When, only_tasks: bool, make: Any) -> None:
    never = KillAt(0, when)
    with make(merging, never) as harness:
        expected = run(harness, never)
    for number in range(1, 500):
        plan = KillAt(number, when, only_tasks=only_tasks)
        with make(merging, plan) as harness:
            found = run(harness, plan)
            plan.disarm()
            assert found == expected, plan.killed_at
            if not plan.killed_at:
                assert number > (3 if only_tasks and make is unkeyed else 10), "hardly anything happened"
                return
            # What a dead run has left goes with the next start, or with the next batch.
            harness.restart(2)
            harness.push([], 2000)
            harness.push([], 2000)
            assert leftovers(parts_of(harness).query) == set(), plan.killed_at
    pytest.fail("there is no end of operations")
