"""Faults at the steps of a batch: kills and stalls that happen once, and waiting for something to happen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from statelog import Observer, Step


def make_marker(path: Path | str) -> str:
    """Arm a fault that happens once."""
    Path(path).touch()
    return str(path)


def take_marker(path: Path | str) -> bool:
    """Whether the marker was there; only one caller gets it."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


@dataclass(frozen=True)
class KillAt(Observer):
    """Kills a process the first time that a step of a batch is passed.

    Parameters
    ----------
    step, batch : Step, int
        Where.
    marker : str
        A file that arms the fault.
    pid_file : str
        Holds the process to kill; empty for the process that passes the step.
    """

    at: str
    batch: int
    marker: str
    pid_file: str = ""

    def step(self, step: Step, batch: int, subtask: int) -> None:
        if step == self.at and batch == self.batch and take_marker(self.marker):
            pid = int(Path(self.pid_file).read_text()) if self.pid_file else os.getpid()
            os.kill(pid, signal.SIGKILL)
            time.sleep(60)  # until the death of the other process is noticed


@dataclass(frozen=True)
class KillAtMany(Observer):
    """Several :class:`KillAt` one after the other."""

    faults: tuple[KillAt, ...]

    def step(self, step: Step, batch: int, subtask: int) -> None:
        for fault in self.faults:
            fault.step(step, batch, subtask)


@dataclass(frozen=True)
class StallAt(Observer):
    """Stops at a step of a batch, says so by making a file, and goes on when another file appears."""

    at: str
    batch: int
    stalled: str
    go_on: str

    def step(self, step: Step, batch: int, subtask: int) -> None:
        if step == self.at and batch == self.batch:
            Path(self.stalled).touch()
            wait_until(Path(self.go_on).exists, "the sign to continue")


def wait_until(is_done: Callable[[], bool], what: str, timeout_s: float = 200) -> None:
    """Wait for something; fail if it does not happen."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s} s for {what}")
        time.sleep(0.02)
