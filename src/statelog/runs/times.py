"""Time in states, timers and merges: the two clocks of a batch, and how long entries live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from statelog.errors import ConfigurationError
from statelog.runs.schema import TimeDomain

NO_TIME_MS: Final = -(1 << 63)
"""Before all times: the watermark before any row, and the mark of timers before any has fired."""


@dataclass(frozen=True)
class Moment:
    """The time of a batch by both clocks, in milliseconds since the Unix epoch."""

    processing_ms: int
    watermark_ms: int
    """Timers up to it fire."""
    late_watermark_ms: int = NO_TIME_MS
    """The watermark of the batch before; rows up to it are late."""

    def now_ms(self, domain: TimeDomain) -> int:
        """The time by one of the two clocks."""
        return self.processing_ms if domain is TimeDomain.PROCESSING else self.watermark_ms


@dataclass(frozen=True)
class Watermark:
    """An operator's own watermark: the largest event time seen in all its subtasks minus a delay.

    It advances between batches, is stored in the checkpoint and never goes back, whatever the parallelism. It does not
    need Spark's ``withWatermark``, but works beside it.

    Parameters
    ----------
    column : str
        The input column with the event time, a timestamp.
    delay_ms : int
        How much later than the newest row a row may come, in milliseconds.
    inputs : int
        Number of inputs, if the operator reads a union of several. Their smallest watermark counts, and until each
        input has had a row there is none.
    input_column : str, optional
        The column with the number of a row's input, an integer from 0 to `inputs` - 1. Required
        with several inputs, not allowed with one.
    max_ahead : int, optional
        How far ahead of its batch's processing time a row may be to move the watermark, in milliseconds. One with a
        later event time is handled like any other and does not move it; by default all rows do.

    Raises
    ------
    ConfigurationError
        If a value is out of its range.
    """

    column: str
    delay_ms: int = 0
    inputs: int = 1
    input_column: str | None = None
    max_ahead: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("delay_ms", 0), ("inputs", 1), ("max_ahead", 0)):
            value = getattr(self, name)
            if name == "max_ahead" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"The watermark's {name} is {value!r}.", hint=f"It must be {least} or more.")
        if (self.inputs > 1) != (self.input_column is not None):
            raise ConfigurationError(
                f"The watermark has {self.inputs} inputs and input_column {self.input_column!r}.",
                hint="Several inputs need a column that tells them apart, a single one must not have it.",
            )


@dataclass(frozen=True)
class Ttl:
    """How long the entries of a state live; each value, list element and map entry on its own.

    Spark's ``ttlDurationMs`` is ``Ttl(duration_ms)``; the other parameters are those that Flink's StateTtlConfig adds.

    Parameters
    ----------
    duration_ms : int
        Lifetime after the last write, in milliseconds; at least 1.
    time : {"processing", "event"}
        The clock that counts. In processing time an entry lives until the batch's time reaches its last write plus the
        duration. In event time it lives until the watermark reaches the event time of its last write plus the duration.
        The event time of a write is the newest of the rows being handled, or the time of the timer.
    renew_on_read : bool
        Whether reading an entry counts as writing it.

    Raises
    ------
    ConfigurationError
        If a value is out of its range.
    """

    duration_ms: int
    time: Literal["processing", "event"] = "processing"
    renew_on_read: bool = False

    def __post_init__(self) -> None:
        is_number = isinstance(self.duration_ms, int) and not isinstance(self.duration_ms, bool)
        if not is_number or self.duration_ms < 1:
            raise ConfigurationError(f"The TTL duration is {self.duration_ms!r}.", hint="It must be 1 ms or more.")
        if self.time not in ("processing", "event"):
            raise ConfigurationError(f"The TTL's time is {self.time!r}.", hint="It must be 'processing' or 'event'.")

    @property
    def domain(self) -> TimeDomain:
        """The clock that counts."""
        return TimeDomain(self.time)
