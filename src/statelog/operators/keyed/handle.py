"""The handle that a processor's ``init`` gets on a task: the states declared on the driver, and the timers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Final

from statelog.errors import ErrorKind, ProcessorError
from statelog.numbers import Duration
from statelog.operators.keyed.collections import ListState, MapState, make_row_state
from statelog.operators.keyed.columns import Arrivals, Expire
from statelog.operators.keyed.cursor import Row
from statelog.operators.keyed.operator import KeyedOperator
from statelog.operators.keyed.time_columns import TimeColumns
from statelog.operators.keyed.timers import Timers
from statelog.operators.keyed.values import AggregateFunction, AggregatingState, ReadyMade, ReducingState, ValueState
from statelog.runs.schema import StateKind
from statelog.runs.times import Ttl

_NAMES: Final = {
    StateKind.VALUE: "ValueState",
    StateKind.LIST: "ListState",
    StateKind.MAP: "MapState",
    StateKind.REDUCING: "ReducingState",
    StateKind.AGGREGATING: "AggregatingState",
    StateKind.TIMER: "arrivals",
}


class ProcessorHandle:
    """Spark's StatefulProcessorHandle, with Flink's kinds of state as well.

    `states` has the handles of the operator's states by name; `timers` is None if the time mode has none. Windows that
    end at `closed_ms` or before were closed by starts with other settings.
    """

    def __init__(
        self,
        operator: KeyedOperator,
        states: MutableMapping[str, Any],
        timers: Any,  # Timers, or their columns
        closed_ms: int,
    ) -> None:
        self.late_rows = 0
        """Number of rows that were too late for the processor."""
        self.closed_ms = closed_ms
        self.declares_by_key = False
        """Whether a processor of columns declares states that it uses key by key."""
        self._states = states
        self.timers = timers
        """Their columns, if the processor takes columns."""
        self._uid = operator.uid
        self._deleted = operator.deleted_states
        self._kinds = {binding.name: binding.descriptor.kind for binding in (*operator.states, *operator.batch_states)}
        self._is_initialized = False

    def end_init(self) -> None:
        """Note that ``init`` has returned: states cannot be deleted any more."""
        self._is_initialized = True

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: Duration | Ttl | None = None) -> ValueState:
        """The value state of this name."""
        state: ValueState = self._declared(stateName, StateKind.VALUE)
        return state

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: Duration | Ttl | None = None) -> ListState:
        """The list state of this name."""
        state: ListState = self._declared(stateName, StateKind.LIST)
        return state

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: Duration | Ttl | None = None
    ) -> MapState:
        """The map state of this name."""
        state: MapState = self._declared(stateName, StateKind.MAP)
        return state

    def getReducingState(
        self,
        stateName: str,
        schema: Any,
        reduce_function: Callable[[Row, Row], Row] | ReadyMade,
        ttlDurationMs: Duration | Ttl | None = None,
    ) -> ReducingState:
        """The reducing state of this name."""
        state: ReducingState = self._declared(stateName, StateKind.REDUCING)
        state.bind(reduce_function)
        return state

    def getAggregatingState(
        self,
        stateName: str,
        accumulator_schema: Any,
        aggregate_function: AggregateFunction[Any, Any] | ReadyMade,
        ttlDurationMs: Duration | Ttl | None = None,
    ) -> AggregatingState:
        """The aggregating state of this name."""
        state: AggregatingState = self._declared(stateName, StateKind.AGGREGATING)
        state.bind(aggregate_function)
        return state

    def getTimeColumns(self, stateName: str, userKeySchema: Any, valueSchema: Any) -> TimeColumns:
        """The map state of this name by time, as columns; its map keys have one field, a long, or also an ordinal."""
        self._declared(stateName, StateKind.MAP)
        columns: TimeColumns = self._used_as(stateName, TimeColumns)
        return columns

    def getArrivals(self, stateName: str, limit_ms: int, expire: Expire) -> Arrivals:
        """The arrivals of this name, as columns: times of the processor's own, of which each has the same limit."""
        found: Arrivals = self._declared(stateName, StateKind.TIMER)
        found.bind(limit_ms, expire)
        return found

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Request a call of handleExpiredTimer for the current key; the same time requested twice is one timer."""
        self._require_timers("registerTimer").register(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Delete a timer of the current key; nothing happens if there is none."""
        self._require_timers("deleteTimer").delete(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """The times of the current key's timers, ascending."""
        return self._require_timers("listTimers").list()

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a state's values; allowed in ``init`` only.

        On a task this changes nothing: the query has deleted them at its start, or the batch begins without them.
        """
        if self._is_initialized:
            raise ProcessorError(
                f"deleteIfExists('{stateName}') was called after init().",
                kind=ErrorKind.STATE_USAGE,
                hint="Declare and delete states in init() only.",
            )

    def countLateRows(self, rows: int) -> None:
        """Count rows as late, whether the processor drops them or not."""
        self.late_rows += rows

    def _require_timers(self, method: str) -> Timers:
        if self.timers is None:
            raise ProcessorError(
                f"{method}() was called, but the operator's timeMode is None.",
                kind=ErrorKind.STATE_USAGE,
                hint="Use timeMode='ProcessingTime' or 'EventTime'.",
            )
        found: Timers = self.timers
        return found

    def _used_as(self, name: str, kind: Callable[..., Any]) -> Any:
        state = self._states[name] = self._states[name].used_as(kind)
        state.open()
        return state

    def _declared(self, name: str, kind: StateKind) -> Any:
        if name in self._deleted:
            return self._deleted[name]
        if self._kinds.get(name) is not kind:
            raise ProcessorError(
                f"operator '{self._uid}': init() asks for {_NAMES[kind]} '{name}' on a task, but did not"
                " declare it as such when the query was built.",
                kind=ErrorKind.STATE_USAGE,
                hint="Declare the same states in every call of init(), and only there.",
            )
        return self._used_as(name, make_row_state) if self.declares_by_key else self._states[name]
