"""The engine of windows on columns: what those of time, sessions and counts have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from statelog.aggregates.kernels import Columns
from statelog.convert.codecs import ColumnCodecs
from statelog.convert.times import TimeMode
from statelog.convert.types import arrow_type, key_decoder
from statelog.errors import ConfigurationError
from statelog.numbers import US_PER_MS
from statelog.operators.event_time import EventTime
from statelog.operators.keyed.column_caller import DueTimers
from statelog.operators.keyed.columns import Mask
from statelog.operators.keyed.cursor import Row
from statelog.operators.keyed.indexing import IndexedRows, Int64s
from statelog.runs.keys import KeyCodec
from statelog.runs.times import NO_TIME_MS, Moment
from statelog.tables.table import KeyBatch
from statelog.windows.contents import Contents, KeyOf, Returned, TimedRows
from statelog.windows.processor import WindowContext

_FAR_MS: Final = 1 << 61
"""Beyond all times of rows; sums of a few such times stay within 64 bits."""


@dataclass(frozen=True)
class Clock:
    """The time that completes windows: the watermark, or the batches' processing time."""

    is_event_time: bool
    """Whether it is the watermark."""
    allowed_lateness_ms: int = 0
    """How long complete windows still accept late rows."""
    returns_late: bool = False
    """Whether rows that are too late are returned; otherwise they are dropped."""


@dataclass(frozen=True)
class WindowShape:
    """The input and the output of windows; picklable."""

    key_schema: pa.Schema
    zone: str
    """The session's time zone."""
    time_mode: TimeMode
    """The time that fires the operator's timers."""
    event_time: EventTime | None
    """The rows' event time; None in processing time and for count windows."""
    output: StructType
    """The grouping columns, the windows' start and end if they have any, the results, and perhaps the late rows."""


@dataclass(frozen=True)
class ChunkKeys:
    """The keys of a chunk, as columns and as tuples."""

    keys: KeyBatch
    codec: KeyCodec
    zone: str

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def columns(self) -> Columns:
        """The grouping columns."""
        return self.codec.decode_columns(self.keys.keys)

    def of(self, owners: Int64s) -> KeyOf:
        """What makes the key of a group; `owners` are the groups' keys."""
        return lambda group: tuple(self.tuples(owners[group : group + 1])[0])

    def tuples(self, owners: Int64s) -> list[Row]:
        """Keys as the user sees them."""
        return key_decoder(self.codec, self.zone)(self.keys.keys.take(pa.array(owners)).to_pylist())


@dataclass(frozen=True)
class WindowTimes:
    """What the times of a batch mean for windows, milliseconds."""

    context: WindowContext
    """Of windows that are returned because they are complete."""
    update: WindowContext
    """Of windows that are returned again because of late rows."""
    now_ms: int
    """Windows that end up to it are complete."""
    before_ms: int
    """Windows that end up to it were complete in the batch before."""
    closed_now_ms: int
    """Windows that end up to it are closed after the batch."""
    closed_before_ms: int
    """Windows that end up to it were closed before the batch."""


