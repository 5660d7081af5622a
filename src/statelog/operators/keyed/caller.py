"""Calls a processor on key chunks: the base of the two ways, by rows and by columns; and counts its hottest keys."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.errors import CorruptionError, ProcessorError, StorageError
from statelog.operators.keyed.changes import BatchChanges, ListPosition
from statelog.operators.keyed.columns import Arrivals
from statelog.operators.keyed.cursor import KeyCursor
from statelog.operators.keyed.operator import BatchContext, KeyedOperator, KeyedRows
from statelog.runs.key_groups import GROUP_SHIFT, Hashes
from statelog.runs.schema import TimeDomain
from statelog.shown import shown_key
from statelog.stopwatch import Part, Stopwatch
from statelog.tables.runs import RunsTable
from statelog.tables.table import KeyBatch, StateTable, TimerRows

_NO_KEYS: Final = KeyBatch(np.zeros(0, np.uint64), pa.array([], pa.binary()))


class Caller(ABC):
    """Calls the processor of a subtask, with the states and timers of its key chunks.

    The methods yield output rows as soon as they make a chunk, and a batch after every key chunk, if necessary without
    rows, so that changes can be taken. They raise ProcessorError if the processor raises, or returns values or rows
    that do not fit their schemas.
    """

    states: MutableMapping[str, Any]
    """The handles of the states, by declared name."""
    timers: Any
    """The handle of the timers; None if there are none."""
    arrivals: Arrivals | None = None
    """The handle of the arrivals, which only processors of columns have."""

    def __init__(
        self, operator: KeyedOperator, table: StateTable, context: BatchContext, stopwatch: Stopwatch, most_keys: int
    ) -> None:
        budget = operator.budget
        self.changes = BatchChanges(table, budget)
        self.hot_keys = HotKeys()
        self._operator = operator
        self._context = context
        self._budget = budget
        self._stopwatch = stopwatch
        # Changes of the states that live for one batch: later phases read them, and they are never stored.
        self._batch_changes = BatchChanges(RunsTable(budget=budget), budget)
        self._cursor = KeyCursor(
            table, ListPosition(context.epoch, context.batch), _NO_KEYS, context.moment, budget=budget
        )
        self._cursor.batch_table = self._batch_changes.table
        self._cursor.batch_states = frozenset(binding.descriptor.name for binding in operator.batch_states)
        self._most_keys = most_keys
        self._bindings = [*operator.states, *operator.batch_states]
        self._chunk_keys = self._fitting_keys()
        self._needs_event_ms = operator.event_time is not None and any(
            binding.ttl is not None and binding.ttl.domain is TimeDomain.EVENT for binding in self._bindings
        )

    @abstractmethod
    def load_initial_state(self, read: KeyedRows) -> Iterator[pa.RecordBatch]:
        """Give the processor the rows of the initial state."""

    @abstractmethod
    def process(self, read: KeyedRows) -> Iterator[pa.RecordBatch]:
        """Give the processor rows, by key."""

    @abstractmethod
    def fire(self, due: TimerRows) -> Iterator[pa.RecordBatch]:
        """Give the processor the due timers, and delete them."""

    def expire(self, due: TimerRows) -> Iterator[pa.RecordBatch]:
        """Give the processor the arrivals whose limit is over, and delete them."""
        raise AssertionError("only processors of columns have arrivals")

    def begin_phase(self) -> None:
        """Let the next phase read the changes so far."""
        self.changes.begin_phase()
        self._cursor.table = self.changes.table
        self._batch_changes.begin_phase()
        self._cursor.batch_table = self._batch_changes.table
        self._cursor.list_position = replace(self._cursor.list_position, phase=self.changes.phase)

    def call(self, name: str, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method of the processor that does not concern a key."""
        try:
            method(*arguments)
        except Exception as error:
            raise self.failure(error, name) from error

    def failure(self, error: Exception, method: str, key: object = None) -> ProcessorError:
        """The error of a call, with the operator, the method and the key."""
        if isinstance(error, CorruptionError | StorageError):
            raise error  # an error of the state, not of the processor
        where = f"operator '{self._operator.uid}': {method}() failed"
        if key is not None:
            where += f" for key {shown_key(key)}"
        if isinstance(error, ProcessorError):
            return ProcessorError(f"{where}: {error.message}", kind=error.kind, hint=error.hint)
        return ProcessorError(
            f"{where}: {type(error).__name__}: {error}.",
            hint="The traceback of the cause shows the line of the processor. Nothing from this batch was kept;"
            " start the query again when the code is fixed.",
        )

    # ---- Key chunks ----

    def _open_keys(self, chunk_keys: KeyBatch, describe: Callable[[int], str]) -> None:
        self._cursor.keys = chunk_keys
        self._cursor.event_ms = None
        self._cursor.loaded_bytes, self._cursor.counts = 0, {}
        self.changes.buffer.describe_key = describe
        self._batch_changes.buffer.describe_key = describe

    def open_states(self) -> None:
        """Forget everything that the states have read and written."""
        for state in self.states.values():
            state.open()
        if self.timers is not None:
            self.timers.open()

    def flush(self) -> None:
        """Make changes of the states' writes, which ends the key chunk."""
        self._cursor.position = -1
        with operator_named(self._operator.uid), self._stopwatch.counting(Part.ENCODE):
            before_bytes = self.changes.buffer.unstored_bytes
            for binding in self._operator.states:
                self.states[binding.name].flush(self.changes.buffer)
            for binding in self._operator.batch_states:
                self.states[binding.name].flush(self._batch_changes.buffer)
            if self.timers is not None:
                self.timers.flush(self.changes.buffer)
            self.open_states()  # forgets everything read and written
        used_bytes = self._cursor.loaded_bytes + self.changes.buffer.unstored_bytes - before_bytes
        self._chunk_keys = self._fitting_keys(used_bytes // max(1, len(self._cursor.keys)))

    def _fitting_keys(self, key_bytes: int = 0) -> int:
        """Number of keys that the next chunk may have; `key_bytes` is the size of a key in the last one."""
        table = self.changes.table
        single = [binding.descriptor for binding in self._operator.states if not binding.descriptor.kind.has_entries]
        key_bytes = max(key_bytes, sum([table.mean_bytes(state) for state in single]))
        return min(self._most_keys, max(1, self._budget.slice_bytes // max(1, key_bytes)))


@contextmanager
def operator_named(uid: str) -> Iterator[None]:
    """Add the operator's name to errors of encoding."""
    try:
        yield
    except ProcessorError as error:
        raise ProcessorError(f"operator '{uid}': {error.message}", kind=error.kind, hint=error.hint) from error


MOST: Final = 10
"""Number of keys, and of key groups, that a subtask reports."""
_MOST_KEY_BYTES: Final = 1024
"""Longer keys are counted, but not reported."""
_FEW_ROWS: Final = 4096
"""With fewer rows, sorting them takes less time than counting all key groups."""

_Counts = npt.NDArray[np.int64]


@dataclass
class HotKeys:
    """The keys with the most input rows so far, of keys that come once each; exact."""

    found: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Rows, key group and key, the most rows first; keys with one row are not hot."""

    def note(self, keys: KeyBatch, rows: _Counts) -> None:
        """Note some keys and their numbers of rows, shape (keys,)."""
        places = _hottest(rows)
        found = keys.take(places)
        hottest = zip(rows[places].tolist(), found.hashes.tolist(), found.keys.to_pylist(), strict=True)
        told = [
            (count, hashed >> GROUP_SHIFT, key if len(key) <= _MOST_KEY_BYTES else b"")
            for count, hashed, key in hottest
        ]
        self.found = heapq.nlargest(MOST, [*self.found, *told])


def hot_key_groups(hashes: Hashes) -> list[tuple[int, int]]:
    """Rows and key group of the groups with the most rows, the most first; groups with one row are not hot."""
    groups = (hashes >> np.uint64(GROUP_SHIFT)).astype(np.int64)
    if len(groups) < _FEW_ROWS:
        present, rows = np.unique(groups, return_counts=True)
    else:
        rows = np.bincount(groups)
        present = np.arange(len(rows))
    places = _hottest(rows)
    return sorted(zip(rows[places].tolist(), present[places].tolist(), strict=True), reverse=True)


def _hottest(rows: _Counts) -> _Counts:
    """The ascending places of the largest numbers of rows, without single rows."""
    places = np.flatnonzero(rows > 1)
    if len(places) > MOST:
        places = np.sort(places[np.argpartition(rows[places], -MOST)[-MOST:]])
    return places
