"""Window assigners: they say which windows a row belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from statelog.aggregates.pane_grid import Panes
from statelog.errors import ConfigurationError

_LONGEST_MS: Final = 1 << 50
"""About 35,000 years; a few of them added to any time stay within 64 bits."""


@dataclass(frozen=True)
class TumblingWindows:
    """Windows of one size, one after the other: a row belongs to the window that contains its time.

    Parameters
    ----------
    size_ms : int
        Length of a window, milliseconds.
    offset_ms : int
        Windows start at multiples of the size plus this.

    Raises
    ------
    ConfigurationError
        If a value is out of its range.
    """

    size_ms: int
    offset_ms: int = 0

    def __post_init__(self) -> None:
        _require(self, "size_ms")
        _require(self, "offset_ms", least=-_LONGEST_MS)

    def panes(self) -> Panes:
        """The windows as panes: each window is one pane."""
        return Panes(self.size_ms, self.size_ms, self.offset_ms)


@dataclass(frozen=True)
class SlidingWindows:
    """Windows of one size that start at regular distances: a row belongs to all windows that contain its time.

    Parameters
    ----------
    size_ms : int
        Length of a window, milliseconds.
    slide_ms : int
        Distance between two starts, milliseconds. If it is larger than the size, rows between two windows belong to
        none.
    offset_ms : int
        Windows start at multiples of the slide plus this.

    Raises
    ------
    ConfigurationError
        If a value is out of its range.
    """

    size_ms: int
    slide_ms: int
    offset_ms: int = 0

    def __post_init__(self) -> None:
        _require(self, "size_ms")
        _require(self, "slide_ms")
        _require(self, "offset_ms", least=-_LONGEST_MS)

    def panes(self) -> Panes:
        """The panes that the windows are made of."""
        return Panes(self.size_ms, self.slide_ms, self.offset_ms)


@dataclass(frozen=True)
class SessionWindows:
    """Sessions of activity: successive rows belong to one session if they are not further apart than the gap.

    Parameters
    ----------
    gap_ms : int
        Longest distance of successive rows in a session, milliseconds. A session ends this long after its last row.

    Raises
    ------
    ConfigurationError
        If the gap is out of its range.
    """

    gap_ms: int

    def __post_init__(self) -> None:
        _require(self, "gap_ms")


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
        If the size is out of its range.
    """

    size: int

    def __post_init__(self) -> None:
        _require(self, "size")


WindowAssigner = TumblingWindows | SlidingWindows | SessionWindows | CountWindows


def _require(windows: object, name: str, least: int = 1) -> None:
    """Refuse windows whose field of this name is no whole number in its range."""
    value = getattr(windows, name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LONGEST_MS:
        unit = "milliseconds" if name.endswith("_ms") else "rows"
        raise ConfigurationError(
            f"{type(windows).__name__}: {name} is {value!r}.",
            hint=f"It must be a whole number of {unit} from {least} to {_LONGEST_MS}.",
        )
