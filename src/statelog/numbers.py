"""Numbers and durations that users give, checked by name; durations are numbers, timedeltas, or words as in Spark."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from decimal import Decimal
from numbers import Integral, Real
from typing import Final, TypeAlias, TypeGuard

import numpy as np

from statelog.errors import ConfigurationError
from statelog.shown import shown_value


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number by its type; 2.0 is not."""
    return isinstance(value, Integral) and is_number(value)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number; NaN and infinity are included."""
    return isinstance(value, Real) and not isinstance(value, bool | np.timedelta64)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return is_number(value) and math.isfinite(value)


def checked_whole(value: object, name: str, least: int, most: int | None = None) -> int:
    """A whole number in its range, as an int; ConfigurationError otherwise. `name` begins the message."""
    if is_whole(value):
        number = int(value)
        if least <= number and (most is None or number <= most):
            return number
    within = f"{least} or more" if most is None else f"from {least} to {most}"
    raise ConfigurationError(f"{name} is {value!r:.80}.", hint=f"It must be a whole number, {within}.")


def checked_batch(value: object, name: str, least: int = 0) -> int | None:
    """The number of a batch, or None if none was given; ConfigurationError for anything else."""
    return None if value is None else checked_whole(value, name, least)


Duration: TypeAlias = int | timedelta | str
"""A whole number of milliseconds, a timedelta, or words such as "1 hour 30 minutes"."""
Seconds: TypeAlias = float | timedelta | str
"""A number of seconds, a timedelta, or words such as "1 hour 30 minutes"."""

LONGEST_MS: Final = 1 << 50
"""About 35,000 years; a few of them added to any time stay within 64 bits."""

US_PER_MS: Final = 1000
_UNITS_US: Final = {
    "microsecond": 1,
    "millisecond": US_PER_MS,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_PART: Final = re.compile(rf"([+-]?[0-9]+)(\.[0-9]+)?\s+({'|'.join(_UNITS_US)})s?(?:\s+|$)", re.IGNORECASE | re.ASCII)
_CALENDAR: Final = re.compile(r"\b(month|year)s?\b", re.IGNORECASE)


def in_milliseconds(given: object, subject: str, *, least: int = 1, most: int = LONGEST_MS) -> int:
    """The whole number of milliseconds of a duration; ConfigurationError names the subject and the value."""
    hint = (
        "It must be a whole number of milliseconds, a datetime.timedelta, or words such as '10 seconds',"
        f" from {least} to {most} ms."
    )
    if is_whole(given):
        found_ms, rest = int(given), 0
    else:
        found_ms, rest = divmod(_microseconds(given, subject, hint), US_PER_MS)
    if rest or not least <= found_ms <= most:
        raise ConfigurationError(f"{subject} is {shown_value(given)}.", hint=hint)
    return found_ms


def in_seconds(given: object, subject: str) -> float:
    """The seconds of a duration; a number is returned unchanged. ConfigurationError names the subject and the value."""
    if is_number(given):
        return given
    hint = "It must be a number of seconds, a datetime.timedelta, or words such as '10 seconds'."
    return _microseconds(given, subject, hint) / _UNITS_US["second"]


def checked_seconds(given: object, name: str, *, is_positive: bool = False) -> float:
    """The seconds of a duration: finite and, with `is_positive`, more than 0; ConfigurationError otherwise."""
    seconds = in_seconds(given, name)
    if is_finite(seconds) and (seconds > 0 or not is_positive):
        return float(seconds)
    within = ", more than 0" if is_positive else ""
    raise ConfigurationError(f"{name} is {shown_value(given)}.", hint=f"It must be a finite number of seconds{within}.")


def _microseconds(given: object, subject: str, hint: str) -> int:
    if isinstance(given, timedelta):
        return given // timedelta(microseconds=1)
    if not isinstance(given, str):
        raise ConfigurationError(f"{subject} is {shown_value(given)}.", hint=hint)
    found_us = _words_in_microseconds(given)
    if found_us is None:
        if _CALENDAR.search(given):
            hint = f"Months and years have no fixed length: use days. {hint}"
        raise ConfigurationError(f"{subject} is {shown_value(given)}.", hint=hint)
    return found_us


def _words_in_microseconds(words: str) -> int | None:
    """The length of an interval such as "1 minute -1.5 seconds", as Spark reads it; None if it is not an interval."""
    text = re.sub(r"^interval\s+", "", words.strip(), flags=re.IGNORECASE)
    total_us, place = Decimal(0), 0
    while place < len(text):
        part = _PART.match(text, place)
        if part is None:
            return None
        number, fraction, unit = part[1], part[2] or "", part[3].lower()
        if fraction and unit != "second":
            return None
        total_us += Decimal(number + fraction) * _UNITS_US[unit]
        place = part.end()
    return int(total_us) if place and total_us == int(total_us) else None
