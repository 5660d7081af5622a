"""The driver's server for the tasks' calls: one endpoint per process, one coordinator per operator and start."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from msgspec import structs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statelog.checkpoint.admission import OperatorConfig, begins_state, incomplete_batch, require_admission
from statelog.checkpoint.coordinator import Coordinator
from statelog.checkpoint.history import History
from statelog.checkpoint.protocol import Ping, Pinged, Reply, Request, TaskId, Tick, Ticked
from statelog.checkpoint.query_operators import OperatorChanges, noted_location
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind, FencedError, ProcessorError, StatelogError, StateMissingError
from statelog.exporters.totals import Counted, OperatorTotals, process_totals
from statelog.log.entry import Entry, QueryOperators
from statelog.log.open import (
    INITIAL_FOLDER,
    RUNS_FOLDER,
    STATE_FOLDER,
    open_location,
    open_log,
    open_retrying_store,
    operator_folder,
)
from statelog.log.references import StoredRun
from statelog.log_fields import LogFields, get_logger, in_background, log_fields
from statelog.metrics import Measurements
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
from statelog.spark.rpc_tls import TlsIdentity, new_identity
from statelog.storage import LocalStore
from statelog.storage.probe import check_put_if_absent

_log = get_logger(__name__)


@dataclass(frozen=True)
class _StoredInitial:
    """The state that was stored before the first batch."""

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
class RunningOperator:
    """An operator of a running query."""

    session: SparkSession
    uid: str
    location: str
    root: str
    """The operator's folder in the location."""
    coordinator: Coordinator


