"""The clocks of queries: which of them need a batch without new rows, and how Spark's log accepts a new clock."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from pyspark.sql.streaming.query import StreamingQuery

from statelog.clock import Clock
from statelog.coordinator.batch import BatchTime
from statelog.coordinator.coordinator import Coordinator
from statelog.log_fields import get_logger
from statelog.rpc.messages import TaskId, Tick
from statelog.spark.checkpoint.checkpoint import COMMITS, OFFSETS, SparkCheckpoint
from statelog.spark.checkpoint.logs import BatchOffsets
from statelog.spark.driver import internals
from statelog.spark.plan.operator_plan import IdleTime, OperatorPlan, QueryProgress, needs_batch
from statelog.storage.store import if_present

_log: Final = get_logger(__name__)

_CONNECT_S: Final = 10.0


@dataclass
class _QueryClock:
    """The clock source of a running query."""

    query: StreamingQuery
    plans: list[OperatorPlan]
    """The query's operators that may need a batch without data."""
    has_no_data_batches: bool
    last_batch: int = -1
    """The newest batch that `last` was looked up for."""
    last: BatchTime | None = None
    idle: IdleTime = field(default_factory=IdleTime)
    """The time since that batch became the last one."""


class ClockStarts:
    """Lets the processes of clock sources start one after the other.

    Spark waits 10 seconds until a new process connects, and has no setting for it. If many started at once, they
    would compete for the processor for longer.
    """

    def __init__(self, clock: Clock, pause_s: float = 0.02) -> None:
        self._clock = clock
        self._pause_s = pause_s
        self._turn = threading.Lock()
        self._pause = threading.Event()
        self._last: tuple[StreamingQuery, float] | None = None

    def wait(self, query: StreamingQuery) -> None:
        """Wait until the process of the query before this one has started, or Spark no longer waits for it."""
        with self._turn:
            last, self._last = self._last, None
            if last is not None:
                before, since_s = last
                while not internals.has_sources(before) and self._clock.monotonic_s() - since_s < _CONNECT_S:
                    self._pause.wait(self._pause_s)
            self._last = query, self._clock.monotonic_s()


class QueryClocks:
    """Finds the query of a clock source, and asks the query's operators whether they need a batch.

    A clock source does not know its query. So it puts an id of its own into its offsets, and the driver looks for this
    id in the offsets that Spark holds for each query.
    """

    def __init__(
        self,
        plans: Callable[[], list[OperatorPlan]],
        coordinator: Callable[[TaskId], Coordinator],
        clock: Clock,
    ) -> None:
        self._plans = plans
        self._coordinator = coordinator
        self._clock = clock
        self._clocks: dict[str, _QueryClock] = {}
        self._lock = threading.Lock()

    def needs_batch(self, tick: Tick) -> bool:
        """Whether the query of a clock source needs a batch now.

        Spark asks between two batches and waits for the answer, so the facts behind the answer do not change meanwhile.
        """
        with self._lock:
            clock = self._clocks.get(tick.reader) or self._find(tick)
        if clock is None:
            return False
        batch = internals.next_batch(clock.query) - 1
        if clock.last is None or batch != clock.last_batch:
            clock.last_batch, clock.last = batch, internals.batch_time(clock.query, batch)
        progress = QueryProgress(
            last=clock.last,
            spark_watermark_ms=internals.current_watermark_ms(clock.query),
            now_ms=int(self._clock.now_s() * 1000),
            idle_ms=clock.idle.of(batch, self._clock.monotonic_s()),
            has_no_data_batches=clock.has_no_data_batches,
            ends_when_idle=tick.ends_when_idle,
        )
        return any(
            needs_batch(plan.no_data_rule, progress, own_watermark_advances=self._advances(plan, clock))
            for plan in clock.plans
        )

    def _find(self, tick: Tick) -> _QueryClock | None:
        plans = self._plans()
        queries = (query for session in {plan.session for plan in plans} for query in internals.active_queries(session))
        query = next((query for query in queries if tick.clock in internals.committed_offsets(query)), None)
        if query is None:
            return None
        observed = internals.observations(query)
        own = [plan for plan in plans if plan.no_data_rule.needs_clock and plan.observation in observed]
        self._clocks = {reader: clock for reader, clock in self._clocks.items() if clock.query.isActive}
        clock = self._clocks[tick.reader] = _QueryClock(query, own, internals.has_no_data_batches(query))
        return clock

    def _advances(self, plan: OperatorPlan, clock: _QueryClock) -> bool:
        """Whether an operator's own watermark is later after the last batch than it was in that batch."""
        if not plan.no_data_rule.own_watermark or not clock.has_no_data_batches:
            return False
        query = clock.query
        next_task = TaskId(str(query.id), str(query.runId), plan.uid, plan.instance, clock.last_batch + 1, -1, -1)
        return self._coordinator(next_task).watermark_advances(plan.uid, clock.last_batch)


