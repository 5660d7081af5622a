"""Runs of the job: each is a process with children of its own, is followed by its telemetry, and may be killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

import psutil

from examples.flights.telemetry import Event, EventReader, request_pause
from examples.processes import JobFailedError, members, open_session
from statelog import Step

__all__ = ["Kill", "Run", "Target", "plan_runs", "run_module", "supervise"]

_PARALLELISMS: Final = (2, 1, 3)
_POLL_S: Final = 0.05
_SILENCE_LIMIT_S: Final = 180.0


class Target(StrEnum):
    """What is killed."""

    WORKER = "Python worker"
    DRIVER = "Python driver"
    JVM = "JVM"


@dataclass(frozen=True)
class Kill:
    """A SIGKILL to come.

    Parameters
    ----------
    target : Target
        What is killed.
    step : Step
        Where in the batch.
    batch : int
        In which batch.
    """

    target: Target
    step: Step
    batch: int

    @property
    def ends_run(self) -> bool:
        """Whether the job must be started again; a worker is replaced by Spark."""
        return self.target is not Target.WORKER


@dataclass
class Run:
    """One start of the job, and what was seen of it.

    Parameters
    ----------
    parallelism : int
        Number of subtasks.
    kills : list of Kill
        What to kill, in this order.
    started_s : float
        When the process was started, seconds since the Unix epoch.
    killed_s : dict
        When each kill was done, seconds since the Unix epoch.
    events : list of Event
        The telemetry.
    """

    parallelism: int
    kills: list[Kill]
    started_s: float = 0.0
    killed_s: dict[Kill, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def events_of(self, kind: str) -> list[Event]:
        """The events of a kind."""
        return [event for event in self.events if event["event"] == kind]


def plan_runs(batches: int, seed: int) -> list[Run]:
    """Spread the kills over the batches: a worker and the driver in the first run, the JVM in the second."""
    source = random.Random(seed)
    worker, driver, jvm = (round(batches * (share + source.uniform(-0.05, 0.05))) for share in (0.2, 0.45, 0.7))
    kills = [
        # A worker that has changed its state, and has told nobody yet.
        [Kill(Target.WORKER, Step.ACKING, worker), Kill(Target.DRIVER, Step.DURABLE, driver)],
        # The driver above: the checkpoint exists, Spark has not committed the batch and will repeat it.
        # The JVM here: all changes have arrived, the checkpoint does not exist.
        [Kill(Target.JVM, Step.LAST_ACK, jvm)],
        [],
    ]
    return [Run(parallelism, of_run) for parallelism, of_run in zip(_PARALLELISMS, kills, strict=True)]


def supervise(
    run: Run,
    command: Sequence[str],
    *,
    telemetry: Path,
    work: Path,
    log: Path,
    on_event: Callable[[Event], None],
    on_kill: Callable[[Kill], None],
) -> None:
    """Start the job, follow it to its end, and kill what the run's plan says on the way.

    Parameters
    ----------
    run : Run
        The run; what is seen is noted in it.
    command : sequence of str
        The job's module and arguments.
    telemetry : Path
        File that the job writes its telemetry to.
    work, log : Path
        The job's working directory, and the file that gets its console output.
    on_event, on_kill : callable
        Told what happens.

    Raises
    ------
    JobFailedError
        If the job ends by itself with an error or before it was killed, or is silent for three minutes.
    """
    for kill in run.kills:
        request_pause(telemetry, kill.step, kill.batch)
    run.started_s = time.time()
    with open_session(command, work, log) as process:
        for event in _follow(process, EventReader(telemetry)):
            run.events.append(event)
            on_event(event)
            if event["event"] != "paused":
                continue
            kill = next(kill for kill in run.kills if kill.step == event["step"])
            os.kill(_victim(kill.target, process.pid, event), signal.SIGKILL)
            run.killed_s[kill] = time.time()
            on_kill(kill)
            if kill.ends_run:
                return
    if process.returncode:
        raise JobFailedError(f"The job ended with exit code {process.returncode}.")
    if len(run.killed_s) < len(run.kills):
        raise JobFailedError("The job ended before everything was killed.")


def run_module(command: Sequence[str], work: Path, log: Path) -> int:
    """Run a module with arguments to its end; its exit code is returned."""
    with open_session(command, work, log) as process:
        return process.wait()


def _follow(process: subprocess.Popen[bytes], reader: EventReader) -> Iterator[Event]:
    """The events of a job until it ends."""
    heard_s = time.monotonic()
    while True:
        has_ended = process.poll() is not None  # before the last look at the events, so that none is missed
        for event in reader.read():
            heard_s = time.monotonic()
            yield event
        if has_ended:
            return
        if time.monotonic() - heard_s > _SILENCE_LIMIT_S:
            raise JobFailedError(f"The job has done nothing for {_SILENCE_LIMIT_S:.0f} s.")
        time.sleep(_POLL_S)


def _victim(target: Target, job: int, event: Event) -> int:
    """The id of the process to kill; it is one of the job's."""
    if target is Target.DRIVER:
        return job
    if target is Target.WORKER:
        return int(event["pid"])
    return next(member for member in members(job) if psutil.Process(member).name() == "java")
