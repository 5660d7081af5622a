"""The driver's side of the calls: one endpoint per application, one coordinator per operator and run."""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from dataclasses import dataclass, field

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statelog.checkpoint.admission import OperatorRun
from statelog.checkpoint.coordinator import OperatorCoordinator
from statelog.checkpoint.open_log import open_log
from statelog.checkpoint.protocol import Acked, Begin, Fetch, Reply, Request, TaskId
from statelog.clock import Clock, SystemClock
from statelog.errors import ConfigurationError, ErrorKind, FencedError
from statelog.options import Options
from statelog.spark import internals
from statelog.spark.rpc import RpcServer
from statelog.state.schema import StateSchema
from statelog.storage import open_store

__all__ = ["Endpoint", "OperatorPlan", "operator_root"]

_log = logging.getLogger(__name__)

STATE_FOLDER = "statelog"
"""The default location, below the query's checkpointLocation."""


@dataclass(frozen=True)
class OperatorPlan:
    """An operator as its query's plan has it, known to the driver.

    Parameters
    ----------
    instance : str
        Unique per operator of the driver's program.
    session : SparkSession
        The session of the stream.
    uid : str or None
        The operator's name, if the user gave one.
    parallelism : int
        Number of subtasks.
    location : str or None
        Where the state is; None is a folder below the query's checkpointLocation.
    key_schema : bytes
        Arrow IPC schema message of the grouping columns.
    states : list of StateSchema
        The declared states.
    options : Options
        Options.
    """

    instance: str
    session: SparkSession
    uid: str
    parallelism: int
    location: str | None
    key_schema: bytes
    states: list[StateSchema]
    options: Options


@dataclass
class _Slot:
    """The coordinator that serves an operator of a query, replaced when the query is started again."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    run_id: str = ""
    instance: str = ""
    coordinator: OperatorCoordinator | None = None


def operator_root(uid: str) -> str:
    """Folder of an operator below its location: the uid, with what no file name can hold replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", lambda found: f"%{ord(found[0]):02X}", uid).replace("..", "%2E%2E")


class Endpoint:
    """Receives the tasks' calls and hands them to the operators' coordinators.

    Parameters
    ----------
    host, port : str, int
        Address to listen on; port 0 takes a free one.
    clock : Clock
        Time.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.process_id = os.getpid()
        self.secret = secrets.token_bytes(32)
        self._clock = clock or SystemClock()
        self._plans: dict[str, OperatorPlan] = {}
        self._slots: dict[tuple[str, str], _Slot] = {}
        self._lock = threading.Lock()
        self._server = RpcServer(host, port, self.secret, self._handle)
        self.port = self._server.port

    def register(self, plan: OperatorPlan) -> None:
        """Make an operator known before its first task calls."""
        with self._lock:
            self._plans[plan.instance] = plan

    def _handle(self, request: Request, payload: bytes) -> Reply:
        coordinator = self._coordinator(request.task)
        if isinstance(request, Begin):
            return coordinator.begin(request)
        if isinstance(request, Fetch):
            return coordinator.fetch(request)
        coordinator.ack(request, payload)
        return Acked()

    def _coordinator(self, task: TaskId) -> OperatorCoordinator:
        with self._lock:
            plan = self._plans.get(task.instance)
            slot = self._slots.setdefault((task.query_id, task.uid), _Slot())
        if plan is None:
            raise FencedError(
                f"operator '{task.uid}' was not built by this driver.",
                kind=ErrorKind.STALE_RUN,
                hint="The task is a leftover of an earlier application.",
            )
        with slot.lock:
            if slot.coordinator is None or slot.run_id != task.run_id:
                self._open(slot, plan, task)
            elif slot.instance != task.instance:
                raise ConfigurationError(
                    f"Query {task.query_id} has two stateful operators named '{task.uid}'.",
                    kind=ErrorKind.UID_REQUIRED,
                    hint="Give each operator a name of its own: transformWithState(..., uid='...').",
                )
            assert slot.coordinator is not None
            return slot.coordinator

    def _open(self, slot: _Slot, plan: OperatorPlan, task: TaskId) -> None:
        query = internals.find_query(plan.session, task.query_id, task.run_id)
        internals.require_synchronous_progress(query)
        if slot.coordinator is not None:
            slot.coordinator.close()
            slot.coordinator = None
        location = plan.location or f"{internals.checkpoint_location(query).rstrip('/')}/{STATE_FOLDER}"
        store = open_store(location)
        root = operator_root(plan.uid)
        run = OperatorRun(
            task.query_id,
            task.run_id,
            plan.uid,
            plan.instance,
            plan.parallelism,
            plan.key_schema,
            plan.states,
        )
        coordinator = OperatorCoordinator(
            run,
            store=store,
            location=location,
            root=root,
            log=open_log(store, f"{root}/log", plan.options.log_form),
            options=plan.options,
            clock=self._clock,
            new_token=lambda: secrets.token_bytes(16),
            batch_time=lambda batch: internals.batch_time(query, batch),
        )
        coordinator.open(task.batch)
        slot.run_id, slot.instance, slot.coordinator = task.run_id, task.instance, coordinator
        _close_at_end(query, coordinator)


def _close_at_end(query: StreamingQuery, coordinator: OperatorCoordinator) -> None:
    def wait() -> None:
        try:
            query.awaitTermination()
        except Exception:
            _log.debug("query %s ended with an error", query.id)
        coordinator.close()

    threading.Thread(target=wait, name=f"statelog-end-{query.id}", daemon=True).start()
