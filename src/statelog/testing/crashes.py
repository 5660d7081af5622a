"""Crashes on purpose, at a chosen step of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from statelog.observer import CheckpointMetrics, Observer, RestoreMetrics, Step

DRIVER_STEPS: Final = frozenset({Step.LAST_ACK, Step.DURABLE})
"""The steps that the driver passes; the others are a task's."""


class Crash(Exception):
    """The death of a process at a step; only tests that run single attempts see it."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.step = step


@dataclass(frozen=True)
class Passed:
    """A step that was passed; subtask -1 stands for the driver."""

    step: Step
    batch: int
    subtask: int


class CrashPoint(Observer):
    """Crashes once at step `at`, in `subtask` or else in any, and forwards all events to the test's own observer."""

    def __init__(self, inner: Observer) -> None:
        self._inner = inner
        self.at: Step | None = None
        self.subtask: int | None = None
        self.crashes: list[Passed] = []
        self.checkpoints: list[CheckpointMetrics] = []

    def arm(self, step: Step | None, subtask: int | None = None) -> None:
        """Crash when the step is passed next, in this subtask or else in any; step None cancels the crash."""
        self.at, self.subtask = step, subtask

    def step(self, step: Step, batch: int, subtask: int) -> None:
        self._inner.step(step, batch, subtask)
        if step is self.at and self.subtask in (None, subtask):
            self.arm(None)
            self.crashes.append(Passed(step, batch, subtask))
            raise Crash(step)

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.checkpoints.append(metrics)
        self._inner.checkpoint(metrics)

    def restore(self, metrics: RestoreMetrics) -> None:
        self._inner.restore(metrics)