@dataclass
class _Slot:
    """Holds the coordinator of an operator of a query; the query's next start replaces it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    run_id: str = ""
    instance: str = ""
    coordinator: Coordinator | None = None
    root: str = ""


class Endpoint:
    """Receives the tasks' calls, with an `identity` by TLS, and hands them to the operators' coordinators.

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
        self._slots: dict[tuple[str, str], _Slot] = {}
        self._checked: set[str] = set()
        """The locations other than directories whose stores can be trusted with a log."""
        self._ends: dict[tuple[str, str], StateMissingError | None] = {}
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
                if plan.has_initial:
                    self._try_initial(plan, query, run_id)

    def _try_initial(self, plan: OperatorPlan, query: StreamingQuery, run_id: str) -> None:
        try:
            outcome: _StoredInitial | Exception | None = _store_initial(plan, query, run_id)
        except Exception as error:
            outcome = error
        if outcome is None:
            return
        with self._lock:
            self._initial_outcomes[run_id, plan.instance] = outcome

    def plans(self) -> list[OperatorPlan]:
        """All operators that this driver has planned."""
        with self._lock:
            return list(self._plans.values())

    def operators_of(self, query: StreamingQuery) -> list[RunningOperator]:
        """All operators of a running query; raises StateMissingError if one of them has not begun a batch yet."""
        found: list[RunningOperator] = []
        for planned in self.planned_operators(query):
            running = self.running_operator(planned)
            if running is None:
                raise StateMissingError(
                    f"operator '{planned.uid}' of query {query.id} has not begun a batch yet.",
                    hint="Try again after the query's first batch.",
                )
            found.append(running)
        return found

    def planned_operators(self, query: StreamingQuery) -> list[PlannedOperator]:
        """All operators of a query."""
        query_id, run_id = str(query.id), str(query.runId)
        return [
            PlannedOperator(
                plan.session,
                plan.uid,
                _location(plan, query),
                plan.parallelism,
                plan.options.redact_keys,
                query_id,
                run_id,
            )
            for plan in self._plans_of(query)
        ]

    def running_operator(self, planned: PlannedOperator) -> RunningOperator | None:
        """An operator, without a call of Spark's; None if it has not begun a batch in this start."""
        with self._lock:
            slot = self._slots.get((planned.query_id, planned.uid))
        coordinator = None if slot is None or slot.run_id != planned.run_id else slot.coordinator
        if slot is None or coordinator is None:
            return None
        return RunningOperator(planned.session, planned.uid, planned.location, slot.root, coordinator)

    def incomplete_end(self, query: StreamingQuery) -> StateMissingError | None:
        """Why a query that has ended without an error cannot go on; None if nothing is missing.

        Spark commits a batch after its last action. If that action did not run every subtask to its end, the next batch
        is refused. After the last batch there is no next one, so only this method tells.
        """
        run_id = str(query.runId)
        for plan in self._plans_of(query):
            with self._lock:
                is_known, known = (run_id, plan.uid) in self._ends, self._ends.get((run_id, plan.uid))
                slot = self._slots.get((str(query.id), plan.uid))
            if not is_known:
                coordinator = slot.coordinator if slot is not None and slot.run_id == run_id else None
                known = _incomplete_end(plan, query, coordinator)
            if known is not None:
                return known
        return None

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

    def _require_initial(self, plan: OperatorPlan, task: TaskId) -> _StoredInitial:
        with self._lock:
            outcome = self._initial_outcomes.get((task.run_id, plan.instance))
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
        query = internals.find_query(plan.session, task.query_id, task.run_id)
        internals.require_synchronous_progress(query)
        if slot.coordinator is not None:
            slot.coordinator.close()
            slot.coordinator = None
        location = _location(plan, query)
        measurements = Measurements()
        store = open_retrying_store(location, plan.options, self._clock, measurements)
        if not isinstance(store.own, LocalStore) and location not in self._checked:
            check_put_if_absent(store)
            self._checked.add(location)
        root = operator_folder(store, plan.uid)
        totals = process_totals().begin(task.query_id, plan.uid)
        locations = {one.uid: noted_location(one.location) for one in self._plans_of(query)}
        coordinator = Coordinator(
            _config_of(plan, query, QueryOperators(int(self._clock.now_s() * 1000), locations)),
            changes=_operator_changes(query, self._plans_of(query)),
            store=store,
            location=location,
            root=root,
            log=open_log(store.own, root, plan.options, self._clock),
            options=replace(plan.options, observer=Counted(plan.options.observer, totals)),
            clock=self._clock,
            new_token=lambda: secrets.token_bytes(16),
            batch_time=lambda batch: internals.batch_time(query, batch),
            measurements=measurements,
            deletes_in_background=True,
            slots=plan.session.sparkContext.defaultParallelism,
        )
        keeps = self._keeps(plan, query, task)
        if plan.has_initial and coordinator.begins_at(task.batch):
            initial = self._require_initial(plan, task)
            coordinator.open(task.batch, initial.runs, keeps=keeps)
            if coordinator.kept_batch is None:
                coordinator.offer_initial_state(initial.rows)
        else:
            coordinator.open(task.batch, keeps=keeps)
        slot.run_id, slot.instance, slot.coordinator, slot.root = task.run_id, task.instance, coordinator, root
        with self._lock:  # Not earlier: if it could not be stored, every subtask must find the reason here.
            self._initial_outcomes.pop((task.run_id, plan.instance), None)
        self._close_at_end(plan, query, coordinator, totals)

    def _keeps(self, plan: OperatorPlan, query: StreamingQuery, task: TaskId) -> Callable[[History], bool]:
        """Whether the checkpoint of a start's first batch stays: if the operator that stores the output has it.

        That operator's last subtask acks after those of all others. So then they have the checkpoint, too.
        """
        if plan.stores_output:
            return lambda history: _has_output(history, query, task.batch, plan.session)
        last = next((one for one in self._plans_of(query) if one.stores_output), None)
        if last is None:
            return lambda _: False
        # No start can write there any more once this one has claimed it, so all operators decide alike.
        coordinator = self._coordinator(structs.replace(task, uid=last.uid, instance=last.instance))
        return lambda _: coordinator.kept_batch == task.batch

    def _close_at_end(
        self, plan: OperatorPlan, query: StreamingQuery, coordinator: Coordinator, totals: OperatorTotals
    ) -> None:
        def wait() -> None:
            end = None
            try:
                query.awaitTermination()
                end = _incomplete_end(plan, query, coordinator)
            except Exception:
                _log.debug("query %s ended with an error", query.id)
            if end is not None:
                _log.error("query %s has ended, and cannot go on: %s", query.id, end)
            with self._lock:
                self._ends[str(query.runId), plan.uid] = end
            process_totals().end(totals)
            coordinator.close()

        threading.Thread(target=in_background(wait), name=f"statelog-end-{query.id}", daemon=True).start()


