"""Durations as users give them: a number, a timedelta, or words as in Spark, such as "10 seconds"."""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from typing import Final, TypeAlias

from statelog.errors import ConfigurationError
from statelog.numbers import is_finite, is_number, is_whole
from statelog.shown import shown_value

Duration: TypeAlias = int | timedelta | str
"""A whole number of milliseconds, a timedelta, or words such as "1 hour 30 minutes"."""
Seconds: TypeAlias = float | timedelta | str
"""A number of seconds, a timedelta, or words such as "1 hour 30 minutes"."""

LONGEST_MS: Final = 1 << 50
"""About 35,000 years; a few of them added to any time stay within 64 bits."""

_US_PER_MS: Final = 1000
_UNITS_US: Final = {
    "microsecond": 1,
    "millisecond": _US_PER_MS,
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
        found_ms, rest = divmod(_microseconds(given, subject, hint), _US_PER_MS)
    if rest or not least <= found_ms <= most:
        raise ConfigurationError(f"{subject} is {shown_value(given)}.", hint=hint)
    return found_ms


def in_seconds(given: object, subject: str) -> float:
    """The seconds of a duration, as they are if it is a number; ConfigurationError names the subject and the value."""
    if is_number(given):
        return given
    hint = "It must be a number of seconds, a datetime.timedelta, or words such as '10 seconds'."
    return _microseconds(given, subject, hint) / _UNITS_US["second"]


def checked_seconds(given: object, name: str, *, is_positive: bool = False) -> float:
    """The seconds of a duration, finite and with `is_positive` more than 0; ConfigurationError otherwise."""
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
    """The length of an interval such as "1 minute -1.5 seconds", as Spark reads it; None if it is none."""
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
