"""Reads the state of a keyed operator at its newest checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statelog.convert.input import RowInput
from statelog.convert.times import TimeMode
from statelog.errors import ConfigurationError, ErrorKind
from statelog.history.operator_history import History
from statelog.local.restore import restore_runs
from statelog.local.runs import LocalRuns
from statelog.operators.keyed.grouping import KeyChunk
from statelog.operators.keyed.handle import ProcessorHandle
from statelog.operators.keyed.operator import BatchContext, InputCodec, KeyedInput, KeyedOperator, KeyedRows
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.runs import digests
from statelog.runs.key_groups import hash_range
from statelog.runs.merge import Garbage
from statelog.runs.schema import StateKind
from statelog.runs.times import Moment
from statelog.spark.plan.states import KeyedStateDeclaration
from statelog.stopwatch import Stopwatch
from statelog.storage import LocalStore
from statelog.tables.memory import MemoryTable
from statelog.tables.runs import RunsTable
from statelog.tables.table import StateTable
from statelog.tasks.keyed_task import as_stored
from statelog.testing.query import LocalQuery, MicroBatches

_LARGEST_VIEW_RUNS: Final = 8
_UNUSED: Final[Any] = None
"""Replaces the processor's function where accumulators are only read."""
_T = TypeVar("_T")
_Row = tuple[Any, ...]


@dataclass(frozen=True)
class StateView:
    """The states and timers of a query's operator, by key."""

    make: Callable[[], KeyedOperator]
    """Makes the operator."""
    states: Mapping[str, KeyedStateDeclaration]
    time_mode: TimeMode
    batches: MicroBatches
    row_of: Callable[[Any], KeyedRows]
    """Makes a row with a key."""

    def value(self, name: str, key: Any) -> _Row | None:
        """A value, or an accumulator; None if the key has none."""
        kind = self._kind(name, StateKind.VALUE, StateKind.REDUCING, StateKind.AGGREGATING)

        def look(handle: ProcessorHandle) -> _Row | None:
            if kind is StateKind.VALUE:
                return handle.getValueState(name, None).get()
            if kind is StateKind.REDUCING:
                return handle.getReducingState(name, None, _UNUSED).get()
            return handle.getAggregatingState(name, None, _UNUSED).getAccumulator()

        return self.look(key, look)

    def elements(self, name: str, key: Any) -> list[_Row]:
        """The elements of a list."""
        self._kind(name, StateKind.LIST)
        return self.look(key, lambda handle: list(handle.getListState(name, None).get()))

    def entries(self, name: str, key: Any) -> dict[_Row, _Row]:
        """The entries of a map."""
        self._kind(name, StateKind.MAP)
        return self.look(key, lambda handle: dict(handle.getMapState(name, None, None).iterator()))

    def timers(self, key: Any) -> list[int]:
        """The times of the timers, in order."""
        if self.time_mode is TimeMode.NONE:
            raise ConfigurationError("timers: the operator has none, because its timeMode is None.")
        return self.look(key, lambda handle: sorted(handle.listTimers()))

    def look(self, key: Any, look: Callable[[ProcessorHandle], _T]) -> _T:
        """Read a key's state with a function, as a subtask on a new host would: at the newest checkpoint and its times.

        The function gets the processor's handle.
        """
        processor, row = _Look(look), self.row_of(key)
        query, history, made = self.batches.query, self.batches.history(), self.make()
        moment = Moment(0, 0)
        if (latest := history.latest) is not None:
            moment = Moment(latest.batch_time_ms, latest.watermark_ms)
            expires_by = {state.name: state.expires_by for state in latest.states if state.expires_by}
            made = as_stored(made, latest.generations, expires_by)
        keys = KeyedInput(made.input.key_columns, _KeysOnly(made.input.codec or RowInput([])))
        states = [state for state in made.states if state.descriptor.kind is not StateKind.TIMER]
        keyed = replace(made, processor=processor, input=keys, states=states, event_time=None, takes_columns=False)
        table, stopwatch = _table(query, history, moment), Stopwatch(query.clock)
        subtask = KeyedSubtask(keyed, table, BatchContext(0, 0, moment), stopwatch)
        for _ in subtask.process(row):
            pass
        seen: _T = processor.seen
        return seen

    def _kind(self, name: str, *kinds: StateKind) -> StateKind:
        declared = self.states.get(name)
        if declared is None or declared.kind not in kinds:
            states = ", ".join(f"{state.kind} state '{state.name}'" for state in self.states.values())
            raise ConfigurationError(
                f"There is no {' or '.join(kinds)} state '{name}'.",
                kind=ErrorKind.STATE_USAGE,
                hint=f"The processor declares: {states or 'nothing'}.",
            )
        return declared.kind


class _Look(StatefulProcessor):
    """A processor that only looks at its handle, for one key."""

    def __init__(self, look: Callable[[ProcessorHandle], Any]) -> None:
        self.seen: Any = None
        self._look = look

    def init(self, handle: Any) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self.seen = self._look(self._handle)
        return iter(())

    def close(self) -> None:
        pass


class _KeysOnly:
    """An input codec with keys and no rows, because only the state of a key is read."""

    def __init__(self, codec: InputCodec) -> None:
        self.keys = codec.keys

    def by_key(self, window: KeyChunk) -> list[Iterator[Any]]:
        return [iter(()) for _ in range(len(window.keys))]


def _table(query: LocalQuery, history: History, moment: Moment) -> StateTable:
    latest = history.latest
    if latest is None:
        return RunsTable()
    last = latest.batch
    genesis = digests.genesis(latest.identity, 0, 1)
    directory = query.directory / "view"
    local = LocalRuns(directory)
    if len(local.local_runs()) > _LARGEST_VIEW_RUNS:
        shutil.rmtree(directory)
    found = restore_runs(
        local,
        genesis=genesis,
        head=history.digest(genesis, 0, 1, last),
        last_batch=last,
        within=hash_range(0, 1),
        garbage=Garbage(moment, latest.generations),
        fetch=lambda known: history.missing_segments(genesis, 0, 1, last, set(known)),
        open_store=lambda: LocalStore(query.location),
        token="view",
    )
    runs = [run for _, run in found]
    if query.options.table != "memory":
        return RunsTable(runs)
    table = MemoryTable()
    table.apply(runs)
    return table
