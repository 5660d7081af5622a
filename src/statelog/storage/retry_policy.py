"""How often a request to a store is attempted, and when."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from statelog.errors import ConfigurationError

_MAX_DOUBLINGS: Final = 60


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is attempted, and when; a value out of range raises ConfigurationError."""

    attempts: int = 3
    """Upper bound of attempts at a request, including the first one and hedges."""
    timeout_s: float | None = 1.0
    """A write that takes longer is hedged at once, within a budget; None hedges nothing.

    A write that takes longer than usual is hedged sooner. This is no limit: the store decides how long an attempt may
    take.
    """
    delay_s: float = 0.5
    """Upper end of the random delay (from 0) before the first repetition; it doubles with each further one."""
    max_delay_s: float = 10.0
    """Limit of that upper end."""

    def __post_init__(self) -> None:
        is_whole = isinstance(self.attempts, int) and not isinstance(self.attempts, bool)
        _require(is_whole and self.attempts >= 1, "attempts", self.attempts, "a whole number from 1 on")
        is_timeout = self.timeout_s is None or (_is_duration(self.timeout_s) and self.timeout_s > 0)
        _require(is_timeout, "timeout_s", self.timeout_s, "None, or a number above 0")
        _require(_is_duration(self.delay_s), "delay_s", self.delay_s, "a number from 0 on")
        _require(_is_duration(self.max_delay_s), "max_delay_s", self.max_delay_s, "a number from 0 on")

    @classmethod
    def none(cls) -> RetryPolicy:
        """One attempt, however long it takes."""
        return cls(attempts=1, timeout_s=None)

    def longest_delay_s(self, failures: int) -> float:
        """The longest delay before the next attempt, after `failures` (at least one) failed attempts."""
        return min(self.max_delay_s, self.delay_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _require(is_valid: bool, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise ConfigurationError(f"{name} of the retry policy is {value!r}.", hint=f"It must be {expected}.")
