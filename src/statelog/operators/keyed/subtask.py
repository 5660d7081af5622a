"""Runs one batch of one subtask: rows in, calls of the processor, rows and changes out. No Spark here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from statelog.clock import Clock
from statelog.errors import CorruptionError, ProcessorError, StorageError
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.changes import BatchChanges, ListPosition
from statelog.operators.keyed.collections import ListState, MapState
from statelog.operators.keyed.cursor import KeyCursor
from statelog.operators.keyed.grouping import KeyChunk, key_chunks
from statelog.operators.keyed.handle import ProcessorHandle
from statelog.operators.keyed.operator import KeyedInput, KeyedOperator, StateBinding
from statelog.operators.keyed.outputs import Outputs, rare_garbage_collection
from statelog.operators.keyed.timers import Timers, key_stretches
from statelog.operators.keyed.values import AggregatingState, KeyedState, ReducingState, ValueState
from statelog.runs.byte_slices import to_batches
from statelog.runs.key_groups import Hashes
from statelog.runs.keys import differs_from_previous
from statelog.runs.schema import StateKind, TimeDomain
from statelog.runs.times import NO_TIME_MS, Moment
from statelog.tables.runs import RunsTable
from statelog.tables.table import KeyBatch, StateTable, TimerRows

_NO_KEYS: Final = KeyBatch(np.zeros(0, np.uint64), pa.array([], pa.binary()))

_WITHOUT_MAP_KEYS: Final[dict[StateKind, type[ValueState | ReducingState | AggregatingState | ListState]]] = {
    StateKind.VALUE: ValueState,
    StateKind.REDUCING: ReducingState,
    StateKind.AGGREGATING: AggregatingState,
    StateKind.LIST: ListState,
}

Key = tuple[Any, ...]


@dataclass(frozen=True)
class BatchContext:
    """The number and the times of a batch."""

    epoch: int
    batch: int
    """Spark's batch id."""
    moment: Moment
    timers_after_ms: int = NO_TIME_MS
    """No timer up to this time is left to fire."""
    closed_ms: int = NO_TIME_MS
    """Windows that end at this time or before were closed by starts with other settings."""


@dataclass(frozen=True)
class KeyedRows:
    """Rows and their key hashes."""

    rows: pa.RecordBatch | pa.Table
    """In order of arrival; without columns if there are no rows."""
    hashes: Hashes
    """One for each row."""