# ---- A clock that was added or removed since the last start ----
#
# Spark compares the number of sources with that in its offset log, and numbers the sources by their order in the plan.
# Without a fix, a query whose clock was added or removed could not continue, although a clock has no rows to lose.


_ASIDE: Final = "statelog-replaced"
"""Folder for copies of the files that are replaced; Spark ignores folders whose names it does not know."""


def fit_clock_offsets(spark: SparkCheckpoint, are_clocks: Sequence[bool]) -> list[int]:
    """Add the clock's offsets to Spark's offset log, or remove them; to be called before Spark reads the log.

    `are_clocks` says for each source of the query, in order, whether it is the clock. Returns the batches whose entries
    were replaced, which are the last two at most: Spark reads no others at a start. The old entries are copied first,
    and an interrupted call is completed by the next one. Nothing changes if clocks are before other sources, since
    these would get other numbers, or if other sources differ.

    Raises ConfigurationError for an unknown format of the log, and StorageError if it cannot be read or written.
    """
    _complete(spark)
    replaced: list[int] = []
    clock_id = ""
    for batch in spark.batches(OFFSETS)[-2:]:
        name = f"{OFFSETS}/{batch}"
        data = spark.files.read(name)
        entry = BatchOffsets.parse(data.decode(), f"{spark.location}/{name}")
        clock_id = clock_id or next(iter(entry.clocks), "") or secrets.token_hex(8)
        fitted = entry.with_clocks(are_clocks, clock_id)
        if fitted is None:
            continue
        spark.files.write(f"{_ASIDE}/{name}", data)
        spark.files.write(name, fitted.encode())
        _keep_copy(spark, name)
        replaced.append(batch)
    if replaced:
        change = "added to" if any(are_clocks) else "removed from"
        _log.info("%s: the clock source was %s the offsets of batches %s", spark.location, change, replaced)
    return replaced


def _complete(spark: SparkCheckpoint) -> None:
    """Complete replacements that a crash has interrupted: where files cannot be replaced in one step, one may be lost.

    A lost entry is the one that Spark would continue from, or the one before. If the batch before no longer has a
    commit, the query was set back since, and the entry is not missing.
    """
    for copy in spark.files.list(f"{_ASIDE}/{OFFSETS}"):
        batch = copy.rpartition("/")[2]
        if not batch.isdecimal():
            continue
        name = f"{OFFSETS}/{batch}"
        is_lost = if_present(partial(spark.files.read, name)) is None
        if is_lost and (batch == "0" or int(batch) - 1 in spark.batches(COMMITS)):
            spark.files.write(name, spark.files.read(copy))
        _keep_copy(spark, name)


def _keep_copy(spark: SparkCheckpoint, name: str) -> None:
    """Rename the copy of a replaced entry, so that it no longer counts as a replacement in progress."""
    copy = f"{_ASIDE}/{name}"
    spark.files.move(copy, f"{copy}-{secrets.token_hex(4)}")
