"""Ready-made aggregates in windows, on columns: what the windows of time, sessions and counts have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from statelog.aggregates.accumulators import Accumulators
from statelog.aggregates.groups import Groups, Int64s
from statelog.aggregates.kernels import Columns
from statelog.aggregates.operator import key_named
from statelog.convert.codecs import ColumnCodecs
from statelog.convert.types import arrow_type
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.column_caller import DueTimers
from statelog.operators.keyed.indexing import IndexedRows
from statelog.runs.keys import KeyCodec
from statelog.runs.times import NO_TIME_MS, Moment
from statelog.tables.table import KeyBatch
from statelog.windows.operator import Clock

_US_PER_MS: Final = 1000
_FAR_MS: Final = 1 << 61
"""Beyond all times of rows; sums of a few such times stay within 64 bits."""
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class WindowShape:
    """The input and the output of windows; picklable."""

    key_schema: pa.Schema
    event_time: EventTime | None
    """The rows' event time; None in processing time and for count windows."""
    output: StructType
    """The grouping columns, the windows' start and end if they have any, the aggregates, and perhaps the late rows."""


@dataclass(frozen=True)
class WindowMoment:
    """What the times of a batch mean for windows, milliseconds."""

    now_ms: int
    """Windows that end up to it are complete."""
    before_ms: int
    """Windows that end up to it were complete in the batch before."""
    closed_now_ms: int
    """Windows that end up to it are closed after the batch."""
    closed_before_ms: int
    """Windows that end up to it were closed before the batch."""


@dataclass(frozen=True)
class TimedRows:
    """Rows in order of arrival, with their keys and times."""

    rows: pa.RecordBatch
    owners: Int64s
    """The position of each row's key in the chunk."""
    times_ms: Int64s
    has_time: Mask

    def filter(self, mask: Mask) -> TimedRows:
        """The rows where the mask is set."""
        if mask.all():
            return self
        return TimedRows(self.rows.filter(pa.array(mask)), self.owners[mask], self.times_ms[mask], self.has_time[mask])


