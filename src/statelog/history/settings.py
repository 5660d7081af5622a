"""Decides what changed settings at a start mean for the stored state: a table of rules, and the inherited values.

A checkpoint records the settings that its state depends on. A setting that differs at the next start is harmless, is
converted, or is refused by name. No start silently continues with state that does not fit it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind
from statelog.log.entry import Checkpoint, Settings
from statelog.log_fields import get_logger
from statelog.runs.schema import StateSchema
from statelog.runs.times import NO_TIME_MS

_log: Final = get_logger(__name__)


CLOSED: Final = "closed_ms"
"""Recorded along with the settings: earlier starts have closed the windows that end up to this time."""
LATENESS: Final = "allowedLatenessMs"
AGGREGATE: Final = "aggregate "
"""The name of a ready-made aggregate follows."""
VALUE_DETAIL: Final = "value of "
"""The name of an aggregate follows whose values depend on more than its accumulator."""
COLUMN_TYPE: Final = "column type of "
"""The name of an aggregate follows whose state depends on the types of its columns, and does not show them."""
JOIN: Final = "join"
"""What a join returns and when, and the columns of its event times."""
JOIN_FIRST: Final = "join_lower_ms"
JOIN_LAST: Final = "join_upper_ms"
JOIN_TIMEOUT: Final = "join_timeout_ms"
"""How long in processing time a row of an interval join waits for its first match, or "none"."""
JOIN_TOLERANCE: Final = "join_tolerance_ms"
"""The tolerance of an as-of join, or "none"."""
_TTL: Final = "TTL of state "
_NO_TTL: Final = "none"


class Verdict(StrEnum):
    """The consequence for the state."""

    EQUAL = "equal"
    CONVERT = "convert"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Rule:
    """The meaning of a change of one setting, or of several that are judged together."""

    names: tuple[str, ...]
    """Names of the settings. A name that ends with a blank stands for all settings that begin with it."""
    judge: Callable[[Settings, Settings], Verdict]
    """Maps the recorded and the declared values of these settings to the verdict."""
    effect: str
    """The conversion, or why none is possible; for users."""
    remedy: str = "Use the old setting, or start the query with a new checkpointLocation."
    """A user's options after a refusal."""


def _refused(stored: Settings, declared: Settings) -> Verdict:
    return Verdict.REFUSE


def _equal(stored: Settings, declared: Settings) -> Verdict:
    return Verdict.EQUAL


def _converted(stored: Settings, declared: Settings) -> Verdict:
    return Verdict.CONVERT


def _unless_without_timers(stored: Settings, declared: Settings) -> Verdict:
    return Verdict.EQUAL if stored["timeMode"] == "None" else Verdict.REFUSE


def _sizes(stored: Settings, declared: Settings) -> Verdict:
    """Windows that end together with old ones and begin later can be assembled from the stored panes."""
    (size, slide, offset), (new_size, new_slide, new_offset) = (
        [int(settings[name]) for name in ("size_ms", "slide_ms", "offset_ms")] for settings in (stored, declared)
    )
    if slide != new_slide or (offset - new_offset) % slide:
        return Verdict.REFUSE
    if size == new_size:
        return Verdict.EQUAL
    return Verdict.CONVERT if slide <= new_size < size and (size - new_size) % slide == 0 else Verdict.REFUSE


def _ttl(stored: Settings, declared: Settings) -> Verdict:
    (was,), (now,) = stored.values(), declared.values()
    if was == _NO_TTL:
        return Verdict.EQUAL
    return Verdict.CONVERT if now == _NO_TTL else Verdict.REFUSE


RULES: Final = (
    Rule(
        ("timeMode",),
        _unless_without_timers,
        "Timers that were registered in one kind of time would never fire, or fire at the wrong moment.",
    ),
    Rule(("windows",), _refused, "Windows of one kind cannot use the state of another."),
    Rule(("results",), _refused, "One kind of result cannot use the state of another."),
    Rule(("outputMode",), _refused, "The timers complete keys only in the old mode."),
    Rule(
        ("size_ms", "slide_ms", "offset_ms"),
        _sizes,
        "Open windows can only become shorter, by whole slides: for other windows some rows are no longer stored.",
    ),
    Rule(("gap_ms",), _converted, "The rows of open sessions keep the gap with which they arrived."),
    Rule(("size",), _converted, "An open window that has as many rows or more is returned with its key's next row."),
    Rule((LATENESS,), _converted, "Closed windows stay closed, and all others use the new lateness."),
    Rule(
        (AGGREGATE,),
        _refused,
        "Open windows already have a part of the old result under this name.",
        "Give the new aggregate another alias: it then counts only later rows.",
    ),
    Rule((VALUE_DETAIL,), _equal, "Only readers of state need it: the fractions of quantiles, and types."),
    Rule(
        (COLUMN_TYPE,),
        _refused,
        "Its state has values of the old type, which have different hashes or another meaning in the new type.",
        "Cast the column to its old type, or give the aggregate another alias: it then counts only later rows.",
    ),
    Rule((JOIN,), _refused, "Which waiting rows are stored depends on their event time and on what the join returns."),
    Rule(
        (JOIN_FIRST, JOIN_LAST),
        _converted,
        "Waiting rows are joined with the new bounds; rows that no longer waited under the old ones have been removed.",
    ),
    Rule(
        (JOIN_TIMEOUT,),
        _converted,
        "The new timeout applies to waiting rows, counted from their arrival, except those that arrived without one.",
    ),
    Rule(
        (JOIN_TOLERANCE,),
        _converted,
        "Rows are matched by the new tolerance; right rows that the old one no longer needed have been removed.",
    ),
    Rule(
        (_TTL,),
        _ttl,
        "Existing entries keep the expiry that they were written with, in the old kind of time.",
        "Keep the TTL's kind of time, or declare a state with another name; deleteIfExists removes the old one.",
    ),
)


