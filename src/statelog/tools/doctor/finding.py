"""Checks and their findings: each runs within a time limit, and whatever happens to it becomes a finding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final, Literal

from statelog.clock import SystemClock
from statelog.errors import StatelogError

Level = Literal["ok", "warning", "error"]

DRIVER: Final = "driver"

_LONGEST: Final = 500


@dataclass(frozen=True)
class Finding:
    """What :func:`doctor` has found in one place.

    Parameters
    ----------
    level : str
        ``ok``; ``warning``: queries run, but probably not as intended; ``error``: queries fail.
    check : str
        The stable name of the check, such as ``driver-port``; docs/doctor.md lists them.
    where : str
        ``driver``, or ``executor`` with the executor's id, such as ``executor 2``.
    host : str
        The host's name there.
    found : str
        What was found.
    remedy : str
        What to do about it; empty if nothing needs to be done.
    """

    level: Level
    check: str
    where: str
    host: str
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is checked; makes the findings of that place."""

    where: str
    host: str

    def ok(self, check: str, found: str) -> Finding:
        """Nothing needs to be done."""
        return Finding("ok", check, self.where, self.host, found)

    def warning(self, check: str, found: str, remedy: str) -> Finding:
        """Queries run, but probably not as intended."""
        return Finding("warning", check, self.where, self.host, found, remedy)

    def error(self, check: str, found: str, remedy: str) -> Finding:
        """Queries fail."""
        return Finding("error", check, self.where, self.host, found, remedy)

    def failed(self, check: str, error: BaseException) -> Finding:
        """A check has ended with an error; an error of statelog's says what to do."""
        if isinstance(error, StatelogError):
            return self.error(check, error.message, error.hint)
        reason = (str(error).strip().splitlines() or [""])[0][:_LONGEST]
        return self.error(
            check,
            f"The check could not be completed: {type(error).__name__}: {reason}",
            "Fix what the message names, and check again. If it names nothing in your setup, report the failure.",
        )


# ---- Running checks side by side ----


Findings = Generator[Finding, None, None]

START_CHECKS: Final = 5
"""Starting Spark, or the first executors, may take as long as this number of checks."""
_END_S: Final = 5.0
"""How long an end waits for a check that was asked to end."""


@dataclass(frozen=True)
class Check:
    """A check of one place.

    `run` is a generator. After the time limit it is closed at its next finding, so its ``finally`` removes what it has
    written. `cancel` is called first, to end what `run` waits for, if anything can.
    """

    name: str
    place: Place
    run: Callable[[], Findings]
    stuck: str
    """What to do if it does not end."""
    cancel: Callable[[], None] | None = None


def run_limited(checks: Sequence[Check], timeout_s: float) -> list[Finding]:
    """Run checks, and return their findings in the order of the checks.

    A check that has not ended within the limit is abandoned in its daemon thread. An interruption, such as Ctrl-C, ends
    all checks, and is raised again.
    """
    running = [_Running(check) for check in checks]
    try:
        for one in running:
            one.thread.start()
        _wait(running, timeout_s)
        late = [one for one in running if one.abandon()]
        _wait([one for one in late if one.check.cancel is not None], _END_S)
    except BaseException:
        for one in running:
            one.abandon()
        _wait([one for one in running if one.thread.ident is not None], _END_S)
        raise
    return [finding for one in running for finding in one.findings(timeout_s)]


class _Running:
    """A check in a thread of its own."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.done = threading.Event()
        self._found: list[Finding] = []
        self._abandoned = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"statelog-doctor-{check.name}", daemon=True)

    def _run(self) -> None:
        try:
            with closing(self.check.run()) as findings:
                for finding in findings:
                    if self._abandoned.is_set():
                        break
                    self._found.append(finding)
        except BaseException as error:  # even a panic of a native library becomes a finding
            if not self._abandoned.is_set():
                self._found.append(self.check.place.failed(self.check.name, error))
        finally:
            self.done.set()

    def abandon(self) -> bool:
        """Make the check end as soon as it can; False if it has already ended."""
        if self.done.is_set():
            return False
        self._abandoned.set()
        if self.check.cancel is not None:
            with suppress(Exception):
                self.check.cancel()
        return True

    def findings(self, timeout_s: float) -> list[Finding]:
        found = list(self._found)
        if self._abandoned.is_set():
            told = f"The check was not finished after {timeout_s:g} s."
            found.append(self.check.place.error(self.check.name, told, self.check.stuck))
        return found


def _wait(running: Sequence[_Running], timeout_s: float) -> None:
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + timeout_s
    for one in running:
        one.done.wait(max(deadline_s - clock.monotonic_s(), 0))