def _has_output(history: History, query: StreamingQuery, batch: int, session: SparkSession) -> bool:
    """Whether the newest checkpoint is that of a batch that Spark repeats by itself, not at the user's wish."""
    latest = history.latest
    if latest is None or latest.batch != batch or latest.batch_time_ms != internals.batch_time(query, batch).time_ms:
        return False
    return not open_checkpoint(internals.checkpoint_location(query), session).was_taken_back(batch)


def _location(plan: OperatorPlan, query: StreamingQuery) -> str:
    return plan.location or state_home(internals.checkpoint_location(query))


def _config_of(plan: OperatorPlan, query: StreamingQuery, operators: QueryOperators | None = None) -> OperatorConfig:
    return OperatorConfig(
        str(query.id),
        str(query.runId),
        plan.uid,
        plan.parallelism,
        plan.key_schema,
        plan.states,
        plan.watermark,
        plan.deleted,
        operators,
        plan.settings,
    )


def _fit_clock(session: SparkSession, query: StreamingQuery) -> None:
    """Let the query go on if it has got the clock source, or lost it; after a failure Spark refuses the start."""
    try:
        are_clocks = [name == CLOCK_SOURCE for name in internals.streaming_sources(query)]
        fit_clock_offsets(open_checkpoint(internals.checkpoint_location(query), session), are_clocks)
    except Exception as error:
        _log.error("query %s: its offset log could not be fitted to its sources: %s", query.id, error)


def _operator_changes(query: StreamingQuery, plans: Iterable[OperatorPlan]) -> OperatorChanges:
    home = f"{internals.checkpoint_location(query).rstrip('/')}/{STATE_FOLDER}"
    return OperatorChanges(str(query.id), home, {plan.uid: plan.location or home for plan in plans}, open_location)


def _store_initial(plan: OperatorPlan, query: StreamingQuery, run_id: str) -> _StoredInitial | None:
    """Store the state before the operator's first batch; None if the operator has run before.

    Raises ConfigurationError if the location belongs to another query. It is not claimed yet, so nothing of other
    starts is removed here; the claim removes their orphans.
    """
    location, root, entries = _stored(plan, query)
    # Whether it was really added to the query is found out when its first task calls; then the objects are orphans.
    first_batch = internals.first_batch(query)
    if not begins_state(entries, str(query.id), first_batch, lambda: True):
        return None
    name = f"operator '{plan.uid}' at {location}/{root}"
    require_admission(_config_of(plan, query), History(entries), first_batch, None, name, begins=True)
    rows: list[str] = []
    if plan.initial is not None:
        folder = f"{root}/{INITIAL_FOLDER}/{run_id}"
        rows = store_rows(plan.initial, plan.parallelism, InitialPlace(location, folder, run_id, plan.options))
    # No start has epoch 0. So runs that no checkpoint comes to name are removed like the orphans of a crashed start.
    place = InitialPlace(location, f"{root}/{RUNS_FOLDER}/0", run_id, plan.options)
    return _StoredInitial(rows, store_tables(plan.tables, plan.key_schema, plan.parallelism, place))


def _stored(plan: OperatorPlan, query: StreamingQuery) -> tuple[str, str, list[Entry]]:
    """An operator's location, its folder there, and the entries of its log."""
    location = _location(plan, query)
    store = open_retrying_store(location, plan.options, SystemClock(), Measurements())
    root = operator_folder(store, plan.uid)
    return location, root, open_log(store, root, plan.options, SystemClock()).read()


def _incomplete_end(
    plan: OperatorPlan, query: StreamingQuery, coordinator: Coordinator | None
) -> StateMissingError | None:
    """The error if the last committed batch has no checkpoint. Without a coordinator, no subtask ran in this start."""
    batch = internals.last_committed(query)
    if batch is None:
        return None
    if coordinator is None:
        # A sink that has got the batch in an earlier start leaves it out, and then the checkpoint of that start counts.
        checkpoint = History(_stored(plan, query)[2]).at(batch)
        if checkpoint is not None and checkpoint.batch_time_ms == internals.batch_time(query, batch).time_ms:
            return None
        return incomplete_batch(batch, None, plan.parallelism, f"operator '{plan.uid}' at {_location(plan, query)}")
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
            identity = new_identity() if encrypts else None
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
