"""Spark's time modes, and the objects that give a processor the time."""

from __future__ import annotations

from enum import StrEnum

from pyspark.sql.streaming.stateful_processor import TimerValues

from statelog.errors import ConfigurationError
from statelog.runs.schema import TimeDomain
from statelog.runs.times import Moment


class TimeMode(StrEnum):
    """The clock of an operator's times and timers."""

    NONE = "None"
    PROCESSING_TIME = "ProcessingTime"
    EVENT_TIME = "EventTime"

    @classmethod
    def parse(cls, text: str) -> TimeMode:
        """The mode of a name, in any case; raises ConfigurationError if there is none."""
        for mode in cls:
            if str(text).lower() == mode.lower():
                return mode
        raise ConfigurationError(f"timeMode is {text!r}.", hint="It must be 'None', 'ProcessingTime' or 'EventTime'.")

    @property
    def domain(self) -> TimeDomain | None:
        """The clock that fires timers; None if there are no timers."""
        return _DOMAINS.get(self)

    def timer_values(self, moment: Moment) -> TimerValues:
        """Spark's object that gives a processor the time; without a clock both times are -1."""
        if self is TimeMode.NONE:
            return TimerValues(-1, -1)
        return TimerValues(moment.processing_ms, moment.watermark_ms)


_DOMAINS = {TimeMode.PROCESSING_TIME: TimeDomain.PROCESSING, TimeMode.EVENT_TIME: TimeDomain.EVENT}
