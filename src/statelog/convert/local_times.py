"""Timestamps as datetimes without a zone: local times of the process, as everywhere in PySpark.

If two instants have the same local time, `fold` marks the second. A local time that the clock skips is moved forward by
the gap: half past two, where the clock goes from two to three, is half past three. Python's ``timestamp()`` and Spark
do the same.
"""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from types import NoneType
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa

from statelog.runs.column_values import EPOCH, Integers, require_datetimes

_UTC_EPOCH: Final = EPOCH.replace(tzinfo=datetime.UTC)
_US: Final = datetime.timedelta(microseconds=1)
_SECOND_US: Final = 1_000_000
_EXACT_S: Final = 1 << 32
"""Seconds before or after 1970 up to which floating-point numbers distinguish microseconds."""
_KNOWN_ZONES: Final = (NoneType, datetime.timezone, ZoneInfo)
_STORED: Final = pa.timestamp("us", tz="UTC")
_DURATION: Final = pa.duration("us")
_zone_of: Final = operator.attrgetter("tzinfo")


def to_utc(value: datetime.datetime) -> datetime.datetime:
    """The instant of a datetime with or without a zone."""
    if value.tzinfo is not None:
        return value.astimezone(datetime.UTC)
    try:
        seconds = value.timestamp()
        if -_EXACT_S < seconds < _EXACT_S:
            return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        whole = datetime.datetime.fromtimestamp(value.replace(microsecond=0).timestamp(), datetime.UTC)
        return whole.replace(microsecond=value.microsecond)
    except (ValueError, OverflowError):  # within a day of Python's first or last datetime
        return value.astimezone(datetime.UTC)


def to_local(value: datetime.datetime) -> datetime.datetime:
    """The local time of a datetime with or without a zone."""
    try:
        seconds = value.timestamp()
        if -_EXACT_S < seconds < _EXACT_S:
            # Unlike astimezone() it sets `fold`.
            return datetime.datetime.fromtimestamp(seconds)
        whole = datetime.datetime.fromtimestamp(value.replace(microsecond=0).timestamp())
        return whole.replace(microsecond=value.microsecond)
    except (ValueError, OverflowError):
        return to_utc(value).astimezone().replace(tzinfo=None)


def local_times(times_us: Integers) -> list[datetime.datetime]:
    """The local times of instants, microseconds since 1970."""
    require_datetimes(times_us)
    if (np.abs(times_us) < _EXACT_S * _SECOND_US).all():
        return list(map(datetime.datetime.fromtimestamp, (times_us / _SECOND_US).tolist()))
    return [to_local(_UTC_EPOCH + since) for since in times_us.view("m8[us]").tolist()]


def plain_or_readable(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A conversion that leaves a datetime as it is if it cannot change and causes no error in a column."""
    readable = only_readable(convert)

    def converted(value: Any) -> Any:
        if type(value) is datetime.datetime and 1 < value.year < 9999 and type(value.tzinfo) in _KNOWN_ZONES:
            return value
        return readable(value)

    return converted


def only_readable(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A conversion that raises OverflowError for an instant that has no local time in Python's years."""

    def converted(value: Any) -> Any:
        instant = convert(value)
        if instant is not None:
            to_local(instant)
        return instant

    return converted


def timestamp_column(values: Sequence[datetime.datetime | None]) -> pa.Array:
    """Make a column of the instants of datetimes with or without a zone.

    Raises ValueError or OverflowError for an instant that is beyond Python's.
    """
    try:
        times_us, mask = _instants_us(values), None
    except AttributeError:
        mask = np.fromiter((value is None for value in values), bool, len(values))
        times_us = np.zeros(len(values), np.int64)
        times_us[~mask] = _instants_us([value for value in values if value is not None])
    return pa.array(times_us, pa.int64(), mask=mask).view(_STORED)


def _instants_us(values: Sequence[Any]) -> Integers:
    zones = set(map(_zone_of, values))
    if zones == {None}:
        times_us = _local_instants_us(values)
    elif None in zones:
        return _instants_us(list(map(to_utc, values)))
    elif len(zones) == 1:
        [zone] = zones
        # Between datetimes of one zone, Python subtracts the local times, which takes a third of the time.
        times_us = _since_us(EPOCH.replace(tzinfo=zone), values)
        offset = zone.utcoffset(None)
        times_us = times_us - (_as_us(map(zone.utcoffset, values)) if offset is None else offset // _US)
    else:
        times_us = _since_us(_UTC_EPOCH, values)
    require_datetimes(times_us)
    return times_us


def _local_instants_us(values: Sequence[datetime.datetime]) -> Integers:
    clocks_us = _since_us(EPOCH, values)
    try:
        seconds = np.fromiter(map(datetime.datetime.timestamp, values), np.float64, len(values))
    except (ValueError, OverflowError):
        return _since_us(_UTC_EPOCH, list(map(to_utc, values)))
    # The offsets of zones are whole seconds, so rounding removes the error of floating-point numbers.
    offsets_s = np.rint(clocks_us / _SECOND_US - seconds).astype(np.int64)
    times_us: Integers = clocks_us - offsets_s * _SECOND_US
    return times_us


def _since_us(epoch: datetime.datetime, values: Sequence[datetime.datetime]) -> Integers:
    """Microseconds from an epoch to each datetime."""
    return _as_us(map(operator.sub, values, repeat(epoch)))


def _as_us(durations: Iterable[datetime.timedelta | None]) -> Integers:
    found: Integers = pa.array(durations, _DURATION).view(pa.int64()).to_numpy()
    return found
