"""The driver's server for the tasks' calls: one endpoint per process, one coordinator per operator and start."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statelog.checkpoint.admission import OperatorConfig, admit, incomplete_batch
from statelog.checkpoint.coordinator import Coordinator
from statelog.checkpoint.protocol import Ping, Pinged, Reply, Request, TaskId, Tick, Ticked
from statelog.checkpoint.query_history import QueryHistory, read_history
from statelog.clock import SystemClock
from statelog.errors import (
    ConfigurationError,
    CorruptionError,
    ErrorKind,
    FencedError,
    ProcessorError,
    StatelogError,
    StateMissingError,
)
from statelog.exporters.totals import Counted, OperatorTotals, process_totals
from statelog.local.restore import read_segment
from statelog.log.open import (
    INITIAL_FOLDER,
    RUNS_FOLDER,
    new_identity,
    open_log,
    open_retrying_store,
)
from statelog.log.references import SegmentRef, StoredRun
from statelog.log_fields import LogFields, get_logger, in_background, log_fields
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.spark import internals
from statelog.spark.adaptive import restrain_adaptive_execution
from statelog.spark.arrow_batches import lift_byte_limit
from statelog.spark.checkpoint_location import open_checkpoint, state_home
from statelog.spark.clock_offsets import fit_clock_offsets
from statelog.spark.clock_source import CLOCK_SOURCE
from statelog.spark.encryption import encrypts_traffic
from statelog.spark.file_sinks import check_file_sink
from statelog.spark.initial import InitialPlace, store_rows, store_tables
from statelog.spark.interpreter import is_on_this_machine
from statelog.spark.operator_plan import OperatorPlan
from statelog.spark.query_clocks import QueryClocks
from statelog.spark.rpc import RpcServer
from statelog.spark.rpc_tls import TlsIdentity
from statelog.spark.rpc_tls import new_identity as new_tls_identity
from statelog.storage import LocalStore, Store
from statelog.storage.probe import check_put_if_absent

_log = get_logger(__name__)


@dataclass(frozen=True)
class _StoredInitial:
    """The state that was stored before the first batch of an operator that begins."""

    identity: str
    """The operator's, if it begins as expected."""
    rows: list[str]
    """For each subtask, the object with its rows of the initial state; empty if it has none."""
    runs: dict[int, list[StoredRun]]
    """By subtask, the runs of the initial tables."""


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


