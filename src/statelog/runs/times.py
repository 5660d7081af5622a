"""Time as states, timers and merges see it: the two clocks of a batch, and how long a state lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from statelog.errors import ConfigurationError
from statelog.runs.schema import TimeDomain

NO_TIME_MS: Final = -(1 << 63)
"""Before all times: the watermark before any row, and the mark of timers before any has fired."""


@dataclass(frozen=True)
class Moment:
    """When something happens, in milliseconds since the Unix epoch.

    Parameters
    ----------
    processing_ms : int
        The batch's processing time.
    watermark_ms : int
        The batch's watermark: timers up to it fire.
    late_watermark_ms : int
        The watermark of the batch before: rows up to it are late.
    """

    processing_ms: int
    watermark_ms: int
    late_watermark_ms: int = NO_TIME_MS

    def now_ms(self, domain: TimeDomain) -> int:
        """The time of one of the two clocks."""
        return self.processing_ms if domain is TimeDomain.PROCESSING else self.watermark_ms


@dataclass(frozen=True)
class Watermark:
    """An operator's own watermark: the largest event time seen in all its subtasks minus a delay.

    It advances between batches, is kept in the checkpoint and never goes back, whatever the parallelism. Spark's
    ``withWatermark`` is not needed with it; the column may have it all the same.

    Parameters
    ----------
    column : str
        The input column with the event time, a timestamp.
    delay_ms : int
        How much later than the newest row a row may come, milliseconds.
    inputs : int
        Number of inputs, if the operator reads a union of several. The smallest watermark of them counts, and until
        each has had a row there is none.
    input_column : str, optional
        The column that says which input a row is of: an integer from 0 to `inputs` - 1. Needed with several.

    Raises
    ------
    ConfigurationError
        If a value is out of its range.
    """

    column: str
    delay_ms: int = 0
    inputs: int = 1
    input_column: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("delay_ms", 0), ("inputs", 1)):
            value = getattr(self, name)
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

    Spark's ``ttlDurationMs`` takes a number of milliseconds, which is ``Ttl(duration_ms)``; this class has what
    Flink's StateTtlConfig has beyond that.

    Parameters
    ----------
    duration_ms : int
        Milliseconds from the last write on; at least 1.
    time : {"processing", "event"}
        Which clock counts. In processing time an entry lives until the batch's time has come to its last write
        plus the duration. In event time it lives until the watermark has come to the newest event time of the
        rows during whose handling it was written (or to the time of the timer) plus the duration.
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
