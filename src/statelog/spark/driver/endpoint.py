"""The driver's server for the tasks' calls: one endpoint per process, one coordinator per query and start."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statelog.clock import SystemClock
from statelog.coordinator.coordinator import Coordinator
from statelog.coordinator.totals import OperatorTotals, process_totals
from statelog.errors import (
    ConfigurationError,
    ErrorKind,
    FencedError,
    ProcessorError,
    StatelogError,
    StateMissingError,
    error_in_text,
    failure_in_text,
)
from statelog.log.numbered import NumberedLog
from statelog.log.open import open_log, open_retrying_store
from statelog.log_fields import LogFields, get_logger, in_background, log_fields
from statelog.metrics import Measurements
from statelog.rpc.calls import RpcServer
from statelog.rpc.messages import Acked, DiskFailed, Ping, Pinged, Reply, Request, TaskId, Tick, Ticked
from statelog.rpc.tls import TlsIdentity
from statelog.rpc.tls import new_identity as new_tls_identity
from statelog.spark.checkpoint.location import open_checkpoint
from statelog.spark.driver import executor_internals, internals
from statelog.spark.driver.avoided_executors import AvoidedExecutors
from statelog.spark.driver.encryption import encrypts_traffic
from statelog.spark.driver.interpreter import is_on_this_machine
from statelog.spark.driver.planned_query import PlannedQuery, StoredInitial
from statelog.spark.driver.query_clocks import ClockStarts, QueryClocks, fit_clock_offsets
from statelog.spark.driver.query_session import check_file_sink, lift_byte_limit, plan_without_adaptive_execution
from statelog.spark.plan.operator_plan import OperatorPlan
from statelog.spark.source.clock_source import CLOCK_SOURCE
from statelog.storage import LocalStore
from statelog.storage.links import LinkedStore
from statelog.storage.open import check_put_if_absent

_log = get_logger(__name__)


@dataclass(frozen=True)
class PlannedOperator:
    """An operator of a start of a query."""

    session: SparkSession
    uid: str
    location: str
    parallelism: int
    redacts_keys: bool
    query_id: str
    run_id: str


@dataclass(frozen=True)
class RunningQuery:
    """A query that has begun a batch in this start."""

    session: SparkSession
    location: str
    coordinator: Coordinator


@dataclass(frozen=True)
class _Start:
    """One start of a query; every attempt to open its coordinator uses this log, which knows what it tried to claim."""

    planned: PlannedQuery
    store: LinkedStore
    log: NumberedLog
    measurements: Measurements
    totals: Sequence[OperatorTotals]


@dataclass
class _Slot:
    """Holds the newest start of a query, and its coordinator once a task could open it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    run_id: str = ""
    start: _Start | None = None
    coordinator: Coordinator | None = None

    def clear(self) -> None:
        """Close a start that is over."""
        if self.coordinator is not None:
            self.coordinator.close()
        elif self.start is not None:
            self.start.log.close()
        self.start = self.coordinator = None


