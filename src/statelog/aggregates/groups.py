"""Groups of rows, given by the group of each row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Groups:
    """Rows in groups; a group may have no rows."""

    index: Int64s
    """The group of each row, from 0."""
    count: int
    """The number of groups."""

    @cached_property
    def order(self) -> Int64s:
        """The rows by group, within a group in their order."""
        return np.argsort(self.index, kind="stable")

    @cached_property
    def sizes(self) -> Int64s:
        """The number of rows of each group."""
        return np.bincount(self.index, minlength=self.count)

    def sums(self, values: Int64s) -> Int64s:
        """The sum of the values of each group; it wraps around."""
        sums = np.zeros(self.count, np.int64)
        np.add.at(sums, self.index, values)
        return sums

    def float_sums(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The sum of the values of each group."""
        return np.bincount(self.index, values, self.count).astype(np.float64, copy=False)  # of no rows it is integers

    def counts(self, mask: Mask) -> Int64s:
        """The number of rows of each group where the mask is set."""
        return np.bincount(self.index[mask], minlength=self.count)

    def has_any(self, mask: Mask) -> Mask:
        """Whether the mask is set for any row of each group."""
        found = np.zeros(self.count, bool)
        found[self.index[mask]] = True
        return found

    def first_where(self, mask: Mask, *, is_last: bool = False) -> tuple[Int64s, Mask]:
        """The first or last row of each group where the mask is set, and whether there is any."""
        rows = np.flatnonzero(mask)
        owners = self.index[rows]
        if not is_last:
            rows, owners = rows[::-1], owners[::-1]
        found = np.full(self.count, -1, np.int64)
        found[owners] = rows  # of several rows of a group the last one stays
        return found, found >= 0
