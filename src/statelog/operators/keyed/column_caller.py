"""Calls a processor once per key chunk, with columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.numbers import US_PER_MS
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.caller import Caller
from statelog.operators.keyed.columns import Arrivals, Expire, TimerColumns, make_state
from statelog.operators.keyed.indexing import IndexedRows, index_rows
from statelog.operators.keyed.operator import BatchContext, KeyedInput, KeyedOperator, KeyedRows
from statelog.operators.keyed.timers import timer_descriptor
from statelog.runs.byte_slices import Positions, cut_rows, to_batches
from statelog.runs.key_columns import differs_from_previous
from statelog.runs.schema import StateKind
from statelog.runs.times import NO_TIME_MS, Moment
from statelog.shown import shown_key
from statelog.stopwatch import Stopwatch
from statelog.tables.table import EntryCounts, KeyBatch, StateTable, TimerRows

Counts = dict[str, EntryCounts]
"""What the entries of some keys take, by the stored name of the state."""


@dataclass(frozen=True)
class DueTimers:
    """Timers that are due, by key and then by time."""

    keys: KeyBatch
    """The distinct keys."""
    key_index: Positions
    """The position of each timer's key."""
    times_ms: npt.NDArray[np.int64]


class KeyFailure(Exception):
    """An error in a function that a processor calls for one key."""

    def __init__(self, method: str, key: object, error: Exception) -> None:
        super().__init__(method, key)
        self.method = method
        self.key = key
        self.error = error


class ColumnProcessor(Protocol):
    """The methods that a subtask calls with columns.

    A chunk has distinct keys; the states and timers that ``init`` got from its handle are those of the chunk's keys.
    """

    def init(self, handle: Any) -> None: ...

    def reduce(self, rows: IndexedRows) -> IndexedRows:
        """The rows, or fewer that suffice for :meth:`process`; called before they are cut into chunks."""

    def process(self, chunk: IndexedRows, moment: Moment) -> Iterable[pa.RecordBatch]:
        """Take the rows of some keys; returns output rows."""

    def fire(self, due: DueTimers, moment: Moment) -> Iterable[pa.RecordBatch]:
        """Take the due timers of some keys, which are deleted; returns output rows."""

    def load_initial_state(self, chunk: IndexedRows, moment: Moment) -> Iterable[pa.RecordBatch]:
        """Take the rows of the initial state; returns nothing."""

    def close(self) -> None: ...