@dataclass
class _Slot:
    """Holds the coordinator of a query; the query's next start replaces it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    run_id: str = ""
    coordinator: Coordinator | None = None


class Endpoint:
    """Receives the tasks' calls, with an `identity` by TLS, and hands them to the queries' coordinators.

    Port 0 takes a free port.
    """

    def __init__(self, host: str, port: int = 0, identity: TlsIdentity | None = None) -> None:
        self.process_id = os.getpid()
        self.local_host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
        self.secret = secrets.token_bytes(32)
        self.clock_frames: dict[SparkSession, DataFrame] = {}
        """The clock source of each session; :mod:`statelog.spark.plan` fills this."""
        self._clock = SystemClock()
        self._plans: dict[str, OperatorPlan] = {}
        self._initial_outcomes: dict[tuple[str, str], _StoredInitial | Exception] = {}
        self._slots: dict[str, _Slot] = {}
        self._checked: set[str] = set()
        """The locations other than directories whose stores can be trusted with a log."""
        self._ends: dict[str, StateMissingError | None] = {}
        self._lock = threading.Lock()
        self._clocks = QueryClocks(self.plans, self._coordinator, self._clock)
        self._server = RpcServer(host, port, self.secret, self._handle, identity=identity)
        self.port = self._server.port
        self.certificate = self._server.certificate

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def register(self, plan: OperatorPlan) -> None:
        """Make an operator known, before any of its tasks calls."""
        with self._lock:
            self._plans[plan.instance] = plan
        internals.when_queries_start(plan.session, self._prepare)

    def _prepare(self, query_id: str, run_id: str) -> None:
        """Before a query's first batch: adapt its settings, place its subtasks, store initial state."""
        for session in dict.fromkeys(plan.session for plan in self.plans()):
            query = internals.active_query(session, query_id)
            plans = [] if query is None else self._plans_of(query)
            if query is None or not plans:
                continue
            _fit_clock(session, query)
            restrain_adaptive_execution(query)
            lift_byte_limit(session, query)
            check_file_sink(session, query)
            for plan in plans:
                if plan.placement is not None:
                    plan.placement.keep_during(query)
            if any(plan.has_initial for plan in plans):
                self._store_initial(plans, query, run_id)

    def _store_initial(self, plans: Sequence[OperatorPlan], query: StreamingQuery, run_id: str) -> None:
        """Store the initial state of the operators that begin theirs; an error is reported by their first task."""
        for plan in plans:
            if not plan.has_initial:
                continue
            try:
                outcome: _StoredInitial | Exception | None = _stored_initial(plan, plans, query, run_id)
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
        return RunningQuery(plans[0].session, _location(plans, query), coordinator)

    def planned_operators(self, query: StreamingQuery) -> list[PlannedOperator]:
        """All operators of a query."""
        query_id, run_id, plans = str(query.id), str(query.runId), self._plans_of(query)
        return [
            PlannedOperator(
                plan.session,
                plan.uid,
                _location(plans, query),
                plan.parallelism,
                plan.options.redact_keys,
                query_id,
                run_id,
            )
            for plan in plans
        ]

    def coordinator_of(self, query_id: str, run_id: str) -> Coordinator | None:
        """The coordinator of a start, without a call of Spark's; None if it has not begun a batch."""
        with self._lock:
            slot = self._slots.get(query_id)
        return None if slot is None or slot.run_id != run_id else slot.coordinator

    def incomplete_end(self, query: StreamingQuery) -> StateMissingError | None:
        """Why a query that has ended without an error cannot go on; None if nothing is missing.

        Spark commits a batch after its last action. If that action did not run every subtask to its end, the next batch
        is refused. After the last batch there is no next one, so only this method tells.
        """
        run_id, plans = str(query.runId), self._plans_of(query)
        if not plans:
            return None
        with self._lock:
            if run_id in self._ends:
                return self._ends[run_id]
        return _incomplete_end(plans, query, self.coordinator_of(str(query.id), run_id))

    def _plans_of(self, query: StreamingQuery) -> list[OperatorPlan]:
        observed = internals.observations(query)
        return [plan for plan in self.plans() if plan.observation in observed]

    def _handle(self, request: Request, payload: bytes) -> Reply:
        if isinstance(request, Tick):
            return Ticked(self._clocks.needs_batch(request))
        if isinstance(request, Ping):
            return Pinged(self._clock.now_s())
        task = request.task
        with log_fields(LogFields(task.uid, task.batch, task.subtask)):
            return self._coordinator(task).handle(request, payload)

    def _coordinator(self, task: TaskId) -> Coordinator:
        with self._lock:
            plan = self._plans.get(task.instance)
            slot = self._slots.setdefault(task.query_id, _Slot())
        if plan is None:
            raise FencedError(
                f"operator '{task.uid}' was not built by this driver.",
                kind=ErrorKind.STALE_RUN,
                hint="The task is a leftover of an earlier application.",
            )
        with slot.lock:
            if slot.coordinator is None or slot.run_id != task.run_id:
                self._open(slot, plan, task)
            assert slot.coordinator is not None
            return slot.coordinator

    def _require_initial(self, plan: OperatorPlan, run_id: str) -> _StoredInitial:
        with self._lock:
            outcome = self._initial_outcomes.get((run_id, plan.instance))
        if isinstance(outcome, _StoredInitial):
            return outcome
        if isinstance(outcome, StatelogError):
            raise outcome
        raise ProcessorError(
            f"operator '{plan.uid}': its initial state could not be stored before the first batch: "
            + ("the query's start was not announced." if outcome is None else f"{type(outcome).__name__}: {outcome}"),
            kind=ErrorKind.INITIAL_STATE,
            hint="Can initialState, or each of initialTables, be computed on its own, for example with count()?",
        )

    def _open(self, slot: _Slot, plan: OperatorPlan, task: TaskId) -> None:
        """Open a start of a query with its first task, one of the operator `plan`."""
        query = internals.find_query(plan.session, task.query_id, task.run_id)
        internals.require_synchronous_progress(query)
        if slot.coordinator is not None:
            slot.coordinator.close()
            slot.coordinator = None
        plans = self._plans_of(query)
        options = query_options(plans)
        location = _location(plans, query)
        measurements = Measurements()
        store = open_retrying_store(location, options, self._clock, measurements)
        if not isinstance(store.own, LocalStore) and location not in self._checked:
            check_put_if_absent(store)
            self._checked.add(location)
        totals = [process_totals().begin(task.query_id, one.uid) for one in plans]
        coordinator = Coordinator(
            _roster(plans, query, totals),
            store=store,
            location=location,
            log=open_log(store.own, options, self._clock),
            options=options,
            clock=self._clock,
            new_token=lambda: secrets.token_bytes(16),
            batch_time=lambda batch: internals.batch_time(query, batch),
            measurements=measurements,
            deletes_in_background=True,
            slots=plan.session.sparkContext.defaultParallelism,
        )
        with_initial = [one for one in plans if one.has_initial]
        beginning = coordinator.beginning(task.batch) if with_initial else set()
        initial = {one.uid: self._require_initial(one, task.run_id) for one in with_initial if one.uid in beginning}
        coordinator.open(
            task.batch,
            {uid: stored.runs for uid, stored in initial.items()},
            initial_rows={uid: stored.rows for uid, stored in initial.items() if stored.rows},
            identities={uid: stored.identity for uid, stored in initial.items()},
            keeps=_keeps(plans, query, task.batch, store),
        )
        slot.run_id, slot.coordinator = task.run_id, coordinator
        with self._lock:  # Not earlier: if it could not be stored, every subtask must find the reason here.
            for one in with_initial:
                self._initial_outcomes.pop((task.run_id, one.instance), None)
        self._close_at_end(plans, query, coordinator, totals)

    def _close_at_end(
        self,
        plans: Sequence[OperatorPlan],
        query: StreamingQuery,
        coordinator: Coordinator,
        totals: Sequence[OperatorTotals],
    ) -> None:
        def wait() -> None:
            end = None
            try:
                query.awaitTermination()
                end = _incomplete_end(plans, query, coordinator)
            except Exception:
                _log.debug("query %s ended with an error", query.id)
            if end is not None:
                _log.error("query %s has ended, and cannot go on: %s", query.id, end)
            with self._lock:
                self._ends[str(query.runId)] = end
            for one in totals:
                process_totals().end(one)
            coordinator.close()

        threading.Thread(target=in_background(wait), name=f"statelog-end-{query.id}", daemon=True).start()


