"""What a start with other settings means for the state: the one table of it, and what a run takes over.

A checkpoint records the settings that its state depends on. One that is another at the next start is harmless, is
converted, or is refused by name; no run goes on in silence with state that does not fit it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind
from statelog.log.entry import Checkpoint, Settings
from statelog.runs.schema import StateSchema
from statelog.runs.times import NO_TIME_MS

_log: Final = logging.getLogger(__name__)


_CLOSED: Final = "closed_ms"
"""Recorded beside the settings: windows that end up to then were closed by earlier runs."""
_LATENESS: Final = "allowedLatenessMs"
_AGGREGATE: Final = "aggregate "
_TTL: Final = "TTL of state "
_NO_TTL: Final = "none"


class Verdict(StrEnum):
    """What becomes of the state."""

    EQUAL = "equal"
    CONVERT = "convert"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Rule:
    """What the change of a setting means.

    Parameters
    ----------
    names : tuple of str
        The setting, or those that are judged together. One that ends with a blank stands for all that begin with it.
    judge : callable
        From these settings as they were recorded, and as they are now, to the verdict.
    effect : str
        What is done, or why nothing can be.
    remedy : str
        What the user can do where it is refused.
    """

    names: tuple[str, ...]
    judge: Callable[[Settings, Settings], Verdict]
    effect: str
    remedy: str = "Use the old setting, or start the query with a new checkpointLocation."


def _refused(stored: Settings, declared: Settings) -> Verdict:
    return Verdict.REFUSE


def _converted(stored: Settings, declared: Settings) -> Verdict:
    return Verdict.CONVERT


def _unless_without_timers(stored: Settings, declared: Settings) -> Verdict:
    return Verdict.EQUAL if stored["timeMode"] == "None" else Verdict.REFUSE


def _sizes(stored: Settings, declared: Settings) -> Verdict:
    """Windows that end with whole old ones, and begin later, can be put together from the panes that are there."""
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
        "Timers that were registered for one time would never fire, or at a wrong moment.",
    ),
    Rule(
        ("windows",),
        _refused,
        "What is kept of open windows of one kind is nothing to another.",
    ),
    Rule(
        ("results",),
        _refused,
        "What is kept of open windows for one kind of result is nothing to another.",
    ),
    Rule(
        ("size_ms", "slide_ms", "offset_ms"),
        _sizes,
        "Open windows can only be cut shorter, by whole slides: of others a part of the rows is not kept.",
    ),
    Rule(
        ("gap_ms",),
        _converted,
        "The rows of open sessions keep the gap that they came with.",
    ),
    Rule(
        ("size",),
        _converted,
        "An open window that has as many rows or more is returned with its key's next row.",
    ),
    Rule(
        (_LATENESS,),
        _converted,
        "Windows that were closed stay closed, and all others go by the new lateness.",
    ),
    Rule(
        (_AGGREGATE,),
        _refused,
        "Open windows have a part of the old result under this name.",
        "Give the new aggregate another alias: then it counts from now on.",
    ),
    Rule(
        (_TTL,),
        _ttl,
        "What is there keeps the expiry that it was written with, which is one of the old time.",
        "Keep the time of the TTL, or declare a state of another name; deleteIfExists removes the old one.",
    ),
)


@dataclass(frozen=True)
class Change:
    """A setting, or some that are judged together, that is another one at a start.

    Parameters
    ----------
    rule : Rule
        What is said of it.
    stored, declared : dict
        As it was, and as it is.
    """

    rule: Rule
    stored: Settings
    declared: Settings

    @property
    def verdict(self) -> Verdict:
        """What becomes of the state."""
        return self.rule.judge(self.stored, self.declared)

    def __str__(self) -> str:
        stored, declared = (
            ", ".join(f"{name}={value!r}" for name, value in settings.items())
            for settings in (self.stored, self.declared)
        )
        return f"the state was written with {stored}, and the operator now has {declared}"


def changes(stored: Settings, declared: Settings) -> Iterator[Change]:
    """The settings that differ; one that only one side has is none."""
    for rule in RULES:
        for names in _names(rule, stored):
            if names <= stored.keys() and names <= declared.keys():
                was, now = ({name: settings[name] for name in sorted(names)} for settings in (stored, declared))
                if was != now:
                    yield Change(rule, was, now)


def _names(rule: Rule, stored: Settings) -> list[set[str]]:
    """The settings that a rule judges, one verdict each."""
    (first, *_) = rule.names
    if not first.endswith(" "):
        return [set(rule.names)]
    return [{name} for name in stored if name.startswith(first)]


def require_convertible(settings: Settings, states: Sequence[StateSchema], before: Checkpoint, where: str) -> None:
    """Check that a run with these settings can go on from a checkpoint.

    Parameters
    ----------
    settings : dict
        The run's settings.
    states : sequence of StateSchema
        The states that it declares.
    before : Checkpoint
        The checkpoint before its first batch; one of an earlier version has no settings to compare with.
    where : str
        Operator and location, for messages.

    Raises
    ------
    ConfigurationError
        If a setting is refused.
    """
    for change in changes(_with_ttl(before.settings, before.states), _with_ttl(settings, states)):
        if change.verdict is Verdict.REFUSE:
            raise ConfigurationError(
                f"{where}: {change}. {change.rule.effect}", kind=ErrorKind.OTHER_SETTINGS, hint=change.rule.remedy
            )


def _with_ttl(settings: Settings, states: Sequence[StateSchema]) -> dict[str, int | str]:
    return {**settings, **{f"{_TTL}'{state.name}'": str(state.expires_by) or _NO_TTL for state in states}}


@dataclass(frozen=True)
class TakenOver:
    """What a run takes over of those before it.

    Parameters
    ----------
    settings : dict
        What its checkpoints record.
    closed_ms : int
        Windows that end up to then are closed, whatever lateness is allowed now.
    expires_by : dict of str to str
        For each state that has no TTL any more the time that what is there expires by.
    """

    settings: dict[str, int | str] = field(default_factory=dict)
    closed_ms: int = NO_TIME_MS
    expires_by: dict[str, str] = field(default_factory=dict)


def take_over(settings: Settings, states: Sequence[StateSchema], before: Checkpoint | None, where: str) -> TakenOver:
    """What a run takes over of the checkpoint before its first batch.

    Parameters
    ----------
    settings : dict
        The run's settings.
    states : sequence of StateSchema
        The states that it declares.
    before : Checkpoint or None
        The checkpoint; None if there is none.
    where : str
        Operator and location, for messages.
    """
    if before is None:
        return TakenOver(dict(settings))
    for change in changes(_with_ttl(before.settings, before.states), _with_ttl(settings, states)):
        if change.verdict is Verdict.CONVERT:
            _log.info("%s: %s. %s", where, change, change.rule.effect)
    closed_ms = _closed_ms(before)
    # An aggregate that was removed is still in what open windows have, and may come back.
    removed = {name: value for name, value in before.settings.items() if name.startswith(_AGGREGATE)}
    declared = {state.name for state in states if not state.expires_by}
    return TakenOver(
        {**removed, **settings, **({} if closed_ms == NO_TIME_MS else {_CLOSED: closed_ms})},
        closed_ms,
        {state.name: state.expires_by for state in before.states if state.expires_by and state.name in declared},
    )


def _closed_ms(before: Checkpoint) -> int:
    """Up to when windows had been closed after a checkpoint; what they had is gone."""
    closed_ms = int(before.settings.get(_CLOSED, NO_TIME_MS))
    if _LATENESS not in before.settings:
        return closed_ms
    return max(closed_ms, before.watermark_ms - int(before.settings[_LATENESS]))
