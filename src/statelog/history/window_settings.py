"""The stored names of windows: their states and fields, and their settings in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from statelog.history.settings import AGGREGATE, CLOSED, LATENESS, VALUE_DETAIL
from statelog.log.entry import Settings
from statelog.runs.times import NO_TIME_MS

PANES_STATE: Final = "window.panes"
"""A map from the start of a pane to its accumulator."""
SESSIONS_STATE: Final = "window.sessions"
"""A map from the start of a session to its end and its accumulator."""
SESSION_END_FIELD: Final = "session_end_ms"
"""The end of the session; it precedes the accumulator's fields in the stored session."""
COUNT_STATE: Final = "window.count"
"""The number of rows of a key's count window, and its accumulator."""
COUNT_FIELD: Final = "window_rows"
"""The number of rows so far; it precedes the accumulator's fields in the stored window."""
ROWS_STATE: Final = "window.rows"
"""A map from time and order of arrival to the rows of `process` windows."""


class WindowKind(StrEnum):
    """The kinds of windows, as checkpoints record them."""

    OF_TIME = "of time"
    SESSIONS = "sessions"
    COUNTS = "counts"

    @property
    def state(self) -> str:
        """The state that has the windows' accumulators."""
        return _STATES[self]


class WindowResults(StrEnum):
    """What computes the results of windows, as checkpoints record it."""

    AGG = "agg"
    AGGREGATE = "aggregate"
    REDUCE = "reduce"
    PROCESS = "process"


_STATES: Final = {
    WindowKind.OF_TIME: PANES_STATE,
    WindowKind.SESSIONS: SESSIONS_STATE,
    WindowKind.COUNTS: COUNT_STATE,
}


@dataclass(frozen=True)
class WindowSettings:
    """The settings of an operator's windows."""

    kind: WindowKind
    results: WindowResults
    is_event_time: bool
    """Whether the watermark completes them; otherwise the processing time does."""
    lateness_ms: int
    """How long complete windows still take late rows."""
    closed_ms: int
    """Earlier starts have closed the windows that end up to this time."""
    grid: tuple[int, int, int] | None
    """Size, slide and offset of windows of time, milliseconds."""
    aggregates: Mapping[str, str]
    """The ready-made aggregates by name, such as ``sum(n)``; also removed ones that open windows still hold."""
    value_details: Mapping[str, str]
    """What else their values follow from, by name."""

    @classmethod
    def of(cls, settings: Settings) -> WindowSettings | None:
        """The settings in a checkpoint; None if the operator has no windows."""
        kind, results = settings.get("windows"), settings.get("results")
        if kind not in list(WindowKind) or results not in list(WindowResults):
            return None
        kind = WindowKind(str(kind))
        grid = None
        if kind is WindowKind.OF_TIME:
            grid = int(settings["size_ms"]), int(settings["slide_ms"]), int(settings["offset_ms"])
        return cls(
            kind,
            WindowResults(str(results)),
            settings.get("timeMode") == "EventTime",
            int(settings.get(LATENESS, 0)),
            int(settings.get(CLOSED, NO_TIME_MS)),
            grid,
            _named(settings, AGGREGATE),
            _named(settings, VALUE_DETAIL),
        )


def _named(settings: Settings, prefix: str) -> dict[str, str]:
    """The settings that begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): str(value) for name, value in settings.items() if name.startswith(prefix)}