class Endpoint:
    """Receives the calls of an application's tasks, by TLS with an `identity`, and hands them to the coordinators.

    Port 0 takes a free port.
    """

    def __init__(self, host: str, port: int = 0, identity: TlsIdentity | None = None, application: str = "") -> None:
        self.application = application
        self.process_id = os.getpid()
        self.local_host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
        self.secret = secrets.token_bytes(32)
        self.clock_frames: dict[tuple[SparkSession, str], DataFrame] = {}
        """The clock source of each session; :mod:`statelog.spark.plan.plan` fills this."""
        self._clock = SystemClock()
        self._plans: dict[str, OperatorPlan] = {}
        self._initial_outcomes: dict[tuple[str, str], StoredInitial | Exception] = {}
        self._slots: dict[str, _Slot] = {}
        self._prepared: set[str] = set()
        """The ids of started queries that have operators of statelog."""
        self._checked: set[str] = set()
        """The locations other than directories whose stores are known to support a log."""
        self._ends: dict[str, StateMissingError | None] = {}
        self._fenced: set[str] = set()
        """Starts that were ended because another one owns their location."""
        self._avoided = AvoidedExecutors(self._clock)
        self._lock = threading.Lock()
        self._clocks = QueryClocks(self.plans, self._coordinator, self._clock)
        self._clock_starts = ClockStarts(self._clock)
        self._server = RpcServer(host, port, self.secret, self._handle, identity=identity)
        self.port = self._server.port
        self.certificate = self._server.certificate

    def close(self) -> None:
        """Accept no more connections."""
        self._server.close()

    def register(self, plan: OperatorPlan) -> None:
        """Register an operator, before any of its tasks calls."""
        with self._lock:
            self._plans[plan.instance] = plan
        internals.when_queries_start_and_fail(plan.session, self._prepare, self._log_failure)

    def _prepare(self, query_id: str, run_id: str) -> None:
        """Before a query's first batch: adapt its settings, place its subtasks, store initial state."""
        for session in dict.fromkeys(plan.session for plan in self.plans()):
            query = internals.active_query(session, query_id)
            plans = [] if query is None else self._plans_of(query)
            if query is None or not plans:
                continue
            self._prepared.add(query_id)
            _take_back_plans(session, query)
            _fit_clock(session, query)
            plan_without_adaptive_execution(query)
            lift_byte_limit(session, query)
            check_file_sink(session, query, PlannedQuery(query, plans).has_state_of)
            for plan in plans:
                if plan.placement is not None:
                    plan.placement.keep_during(query, self._avoided)
            if any(plan.has_initial for plan in plans):
                self._store_initial(PlannedQuery(query, plans), run_id)
            if any(plan.no_data_rule.needs_clock for plan in plans):
                self._clock_starts.wait(query)

    def _store_initial(self, planned: PlannedQuery, run_id: str) -> None:
        """Store the initial state of operators that have none stored; their first task reports an error."""
        for plan in planned.plans:
            if not plan.has_initial:
                continue
            try:
                outcome: StoredInitial | Exception | None = planned.store_initial(plan, run_id)
            except Exception as error:
                outcome = error
            if outcome is not None:
                with self._lock:
                    self._initial_outcomes[run_id, plan.instance] = outcome

    def plans(self) -> list[OperatorPlan]:
        """All operators that this driver has planned."""
        with self._lock:
            return list(self._plans.values())

    def running_query(self, query: StreamingQuery) -> RunningQuery | None:
        """A query of statelog's; None if it has no operators.

        Raises StateMissingError if it has not begun a batch yet.
        """
        plans = self._plans_of(query)
        if not plans:
            return None
        coordinator = self.coordinator_of(str(query.id), str(query.runId))
        if coordinator is None:
            raise StateMissingError(
                f"Query {query.id} has not begun a batch yet.", hint="Try again after the query's first batch."
            )
        return RunningQuery(plans[0].session, PlannedQuery(query, plans).location, coordinator)

    def planned_operators(self, query: StreamingQuery) -> list[PlannedOperator]:
        """All operators of a query."""
        query_id, run_id, plans = str(query.id), str(query.runId), self._plans_of(query)
        location = PlannedQuery(query, plans).location if plans else ""
        return [
            PlannedOperator(
                plan.session,
                plan.uid,
                location,
                plan.parallelism,
                plan.options.redact_keys,
                query_id,
                run_id,
            )
            for plan in plans
        ]

    def coordinator_of(self, query_id: str, run_id: str) -> Coordinator | None:
        """The coordinator of a start, found without calling Spark; None if it has not begun a batch."""
        with self._lock:
            slot = self._slots.get(query_id)
        return None if slot is None or slot.run_id != run_id else slot.coordinator

    def incomplete_end(self, query: StreamingQuery) -> StateMissingError | None:
        """Why a query that has ended without an error cannot continue; None if nothing is missing.

        Spark commits a batch after its last action. If that action did not run every subtask to its end, the next batch
        is refused. After the last batch there is no next one, so only this method reports it.
        """
        run_id, plans = str(query.runId), self._plans_of(query)
        if not plans:
            return None
        with self._lock:
            if run_id in self._ends:
                return self._ends[run_id]
        return PlannedQuery(query, plans).incomplete_end(self.coordinator_of(str(query.id), run_id))

    def _plans_of(self, query: StreamingQuery) -> list[OperatorPlan]:
        observed = internals.observations(query)
        return [plan for plan in self.plans() if plan.observation in observed]

    def _handle(self, request: Request, payload: bytes) -> Reply:
        if isinstance(request, Tick):
            return Ticked(self._clocks.needs_batch(request))
        if isinstance(request, Ping):
            return Pinged(self._clock.now_s())
        if isinstance(request, DiskFailed):
            self._avoid_executor_of(request)
            return Acked()
        task = request.task
        with log_fields(LogFields(task.uid, task.batch, task.subtask)):
            try:
                return self._coordinator(task).handle(request, payload)
            except FencedError as error:
                if error.kind is ErrorKind.NEWER_EPOCH:
                    self._end_fenced(task, error)
                raise

    def _end_fenced(self, task: TaskId, error: FencedError) -> None:
        """End a start when another one owns the location; Spark would retry its task, and wait for an executor."""
        with self._lock:
            plan = None if task.run_id in self._fenced else self._plans.get(task.instance)
            self._fenced.add(task.run_id)
        if plan is not None:
            internals.cancel_jobs(plan.session, task.run_id, error)

    def _avoid_executor_of(self, failed: DiskFailed) -> None:
        with self._lock:
            plan = self._plans.get(failed.task.instance)
        if plan is None or plan.placement is None:
            return  # Spark alone decides where the subtask runs.
        try:
            found = executor_internals.executor_of(plan.session, failed.stage, failed.task.attempt)
        except Exception as error:  # not Apache Spark's status store
            _log.debug("the executor of %s is unknown: %s", failed.task.name, error)
            found = None
        if found is not None and (avoided_s := self._avoided.note(*found)) is not None:
            _log.warning(
                "executor %s on host %s cannot keep local files: for %.0f min, subtasks are placed on other executors,"
                " if there are any",
                *found,
                avoided_s / 60,
            )

    def _coordinator(self, task: TaskId) -> Coordinator:
        with self._lock:
            plan = self._plans.get(task.instance)
            slot = self._slots.setdefault(task.query_id, _Slot())
        if plan is None:
            raise FencedError(
                f"operator '{task.uid}' was not built by this driver.",
                kind=ErrorKind.STALE_RUN,
                hint="The task is left over from an earlier application.",
            )
        with slot.lock:
            if slot.coordinator is None or slot.run_id != task.run_id:
                self._open(slot, plan, task)
            assert slot.coordinator is not None
            return slot.coordinator

    def _require_initial(self, plan: OperatorPlan, run_id: str) -> StoredInitial:
        with self._lock:
            outcome = self._initial_outcomes.get((run_id, plan.instance))
        if isinstance(outcome, StoredInitial):
            return outcome
        if isinstance(outcome, StatelogError):
            raise outcome
        raise ProcessorError(
            f"operator '{plan.uid}': its initial state could not be stored before the first batch: "
            + ("Spark did not announce the start." if outcome is None else f"{type(outcome).__name__}: {outcome}"),
            kind=ErrorKind.INITIAL_STATE,
            hint="Check that initialState, or each of its tables, can be computed by itself, for example with count().",
        )

    def _open(self, slot: _Slot, plan: OperatorPlan, task: TaskId) -> None:
        """Open a start of a query with its first task, one of the operator `plan`."""
        if slot.start is None or slot.run_id != task.run_id:
            start = self._begin(plan, task)  # first: it refuses a task of an earlier start
            slot.clear()
            slot.run_id, slot.start = task.run_id, start
        planned, store = slot.start.planned, slot.start.store
        query, options = planned.query, planned.options
        coordinator = Coordinator(
            planned.roster(slot.start.totals),
            store=store,
            location=planned.location,
            log=slot.start.log,
            options=options,
            clock=self._clock,
            new_token=lambda: secrets.token_bytes(16),
            batch_time=lambda batch: internals.batch_time(query, batch),
            measurements=slot.start.measurements,
            deletes_in_background=True,
            slots=plan.session.sparkContext.defaultParallelism,
            stored_commit=planned.stored_commit(),
        )
        with_initial = [one for one in planned.plans if one.has_initial]
        beginning = coordinator.beginning(task.batch) if with_initial else set()
        initial = {one.uid: self._require_initial(one, task.run_id) for one in with_initial if one.uid in beginning}
        coordinator.open(
            task.batch,
            {uid: stored.runs for uid, stored in initial.items()},
            initial_rows={uid: stored.rows for uid, stored in initial.items() if stored.rows},
            identities={uid: stored.identity for uid, stored in initial.items()},
            keeps=planned.keeps(task.batch, store),
        )
        slot.coordinator = coordinator
        with self._lock:  # Not earlier: if it could not be stored, every subtask must find the reason here.
            for one in with_initial:
                self._initial_outcomes.pop((task.run_id, one.instance), None)
        self._close_at_end(planned, coordinator, slot.start.totals)

    def _begin(self, plan: OperatorPlan, task: TaskId) -> _Start:
        query = internals.find_query(plan.session, task.query_id, task.run_id)
        planned = PlannedQuery(query, self._plans_of(query))
        options, location = planned.options, planned.location
        measurements = Measurements()
        store = open_retrying_store(location, options, self._clock, measurements)
        if not isinstance(store.own, LocalStore) and location not in self._checked:
            check_put_if_absent(store)
            self._checked.add(location)
        totals = [process_totals().begin(task.query_id, one.uid) for one in planned.plans]
        return _Start(planned, store, open_log(store.own, options, self._clock), measurements, totals)

    def _close_at_end(self, planned: PlannedQuery, coordinator: Coordinator, totals: Sequence[OperatorTotals]) -> None:
        query = planned.query

        def wait() -> None:
            end = None
            try:
                query.awaitTermination()
                end = planned.incomplete_end(coordinator)
            except Exception:
                _log.debug("query %s ended with an error", query.id)
            if end is not None:
                _log.error("query %s has ended, and cannot continue: %s", query.id, end)
            with self._lock:
                self._ends[str(query.runId)] = end
            for one in totals:
                process_totals().end(one)
            coordinator.close()

        threading.Thread(target=in_background(wait), name=f"statelog-end-{query.id}", daemon=True).start()

    def _log_failure(self, query_id: str, text: str) -> None:
        """Log in one line why a query failed; Spark's own report of a failed foreachBatch is long."""
        failure = failure_in_text(text)
        if failure is not None and (query_id in self._prepared or error_in_text(text) is not None):
            _log.error("query %s has failed: %s", query_id, failure)


