"""Divides the time of a task among the parts of its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import ParamSpec, TypeVar

from statelog.clock import Clock

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Part(StrEnum):
    """The parts, named as their times in :class:`statelog.SubtaskMetrics`."""

    READ = "read_s"
    PROCESSOR = "processor_s"
    ENCODE = "encode_s"
    UPLOAD = "upload_s"
    WAIT = "wait_s"


class Stopwatch:
    """Counts the time of each part of one thread's work. The time of a part within another counts only for itself."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._part: Part | None = None
        self._since_s = 0.0
        self._spent_s = dict.fromkeys(Part, 0.0)

    def spent_s(self, part: Part) -> float:
        """The time of a part so far, without a stretch that is still running."""
        return self._spent_s[part]

    @contextmanager
    def counting(self, part: Part) -> Iterator[None]:
        """Count the time of the block."""
        outer = self._switch(part)
        try:
            yield
        finally:
            self._switch(outer)

    def call(
        self, part: Part, method: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """Call a method and count its time."""
        outer = self._switch(part)
        try:
            return method(*arguments, **named)
        finally:
            self._switch(outer)

    def _switch(self, part: Part | None) -> Part | None:
        """Count the time from now on for a part; returns the part before."""
        now_s, before = self._clock.monotonic_s(), self._part
        if before is not None:
            self._spent_s[before] += now_s - self._since_s
        self._part, self._since_s = part, now_s
        return before