@dataclass(frozen=True)
class Change:
    """A setting that differs at a start, or several that are judged together."""

    rule: Rule
    stored: Settings
    declared: Settings

    @property
    def verdict(self) -> Verdict:
        """The consequence for the state."""
        return self.rule.judge(self.stored, self.declared)

    def __str__(self) -> str:
        stored, declared = (
            ", ".join(f"{name}={value!r}" for name, value in settings.items())
            for settings in (self.stored, self.declared)
        )
        return f"the state was written with {stored}, and the operator now has {declared}"


def changes(stored: Settings, declared: Settings) -> Iterator[Change]:
    """The settings that differ; settings that only one side has do not count."""
    for rule in RULES:
        (first, *_) = rule.names
        groups = [{name} for name in stored if name.startswith(first)] if first.endswith(" ") else [set(rule.names)]
        for names in groups:
            if names <= stored.keys() and names <= declared.keys():
                was, now = ({name: settings[name] for name in sorted(names)} for settings in (stored, declared))
                if was != now:
                    yield Change(rule, was, now)


def require_convertible(settings: Settings, states: Sequence[StateSchema], before: Checkpoint, where: str) -> None:
    """Raise ConfigurationError if a start with these settings cannot continue from a checkpoint."""
    for change in changes(_with_ttl(before.settings, before.states), _with_ttl(settings, states)):
        if change.verdict is Verdict.REFUSE:
            raise ConfigurationError(
                f"{where}: {change}. {change.rule.effect}", kind=ErrorKind.OTHER_SETTINGS, hint=change.rule.remedy
            )


def _with_ttl(settings: Settings, states: Sequence[StateSchema]) -> dict[str, int | str]:
    return {**settings, **{f"{_TTL}'{state.name}'": str(state.expires_by) or _NO_TTL for state in states}}


@dataclass(frozen=True)
class Inherited:
    """The values that a start inherits from earlier ones."""

    settings: dict[str, int | str] = field(default_factory=dict)
    """The settings that the start's checkpoints record."""
    closed_ms: int = NO_TIME_MS
    """Windows that end up to this time are closed, whatever lateness is allowed now."""
    expires_by: dict[str, str] = field(default_factory=dict)
    """For each state that no longer has a TTL, the kind of time by which its existing values still expire."""


def inherit(settings: Settings, states: Sequence[StateSchema], before: Checkpoint | None, where: str) -> Inherited:
    """The values that a start inherits from the checkpoint before its first batch, if there is one."""
    if before is None:
        return Inherited(dict(settings))
    for change in changes(_with_ttl(before.settings, before.states), _with_ttl(settings, states)):
        if change.verdict is Verdict.CONVERT:
            _log.info("%s: %s. %s", where, change, change.rule.effect)
    # The time up to which windows were closed as of the checkpoint; their state is gone.
    closed_ms = int(before.settings.get(CLOSED, NO_TIME_MS))
    if LATENESS in before.settings:
        closed_ms = max(closed_ms, before.watermark_ms - int(before.settings[LATENESS]))
    # Open windows still hold the results of a removed aggregate, and it may come back.
    of_aggregates = (AGGREGATE, VALUE_DETAIL, COLUMN_TYPE)
    removed = {name: value for name, value in before.settings.items() if name.startswith(of_aggregates)}
    declared = {state.name for state in states if not state.expires_by}
    return Inherited(
        {**removed, **settings, **({} if closed_ms == NO_TIME_MS else {CLOSED: closed_ms})},
        closed_ms,
        {state.name: state.expires_by for state in before.states if state.expires_by and state.name in declared},
    )


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
    """The ready-made aggregates by name, such as ``sum(n)``, including removed ones that open windows still hold."""
    value_details: Mapping[str, str]
    """What else the values of aggregates depend on, by name."""

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
