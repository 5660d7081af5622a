"""The driver's answers to the clock sources: does a query need a batch although it has no new rows?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pyspark.sql.streaming.query import StreamingQuery

from statelog.checkpoint.batch import BatchTime
from statelog.checkpoint.coordinator import Coordinator
from statelog.checkpoint.protocol import TaskId, Tick
from statelog.clock import Clock
from statelog.spark import internals
from statelog.spark.no_data import IdleTime, QueryProgress, needs_batch
from statelog.spark.operator_plan import OperatorPlan

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

    Spark waits 10 seconds until a new process connects, and has no setting for it. If many started at once, they would
    keep each other from the processor for longer.
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
