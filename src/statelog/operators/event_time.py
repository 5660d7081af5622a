"""The event time of rows: which are late, and its progress at a checkpoint (an operator's watermark)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from statelog.errors import ErrorKind, ProcessorError
from statelog.numbers import US_PER_MS
from statelog.runs.times import NO_TIME_MS, Watermark


@dataclass(frozen=True)
class EventTime:
    """Reads the event time of rows from one of their columns."""

    column: int
    """A timestamp, or a struct whose field ``end`` is one, as Spark's ``window`` makes it."""
    drops_late: bool = True
    """Whether late rows are dropped; otherwise the processor gets them."""
    inputs: int = 0
    """Number of inputs that the operator's own watermark follows; 0 if it has none."""
    input_column: int | None = None
    """The column with the number of a row's input, from 0; None if there is only one input."""
    rows_column: int | None = None
    """The column with the number of rows that a row stands for; None if it stands for itself."""
    max_ahead_ms: int | None = None
    """How far ahead of processing time a row may be to move the operator's own watermark; None for no limit."""

    def times_us(self, rows: pa.RecordBatch) -> pa.Array:
        """Event time of each row, microseconds since the Unix epoch; null where the row has none."""
        column = rows.column(self.column)
        if pa.types.is_struct(column.type):
            column = pc.struct_field(column, "end")
        return column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())

    def on_time(self, rows: pa.RecordBatch, watermark_ms: int) -> pa.BooleanArray | None:
        """Mask of the rows that are later than a watermark, or have no event time; None if no row is late."""
        if watermark_ms <= NO_TIME_MS // US_PER_MS:
            return None
        late = pc.less_equal(self.times_us(rows), watermark_ms * US_PER_MS).fill_null(False)
        return pc.invert(late) if late.true_count else None

    def count(self, rows: pa.RecordBatch, mask: npt.NDArray[np.bool_]) -> int:
        """How many rows those with the mask set stand for."""
        if self.rows_column is None:
            return int(mask.sum())
        return int(rows.column(self.rows_column).to_numpy()[mask].sum())

    def require_on_time(self, rows: pa.RecordBatch, watermark_ms: int) -> None:
        """Raise ProcessorError if the next operator would drop an output row as late."""
        oldest = pc.min(self.times_us(rows)).as_py()
        if oldest is not None and oldest <= watermark_ms * US_PER_MS:
            raise ProcessorError(
                f"an output row has event time {oldest // US_PER_MS} ms in column"
                f" '{rows.schema.names[self.column]}', which is late: the watermark is {watermark_ms} ms.",
                kind=ErrorKind.OUTPUT_MISMATCH,
                hint="Return rows whose event time is after the watermark of the batch before. If a ready-made operator"
                " returned this row, omit its eventTimeColumnName.",
            )

    def largest_ms(self, rows: pa.RecordBatch, processing_ms: int) -> list[int | None]:
        """The largest event time of each of the `inputs`, milliseconds; None for an input without rows.

        Rows that are too far ahead of the batch's processing time do not count.
        """
        if not rows.num_rows:
            return [None] * self.inputs
        parts = [self.times_us(rows)]
        if self.input_column is not None:
            inputs = rows.column(self.input_column)
            parts = [parts[0].filter(pc.equal(inputs, index)) for index in range(self.inputs)]
        if self.max_ahead_ms is not None:
            newest_us = (processing_ms + self.max_ahead_ms) * US_PER_MS
            parts = [times.filter(pc.less_equal(times, newest_us)) for times in parts]
        largest = (pc.max(times).as_py() for times in parts[: self.inputs])
        return [None if time_us is None else time_us // US_PER_MS for time_us in largest]

    def newest_ms(self, rows: pa.RecordBatch, starts: npt.NDArray[np.int64]) -> list[int | None]:
        """The newest event time of each key, milliseconds; None for a key whose rows have none.

        The rows are sorted by key; `starts`, shape (keys + 1,), has each key's first row and then the number of rows.
        """
        times = self.times_us(rows).fill_null(NO_TIME_MS).to_numpy()
        newest = np.maximum.reduceat(times, starts[:-1]).tolist()
        return [None if time_us == NO_TIME_MS else time_us // US_PER_MS for time_us in newest]


@dataclass(frozen=True)
class WatermarkPolicy:
    """Computes the watermark: the largest event time seen, minus a delay; with several inputs the smallest counts.

    The watermark advances between batches: the rows of a batch move the watermark of the next one. It never goes back,
    even if the delay is raised or an input is added.
    """

    delay_ms: int
    """How far a row may be behind the newest one."""
    inputs: int = 1
    """Number of inputs. Until each of them has had a row, the watermark stands still."""
    delays_ms: Sequence[int] = ()
    """The delay of each input, if they have different ones."""
    idle_ms: Sequence[int | None] = ()
    """After how much silence an input is idle, in processing time; None for never. Empty if none ever is."""

    @classmethod
    def of(cls, watermark: Watermark) -> WatermarkPolicy:
        """The policy of a watermark as users declare it."""
        idle_ms = watermark.idle_of_inputs_ms
        has_idle = any(own_ms is not None for own_ms in idle_ms)
        return cls(watermark.delay_ms, watermark.inputs, watermark.delays_ms, idle_ms if has_idle else ())

    def advance(
        self, before_ms: int, max_event_ms: Sequence[int | None], silent_ms: Sequence[int] = (), gap_ms: int = 0
    ) -> int:
        """The watermark after a batch.

        `before_ms` is the watermark of the batch, `max_event_ms` the largest event time of each input up to its end,
        `silent_ms` the :meth:`silence` of the inputs up to it, and `gap_ms` the time from it to the next one. If all
        inputs are idle, the largest of their watermarks counts, as if they had become idle one after the other.
        """
        delays = self.delays_ms or [self.delay_ms] * self.inputs
        reached = [
            None if index >= len(max_event_ms) or (at_ms := max_event_ms[index]) is None else at_ms - delay_ms
            for index, delay_ms in enumerate(delays)
        ]
        silent = self._after_gap(silent_ms, gap_ms)
        awake = [
            at_ms
            for at_ms, own_ms, idle_ms in zip(reached, silent, self._idle, strict=True)
            if idle_ms is None or own_ms < idle_ms
        ]
        known = [at_ms for at_ms in awake or reached if at_ms is not None]
        if not known or (awake and len(known) < len(awake)):
            return before_ms
        return max(before_ms, min(known) if awake else max(known))

    def silence(self, before_ms: Sequence[int], of_subtasks: Iterable[Sequence[int | None]], gap_ms: int) -> list[int]:
        """For how long each input has had no rows, up to a batch and in processing time; empty if none is ever idle.

        `before_ms` is that of the batch before, `gap_ms` the time since then, and `of_subtasks` has the largest event
        times in the batch. A gap counts for at most half of the time after which an input is idle: so a query that was
        stopped for long does not consider its inputs idle at its start, although a repeated batch must decide alike.
        """
        if not self.idle_ms:
            return []
        silent = self._after_gap(before_ms, gap_ms)
        for times in of_subtasks:
            for index, largest_ms in enumerate(times[: self.inputs]):
                if largest_ms is not None:
                    silent[index] = 0
        return silent

    def _after_gap(self, silent_ms: Sequence[int], gap_ms: int) -> list[int]:
        """The silence of each input after a gap; that of a new input begins now."""
        return [
            0
            if idle_ms is None or index >= len(silent_ms)
            else min(silent_ms[index] + max(0, min(gap_ms, -(-idle_ms // 2))), idle_ms)
            for index, idle_ms in enumerate(self._idle)
        ]

    @property
    def _idle(self) -> Sequence[int | None]:
        return self.idle_ms or [None] * self.inputs

    def combine(self, of_subtasks: Iterable[Sequence[int | None]]) -> list[int | None]:
        """The largest event time of each input, over all subtasks and the checkpoint before."""
        largest: list[int | None] = [None] * self.inputs
        for times in of_subtasks:
            for index, time_ms in enumerate(times[: self.inputs]):
                if time_ms is not None:
                    held = largest[index]
                    largest[index] = time_ms if held is None else max(held, time_ms)
        return largest
