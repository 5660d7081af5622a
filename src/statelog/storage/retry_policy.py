"""How often a request to a store is attempted, and when."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from statelog.errors import ConfigurationError

_MAX_DOUBLINGS: Final = 60


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is attempted, and when.

    Parameters
    ----------
    attempts : int
        Attempts at a request at most, the first one and hedges included.
    timeout_s : float or None
        A write that has taken so long gets another attempt beside it, at once and within a budget; earlier if it takes
        longer than writes usually do. None is never. It is no limit: how long an attempt may take is up to the store.
    delay_s : float
        Before a failed request is repeated, a random time from 0 to this passes; from 0 to twice this before the
        next repetition, and so on.
    max_delay_s : float
        But no more than this.

    Raises
    ------
    ConfigurationError
        If a value is out of its range.
    """

    attempts: int = 3
    timeout_s: float | None = 1.0
    delay_s: float = 0.5
    max_delay_s: float = 10.0

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
        """The longest time that may pass before the next attempt.

        Parameters
        ----------
        failures : int
            How many attempts have failed, at least one.
        """
        return min(self.max_delay_s, self.delay_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _require(is_valid: bool, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise ConfigurationError(f"{name} of the retry policy is {value!r}.", hint=f"It must be {expected}.")