class KeyedSubtask:
    """Runs a processor over one batch of one subtask.

    The order of calls is :meth:`process` once, consumed to its end; then the attributes hold the results. A batch has
    up to three phases: the rows of the initial state, the rows of the stream, and the due timers. Each reads the
    changes of the one before.
    """

    def __init__(self, operator: KeyedOperator, table: StateTable, context: BatchContext, clock: Clock) -> None:
        budget = operator.budget
        self.changes = BatchChanges(table, budget)
        self._budget = budget
        self.flush_s = 0.0
        """Time spent so far on making changes of the processor's writes."""
        self.late_rows = 0
        """Rows that were dropped as late, or that the processor counted as late."""
        self.max_event_ms: list[int | None] = []
        """The largest event time of each tracked input."""
        self.timers_to_ms = NO_TIME_MS
        """After the batch, no timer up to this time is left to fire."""
        self._clock = clock
        self._operator = operator
        self._context = context
        # Changes of the states that live for one batch: later phases read them, and they are never stored.
        self._batch_changes = BatchChanges(RunsTable(budget=budget), budget)
        self._cursor = KeyCursor(
            table, ListPosition(context.epoch, context.batch), _NO_KEYS, context.moment, budget=budget
        )
        self._cursor.batch_table = self._batch_changes.table
        self._cursor.batch_states = frozenset(binding.descriptor.name for binding in operator.batch_states)
        self._window_keys = self._fitting_keys()
        self._outputs = Outputs(operator.output, budget)
        bindings = [*operator.states, *operator.batch_states]
        self._states = {binding.name: _make_state(self._cursor, binding) for binding in bindings}
        self._timers = None if operator.timer_domain is None else Timers(self._cursor, operator.timer_domain)
        self._open_states()
        self._timer_values = operator.timer_values(context.moment)
        self._needs_event_ms = operator.event_time is not None and any(
            binding.ttl is not None and binding.ttl.domain is TimeDomain.EVENT for binding in bindings
        )

    def process(self, read: KeyedRows, initial: KeyedRows | None = None) -> Iterator[pa.RecordBatch]:
        """Call the processor for every key of the batch, with all of the key's rows, and for every due timer.

        Yields output rows as soon as they make a chunk, and a batch after every key chunk, if need be without rows, so
        that the caller can take changes. Raises ProcessorError if the processor raises, or returns values or rows that
        do not fit their schemas.
        """
        operator = self._operator
        handle = ProcessorHandle(
            self._states, self._timers, operator.uid, self._context.closed_ms, operator.deleted_states
        )
        self._call("init", operator.processor.init, handle)
        handle.end_init()
        if initial is not None and initial.rows.num_rows:
            assert operator.initial is not None
            for window in self._windows(initial, operator.initial):
                yield self._load_initial_state(window, operator.initial)
            self._begin_phase()
        read = self._on_time(read)
        if read.rows.num_rows:
            for window in self._windows(read, operator.input):
                yield from self._process_rows(window)
        yield from self._fire_timers()
        self._call("close", operator.processor.close)
        self.late_rows += handle.late_rows

    def _on_time(self, read: KeyedRows) -> KeyedRows:
        event_time = self._operator.event_time
        if event_time is None:
            return read
        batches = to_batches(read.rows)
        largest = [event_time.largest_ms(rows) for rows in batches or [read.rows]]
        self.max_event_ms = [
            max((at for at in of_input if at is not None), default=None) for of_input in zip(*largest, strict=True)
        ]
        if not event_time.drops_late or not read.rows.num_rows:
            return read
        masks = [event_time.on_time(rows, self._context.moment.late_watermark_ms) for rows in batches]
        if all(mask is None for mask in masks):
            return read
        kept = [
            np.ones(len(rows), bool) if mask is None else mask.to_numpy(zero_copy_only=False)
            for rows, mask in zip(batches, masks, strict=True)
        ]
        on_time = np.concatenate(kept)
        self.late_rows = len(on_time) - int(on_time.sum())
        rows = [rows.filter(pa.array(mask)) for rows, mask in zip(batches, kept, strict=True)]
        return KeyedRows(pa.Table.from_batches(rows), read.hashes[on_time])

    def _windows(self, read: KeyedRows, source: KeyedInput) -> Iterator[KeyChunk]:
        def encode_keys(rows: pa.RecordBatch) -> pa.Array:
            return self._operator.key_codec.encode_columns([rows.column(index) for index in source.key_columns])

        batches = to_batches(read.rows)
        return key_chunks(batches, read.hashes, encode_keys, self._budget, lambda: self._window_keys)

    def _begin_phase(self) -> None:
        self.changes.begin_phase()
        self._cursor.table = self.changes.table
        self._batch_changes.begin_phase()
        self._cursor.batch_table = self._batch_changes.table
        self._cursor.list_position = replace(self._cursor.list_position, phase=self.changes.phase)

    # ---- Initial state ----

    def _load_initial_state(self, window: KeyChunk, source: KeyedInput) -> pa.RecordBatch:
        """Call the processor with the rows of some keys; returns a batch without rows, so that changes can be taken."""
        cursor, handle_state = self._cursor, self._operator.processor.handleInitialState
        keys = self._keys_of(window, source)
        self._open(window.keys, keys)
        rows_by_key = self._rows_by_key(window, source, "handleInitialState", keys)
        cursor.position = 0
        try:
            for key, rows in zip(keys, rows_by_key, strict=True):
                for row in rows:
                    handle_state(key, row, self._timer_values)
                cursor.position += 1
        except Exception as error:
            raise self._failure(error, "handleInitialState", self._current(keys)) from error
        self._flush()
        return self._operator.output.encode([], str)

    # ---- Rows ----

    def _process_rows(self, window: KeyChunk) -> Iterator[pa.RecordBatch]:
        operator, cursor, outputs = self._operator, self._cursor, self._outputs
        keys = self._keys_of(window, operator.input)
        self._open(window.keys, keys)
        if self._needs_event_ms:
            assert operator.event_time is not None
            cursor.event_ms = _newest_ms(operator.event_time, window)
        handle_rows, timer_values = operator.processor.handleInputRows, self._timer_values

        def calls(rows_by_key: Iterable[Iterator[Any]]) -> Iterator[Iterable[Any]]:
            taken, note_start = outputs.taken, outputs.starts.append
            cursor.position = 0
            # The hottest loop of all: it holds nothing that could stand outside.
            for key, rows in zip(keys, rows_by_key, strict=True):
                note_start(len(taken))
                yield handle_rows(key, rows, timer_values)
                cursor.position += 1  # now, as an error in reading the next key's rows is the next key's

        read = self._rows_by_key(window, operator.input, "handleInputRows", keys)
        outputs.begin(calls(read), lambda call: f"key {keys[call]!r}", handle_rows)
        yield from self._run_calls("handleInputRows", keys)

    def _rows_by_key(
        self, window: KeyChunk, source: KeyedInput, method: str, keys: list[Key]
    ) -> Iterable[Iterator[Any]]:
        """The rows of each key. An error that concerns the whole chunk names a key only if there is no other."""
        try:
            with rare_garbage_collection():
                return source.codec.by_key(window)
        except Exception as error:
            raise self._failure(error, method, keys[0] if len(keys) == 1 else None) from error

    def _keys_of(self, window: KeyChunk, source: KeyedInput) -> list[Key]:
        firsts = pa.array(window.starts[:-1])
        with _operator_named(self._operator.uid), rare_garbage_collection():
            return source.codec.keys([window.rows.column(index).take(firsts) for index in source.key_columns])

    # ---- Timers ----

    def _fire_timers(self) -> Iterator[pa.RecordBatch]:
        timers, domain = self._timers, self._operator.timer_domain
        if timers is None or domain is None:
            return
        until_ms = self._context.moment.now_ms(domain)
        after_ms, lowest_ms = self._context.timers_after_ms, timers.lowest_ms
        self.timers_to_ms = until_ms
        if lowest_ms is not None:
            after_ms = min(after_ms, lowest_ms - 1)
        elif not len(self.changes.table.due_timers(timers.state, after_ms, until_ms).keys):
            return
        self._begin_phase()
        timers.lowest_ms = None
        due = self.changes.table.due_timers(timers.state, after_ms, until_ms)
        for start, end in key_stretches(due, lambda: self._window_keys):
            yield from self._fire_window(timers, due, start, end)
        if timers.lowest_ms is not None:
            # A timer that was registered during these calls for a time already past fires in the next batch.
            self.timers_to_ms = min(until_ms, timers.lowest_ms - 1)

    def _fire_window(self, timers: Timers, due: TimerRows, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Fire the timers of some keys, in order of their times."""
        operator, cursor, outputs = self._operator, self._cursor, self._outputs
        rows = due.keys.slice(start, end)
        is_first = differs_from_previous(rows.keys)
        firsts = np.flatnonzero(is_first)
        key_of = np.cumsum(is_first) - 1
        found = rows.take(firsts)
        window_keys = KeyBatch(found.hashes, found.keys.cast(pa.binary()))
        with rare_garbage_collection():
            keys = operator.decode_keys(window_keys.keys.to_pylist())
        times = due.times_ms[start:end]
        self._open(window_keys, keys)
        if self._needs_event_ms:
            cursor.event_ms = np.maximum.reduceat(times, firsts).tolist()
        order = np.argsort(times, kind="stable")
        fired: list[int] = []
        fire, timer_values, info = operator.processor.handleExpiredTimer, self._timer_values, operator.expired_timer

        def calls() -> Iterator[Iterable[Any]]:
            for position, time_ms in zip(key_of[order].tolist(), times[order].tolist(), strict=True):
                cursor.position = position
                if timers.was_deleted(time_ms):
                    continue
                fired.append(position)
                outputs.starts.append(len(outputs.taken))
                yield fire(keys[position], timer_values, info(time_ms))
                timers.note_fired(time_ms)

        outputs.begin(calls(), lambda call: f"key {keys[fired[call]]!r}", fire)
        yield from self._run_calls("handleExpiredTimer", keys)

    # ---- Key chunks ----

    def _run_calls(self, method: str, keys: list[Key]) -> Iterator[pa.RecordBatch]:
        """Make the calls that the outputs began with; between two chunks the processor stands still at a yield."""
        outputs, cursor = self._outputs, self._cursor
        has_more = True
        try:
            while has_more:
                with rare_garbage_collection():
                    try:
                        has_more = outputs.take()
                    except Exception as error:
                        raise self._failure(error, method, self._current(keys)) from error
                    if not has_more:
                        self._flush()
                    batches = self._encoded(is_last=not has_more)
                yield from batches
        finally:
            cursor.position = -1  # before generators are closed: they may not use the state any more
            outputs.end()

    def _current(self, keys: list[Key]) -> Key | None:
        """The key that is being processed, for messages; None if none is."""
        position = self._cursor.position
        return keys[position] if 0 <= position < len(keys) else None

    def _open(self, window_keys: KeyBatch, keys: list[Key]) -> None:
        self._cursor.keys = window_keys
        self._cursor.event_ms = None
        self._cursor.loaded_bytes = 0
        self.changes.buffer.describe_key = lambda position: repr(keys[position])
        self._batch_changes.buffer.describe_key = self.changes.buffer.describe_key

    def _open_states(self) -> None:
        for state in self._states.values():
            state.open()
        if self._timers is not None:
            self._timers.open()

    def _flush(self) -> None:
        self._cursor.position = -1
        with _operator_named(self._operator.uid):
            started_s = self._clock.monotonic_s()
            before_bytes = self.changes.buffer.unstored_bytes
            for binding in self._operator.states:
                self._states[binding.name].flush(self.changes.buffer)
            for binding in self._operator.batch_states:
                self._states[binding.name].flush(self._batch_changes.buffer)
            if self._timers is not None:
                self._timers.flush(self.changes.buffer)
            self._open_states()  # forgets everything read and written
            self.flush_s += self._clock.monotonic_s() - started_s
        used_bytes = self._cursor.loaded_bytes + self.changes.buffer.unstored_bytes - before_bytes
        self._window_keys = self._fitting_keys(used_bytes // max(1, len(self._cursor.keys)))

    def _fitting_keys(self, key_bytes: int = 0) -> int:
        """Number of keys that the next chunk may have; `key_bytes` is the size of a key in the last one."""
        table = self.changes.table
        single = [binding.descriptor for binding in self._operator.states if not binding.descriptor.kind.has_entries]
        key_bytes = max(key_bytes, sum([table.mean_bytes(state) for state in single]))
        return min(self._budget.window_keys, max(1, self._budget.slice_bytes // max(1, key_bytes)))

    def _encoded(self, *, is_last: bool) -> list[pa.RecordBatch]:
        with _operator_named(self._operator.uid):
            batches = self._outputs.encoded(is_last=is_last)
            if self._operator.output_event_time is not None:
                for batch in batches:
                    self._operator.output_event_time.require_on_time(batch, self._context.moment.late_watermark_ms)
            return batches

    def _call(self, name: str, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception as error:
            raise self._failure(error, name) from error

    def _failure(self, error: Exception, method: str, key: Key | None = None) -> ProcessorError:
        if isinstance(error, CorruptionError | StorageError):
            raise error  # an error of the state, not of the processor
        where = f"operator '{self._operator.uid}': {method}() failed"
        if key is not None:
            where += f" for key {key!r}"
        if isinstance(error, ProcessorError):
            return ProcessorError(f"{where}: {error.message}", kind=error.kind, hint=error.hint)
        return ProcessorError(
            f"{where}: {type(error).__name__}: {error}.",
            hint="The traceback of the cause shows the line of the processor. Nothing of this batch was kept;"
            " start the query again when the code is mended.",
        )


@contextmanager
def _operator_named(uid: str) -> Iterator[None]:
    """Add the operator's name to errors of encoding."""
    try:
        yield
    except ProcessorError as error:
        raise ProcessorError(f"operator '{uid}': {error.message}", kind=error.kind, hint=error.hint) from error


def _newest_ms(event_time: EventTime, window: KeyChunk) -> list[int | None]:
    """The newest event time of each key's rows; None for a key without any."""
    newest = event_time.newest_ms(window.rows, window.starts)
    if not window.more:
        return newest
    for rows in window.more:
        newest += event_time.newest_ms(rows, np.array([0, len(rows)]))
    return [max((at for at in newest if at is not None), default=None)]


def _make_state(cursor: KeyCursor, binding: StateBinding) -> KeyedState:
    descriptor, codec, ttl = binding.descriptor, binding.codec, binding.ttl
    if binding.entry_codec is not None:
        return MapState(cursor, descriptor, codec, binding.entry_codec, binding.to_row, ttl)
    return _WITHOUT_MAP_KEYS[descriptor.kind](cursor, descriptor, codec, ttl)
