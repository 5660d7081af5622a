"""Panes: the parts of time that overlapping windows share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_Times = TypeVar("_Times", int, npt.NDArray[np.int64])


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

    def first_open(self, time_ms: int) -> int:
        """Start of the first pane in a window that ends after a time."""
        last_closed = time_ms - self.size_ms
        return last_closed - (last_closed - self.offset_ms) % self.slide_ms + self.slide_ms

    def last_end_of(self, pane: _Times) -> _Times:
        """End of the last window that contains a pane, or each of several."""
        return pane - (pane - self.offset_ms) % self.slide_ms + self.size_ms