class AggregatedWindows(ABC):
    """A processor of columns that keeps accumulators of windows."""

    def __init__(self, accumulators: Accumulators, clock: Clock, shape: WindowShape, codecs: ColumnCodecs) -> None:
        self.codecs = codecs
        self._accumulators = accumulators
        self._clock = clock
        self._lateness_ms = clock.allowed_lateness_ms
        self._shape = shape

    def init(self, handle: Any) -> None:
        """Declare the states."""
        self._handle = handle
        self._key_codec = KeyCodec(self._shape.key_schema)
        output = self._shape.output
        self._output = pa.schema([(field.name, arrow_type(field.dataType, "an output column")) for field in output])

    def reduce(self, rows: IndexedRows) -> IndexedRows:
        """The rows themselves: so the sums in a pane do not depend on the cut of the stream into batches."""
        return rows

    @abstractmethod
    def process(self, chunk: IndexedRows, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Add rows to windows, and return the windows that they complete or update, and late rows."""

    def fire(self, due: DueTimers, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Return the windows that are complete now, and remove those that are closed."""
        raise AssertionError("an operator that registers timers handles them")

    def load_initial_state(self, chunk: IndexedRows, moment: Moment) -> Iterable[pa.RecordBatch]:
        raise AssertionError("windows take no initial rows")

    def close(self) -> None:  # noqa: B027 - nothing to do
        """End the batch."""

    # ---- Times ----

    def _moment(self, moment: Moment) -> WindowMoment:
        now_ms, before_ms = moment.processing_ms, NO_TIME_MS
        if self._clock.is_event_time:
            now_ms, before_ms = moment.watermark_ms, moment.late_watermark_ms
        times = now_ms, before_ms, self._closed_ms(now_ms), self._closed_ms(before_ms)
        return WindowMoment(*[min(max(at_ms, -_FAR_MS), _FAR_MS) for at_ms in times])

    def _closed_ms(self, at_ms: int) -> int:
        """Windows that end up to the returned time are closed when the clock is at `at_ms`.

        A window that was closed under a shorter lateness stays closed: its state has been deleted.
        """
        own_ms = at_ms - self._lateness_ms
        return max(own_ms, self._handle.closed_ms) if self._clock.is_event_time else own_ms

    def _timed(self, chunk: IndexedRows, moment: Moment) -> Iterator[TimedRows]:
        """The rows of a chunk; several batches of them only if they are those of a single key."""
        event_time, start = self._shape.event_time, 0
        for rows in chunk.rows:
            owners = chunk.key_index[start : start + rows.num_rows]
            start += rows.num_rows
            has_time = np.ones(len(owners), bool)
            if event_time is None:
                yield TimedRows(rows, owners, np.full(len(owners), moment.processing_ms), has_time)
                continue
            times_us = event_time.times_us(rows)
            if times_us.null_count:
                has_time = times_us.is_valid().to_numpy(zero_copy_only=False)
                times_us = times_us.fill_null(0)
            yield TimedRows(rows, owners, times_us.to_numpy() // _US_PER_MS, has_time)

    def _in_order(self, timed: TimedRows) -> TimedRows:
        """The rows in order of time, if an aggregate depends on it."""
        times_ms = timed.times_ms
        if not self._accumulators.depends_on_arrival or (np.diff(times_ms) >= 0).all():
            return timed
        order = np.argsort(times_ms, kind="stable")
        rows = timed.rows.take(pa.array(order))
        return TimedRows(rows, timed.owners[order], times_ms[order], timed.has_time[order])

    # ---- Accumulators ----

    def _lifted(self, timed: TimedRows) -> Columns:
        """The accumulator of each row. In processing time, and in count windows, rows are in order of arrival."""
        times_ms = np.zeros_like(timed.times_ms) if self._shape.event_time is None else timed.times_ms
        return self._accumulators.lift(timed.rows, pa.array(times_ms))

    def _reduced(self, held: Columns, groups: Groups, owners: Int64s, keys: KeyBatch) -> Columns:
        """Merge the accumulators of each group; `owners` are the groups' keys."""
        with key_named(lambda group: self._key_codec.decode(keys.keys[int(owners[group])].as_py())):
            return self._accumulators.reduce(held, groups)

    # ---- Output ----

    def _returned(self, keys: Columns, owners: Int64s, held: Columns, bounds: Sequence[Int64s]) -> pa.RecordBatch:
        """Results of windows from their accumulators; `bounds` are their starts and ends, if they have any."""
        picked = pa.array(owners)
        columns = [column.take(picked) for column in keys]
        columns += [pa.array(at_ms * _US_PER_MS).cast(pa.timestamp("us", "UTC")) for at_ms in bounds]
        with key_named(lambda window: tuple(column[int(owners[window])].as_py() for column in keys)):
            columns += self._accumulators.results(held).columns
        if self._clock.returns_late:
            columns.append(pa.nulls(len(owners), self._output.types[-1]))
        return pa.RecordBatch.from_arrays(
            [column.cast(field.type) for column, field in zip(columns, self._output, strict=True)], schema=self._output
        )

    def _late(self, timed: TimedRows, mask: Mask) -> Iterator[pa.RecordBatch]:
        """Count the rows with the mask set, whose windows are all closed, and return them if the user wants them."""
        if not mask.any():
            return
        self._handle.countLateRows(int(mask.sum()))
        if self._clock.returns_late:
            rows, kind = timed.rows.filter(pa.array(mask)), self._output.types[-1]
            columns = [column.cast(field.type) for column, field in zip(rows.columns, kind.fields, strict=True)]
            nulls = [pa.nulls(rows.num_rows, field.type) for field in list(self._output)[:-1]]
            late = pa.StructArray.from_arrays(columns, fields=kind.fields)
            yield pa.RecordBatch.from_arrays([*nulls, late], schema=self._output)

    def _keys(self, keys: KeyBatch) -> Columns:
        """The grouping columns of keys."""
        return self._key_codec.decode_columns(keys.keys)
