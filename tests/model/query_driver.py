"""The driver of a query of several operators, as the protocol model of whole queries sees it.

:class:`Driver` is the only part of that model which knows how statelog's driver is built.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from statelog.clock import Clock
from statelog.coordinator.admission import stale_run
from statelog.coordinator.batch import BatchTime
from statelog.coordinator.coordinator import Coordinator
from statelog.history.query_history import QueryHistory
from statelog.log.numbered import NumberedLog
from statelog.log.open import open_log
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.rpc.messages import Reply, TaskRequest
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
    stored_commit: Callable[[], int] | None = None
    """As the coordinator takes it."""


class Driver:
    """One start of a query's driver: a coordinator with one log for all operators.

    The model calls :meth:`start`, then :meth:`handle` for every request of a task, from any thread, then :meth:`close`.
    A driver that dies is not closed. :meth:`checkpoints` and the class variables tell what another process finds in the
    location, and how much the driver promises.
    """

    is_atomic: ClassVar[bool] = True
    """Whether a checkpoint exists for all operators of the query or for none."""
    least_retained: ClassVar[int] = 2
    """How many checkpoints must be retained."""
    notes_equal_attempts: ClassVar[bool] = True
    """Whether an attempt with the result that counts already is noted as the latest: earlier ones count no more."""

    def __init__(self, surroundings: Surroundings, run_id: str) -> None:
        self._surroundings = surroundings
        self._run_id = run_id
        self._roster: Roster = {}
        self._lock = threading.Lock()
        self._log: NumberedLog | None = None
        self._coordinator: Coordinator | None = None

    def start(self, first_batch: int, roster: Roster) -> None:
        """Begin a start of the query with a batch; as in a query its first task opens the coordinator.

        If it cannot, the next one tries again, with the same log.
        """
        self._roster = roster

    def handle(self, request: TaskRequest, payload: bytes) -> Reply:
        """Answer a request of a task; raises what the request's handler does, FencedError for another start's task."""
        task = request.task
        if task.run_id != self._run_id:
            raise stale_run(f"operator '{task.uid}': the run {task.run_id} is over.")
        with self._lock:
            if self._coordinator is None:
                coordinator = self._made()
                coordinator.open(task.batch)
                self._coordinator = coordinator
        return self._coordinator.handle(request, payload)

    def close(self) -> None:
        """Stop in good order."""
        if self._coordinator is not None:
            self._coordinator.close()

    @staticmethod
    def checkpoints(around: Surroundings, uids: Iterable[str] | None = None) -> dict[int, Results]:
        """The results that the checkpoints in the location consist of, by batch, as another process reads them.

        Those of some operators, or by default of all that the log has on its line.
        """
        found: dict[int, dict[str, list[list[bytes]]]] = {}
        store = LocalStore(around.location)
        query = QueryHistory(open_log(store, around.options, around.clock).read())
        wanted = None if uids is None else set(uids)
        for history in query.histories.values():
            for checkpoint in history.checkpoints:
                if wanted is None or checkpoint.uid in wanted:
                    found.setdefault(checkpoint.batch, {})[checkpoint.uid] = [
                        [segment.checksum for segment in own] for own in checkpoint.by_subtask()
                    ]
        store.close()
        return {**found}

    def _made(self) -> Coordinator:
        around = self._surroundings
        store = around.open_store(around.location)
        self._log = self._log or open_log(store, around.options, around.clock)
        return Coordinator(
            [
                replace(
                    member.operator.config_of(around.query_id, self._run_id, member.parallelism), options=around.options
                )
                for member in self._roster.values()
            ],
            store=store,
            location=around.location,
            log=self._log,
            options=around.options,
            clock=around.clock,
            new_token=around.new_token,
            batch_time=around.batch_time,
            measurements=Measurements(),
            deletes_in_background=False,
            slots=2,
            stored_commit=around.stored_commit,
        )
