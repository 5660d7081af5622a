"""A query with its planned operators: what they share, and what a start of the query is made of."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from pyspark.sql.streaming.query import StreamingQuery

from statelog.clock import SystemClock
from statelog.coordinator.admission import OperatorConfig, admit, incomplete_batch
from statelog.coordinator.coordinator import Coordinator
from statelog.coordinator.totals import Counted, OperatorTotals
from statelog.errors import ConfigurationError, CorruptionError, ErrorKind, StateMissingError
from statelog.history.query_history import QueryHistory, read_history
from statelog.local.restore import read_segment
from statelog.log.entry import QueryCheckpoint
from statelog.log.open import INITIAL_FOLDER, RUNS_FOLDER, new_identity, open_retrying_store
from statelog.log.references import StoredRun
from statelog.log_fields import get_logger
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.spark.checkpoint.location import state_home
from statelog.spark.driver import internals
from statelog.spark.plan.initial import InitialPlace, store_rows, store_tables
from statelog.spark.plan.operator_plan import OperatorPlan
from statelog.storage import Store

_log: Final = get_logger(__name__)

_SHARED: Final = (
    "file_merging",
    "max_space_amplification",
    "retained_checkpoints",
    "retained_s",
    "inline_budget_bytes",
    "driver_timeout_s",
    "heartbeat_s",
    "placement",
)
_SHARED_TUNING: Final = (
    "max_file_bytes",
    "log_min_age_s",
    "orphan_min_age_s",
    "upload_attempts",
    "upload_timeout_s",
    "upload_retry_delay_s",
)
"""The options that all operators of a query share: those of its log, its store, its batches and its calls."""


@dataclass(frozen=True)
class StoredInitial:
    """The state that was stored before the first batch of an operator that begins."""

    identity: str
    """The operator's, if it begins as expected."""
    rows: list[str]
    """For each subtask, the object with its rows of the initial state; empty if it has none."""
    runs: dict[int, list[StoredRun]]
    """By subtask, the runs of the initial tables."""


