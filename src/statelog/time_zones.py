"""Session time zones by the names that Spark accepts; Arrow and Python know only some of these names."""

from __future__ import annotations

import datetime
import re
from functools import cache
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from statelog.errors import ConfigurationError

_SHORT_NAMES: Final = {
    "ACT": "Australia/Darwin",
    "AET": "Australia/Sydney",
    "AGT": "America/Argentina/Buenos_Aires",
    "ART": "Africa/Cairo",
    "AST": "America/Anchorage",
    "BET": "America/Sao_Paulo",
    "BST": "Asia/Dhaka",
    "CAT": "Africa/Harare",
    "CNT": "America/St_Johns",
    "CST": "America/Chicago",
    "CTT": "Asia/Shanghai",
    "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris",
    "EST": "-05:00",
    "HST": "-10:00",
    "IET": "America/Indiana/Indianapolis",
    "IST": "Asia/Kolkata",
    "JST": "Asia/Tokyo",
    "MIT": "Pacific/Apia",
    "MST": "-07:00",
    "NET": "Asia/Yerevan",
    "NST": "Pacific/Auckland",
    "PLT": "Asia/Karachi",
    "PNT": "America/Phoenix",
    "PRT": "America/Puerto_Rico",
    "PST": "America/Los_Angeles",
    "SST": "Pacific/Guadalcanal",
    "VST": "Asia/Ho_Chi_Minh",
}
"""Java's ``ZoneId.SHORT_IDS``."""

_REGION: Final = re.compile(r"[A-Za-z][A-Za-z0-9~/._+-]+")
_ONE_DIGIT_HOUR: Final = re.compile(r"([+-])([0-9]):")
_ONE_DIGIT_MINUTE: Final = re.compile(r"([+-][0-9]{2}:)([0-9])$")
_OFFSET: Final = re.compile(r"(?:UTC|GMT|UT)?([+-])([0-9]{1,2}|[0-9]{4}|[0-9]{6}|[0-9]{2}:[0-9]{2}(?::[0-9]{2})?)")
_ZERO: Final = ("Z", "UTC", "GMT", "UT")
_MOST_S: Final = 18 * 3600


@cache
def time_zone(name: str) -> datetime.tzinfo:
    """The time zone of a name: if Arrow knows it, the object that Arrow's own datetimes have.

    Raises ConfigurationError if there is no such zone.
    """
    offset = _offset(name)
    zone = _in_arrow(name) if offset is not None or _REGION.fullmatch(name) else None
    if zone is not None:
        return zone
    if offset is not None:
        return datetime.timezone(offset)
    if name in _SHORT_NAMES:
        return time_zone(_SHORT_NAMES[name])
    raise ConfigurationError(
        f"The session's time zone is {name!r}, which Python does not know.",
        hint="Set spark.sql.session.timeZone to a region such as 'Europe/Berlin' or an offset such as '+02:00'.",
    )


def _in_arrow(name: str) -> datetime.tzinfo | None:
    try:
        zone: datetime.tzinfo = pa.lib.string_to_tzinfo(name)
    except (KeyError, ValueError, OSError):
        return None
    return zone


def _offset(name: str) -> datetime.timedelta | None:
    """The offset that Spark and Java read from a name such as ``Z``, ``+2``, ``UTC-02:30`` or ``GMT+020010``."""
    if name in _ZERO:
        return datetime.timedelta()
    name = _ONE_DIGIT_HOUR.sub(r"\g<1>0\2:", name, count=1)
    found = _OFFSET.fullmatch(_ONE_DIGIT_MINUTE.sub(r"\g<1>0\2", name))
    if found is None:
        return None
    digits = found[2].replace(":", "").zfill(2).ljust(6, "0")
    hours, minutes, seconds = (int(digits[place : place + 2]) for place in (0, 2, 4))
    total_s = 3600 * hours + 60 * minutes + seconds
    if max(minutes, seconds) > 59 or total_s > _MOST_S:
        return None
    return datetime.timedelta(seconds=-total_s if found[1] == "-" else total_s)


def local_clock(column: pa.Array) -> pa.Array:
    """The local times of a timestamp column in its zone, as timestamps without a zone."""
    kind = column.type
    if (offset := time_zone(kind.tz).utcoffset(None)) is None:
        return pc.local_timestamp(column.cast(pa.timestamp(kind.unit, _SHORT_NAMES.get(kind.tz, kind.tz))))
    return pc.add(column.cast(pa.timestamp(kind.unit)), pa.scalar(offset, pa.duration(kind.unit)))


def instants(clock: pa.Array, name: str) -> pa.Array:
    """The instants, in UTC, at which the clock of a zone shows these times.

    If two instants have the same local time, this is the later one; for a time in a gap, it is the end of the gap.
    """
    utc = pa.timestamp(clock.type.unit, "UTC")
    if (offset := time_zone(name).utcoffset(None)) is None:
        region = _SHORT_NAMES.get(name, name)
        return pc.assume_timezone(clock, region, ambiguous="latest", nonexistent="latest").cast(utc)
    return pc.subtract(clock, pa.scalar(offset, pa.duration(clock.type.unit))).cast(utc)
