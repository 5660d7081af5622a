"""Runs one batch of one subtask: initial state, rows, due timers, each with the changes of the one before. No Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from statelog.operators.keyed.caller import Caller, HotKeys
from statelog.operators.keyed.column_caller import ColumnCaller
from statelog.operators.keyed.handle import ProcessorHandle
from statelog.operators.keyed.operator import BatchContext, KeyedOperator, KeyedRows
from statelog.operators.keyed.row_caller import RowCaller
from statelog.runs.byte_slices import to_batches
from statelog.runs.times import NO_TIME_MS
from statelog.stopwatch import Stopwatch
from statelog.tables.table import StateTable, TimedTable, TimerRows


class KeyedSubtask:
    """Runs a processor over one batch of one subtask.

    The order of calls is :meth:`process` once, consumed to its end; then the attributes hold the results. A batch has
    up to three phases: the rows of the initial state, the rows of the stream, and the due timers. Each reads the
    changes of the one before.
    """

    def __init__(self, operator: KeyedOperator, table: StateTable, context: BatchContext, stopwatch: Stopwatch) -> None:
        make = ColumnCaller if operator.takes_columns else RowCaller
        self._caller: Caller = make(operator, TimedTable(table, stopwatch), context, stopwatch)
        self.changes = self._caller.changes
        self.late_rows = 0
        """Rows that were dropped as late, or that the processor counted as late."""
        self.max_event_ms: list[int | None] = []
        """The largest event time of each tracked input."""
        self.timers_to_ms = NO_TIME_MS
        """After the batch, no timer up to this time is left to fire."""
        self.arrivals_to_ms = NO_TIME_MS
        """After the batch, no arrival up to this time is left."""
        self._operator = operator
        self._context = context

    @property
    def hot_keys(self) -> HotKeys:
        """The keys with the most input rows."""
        return self._caller.hot_keys

    def process(self, read: KeyedRows, initial: KeyedRows | None = None) -> Iterator[pa.RecordBatch]:
        """Call the processor for every key of the batch, with all of the key's rows, and for every due timer.

        Yields and raises like the methods of :class:`Caller`.
        """
        caller, operator = self._caller, self._operator
        handle = ProcessorHandle(operator, caller.states, caller.timers, self._context.closed_ms)
        caller.call("init", operator.processor.init, handle)
        handle.end_init()
        if initial is not None and initial.rows.num_rows:
            yield from caller.load_initial_state(initial)
            caller.begin_phase()
        read = self._on_time(read)
        if read.rows.num_rows:
            yield from caller.process(read)
        yield from self._fire_timers()
        yield from self._expire_arrivals()
        if caller.timers is not None and caller.timers.lowest_ms is not None:
            # A timer that was registered in these two phases for a time already past fires in the next batch.
            self.timers_to_ms = min(self.timers_to_ms, caller.timers.lowest_ms - 1)
        caller.call("close", operator.processor.close)
        self.late_rows += handle.late_rows

    def _on_time(self, read: KeyedRows) -> KeyedRows:
        event_time = self._operator.event_time
        if event_time is None:
            return read
        batches = to_batches(read.rows)
        now_ms = self._context.moment.processing_ms
        largest = [event_time.largest_ms(rows, now_ms) for rows in batches or [read.rows]]
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
        self.late_rows = sum(event_time.count(rows, ~mask) for rows, mask in zip(batches, kept, strict=True))
        rows = [rows.filter(pa.array(mask)) for rows, mask in zip(batches, kept, strict=True)]
        return KeyedRows(pa.Table.from_batches(rows), read.hashes[on_time])

    def _fire_timers(self) -> Iterator[pa.RecordBatch]:
        timers, domain = self._caller.timers, self._operator.timer_domain
        if timers is not None and domain is not None:
            self.timers_to_ms = self._context.moment.now_ms(domain)
            yield from self._fire(timers, self._context.timers_after_ms, self.timers_to_ms, self._caller.fire)

    def _expire_arrivals(self) -> Iterator[pa.RecordBatch]:
        arrivals = self._caller.arrivals
        if arrivals is not None:
            self.arrivals_to_ms = self._context.moment.processing_ms - arrivals.limit_ms
            yield from self._fire(arrivals, self._context.arrivals_after_ms, self.arrivals_to_ms, self._caller.expire)

    def _fire(
        self, timers: Any, after_ms: int, until_ms: int, fire: Callable[[TimerRows], Iterator[pa.RecordBatch]]
    ) -> Iterator[pa.RecordBatch]:
        """Fire the timers after a time, up to which none was left before the batch, and up to another time.

        Then their `lowest_ms` is the earliest time registered during these calls, if it is not after `until_ms`.
        """
        if timers.lowest_ms is not None and timers.lowest_ms <= until_ms:
            after_ms = min(after_ms, timers.lowest_ms - 1)
        elif not len(self.changes.table.due_timers(timers.state, after_ms, until_ms).keys):
            return
        self._caller.begin_phase()
        timers.lowest_ms = None
        yield from fire(self.changes.table.due_timers(timers.state, after_ms, until_ms))