class Windows(ABC):
    """A processor of columns that decides which windows rows belong to, and which are complete, late or closed."""

    has_bounds = True
    """Whether windows have a start and an end."""

    def __init__(self, contents: Contents, clock: Clock, shape: WindowShape, codecs: ColumnCodecs) -> None:
        self.codecs = codecs
        self._contents = contents
        self._clock = clock
        self._lateness_ms = clock.allowed_lateness_ms
        self._shape = shape

    def init(self, handle: Any) -> None:
        """Declare the states."""
        self._handle = handle
        self._key_codec = KeyCodec(self._shape.key_schema)
        output = self._shape.output
        self._output = pa.schema([(field.name, arrow_type(field.dataType, "an output column")) for field in output])
        self._declare(handle)
        self._contents.init(handle)

    @abstractmethod
    def _declare(self, handle: Any) -> None:
        """Declare the states of the windows' accumulators."""

    def reduce(self, rows: IndexedRows) -> IndexedRows:
        """The rows themselves: so the sums in a pane do not depend on how the stream is cut into batches."""
        return rows

    def process(self, chunk: IndexedRows, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Add rows to windows, and return the windows that they complete or update, and late rows."""
        self._contents.begin()
        return self._process(self._timed(chunk, moment), self._keys(chunk.keys), self._times(moment))

    @abstractmethod
    def _process(self, timed: TimedRows, keys: ChunkKeys, times: WindowTimes) -> Iterator[pa.RecordBatch]:
        """Do what :meth:`process` promises."""

    def fire(self, due: DueTimers, moment: Moment) -> Iterator[pa.RecordBatch]:
        """Return the windows that are complete now, and remove those that are closed.

        The accumulators and the times alone decide what is due: the timers may come from a start with other settings.
        """
        self._contents.begin()
        due_ms = due.times_ms[np.flatnonzero(np.diff(due.key_index, prepend=-1))]
        return self._fire(due_ms, self._keys(due.keys), self._times(moment))

    def _fire(self, due_ms: Int64s, keys: ChunkKeys, times: WindowTimes) -> Iterator[pa.RecordBatch]:
        """Do what :meth:`fire` promises, given the first timer of each key."""
        raise AssertionError("an operator that registers timers handles them")

    def load_initial_state(self, chunk: IndexedRows, moment: Moment) -> Iterable[pa.RecordBatch]:
        raise AssertionError("windows take no initial rows")

    def close(self) -> None:
        """End the batch."""
        self._contents.close()

    # ---- Times ----

    def _times(self, moment: Moment) -> WindowTimes:
        now_ms, before_ms = moment.processing_ms, NO_TIME_MS
        if self._clock.is_event_time:
            now_ms, before_ms = moment.watermark_ms, moment.late_watermark_ms
        times = now_ms, before_ms, self._closed_ms(now_ms), self._closed_ms(before_ms)
        shown = self._shape.time_mode.timer_values(moment)
        at_ms = shown.getCurrentProcessingTimeInMs(), shown.getCurrentWatermarkInMs()
        contexts = WindowContext(*at_ms), WindowContext(*at_ms, isUpdate=True)
        return WindowTimes(*contexts, *[min(max(time_ms, -_FAR_MS), _FAR_MS) for time_ms in times])

    def _closed_ms(self, at_ms: int) -> int:
        """Windows that end up to the returned time are closed when the clock is at `at_ms`.

        A window that was closed under a shorter lateness stays closed: its state has been deleted.
        """
        own_ms = at_ms - self._lateness_ms
        return max(own_ms, self._handle.closed_ms) if self._clock.is_event_time else own_ms

    def _timed(self, chunk: IndexedRows, moment: Moment) -> TimedRows:
        """The rows of a chunk with their times."""
        event_time, count = self._shape.event_time, len(chunk.key_index)
        if event_time is None:
            return TimedRows(chunk.rows, chunk.key_index, np.full(count, moment.processing_ms), np.ones(count, bool))
        times_us = pa.chunked_array([event_time.times_us(rows) for rows in chunk.rows]).combine_chunks()
        has_time = times_us.is_valid().to_numpy(zero_copy_only=False)
        times_ms = times_us.fill_null(0).to_numpy() // US_PER_MS
        return TimedRows(chunk.rows, chunk.key_index, times_ms, has_time)

    def _in_order(self, timed: TimedRows) -> TimedRows:
        """The rows in order of time, if the contents depend on it."""
        times_ms = timed.times_ms
        if not self._contents.depends_on_arrival or (np.diff(times_ms) >= 0).all():
            return timed
        return timed.take(np.argsort(times_ms, kind="stable"))

    # ---- Output ----

    def _results(
        self, keys: ChunkKeys, owners: Int64s, held: Columns, bounds: Sequence[Int64s], context: WindowContext
    ) -> Iterator[pa.RecordBatch]:
        """Results of windows from their opened accumulators; `bounds` are those of :class:`Returned`."""
        windows = Returned(
            keys.columns, owners, held, bounds, self.has_bounds, context, lambda: keys.tuples(owners), keys.of(owners)
        )
        for columns in self._contents.results(windows):
            if self._clock.returns_late:
                columns = [*columns, pa.nulls(len(columns[0]), self._output.types[-1])]
            yield pa.RecordBatch.from_arrays(
                [column.cast(field.type) for column, field in zip(columns, self._output, strict=True)],
                schema=self._output,
            )

    def _late(self, late: TimedRows) -> Iterator[pa.RecordBatch]:
        """Count rows whose windows are all closed, and return them if the user wants them."""
        if not len(late):
            return
        self._handle.countLateRows(len(late))
        if not self._clock.returns_late:
            return
        kind = self._output.types[-1]
        for rows in late.parts:
            columns = [column.cast(field.type) for column, field in zip(rows.columns, kind.fields, strict=True)]
            nulls = [pa.nulls(rows.num_rows, field.type) for field in list(self._output)[:-1]]
            structs = pa.StructArray.from_arrays(columns, fields=kind.fields)
            yield pa.RecordBatch.from_arrays([*nulls, structs], schema=self._output)

    def _keys(self, keys: KeyBatch) -> ChunkKeys:
        return ChunkKeys(keys, self._key_codec, self._shape.zone)


def first_of_each(owners: Int64s) -> Int64s:
    """The first place of each of some ascending numbers."""
    return np.flatnonzero(np.diff(owners, prepend=-1))


def last_of_each(owners: Int64s) -> Int64s:
    """The last place of each of some ascending numbers."""
    return np.flatnonzero(np.diff(owners, append=-1))


def open_and_closed(owners: Int64s, is_open: Mask) -> tuple[Int64s, Mask]:
    """The keys of which no row is open, and the rows of the others that are not.

    `owners` has the key of each row, ascending; all rows of the keys are given.
    """
    is_kept = np.zeros(int(owners[-1]) + 1, bool)
    is_kept[owners[is_open]] = True
    return np.unique(owners[~is_kept[owners]]), ~is_open & is_kept[owners]


def schema_behind(name: str, accumulator: StructType) -> StructType:
    """The accumulator's fields, behind a field of the windows' own; raises ConfigurationError if they have it too."""
    if name in accumulator.names:
        raise ConfigurationError(
            f"The windows' accumulator has a field {name!r}, a name that the windows use themselves.",
            hint="Give the field another name.",
        )
    return StructType([StructField(name, LongType()), *accumulator.fields])
