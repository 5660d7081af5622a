"""Calls a processor key by key, with Python rows or pandas frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from statelog.operators.event_time import EventTime
from statelog.operators.keyed.caller import Caller, operator_named
from statelog.operators.keyed.collections import make_row_state
from statelog.operators.keyed.grouping import KeyChunk, key_chunks
from statelog.operators.keyed.operator import BatchContext, KeyedInput, KeyedOperator, KeyedRows
from statelog.operators.keyed.outputs import Outputs, rare_garbage_collection
from statelog.operators.keyed.timers import Timers, key_stretches
from statelog.runs.byte_slices import to_batches
from statelog.runs.key_columns import differs_from_previous
from statelog.shown import shown_key
from statelog.stopwatch import Stopwatch
from statelog.tables.table import KeyBatch, StateTable, TimerRows

Key = tuple[Any, ...]


class RowCaller(Caller):
    """Calls the processor for every key, with all of the key's rows."""

    def __init__(self, operator: KeyedOperator, table: StateTable, context: BatchContext, stopwatch: Stopwatch) -> None:
        super().__init__(operator, table, context, stopwatch, operator.budget.window_keys)
        self._outputs = Outputs(operator.output, operator.budget)
        self.states = {binding.name: make_row_state(self._cursor, binding) for binding in self._bindings}
        self.timers = None if operator.timer_domain is None else Timers(self._cursor, operator.timer_domain)
        self._timer_values = operator.timer_values(context.moment)
        self.open_states()

    def load_initial_state(self, read: KeyedRows) -> Iterator[pa.RecordBatch]:
        assert self._operator.initial is not None
        for chunk in self._chunks(read, self._operator.initial):
            yield self._load_initial_state(chunk, self._operator.initial)

    def process(self, read: KeyedRows) -> Iterator[pa.RecordBatch]:
        for chunk in self._chunks(read, self._operator.input):
            self.hot_keys.note(chunk.keys, chunk.rows_per_key)
            yield from self._process_rows(chunk)

    def fire(self, due: TimerRows) -> Iterator[pa.RecordBatch]:
        for start, end in key_stretches(due, lambda: self._chunk_keys):
            yield from self._fire_chunk(due, start, end)

    def _chunks(self, read: KeyedRows, source: KeyedInput) -> Iterator[KeyChunk]:
        def encode_keys(rows: pa.RecordBatch) -> pa.Array:
            return self._operator.key_codec.encode_columns([rows.column(index) for index in source.key_columns])

        batches = to_batches(read.rows)
        return key_chunks(batches, read.hashes, encode_keys, self._budget, lambda: self._chunk_keys)

    # ---- Initial state ----

    def _load_initial_state(self, window: KeyChunk, source: KeyedInput) -> pa.RecordBatch:
        """Call the processor with the rows of some keys; returns a batch without rows, so that changes can be taken."""
        cursor, handle_state = self._cursor, self._operator.processor.handleInitialState
        keys = self._keys_of(window, source)
        self._open_keys(window.keys, lambda position: shown_key(keys[position]))
        rows_by_key = self._rows_by_key(window, source, "handleInitialState", keys)
        cursor.position = 0
        try:
            for key, rows in zip(keys, rows_by_key, strict=True):
                for row in rows:
                    handle_state(key, row, self._timer_values)
                cursor.position += 1
        except Exception as error:
            raise self.failure(error, "handleInitialState", self._current(keys)) from error
        self.flush()
        return self._operator.output.encode([], str)

    # ---- Rows ----

    def _process_rows(self, window: KeyChunk) -> Iterator[pa.RecordBatch]:
        operator, cursor, outputs = self._operator, self._cursor, self._outputs
        keys = self._keys_of(window, operator.input)
        self._open_keys(window.keys, lambda position: shown_key(keys[position]))
        if self._needs_event_ms:
            assert operator.event_time is not None
            cursor.event_ms = _newest_ms(operator.event_time, window)
        handle_rows, timer_values = operator.processor.handleInputRows, self._timer_values

        def calls(rows_by_key: Iterable[Iterator[Any]]) -> Iterator[Iterable[Any]]:
            taken, note_start = outputs.taken, outputs.starts.append
            cursor.position = 0
            # The hottest loop of all: it contains nothing that could be outside.
            for key, rows in zip(keys, rows_by_key, strict=True):
                note_start(len(taken))
                yield handle_rows(key, rows, timer_values)
                cursor.position += 1  # now, as an error in reading the next key's rows is the next key's

        read = self._rows_by_key(window, operator.input, "handleInputRows", keys)
        outputs.begin(calls(read), lambda call: f"key {shown_key(keys[call])}", handle_rows)
        yield from self._run_calls("handleInputRows", keys)

    def _rows_by_key(
        self, window: KeyChunk, source: KeyedInput, method: str, keys: list[Key]
    ) -> Iterable[Iterator[Any]]:
        """The rows of each key. An error that concerns the whole chunk names a key only if there is no other."""
        try:
            with rare_garbage_collection():
                assert source.codec is not None
                return source.codec.by_key(window)
        except Exception as error:
            raise self.failure(error, method, keys[0] if len(keys) == 1 else None) from error

    def _keys_of(self, window: KeyChunk, source: KeyedInput) -> list[Key]:
        firsts = pa.array(window.starts[:-1])
        assert source.codec is not None
        with operator_named(self._operator.uid), rare_garbage_collection():
            return source.codec.keys([window.rows.column(index).take(firsts) for index in source.key_columns])

    # ---- Timers ----

    def _fire_chunk(self, due: TimerRows, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Fire the timers of some keys, in order of their times."""
        operator, cursor, outputs, timers = self._operator, self._cursor, self._outputs, self.timers
        assert timers is not None
        rows = due.keys.slice(start, end)
        is_first = differs_from_previous(rows.keys)
        firsts = np.flatnonzero(is_first)
        key_of = np.cumsum(is_first) - 1
        found = rows.take(firsts)
        chunk_keys = KeyBatch(found.hashes, found.keys.cast(pa.binary()))
        with rare_garbage_collection():
            keys = operator.decode_keys(chunk_keys.keys.to_pylist())
        times = due.times_ms[start:end]
        self._open_keys(chunk_keys, lambda position: shown_key(keys[position]))
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

        outputs.begin(calls(), lambda call: f"key {shown_key(keys[fired[call]])}", fire)
        yield from self._run_calls("handleExpiredTimer", keys)

    # ---- Calls ----

    def _run_calls(self, method: str, keys: list[Key]) -> Iterator[pa.RecordBatch]:
        """Make the calls that the outputs began with; between two chunks, the processor is suspended at a yield."""
        outputs, cursor = self._outputs, self._cursor
        has_more = True
        try:
            while has_more:
                with rare_garbage_collection():
                    try:
                        has_more = outputs.take()
                    except Exception as error:
                        raise self.failure(error, method, self._current(keys)) from error
                    if not has_more:
                        self.flush()
                    batches = self._encoded(is_last=not has_more)
                yield from batches
        finally:
            cursor.position = -1  # before generators are closed: they may not use the state any more
            outputs.end()

    def _current(self, keys: list[Key]) -> Key | None:
        """The key that is being processed, for messages; None if none is."""
        position = self._cursor.position
        return keys[position] if 0 <= position < len(keys) else None

    def _encoded(self, *, is_last: bool) -> list[pa.RecordBatch]:
        with operator_named(self._operator.uid):
            batches = self._outputs.encoded(is_last=is_last)
            if self._operator.output_event_time is not None:
                for batch in batches:
                    self._operator.output_event_time.require_on_time(batch, self._context.moment.late_watermark_ms)
            return batches


def _newest_ms(event_time: EventTime, window: KeyChunk) -> list[int | None]:
    """The newest event time of each key's rows; None for a key without any."""
    newest = event_time.newest_ms(window.rows, window.starts)
    if not window.more:
        return newest
    for rows in window.more:
        newest += event_time.newest_ms(rows, np.array([0, len(rows)]))
    return [max((at for at in newest if at is not None), default=None)]
