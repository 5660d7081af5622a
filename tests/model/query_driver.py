"""The driver of a query of several operators, as the protocol model of whole queries sees it.

:class:`Driver` is the only part of that model which knows how statelog's driver is built.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from statelog.checkpoint.admission import stale_run
from statelog.checkpoint.batch import BatchTime
from statelog.checkpoint.coordinator import Coordinator
from statelog.checkpoint.history import History
from statelog.checkpoint.protocol import Reply, TaskRequest
from statelog.checkpoint.query_operators import OperatorChanges, operators_of
from statelog.clock import Clock
from statelog.log.entry import QueryOperators
from statelog.log.open import open_log
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.storage import LocalStore, Store
from statelog.testing.query import LocalOperator

Results = Mapping[str, list[list[bytes]]]
"""For each operator and subtask the checksums of the segments of its result."""


@dataclass(frozen=True)
class Member:
    """An operator in one start of a query."""

    operator: LocalOperator
    parallelism: int


Roster = Mapping[str, Member]


@dataclass(frozen=True)
class Surroundings:
    """What a query's starts have in common."""

    query_id: str
    location: str
    options: Options
    clock: Clock
    open_store: Callable[[str], Store]
    batch_time: Callable[[int], BatchTime]
    new_token: Callable[[], bytes]


class Driver:
    """One start of a query's driver: today a coordinator with a log for each operator.

    The model calls :meth:`start`, then :meth:`handle` for every request of a task, from any thread, then :meth:`close`.
    A driver that dies is not closed. :meth:`checkpoints` and the class variables tell what another process finds in the
    location, and how much the driver promises. A change of the driver, such as one coordinator for all operators of a
    query, needs other bodies of these methods and nothing else in the model.
    """

    is_atomic: ClassVar[bool] = False
    """Whether a checkpoint exists for all operators of the query or for none."""
    least_retained: ClassVar[int] = 3
    """How many checkpoints must be retained: an operator may be two batches ahead of one with an incomplete batch."""
    notes_equal_attempts: ClassVar[bool] = False
    """Whether an attempt with the result that counts already is noted as the latest: earlier ones count no more."""

    def __init__(self, surroundings: Surroundings, run_id: str) -> None:
        self._surroundings = surroundings
        self._run_id = run_id
        self._roster: Roster = {}
        self._lock = threading.Lock()
        self._coordinators: dict[str, Coordinator] = {}

    def start(self, first_batch: int, roster: Roster) -> None:
        """Begin a start of the query with a batch.

        Here as in a query the first task of each operator opens its coordinator, for the task's batch. So an operator
        without the state before that batch is refused by the first call of its tasks, and not here.
        """
        self._roster = roster

    def handle(self, request: TaskRequest, payload: bytes) -> Reply:
        """Answer a request of a task; raises what the request's handler does, FencedError for another start's task."""
        task = request.task
        if task.run_id != self._run_id:
            raise stale_run(f"operator '{task.uid}': the run {task.run_id} is over.")
        with self._lock:
            if task.uid not in self._coordinators:
                coordinator = self._coordinator(task.uid, self._roster)
                coordinator.open(task.batch)
                self._coordinators[task.uid] = coordinator
        return self._coordinators[task.uid].handle(request, payload)

    def close(self) -> None:
        """Stop in good order."""
        for coordinator in self._coordinators.values():
            coordinator.close()

    @staticmethod
    def checkpoints(around: Surroundings, uids: Iterable[str] | None = None) -> dict[int, Results]:
        """The results that the checkpoints in the location consist of, by batch, as another process reads them.

        Those of some operators, or by default of all that have a log there.
        """
        found: dict[int, dict[str, list[list[bytes]]]] = {}
        store = LocalStore(around.location)
        for root in operators_of(store) if uids is None else uids:
            history = History(open_log(store, root, around.options, around.clock).read())
            for checkpoint in history.checkpoints:
                segments = checkpoint.by_subtask()
                found.setdefault(checkpoint.batch, {})[checkpoint.uid] = [
                    [segment.checksum for segment in own] for own in segments
                ]
        store.close()
        return {**found}

    def _coordinator(self, uid: str, roster: Roster) -> Coordinator:
        around, member = self._surroundings, roster[uid]
        locations = dict.fromkeys(roster, "")
        store = around.open_store(around.location)
        config = member.operator.config_of(around.query_id, self._run_id, member.parallelism)
        return Coordinator(
            replace(config, operators=QueryOperators(int(around.clock.now_s() * 1000), locations)),
            store=store,
            location=around.location,
            root=uid,
            log=open_log(store, uid, around.options, around.clock),
            options=around.options,
            clock=around.clock,
            new_token=around.new_token,
            batch_time=around.batch_time,
            measurements=Measurements(),
            deletes_in_background=False,
            slots=2,
            changes=OperatorChanges(
                around.query_id, around.location, dict.fromkeys(roster, around.location), around.open_store
            ),
        )
