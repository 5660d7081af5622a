"""Sizes and times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_UNITS: Final = ("B", "KB", "MB", "GB", "TB")


def size_text(size_bytes: int) -> str:
    """A number of bytes for people."""
    size, unit = float(size_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size_bytes} B" if not unit else f"{size:.1f} {_UNITS[unit]}"


def time_text(time_ms: int) -> str:
    """A time for people, in UTC."""
    time = utc_time(time_ms)
    return f"{time_ms} ms" if time is None else time.strftime("%Y-%m-%d %H:%M:%S")


def utc_time(time_ms: int) -> datetime | None:
    """A time in milliseconds since the Unix epoch; None if it is of no year from 1 to 9999."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
