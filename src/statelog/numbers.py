"""Checks the numbers that users pass: Python's and NumPy's are fine; True, NaN and infinity are no numbers here."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TypeGuard

import numpy as np

from statelog.errors import ConfigurationError


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number by its type; 2.0 is none."""
    return isinstance(value, Integral) and is_number(value)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number, also NaN or infinite."""
    return isinstance(value, Real) and not isinstance(value, bool | np.timedelta64)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return is_number(value) and math.isfinite(value)


def checked_whole(value: object, name: str, least: int, most: int | None = None) -> int:
    """A whole number in its range, as Python's; ConfigurationError otherwise. `name` begins the message."""
    if is_whole(value):
        number = int(value)
        if least <= number and (most is None or number <= most):
            return number
    within = f"{least} or more" if most is None else f"from {least} to {most}"
    raise ConfigurationError(f"{name} is {value!r:.80}.", hint=f"It must be a whole number, {within}.")


def checked_batch(value: object, name: str, least: int = 0) -> int | None:
    """The number of a batch, or None for none given; ConfigurationError for anything else."""
    return None if value is None else checked_whole(value, name, least)
