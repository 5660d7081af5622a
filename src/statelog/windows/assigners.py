"""Window assigners: they say which windows a row belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from statelog.errors import ConfigurationError
from statelog.numbers import LONGEST_MS, Duration, in_milliseconds
from statelog.windows.pane_columns import Panes


@dataclass(frozen=True)
class TumblingWindows:
    """Windows of equal size, one after the other: a row belongs to the window that contains its time.

    Parameters
    ----------
    size : int, timedelta or str
        Length of a window: milliseconds, a timedelta, or words such as "10 minutes".
    offset : int, timedelta or str
        Windows start at multiples of the size plus this offset.

    Raises
    ------
    ConfigurationError
        If a value is out of range.
    """

    size: Duration
    offset: Duration = 0

    def __post_init__(self) -> None:
        _to_milliseconds(self, "size")
        _to_milliseconds(self, "offset", least=-LONGEST_MS)

    @property
    def size_ms(self) -> int:
        """The length of a window in milliseconds."""
        return _milliseconds_of(self.size)

    @property
    def offset_ms(self) -> int:
        """The offset of the starts in milliseconds."""
        return _milliseconds_of(self.offset)

    def panes(self) -> Panes:
        """The windows as panes: each window is one pane."""
        return Panes(self.size_ms, self.size_ms, self.offset_ms)


@dataclass(frozen=True)
class SlidingWindows:
    """Windows of equal size that start at regular intervals: a row belongs to all windows that contain its time.

    Parameters
    ----------
    size : int, timedelta or str
        Length of a window: milliseconds, a timedelta, or words such as "10 minutes".
    slide : int, timedelta or str
        Interval between two starts. If it is larger than the size, rows between two windows belong to none.
    offset : int, timedelta or str
        Windows start at multiples of the slide plus this offset.

    Raises
    ------
    ConfigurationError
        If a value is out of range.
    """

    size: Duration
    slide: Duration
    offset: Duration = 0

    def __post_init__(self) -> None:
        _to_milliseconds(self, "size")
        _to_milliseconds(self, "slide")
        _to_milliseconds(self, "offset", least=-LONGEST_MS)

    @property
    def size_ms(self) -> int:
        """The length of a window in milliseconds."""
        return _milliseconds_of(self.size)

    @property
    def slide_ms(self) -> int:
        """The distance between two starts in milliseconds."""
        return _milliseconds_of(self.slide)

    @property
    def offset_ms(self) -> int:
        """The offset of the starts in milliseconds."""
        return _milliseconds_of(self.offset)

    def panes(self) -> Panes:
        """The panes that the windows are made of."""
        return Panes(self.size_ms, self.slide_ms, self.offset_ms)


@dataclass(frozen=True)
class SessionWindows:
    """Sessions of activity: successive rows belong to the same session if they are not further apart than the gap.

    Parameters
    ----------
    gap : int, timedelta or str
        Longest time between successive rows of a session: milliseconds, a timedelta, or words such as "30 minutes". A
        session ends this long after its last row.

    Raises
    ------
    ConfigurationError
        If the gap is out of range.
    """

    gap: Duration

    def __post_init__(self) -> None:
        _to_milliseconds(self, "gap")

    @property
    def gap_ms(self) -> int:
        """The gap in milliseconds."""
        return _milliseconds_of(self.gap)


@dataclass(frozen=True)
class CountWindows:
    """Windows of a fixed number of rows of a key, in order of arrival.

    Parameters
    ----------
    size : int
        Number of rows per window.

    Raises
    ------
    ConfigurationError
        If the size is out of range.
    """

    size: int

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or not 1 <= self.size <= LONGEST_MS:
            raise ConfigurationError(
                f"CountWindows: size is {self.size!r}.",
                hint=f"It must be a whole number of rows from 1 to {LONGEST_MS}.",
            )


WindowAssigner = TumblingWindows | SlidingWindows | SessionWindows | CountWindows


def _to_milliseconds(windows: object, name: str, least: int = 1) -> None:
    """Replace a field of windows by its milliseconds."""
    found_ms = in_milliseconds(getattr(windows, name), f"{type(windows).__name__}: {name}", least=least)
    object.__setattr__(windows, name, found_ms)


def _milliseconds_of(field: Duration) -> int:
    assert isinstance(field, int)
    return field