def _take_back_plans(session: SparkSession, query: StreamingQuery) -> None:
    """Have Spark replan the batches that a start with asynchronous progress left without a stored commit.

    If their plans have a gap, Spark would repeat their input as one batch, under the number of the last one; but the
    state advances batch by batch.
    """
    try:
        if not internals.is_progress_asynchronous(query):
            return
        spark = open_checkpoint(internals.checkpoint_location(query), session)
        if plans := spark.plans_after(internals.first_batch(query)):
            spark.set_aside(plans)
    except Exception as error:
        _log.error("query %s: its offset log could not be set back to its commit log: %s", query.id, error)


def _fit_clock(session: SparkSession, query: StreamingQuery) -> None:
    """Let the query continue if it has gained or lost the clock source; after a failure, Spark refuses the start."""
    try:
        are_clocks = [name == CLOCK_SOURCE for name in internals.streaming_sources(query)]
        fit_clock_offsets(open_checkpoint(internals.checkpoint_location(query), session), are_clocks)
    except Exception as error:
        _log.error("query %s: its offset log could not be adapted to its sources: %s", query.id, error)


# ---- The endpoint of this process ----

_endpoint: Endpoint | None = None
_endpoint_lock = threading.Lock()


def require_endpoint(session: SparkSession) -> tuple[str, Endpoint]:
    """The driver's address for executors, and the endpoint of this process for the application.

    The first call of each application makes one, and closes that of the previous application in this process. Raises
    ConfigurationError if encryption is requested but impossible, or if the endpoint cannot listen on the address.
    """
    global _endpoint
    context, conf = session.sparkContext, session.sparkContext.getConf()
    is_local = is_on_this_machine(context)
    host = "127.0.0.1" if is_local else conf.get("spark.driver.host", "127.0.0.1")
    # Spark writes addresses of IPv6 in brackets.
    reachable = str(conf.get("spark.statelog.coordinator.host", host)).strip("[]")
    bound = str(conf.get("spark.driver.bindAddress", reachable)).strip("[]") if not is_local else host
    with _endpoint_lock:
        is_own = _endpoint is not None and _endpoint.process_id == os.getpid()
        if _endpoint is None or not is_own or _endpoint.application != context.applicationId:
            identity = new_tls_identity() if encrypts_traffic(conf) else None
            if _endpoint is not None and is_own:
                _endpoint.close()  # Its application is over, and the port may be the same.
            _endpoint = None
            port = str(conf.get("spark.statelog.coordinator.port", "0"))
            try:
                _endpoint = Endpoint(bound, int(port), identity, context.applicationId)
            except (OSError, OverflowError, ValueError) as error:
                raise ConfigurationError(
                    f"The coordinator cannot listen on {bound}:{port}: {getattr(error, 'strerror', error)}.",
                    hint="Set spark.statelog.coordinator.host and .port to a free address of this machine.",
                ) from error
        return reachable, _endpoint