# ---- The operators of a query ----

_QUERY_OPTIONS: Final = (
    "file_merging",
    "max_file_bytes",
    "max_space_amplification",
    "retained_checkpoints",
    "retained_s",
    "inline_budget_bytes",
    "log_min_age_s",
    "orphan_min_age_s",
    "upload_attempts",
    "upload_timeout_s",
    "upload_retry_delay_s",
    "driver_timeout_s",
    "heartbeat_s",
    "placement",
)
"""The options that all operators of a query share: those of its log, its store, its batches and its calls."""


def query_options(plans: Sequence[OperatorPlan]) -> Options:
    """The options of a query; ConfigurationError if its operators have different values of those that they share."""
    first = plans[0]
    for plan in plans[1:]:
        for name in _QUERY_OPTIONS:
            one, other = getattr(first.options, name), getattr(plan.options, name)
            if one != other:
                raise ConfigurationError(
                    f"Operator '{first.uid}' has the option {name} {one!r}, and operator '{plan.uid}' {other!r}.",
                    hint=f"The operators of a query share {name}: give all of them the same value.",
                )
    return first.options


def _location(plans: Sequence[OperatorPlan], query: StreamingQuery) -> str:
    """The location of a query's state; ConfigurationError if its operators were given different ones."""
    given = {plan.location: plan.uid for plan in plans if plan.location is not None}
    if len(given) > 1:
        named = ", ".join(f"operator '{uid}' {location}" for location, uid in given.items())
        raise ConfigurationError(
            f"The operators of the query have different locations: {named}.",
            kind=ErrorKind.INVALID_OPTION,
            hint="The state of a query has one location: give all operators the same, or only one of them any.",
        )
    return next(iter(given), None) or state_home(internals.checkpoint_location(query))


def _roster(
    plans: Sequence[OperatorPlan], query: StreamingQuery, totals: Sequence[OperatorTotals | None]
) -> list[OperatorConfig]:
    """The operators of a start of a query; with `totals` their observers count for these, too."""
    uids = {plan.observation: plan.uid for plan in plans}
    return [
        OperatorConfig(
            str(query.id),
            str(query.runId),
            plan.uid,
            plan.parallelism,
            plan.key_schema,
            plan.states,
            plan.watermark,
            plan.deleted,
            plan.settings,
            options=plan.options
            if counted is None
            else replace(plan.options, observer=Counted(plan.options.observer, counted)),
            instance=plan.instance,
            in_front=frozenset(uids[one] for one in plan.in_front if one in uids),
            stores_output=plan.stores_output,
        )
        for plan, counted in zip(plans, totals, strict=True)
    ]


def _keeps(
    plans: Sequence[OperatorPlan], query: StreamingQuery, batch: int, store: Store
) -> Callable[[QueryHistory], bool] | None:
    """Whether the checkpoint of a start's first batch stays: Spark repeats it, and its stored output is whole."""
    output = next((plan for plan in plans if plan.stores_output), None)
    if output is None:
        return None

    def keeps(history: QueryHistory) -> bool:
        # What a rewind took back is not on the line, so the user does not want another result.
        latest, own = history.latest, history.of(output.uid)
        if latest is None or own is None or latest.batch != batch:
            return False
        checkpoint = own.at(batch)
        is_sparks = latest.batch_time_ms == internals.batch_time(query, batch).time_ms
        return is_sparks and checkpoint is not None and _is_whole(store, checkpoint.segments)

    return keeps