@dataclass(frozen=True)
class PlannedQuery:
    """A start of a query, and the operators in its plan: at least one."""

    query: StreamingQuery
    plans: Sequence[OperatorPlan]

    @cached_property
    def options(self) -> Options:
        """The query's options; ConfigurationError if its operators have different values of those that they share."""
        first = self.plans[0]
        for plan in self.plans[1:]:
            for name in (*_SHARED, *_SHARED_TUNING):
                one, other = (
                    getattr(options.tuning if name in _SHARED_TUNING else options, name)
                    for options in (first.options, plan.options)
                )
                if one != other:
                    raise ConfigurationError(
                        f"Operators '{first.uid}' and '{plan.uid}' have different values of the option {name}: {one!r}"
                        f" and {other!r}.",
                        hint=f"The operators of a query share {name}: give all of them the same value.",
                    )
        return first.options

    @cached_property
    def location(self) -> str:
        """The location of the query's state; ConfigurationError if its operators were given different ones."""
        given = {plan.location: plan.uid for plan in self.plans if plan.location is not None}
        if len(given) > 1:
            named = ", ".join(f"operator '{uid}' {location}" for location, uid in given.items())
            raise ConfigurationError(
                f"The operators of the query have different locations: {named}.",
                kind=ErrorKind.INVALID_OPTION,
                hint="The state of a query has one location: give it to all operators, or to only one of them.",
            )
        return next(iter(given), None) or state_home(internals.checkpoint_location(self.query))

    def roster(self, totals: Sequence[OperatorTotals | None] | None = None) -> list[OperatorConfig]:
        """The operators of the start; with `totals`, one for each, their observers also add to these."""
        uids = {plan.observation: plan.uid for plan in self.plans}
        return [
            OperatorConfig(
                str(self.query.id),
                str(self.query.runId),
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
            for plan, counted in zip(self.plans, totals or [None] * len(self.plans), strict=True)
        ]

    def stored(self) -> QueryHistory:
        """The checkpoints in the query's location."""
        return read_history(open_retrying_store(self.location, self.options, SystemClock(), Measurements()))

    def has_state_of(self, batch: int) -> bool:
        """Whether the checkpoint of a batch is stored and has not been taken back."""
        entry = self.stored().at(batch)
        return entry is not None and entry.query_id == str(self.query.id)

    def store_initial(self, plan: OperatorPlan, run_id: str) -> StoredInitial | None:
        """Store the state before the first batch of an operator; None if it has run before.

        The location is not claimed yet, so nothing of other starts is removed here; the claim removes their orphans.
        Raises the errors of :func:`admit`.
        """
        first_batch = internals.first_batch(self.query)
        if plan.uid in admit(self.stored(), self.roster(), first_batch, None, self.location):
            return None
        identity = new_identity(plan.uid, secrets.token_bytes(16))
        rows: list[str] = []
        if plan.initial is not None:
            place = InitialPlace(self.location, f"{identity}/{INITIAL_FOLDER}/{run_id}", run_id, plan.options)
            rows = store_rows(plan.initial, plan.parallelism, place)
        # No start has epoch 0. So runs that no checkpoint ever names are removed like orphans of a crashed start.
        place = InitialPlace(self.location, f"{identity}/{RUNS_FOLDER}/0", run_id, plan.options)
        return StoredInitial(identity, rows, store_tables(plan.tables, plan.key_schema, plan.parallelism, place))

    def keeps(self, batch: int, store: Store) -> Callable[[QueryHistory], bool] | None:
        """Whether the first batch, which Spark repeats, keeps its checkpoint, because its stored output is whole.

        None if the query stores no output.
        """
        output = next((plan for plan in self.plans if plan.stores_output), None)
        if output is None:
            return None

        def keeps(history: QueryHistory) -> bool:
            # What a rewind took back is not on the line, so the user does not want the same result again.
            latest, own = history.latest, history.of(output.uid)
            if latest is None or own is None or latest.batch != batch:
                return False
            is_sparks = latest.batch_time_ms == internals.batch_time(self.query, batch).time_ms
            return is_sparks and own.at(batch) is not None and is_whole(store, latest)

        return keeps

    def stored_commit(self) -> Callable[[], int] | None:
        """Gives the newest batch whose commit Spark has stored, if the next start may repeat several batches.

        None if it repeats one at most: then Spark stores a commit before the next batch begins.
        """
        if not internals.is_progress_asynchronous(self.query):
            return None
        newest = internals.first_batch(self.query) - 1

        def stored_commit() -> int:
            nonlocal newest
            try:
                newest = max(newest, internals.stored_commit(self.query))
            except Exception as error:  # the query ends meanwhile
                _log.debug("query %s: its commit log could not be read: %s", self.query.id, error)
            return newest

        return stored_commit

    def incomplete_end(self, coordinator: Coordinator | None) -> StateMissingError | None:
        """The error if the last committed batch has no checkpoint.

        Without a coordinator, no subtask ran in this start.
        """
        batch = internals.last_committed(self.query)
        if batch is None:
            return None
        if coordinator is None:
            # A sink that got the batch in an earlier start skips it now; then that start's checkpoint counts.
            entry = self.stored().at(batch)
            if entry is not None and entry.batch_time_ms == internals.batch_time(self.query, batch).time_ms:
                return None
            return incomplete_batch(batch, None, self.roster(), self.location)
        try:
            coordinator.require_committed(batch)
        except StateMissingError as error:
            return error
        return None


def is_whole(store: Store, entry: QueryCheckpoint) -> bool:
    """Whether the changes, snapshots and output that a checkpoint has stored are as they were written."""
    try:
        for section in entry.sections:
            for segment in section.segments:
                read_segment(store, segment)
    except CorruptionError:
        return False
    return True