def known_endpoint() -> Endpoint | None:
    """The endpoint of this process; None if it has planned no operator yet."""
    with _endpoint_lock:
        return _endpoint


def error_of(failed: StreamingQuery | BaseException) -> StatelogError | None:
    """Find the statelog error that made a query fail.

    Spark reports a failure as one text with the stack traces of Spark, Java and Python, and the error somewhere in it.

    Parameters
    ----------
    failed : StreamingQuery or exception
        A query of this process, or the exception that ``awaitTermination()`` or an action of a batch query has raised.

    Returns
    -------
    StatelogError or None
        The error, with its class, `message`, `kind` and `hint`. Its ``__cause__`` has, as text, the traceback of the
        cause, such as an exception in the processor, with its line, or else that of the error itself. The error is
        found even if a function given to ``foreachBatch`` has caught it and raised another one ``from`` it. None if the
        query is running, ended without an error, or failed with an error that is not statelog's.

        A query may end without an error although its last batch, which Spark has committed, has no checkpoint, because
        an action did not read the whole batch. The result is then a :class:`StateMissingError`, which the query's next
        start raises too.

    Examples
    --------
    >>> try:  # doctest: +SKIP
    ...     query.awaitTermination()
    ... except StreamingQueryException as failure:
    ...     error = statelog.error_of(failure)
    ...     print(error or failure)
    """
    if isinstance(failed, StatelogError):
        return failed
    if isinstance(failed, BaseException):
        return error_in_text(str(failed))
    if not isinstance(failed, StreamingQuery):
        raise ConfigurationError(
            f"error_of takes a query or an exception, not {type(failed).__name__}.",
            hint="Pass what start() has returned, or the exception that awaitTermination() has raised.",
        )
    failure, endpoint = failed.exception(), known_endpoint()
    if failure is not None:
        return error_in_text(str(failure))
    return None if endpoint is None or failed.isActive else endpoint.incomplete_end(failed)