def _is_whole(store: Store, segments: Iterable[SegmentRef]) -> bool:
    """Whether stored output is as it was written; a crash of the machine may have left less."""
    try:
        for segment in segments:
            read_segment(store, segment)
    except CorruptionError:
        return False
    return True


def _fit_clock(session: SparkSession, query: StreamingQuery) -> None:
    """Let the query go on if it has got the clock source, or lost it; after a failure Spark refuses the start."""
    try:
        are_clocks = [name == CLOCK_SOURCE for name in internals.streaming_sources(query)]
        fit_clock_offsets(open_checkpoint(internals.checkpoint_location(query), session), are_clocks)
    except Exception as error:
        _log.error("query %s: its offset log could not be fitted to its sources: %s", query.id, error)


def _stored_initial(
    plan: OperatorPlan, plans: Sequence[OperatorPlan], query: StreamingQuery, run_id: str
) -> _StoredInitial | None:
    """Store the state before the operator's first batch; None if the operator has run before.

    The location is not claimed yet, so nothing of other starts is removed here; the claim removes their orphans. Raises
    the errors of :func:`admit`.
    """
    location = _location(plans, query)
    first_batch = internals.first_batch(query)
    roster = _roster(plans, query, [None] * len(plans))
    if plan.uid in admit(_stored(plans, query), roster, first_batch, None, location):
        return None
    identity = new_identity(plan.uid, secrets.token_bytes(16))
    rows: list[str] = []
    if plan.initial is not None:
        folder = f"{identity}/{INITIAL_FOLDER}/{run_id}"
        rows = store_rows(plan.initial, plan.parallelism, InitialPlace(location, folder, run_id, plan.options))
    # No start has epoch 0. So runs that no checkpoint comes to name are removed like the orphans of a crashed start.
    place = InitialPlace(location, f"{identity}/{RUNS_FOLDER}/0", run_id, plan.options)
    return _StoredInitial(identity, rows, store_tables(plan.tables, plan.key_schema, plan.parallelism, place))


def _stored(plans: Sequence[OperatorPlan], query: StreamingQuery) -> QueryHistory:
    """The query's checkpoints in its location."""
    return read_history(open_retrying_store(_location(plans, query), plans[0].options, SystemClock(), Measurements()))


def _incomplete_end(
    plans: Sequence[OperatorPlan], query: StreamingQuery, coordinator: Coordinator | None
) -> StateMissingError | None:
    """The error if the last committed batch has no checkpoint. Without a coordinator, no subtask ran in this start."""
    batch = internals.last_committed(query)
    if batch is None:
        return None
    if coordinator is None:
        # A sink that has got the batch in an earlier start leaves it out, and then the checkpoint of that start counts.
        entry = _stored(plans, query).at(batch)
        if entry is not None and entry.batch_time_ms == internals.batch_time(query, batch).time_ms:
            return None
        return incomplete_batch(batch, None, _roster(plans, query, [None] * len(plans)), _location(plans, query))
    try:
        coordinator.require_committed(batch)
    except StateMissingError as error:
        return error
    return None


# ---- The endpoint of this process ----

_endpoint: Endpoint | None = None
_endpoint_lock = threading.Lock()


def require_endpoint(session: SparkSession) -> tuple[str, Endpoint]:
    """The driver's address for executors, and the endpoint of this process, which the first call makes.

    An application that encrypts otherwise than the one before it in this process gets an endpoint of its own. Raises
    ConfigurationError if encryption is asked for and cannot be done, or if the address cannot be listened on.
    """
    global _endpoint
    conf = session.sparkContext.getConf()
    is_local = is_on_this_machine(session.sparkContext)
    host = "127.0.0.1" if is_local else conf.get("spark.driver.host", "127.0.0.1")
    reachable = str(conf.get("spark.statelog.coordinator.host", host))
    bound = str(conf.get("spark.driver.bindAddress", reachable)) if not is_local else host
    encrypts = encrypts_traffic(conf)
    with _endpoint_lock:
        is_own = _endpoint is not None and _endpoint.process_id == os.getpid()
        if _endpoint is None or not is_own or bool(_endpoint.certificate) != encrypts:
            identity = new_tls_identity() if encrypts else None
            if _endpoint is not None and is_own:
                _endpoint.close()  # Its application is over, and the port may be the same.
            _endpoint = None
            port = str(conf.get("spark.statelog.coordinator.port", "0"))
            try:
                _endpoint = Endpoint(bound, int(port), identity)
            except (OSError, OverflowError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise ConfigurationError(
                    f"The coordinator cannot listen on {bound}:{port}: {reason}.",
                    hint="Set spark.statelog.coordinator.host and .port to a free address of this machine.",
                ) from error
        return reachable, _endpoint


def known_endpoint() -> Endpoint | None:
    """The endpoint of this process; None if it has planned no operator yet."""
    with _endpoint_lock:
        return _endpoint
