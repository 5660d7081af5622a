"""The result of one check in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

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
        """A check has ended with an error: one of statelog's says what to do."""
        if isinstance(error, StatelogError):
            return self.error(check, error.message, error.hint)
        reason = (str(error).strip().splitlines() or [""])[0][:_LONGEST]
        return self.error(
            check,
            f"The check could not be made: {type(error).__name__}: {reason}",
            "Mend what the message names, and check again; if it names nothing of yours, please report it.",
        )