class ColumnCaller(Caller):
    """Calls the processor once for all keys of a chunk."""

    timers: TimerColumns | None

    def __init__(self, operator: KeyedOperator, table: StateTable, context: BatchContext, stopwatch: Stopwatch) -> None:
        super().__init__(
            operator,
            table,
            context,
            stopwatch,
            operator.budget.window_keys if operator.makes_objects else operator.budget.column_keys,
        )
        self._processor: ColumnProcessor = operator.processor
        self.states = {binding.name: make_state(self._cursor, binding) for binding in self._bindings}
        domain = operator.timer_domain
        self.timers = None if domain is None else TimerColumns(self._cursor, timer_descriptor(domain))
        self.arrivals = next((state for state in self.states.values() if isinstance(state, Arrivals)), None)
        self.open_states()

    def load_initial_state(self, read: KeyedRows) -> Iterator[pa.RecordBatch]:
        operator, moment = self._operator, self._context.moment
        assert operator.initial is not None
        for chunk, counts in self._chunks(read, operator.initial):
            self._open(chunk.keys, counts)
            yield from self._outputs("handleInitialState", partial(self._processor.load_initial_state, chunk, moment))

    def process(self, read: KeyedRows) -> Iterator[pa.RecordBatch]:
        for chunk, counts in self._chunks(read, self._operator.input):
            self._open(chunk.keys, counts)
            self._cursor.event_ms = chunk.newest_ms
            yield from self._outputs("process", partial(self._processor.process, chunk, self._context.moment))

    def fire(self, due: TimerRows) -> Iterator[pa.RecordBatch]:
        assert self.timers is not None
        yield from self._fire(due, self.timers, "fire", self._processor.fire)

    def expire(self, due: TimerRows) -> Iterator[pa.RecordBatch]:
        assert self.arrivals is not None
        yield from self._fire(due, self.arrivals, "expire", self.arrivals.expire)

    def _fire(self, due: TimerRows, held: TimerColumns, name: str, method: Expire) -> Iterator[pa.RecordBatch]:
        """Call a method with due timers, key chunk by key chunk, and delete them."""
        starts = np.append(np.flatnonzero(differs_from_previous(due.keys.keys)), len(due.keys))
        found = due.keys.take(starts[:-1])
        counts = self._entry_counts(found)
        ends = np.cumsum(np.append(0, _size_bytes(counts, len(found))))
        first = 0
        while first < len(found):
            end = int(np.searchsorted(ends, ends[first] + self._budget.slice_bytes, "right")) - 1
            end = max(first + 1, min(end, first + self._chunk_keys, len(found)))
            keys, times_ms = found.slice(first, end), due.times_ms[starts[first] : starts[end]]
            key_index = np.repeat(np.arange(end - first), np.diff(starts[first : end + 1]))
            timers = DueTimers(KeyBatch(keys.hashes, keys.keys.cast(pa.binary())), key_index, times_ms)
            self._open(timers.keys, _part(counts, first, end))
            if self._needs_event_ms:
                self._cursor.event_ms = np.maximum.reduceat(times_ms, starts[first:end] - starts[first])
            self._cursor.position = 0
            held.delete(timers.key_index, times_ms)
            yield from self._outputs(name, partial(method, timers, self._context.moment))
            first = end

    def _chunks(self, read: KeyedRows, source: KeyedInput) -> Iterator[tuple[IndexedRows, Counts]]:
        budget = self._budget
        for whole in index_rows(to_batches(read.rows), read.hashes, source.key_columns, budget):
            if source is self._operator.input:
                self.hot_keys.note(whole.keys, np.bincount(whole.key_index, minlength=len(whole.keys)))
                if self._operator.event_time is not None:
                    whole = replace(whole, newest_ms=_newest_ms(whole, self._operator.event_time))
                whole = self._reduced(whole)
            counts, start = self._entry_counts(whole.keys), 0
            sizes = _size_bytes(counts, len(whole.keys)) if counts else None
            for chunk in whole.cut(lambda: self._chunk_keys, budget.slice_bytes, sizes):
                yield chunk, _part(counts, start, start + len(chunk.keys))
                start += len(chunk.keys)

    def _entry_counts(self, keys: KeyBatch) -> Counts:
        """What the entries of keys take in each list and map."""
        table, states = self.changes.table, [binding.descriptor for binding in self._operator.states]
        counted = [state for state in states if state.kind.has_entries and state.kind is not StateKind.TIMER]
        return {state.name: table.count_entries(state, keys) for state in counted}

    def _reduced(self, whole: IndexedRows) -> IndexedRows:
        try:
            return self._processor.reduce(whole)
        except Exception as error:
            raise self.failure(error, "process") from error

    def _open(self, keys: KeyBatch, counts: Counts) -> None:
        decode = self._operator.decode_keys
        self._open_keys(keys, lambda position: shown_key(tuple(decode([keys.keys[position].as_py()])[0])))
        self._cursor.counts = counts

    def _outputs(self, method: str, call: Callable[[], Iterable[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """Make one call of the processor, and yield its output, at least one batch; the last comes after the flush."""
        last = self._operator.output.encode([], str)
        self._cursor.position = 0
        try:
            for rows in self._returned(method, call):
                if last.num_rows:
                    yield last
                last = rows
            self.flush()
        finally:
            self._cursor.position = -1
        yield last

    def _returned(self, method: str, call: Callable[[], Iterable[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        output_event_time = self._operator.output_event_time
        try:
            for rows in call():
                if output_event_time is not None:
                    output_event_time.require_on_time(rows, self._context.moment.late_watermark_ms)
                yield from cut_rows(rows, self._budget.slice_bytes)
        except KeyFailure as failure:
            raise self.failure(failure.error, failure.method, failure.key) from failure.error
        except Exception as error:
            raise self.failure(error, method) from error


def _size_bytes(counts: Counts, keys: int) -> npt.NDArray[np.int64]:
    """The size of each key's entries."""
    return sum((of_state.size_bytes for of_state in counts.values()), np.zeros(keys, np.int64))


def _part(counts: Counts, start: int, end: int) -> Counts:
    return {name: of_state.slice(start, end) for name, of_state in counts.items()}


def _newest_ms(chunk: IndexedRows, event_time: EventTime) -> npt.NDArray[np.int64]:
    """The newest event time of each key's rows; ``NO_TIME_MS`` for a key without any."""
    times_us = [event_time.times_us(rows).fill_null(NO_TIME_MS).to_numpy() for rows in chunk.rows]
    newest = np.full(len(chunk.keys), NO_TIME_MS)
    np.maximum.at(newest, chunk.key_index, np.concatenate(times_us))
    return np.where(newest == NO_TIME_MS, newest, newest // US_PER_MS)
