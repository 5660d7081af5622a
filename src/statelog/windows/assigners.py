"""Window assigners: they say which windows a row belongs to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from statelog.errors import ConfigurationError

_Times = TypeVar("_Times", int, npt.NDArray[np.int64])
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


@dataclass(frozen=True)
class Panes:
    """Cuts time into panes, the parts that windows of one size and slide share; a row is in one pane at most.

    If windows overlap, a pane is as wide as the greatest common divisor of size and slide. Otherwise each pane is a
    window. The method is that of Li et al., "No pane, no gain", SIGMOD Record 34(1), 2005.
    """

    size_ms: int
    slide_ms: int
    offset_ms: int

    @cached_property
    def are_windows(self) -> bool:
        """Whether each pane is a whole window."""
        return self.slide_ms >= self.size_ms

    @cached_property
    def width_ms(self) -> int:
        """Length of a pane."""
        return self.size_ms if self.are_windows else math.gcd(self.size_ms, self.slide_ms)

    @cached_property
    def step_ms(self) -> int:
        """Distance between the starts of two panes."""
        return self.slide_ms if self.are_windows else self.width_ms

    def pane_of(self, time_ms: int) -> int | None:
        """Start of the pane that contains a time; None between two windows."""
        start = time_ms - (time_ms - self.offset_ms) % self.step_ms
        return start if time_ms < start + self.width_ms else None

    def ends_of(self, pane: int) -> range:
        """Ends of the windows that contain a pane, ascending."""
        last_start = pane - (pane - self.offset_ms) % self.slide_ms
        count = -(-(last_start + self.size_ms - pane) // self.slide_ms)
        last_end = last_start + self.size_ms
        return range(last_end - (count - 1) * self.slide_ms, last_end + 1, self.slide_ms)

    def first_open(self, time_ms: int) -> int:
        """Start of the first pane in a window that ends after a time."""
        last_closed = time_ms - self.size_ms
        return last_closed - (last_closed - self.offset_ms) % self.slide_ms + self.slide_ms

    def last_end_of(self, pane: _Times) -> _Times:
        """End of the last window that contains a pane, or each of several."""
        return pane - (pane - self.offset_ms) % self.slide_ms + self.size_ms


def _require(windows: object, name: str, least: int = 1) -> None:
    """Refuse windows whose field of this name is no whole number in its range."""
    value = getattr(windows, name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LONGEST_MS:
        unit = "milliseconds" if name.endswith("_ms") else "rows"
        raise ConfigurationError(
            f"{type(windows).__name__}: {name} is {value!r}.",
            hint=f"It must be a whole number of {unit} from {least} to {_LONGEST_MS}.",
        )
