"""Time in states, timers and merges: the two clocks of a batch, and how long entries live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from statelog.errors import ConfigurationError
from statelog.numbers import Duration, in_milliseconds, is_whole
from statelog.runs.schema import TimeDomain

NO_TIME_MS: Final = -(1 << 63)
"""Before all times: the watermark before any row, and the mark of timers before any has fired."""
LAST_MS: Final = (1 << 63) - 1
"""The last time in 64 bits, which never comes."""


@dataclass(frozen=True)
class Moment:
    """The time of a batch by both clocks, in milliseconds since the Unix epoch."""

    processing_ms: int
    watermark_ms: int
    """Timers up to it fire."""
    late_watermark_ms: int = NO_TIME_MS
    """The watermark of the previous batch; rows up to it are late."""

    def now_ms(self, domain: TimeDomain) -> int:
        """The time by one of the two clocks."""
        return self.processing_ms if domain is TimeDomain.PROCESSING else self.watermark_ms


@dataclass(frozen=True)
class Watermark:
    """An operator's own watermark: the largest event time seen in all its subtasks minus a delay.

    It advances between batches, is stored in the checkpoint and never goes backward, whatever the parallelism. It does
    not need Spark's ``withWatermark``, but works alongside it.

    Parameters
    ----------
    column : str
        The input column with the event time, a timestamp.
    delay : int, timedelta or str, or a sequence of them
        How much later than the newest row a row may come: milliseconds, a timedelta, or words such as "10 seconds".
        With several inputs, each may have its own delay.
    inputs : int
        Number of inputs, if the operator reads a union of several. The smallest of their watermarks counts; there is
        none until each input has had a row.
    input_column : str, optional
        The column with the number of a row's input, an integer from 0 to `inputs` - 1. Required with several inputs,
        not allowed with one.
    max_ahead : int, timedelta or str, optional
        How far ahead of its batch's processing time a row may be to move the watermark: milliseconds, a timedelta, or
        words. A row with a later event time is handled like any other but does not move the watermark; by default all
        rows do.
    idle : int, timedelta or str, or a sequence of them, optional
        For several inputs, including the two sides of a join: an input that has had no rows for this long in processing
        time (milliseconds, a timedelta, or words) does not hold back the watermark until it has rows again. There may
        be one value for each input, None for never. Requires ``Options(heartbeat_s=...)``. By default the watermark
        waits for all inputs.

    Raises
    ------
    ConfigurationError
        If a value is out of its range.
    """

    column: str
    delay: Duration | Sequence[Duration] = 0
    inputs: int = 1
    input_column: str | None = None
    max_ahead: Duration | None = None
    idle: Duration | Sequence[Duration | None] | None = None

    def __post_init__(self) -> None:
        of_each = list(self.delay) if isinstance(self.delay, (list, tuple)) else [self.delay]
        delays_ms = tuple(in_milliseconds(delay, "The watermark's delay", least=0) for delay in of_each)
        if isinstance(self.delay, (list, tuple)) and (not delays_ms or len(delays_ms) != self.inputs):
            raise ConfigurationError(
                f"The watermark has {len(delays_ms)} delays but {self.inputs!r} inputs.",
                hint="Give one delay for all inputs, or one for each.",
            )
        object.__setattr__(self, "delay", delays_ms if len(delays_ms) > 1 else delays_ms[0])
        if self.max_ahead is not None:
            ahead_ms = in_milliseconds(self.max_ahead, "The watermark's max_ahead", least=0)
            object.__setattr__(self, "max_ahead", ahead_ms)
        if isinstance(self.idle, (list, tuple)) and (not self.idle or len(self.idle) != self.inputs):
            raise ConfigurationError(
                f"The watermark has {len(self.idle)} values of idle but {self.inputs!r} inputs.",
                hint="Give one value for all inputs, or one for each.",
            )
        of_each_idle = list(self.idle) if isinstance(self.idle, (list, tuple)) else [self.idle]
        idle_ms = tuple(
            None if idle is None else in_milliseconds(idle, "The watermark's idle") for idle in of_each_idle
        )
        object.__setattr__(self, "idle", idle_ms if len(idle_ms) > 1 else idle_ms[0])
        if not is_whole(self.inputs) or self.inputs < 1:
            raise ConfigurationError(f"The watermark's inputs is {self.inputs!r}.", hint="It must be 1 or more.")
        if (self.inputs > 1) != (self.input_column is not None):
            raise ConfigurationError(
                f"The watermark has {self.inputs} inputs and input_column {self.input_column!r}.",
                hint="Several inputs need a column that distinguishes them; a single one must not have it.",
            )

    @property
    def delay_ms(self) -> int:
        """The delay in milliseconds, the longest if inputs have different ones."""
        return max(self.delays_ms)

    @property
    def delays_ms(self) -> tuple[int, ...]:
        """The delay of each input in milliseconds."""
        delays = self.delay if isinstance(self.delay, tuple) else (self.delay,) * self.inputs
        return tuple(int(delay) for delay in delays if isinstance(delay, int))

    @property
    def idle_of_inputs_ms(self) -> tuple[int | None, ...]:
        """The milliseconds without rows after which each input is idle; None for never."""
        given = self.idle if isinstance(self.idle, tuple) else (self.idle,) * self.inputs
        return tuple(idle if isinstance(idle, int) else None for idle in given)

    @property
    def max_ahead_ms(self) -> int | None:
        """The bound `max_ahead` in milliseconds."""
        assert self.max_ahead is None or isinstance(self.max_ahead, int)
        return self.max_ahead


@dataclass(frozen=True)
class Ttl:
    """How long the entries of a state live: each value, list element and map entry separately.

    Spark's ``ttlDurationMs`` is ``Ttl(duration)``; the other parameters are those that Flink's StateTtlConfig adds.

    Parameters
    ----------
    duration : int, timedelta or str
        Lifetime after the last write: milliseconds, at least 1, a timedelta, or words such as "1 hour 30 minutes". An
        entry whose lifetime would end after the last time in 64 bits never expires.
    time : {"processing", "event"}
        The clock that counts. In processing time an entry lives until the batch's time reaches its last write plus the
        duration. In event time it lives until the watermark reaches the event time of its last write plus the duration.
        The event time of a write is the newest of the key's rows in the batch, or the time of the timer, but not
        before the watermark.
    renew_on_read : bool
        Whether reading an entry counts as writing it.

    Raises
    ------
    ConfigurationError
        If a value is out of its range.
    """

    duration: Duration
    time: Literal["processing", "event"] = "processing"
    renew_on_read: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "duration", in_milliseconds(self.duration, "The TTL duration", most=LAST_MS))
        if self.time not in ("processing", "event"):
            raise ConfigurationError(f"The TTL's time is {self.time!r}.", hint="It must be 'processing' or 'event'.")

    @property
    def duration_ms(self) -> int:
        """The duration in milliseconds."""
        assert isinstance(self.duration, int)
        return self.duration

    @property
    def domain(self) -> TimeDomain:
        """The clock that counts."""
        return TimeDomain(self.time)


def expiry_ms(ttl: Ttl, since_ms: int) -> int:
    """When an entry that was written at a time expires; ``LAST_MS`` if it would be later."""
    return min(since_ms + ttl.duration_ms, LAST_MS)


def expiries_ms(ttl: Ttl, since_ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """When entries that were written at some times expire, each as in :func:`expiry_ms`."""
    # A sum beyond 64 bits would wrap around.
    return np.minimum(since_ms, LAST_MS - ttl.duration_ms) + ttl.duration_ms
