"""The kinds of state that ``state`` measures: their processors, their input and their time mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks import state_frames as frames
from benchmarks import state_rows as rows

__all__ = ["KINDS", "Kind"]


@dataclass(frozen=True)
class Kind:
    """A kind of state.

    Parameters
    ----------
    columns : tuple of str
        What its processors read beside the key: ``item``, ``checks``, ``time`` and ``time_ms``.
    time_mode : str
        The time mode.
    takes_rows, takes_frames : callable
        Make the processors; `takes_frames` is None where the kind has rows only.
    has_few_keys : bool
        Whether keys should meet often, so that each has many entries.
    """

    columns: tuple[str, ...]
    time_mode: str
    takes_rows: Callable[[], Any]
    takes_frames: Callable[[], Any] | None
    has_few_keys: bool = False


KINDS: Final = {
    "value": Kind((), "None", rows.CountRows, frames.CountFrames),
    "list": Kind(("item", "checks"), "None", rows.AppendRows, frames.AppendFrames, has_few_keys=True),
    "map": Kind(("item",), "None", rows.EntryRows, frames.EntryFrames, has_few_keys=True),
    "timer": Kind((), "ProcessingTime", rows.TimerRows, frames.TimerFrames),
    "ttl": Kind((), "ProcessingTime", lambda: rows.CountRows(rows.TTL_MS), lambda: frames.CountFrames(rows.TTL_MS)),
    "window": Kind(("time", "time_ms"), "EventTime", rows.WindowRows, None, has_few_keys=True),
}
