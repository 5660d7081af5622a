"""Crashes on purpose: a process that passes a step dies there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from statelog.observer import CheckpointMetrics, Observer, RestoreMetrics, Step

DRIVER_STEPS: Final = frozenset({Step.LAST_ACK, Step.DURABLE})
"""The steps that the driver passes; the others are a task's."""


class Crash(Exception):
    """The process that passes a step dies there; only tests that drive single attempts see it."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.step = step


@dataclass(frozen=True)
class Passed:
    """A step that was passed, -1 stands for the driver."""

    step: Step
    batch: int
    subtask: int


class CrashPoint(Observer):
    """Crashes at a step, once, and tells the test's own observer everything.

    Parameters
    ----------
    inner : Observer
        The test's observer.

    Attributes
    ----------
    at : Step or None
        Where the next crash happens.
    subtask : int or None
        Whose task it hits; None is the first that passes the step.
    crashes : list of Passed
        The crashes so far.
    checkpoints : list of CheckpointMetrics
        The checkpoints so far.
    """

    def __init__(self, inner: Observer) -> None:
        self._inner = inner
        self.at: Step | None = None
        self.subtask: int | None = None
        self.crashes: list[Passed] = []
        self.checkpoints: list[CheckpointMetrics] = []

    def arm(self, step: Step | None, subtask: int | None = None) -> None:
        """Crash when the step is passed next; None takes it back."""
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
