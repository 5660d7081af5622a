"""A query of several operators without Spark, whose subtasks a test runs one by one.

Coordinator, log, and tasks with their local runs are the real ones; :class:`LocalQuery` does the same for one operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import xxhash

from statelog import Options
from statelog.coordinator.batch import BatchTime
from statelog.coordinator.coordinator import Coordinator
from statelog.history.query_history import QueryHistory
from statelog.log.open import open_log
from statelog.metrics import Measurements
from statelog.rpc.messages import Ping, Reply, Request, TaskId, Tick
from statelog.storage import LocalStore, Store
from statelog.tasks.attempt import Attempt, WorkerMemory
from statelog.testing.query import CrashPoint, LocalOperator, ManualClock

_CLOCK_START_S: Final = 10**10
"""Far in the future, so that orphans of a crashed start are old enough to be removed."""


class QueryRunner:
    """Runs the operators of a query, attempt by attempt.

    The order of calls is :meth:`start`, :meth:`run_subtask` for each subtask of each batch, and :meth:`stop`;
    :meth:`start` again, without :meth:`stop`, stands for a driver that died.

    Parameters
    ----------
    directory : Path
        Holds the hosts' local directories, and the location unless another is given.
    options : Options
        Of the query and of all operators.
    location : str
        Of the query's state.
    """

    def __init__(
        self,
        directory: Path,
        options: Options,
        *,
        location: str = "",
        query_id: str = "query",
        open_store: Callable[[str], Store] = LocalStore,
    ) -> None:
        self.directory = directory
        self.location = location or str(directory / "location")
        self.options = options
        self.query_id = query_id
        self.open_store = open_store
        self.clock = ManualClock(_CLOCK_START_S)
        self.times: dict[int, BatchTime] = {}
        """Of each batch; those of others are 1000 milliseconds and the batch's number."""
        self.keeps: Callable[[QueryHistory], bool] | None = None
        """Whether the next start keeps the stored checkpoint of its first batch; None if it does not ask."""
        self.crash_points: defaultdict[str, CrashPoint] = defaultdict(lambda: CrashPoint(options.observer))
        """By operator."""
        self.runs = self.attempts = 0
        self.operators: dict[str, LocalOperator] = {}
        self.parallelism: dict[str, int] = {}
        self.coordinator: Coordinator
        self._workers: dict[str, WorkerMemory] = {}
        self._hosts = self._tokens = 0
        self._stores: list[Store] = []

    @property
    def run_id(self) -> str:
        """Spark's run id of the current start."""
        return f"run-{self.runs}"

    def time_of(self, batch: int) -> BatchTime:
        """Spark's time of a batch."""
        return self.times.get(batch, BatchTime(1000 + batch, 0))

    def start(
        self,
        operators: Sequence[LocalOperator],
        parallelism: int | Mapping[str, int],
        first_batch: int,
        *,
        keep_local: bool = True,
    ) -> None:
        """Start the query, as a new driver process would; without `keep_local` its host has no local files."""
        self.release()
        self.runs += 1
        self._hosts += 0 if keep_local else 1
        self.operators = {operator.uid: operator for operator in operators}
        self.parallelism = {
            uid: parallelism if isinstance(parallelism, int) else parallelism[uid] for uid in self.operators
        }
        self._workers = {uid: WorkerMemory() for uid in self.operators}
        store = self._opened(self.location)
        self.coordinator = Coordinator(
            [
                replace(
                    operator.config_of(self.query_id, self.run_id, self.parallelism[uid]),
                    options=replace(self.options, observer=self.crash_points[uid]),
                    instance=self.run_id,
                )
                for uid, operator in self.operators.items()
            ],
            store=store,
            location=self.location,
            log=open_log(store, self.options, self.clock),
            options=self.options,
            clock=self.clock,
            new_token=self._new_token,
            batch_time=self.time_of,
            measurements=Measurements(),
            deletes_in_background=False,
            slots=2,
        )
        self.coordinator.open(first_batch, keeps=self.keeps)

    def _new_token(self) -> bytes:
        self._tokens += 1
        return xxhash.xxh3_128_digest(f"{self.query_id} {self.runs} {self._tokens}".encode())

    def run_subtask(self, uid: str, batch: int, subtask: int, read: Any) -> list[pa.RecordBatch]:
        """Run one attempt of a subtask to its end, and return its output."""
        self.attempts += 1
        operator, parallelism = self.operators[uid], self.parallelism[uid]
        local = self.directory / f"host-{self._hosts}"
        task = operator.task(
            Attempt(
                task=TaskId(self.query_id, self.run_id, uid, self.run_id, batch, subtask, self.attempts),
                partition=subtask,
                parallelism=parallelism,
                options=replace(self.options, observer=self.crash_points[uid]),
                call=self._call,
                memory=self._workers[uid],
                local_of=lambda identity: local / identity / str(parallelism) / str(subtask),
                open_store=self._opened,
                clock=self.clock,
                token=f"{self.run_id}-{self.attempts}",
            )
        )
        return list(task.run(read))

    def run_operator(self, uid: str, batch: int, data: Any) -> list[pa.RecordBatch]:
        """Run one attempt of each subtask with its part of a batch's data, and return the output of all."""
        parts = self.operators[uid].split(data, self.parallelism[uid], self.time_of(batch).time_ms)
        outputs = [self.run_subtask(uid, batch, subtask, part) for subtask, part in enumerate(parts)]
        return [one for output in outputs for one in output]

    def _call(self, request: Request, payload: bytes) -> Reply:
        assert not isinstance(request, Tick | Ping), "tasks do neither"
        return self.coordinator.handle(request, payload)

    def _opened(self, location: str) -> Store:
        store = self.open_store(location)
        self._stores.append(store)
        return store

    def stop(self) -> None:
        """Stop the query in good order."""
        self.coordinator.close()
        self.release()

    def release(self) -> None:
        """Close the stores of a start that has died; its log stays as it is."""
        for store in self._stores:
            store.close()
        self._stores.clear()
