"""The time zones of sessions."""

from __future__ import annotations

import datetime
from functools import cache

import pyarrow as pa


@cache
def time_zone(name: str) -> datetime.tzinfo:
    """The session's time zone, a region or an offset such as ``+02:00``, as Arrow's timestamps have it."""
    zone: datetime.tzinfo = pa.lib.string_to_tzinfo(name)
    return zone
