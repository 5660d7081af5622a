"""Panes, the parts of time that overlapping windows share, as columns: groups of rows by pane, and merged panes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statelog.aggregates.groups import Groups
from statelog.aggregates.kernels import Columns
from statelog.operators.keyed.indexing import Int64s
from statelog.operators.keyed.time_columns import TimeRows
from statelog.runs.byte_slices import is_variable, row_ends, stretches

Reduce = Callable[[Columns, Groups, Int64s], Columns]
"""Merges the accumulators of groups; the last argument is the owner of each group, for messages."""

_RADIX: Final = 4
"""So many successive parts of a window are merged at once."""
_MOST_CODES: Final = 1 << 62
_CODES_PER_ROW: Final = 4


def pair_codes(owners_count: int, *pairs: tuple[Int64s, Int64s]) -> list[Int64s]:
    """Numbers in the order of pairs of an owner and a time, comparable between several arrays of them."""
    low = min((int(times.min()) for _, times in pairs if len(times)), default=0)
    high = max((int(times.max()) for _, times in pairs if len(times)), default=0)
    span = high - low + 1
    if span * owners_count < _MOST_CODES:
        return [owners * span + (times - low) for owners, times in pairs]
    distinct = np.unique(np.concatenate([times for _, times in pairs]))
    return [owners * len(distinct) + np.searchsorted(distinct, times) for owners, times in pairs]


@dataclass(frozen=True)
class TimeGroups:
    """The groups of rows that have an owner and a time in common, by owner and then by time."""

    owners: Int64s
    times_ms: Int64s
    index: Int64s
    """The group of each row."""

    def __len__(self) -> int:
        return len(self.owners)


def group_rows(owners: Int64s, times_ms: Int64s, owners_count: int, step_ms: int) -> TimeGroups:
    """Group rows; the times have the same remainder when they are divided by the step."""
    if not len(owners):
        return TimeGroups(owners, times_ms, owners)
    low = int(times_ms.min())
    numbers = (times_ms - low) // step_ms
    (codes,) = pair_codes(owners_count, (owners, numbers))
    most = int(codes.max()) + 1
    if most <= _CODES_PER_ROW * len(codes):
        is_used = np.zeros(most, bool)
        is_used[codes] = True
        distinct = np.flatnonzero(is_used)
        rank = np.cumsum(is_used) - 1
        index = rank[codes]
    else:
        distinct, index = np.unique(codes, return_inverse=True)
    rows = np.empty(len(distinct), np.int64)
    rows[index] = np.arange(len(index))
    return TimeGroups(owners[rows], times_ms[rows], index)


def first_ends(grid: Panes, panes: Int64s) -> Int64s:
    """The end of the first window that contains each pane; the panes are given by their starts."""
    last_ends = grid.last_end_of(panes)
    return last_ends - (last_ends - panes - 1) // grid.slide_ms * grid.slide_ms


def next_ends(grid: Panes, panes: Int64s, after_ms: int) -> Int64s:
    """The end of the first window of each pane that ends after a time, if any does."""
    last_ends = grid.last_end_of(panes)
    coming: Int64s = last_ends - (last_ends - after_ms - 1) // grid.slide_ms * grid.slide_ms
    return np.maximum(first_ends(grid, panes), coming)


@dataclass(frozen=True)
class WindowRows:
    """Windows, by owner and then by time, and the rows of their panes."""

    owners: Int64s
    ends_ms: Int64s
    firsts: Int64s
    """The first row of each window; `lasts` are behind the last ones."""
    lasts: Int64s


@dataclass(frozen=True)
class PaneMerge:
    """Merges the panes of windows, in parts of bounded size.

    A window's panes are merged four by four, then the results of that four by four, from the window's first pane on. So
    the number of merges grows with the logarithm of the panes where windows overlap, and their order follows from the
    window and its panes alone.
    """

    grid: Panes
    max_bytes: int
    """Bound of what the accumulators of the windows of a part are made of."""

    def windows(self, panes: TimeRows, picked: TimeRows, first_ms: Int64s, last_ms: int) -> Iterator[WindowRows]:
        """The windows that have one of the picked panes and end between two times.

        The first of these times is given for each picked pane, alike for those of one owner.
        """
        owners, starts = picked.key_index, picked.times_ms
        slide_ms, size_ms = self.grid.slide_ms, self.grid.size_ms
        last_ends = self.grid.last_end_of(starts)
        first = np.maximum(first_ends(self.grid, starts), last_ends - (last_ends - first_ms) // slide_ms * slide_ms)
        is_same = owners[1:] == owners[:-1]
        first[1:] = np.where(is_same, np.maximum(first[1:], last_ends[:-1] + slide_ms), first[1:])
        counts = np.maximum(0, (np.minimum(last_ends, last_ms) - first) // slide_ms + 1)
        ends = np.concatenate(([0], np.cumsum(counts)))
        row_bytes = sum(column.type.bit_width // 8 for column in panes.values if _is_fixed(column.type))
        most = max(1, self.max_bytes // (_RADIX * (row_bytes + 8)))
        sizes = [column for column in panes.values if not _is_fixed(column.type)]
        size_ends = row_ends(pa.RecordBatch.from_arrays(sizes, names=[""] * len(sizes))) if sizes else None
        owners_count = int(owners[-1]) + 1 if len(owners) else 0
        for start in range(0, int(ends[-1]), most):
            numbers = np.arange(start, min(start + most, int(ends[-1])))
            rows = np.searchsorted(ends, numbers, "right") - 1
            of, at = owners[rows], first[rows] + (numbers - ends[rows]) * slide_ms
            held, froms, tos = pair_codes(owners_count, (panes.key_index, panes.times_ms), (of, at - size_ms), (of, at))
            firsts, lasts = np.searchsorted(held, froms), np.searchsorted(held, tos)
            if size_ends is None:
                yield WindowRows(of, at, firsts, lasts)
                continue
            of_windows = np.concatenate(([0], np.cumsum(size_ends[lasts] - size_ends[firsts])))
            for low, high in stretches(of_windows, self.max_bytes):
                yield WindowRows(of[low:high], at[low:high], firsts[low:high], lasts[low:high])

    def merged(self, panes: TimeRows, windows: WindowRows, reduce: Reduce) -> Columns:
        """The accumulators of windows."""
        left = windows.lasts - windows.firsts
        if (left == 1).all():
            picked = pa.array(windows.firsts)
            return [column.take(picked) for column in panes.values]
        nodes, parts = self._plan(windows, len(panes))
        held, places = panes.values, np.arange(len(panes))
        chosen = [(held, parts[0])]
        for level, of_level in enumerate(nodes[1:], start=1):
            rows = (of_level[:, None] + _RADIX ** (level - 1) * np.arange(_RADIX)).ravel()
            groups = Groups(np.repeat(np.arange(len(of_level)), _RADIX), len(of_level))
            held = reduce(taken(held, places[rows]), groups, panes.key_index[of_level])
            places = np.zeros(len(panes), np.int64)
            places[of_level] = np.arange(len(of_level))
            chosen.append((held, (parts[level][0], places[parts[level][1]])))
        merged = [taken(columns, rows) for columns, (_, rows) in reversed(chosen)]
        index = np.concatenate([of_windows for _, (of_windows, _) in reversed(chosen)])
        joined = [pa.concat_arrays(list(column)) for column in zip(*merged, strict=True)]
        return reduce(joined, Groups(index, len(windows.owners)), windows.owners)

    def _plan(self, windows: WindowRows, count: int) -> tuple[list[Int64s], list[tuple[Int64s, Int64s]]]:
        """What is merged: for each level, the first panes of all parts, and windows with the parts that they end up in.

        A part of a level is made of :data:`_RADIX` parts of the level before; those of level 0 are panes.
        """
        left, starts = windows.lasts - windows.firsts, windows.firsts.copy()
        levels = 0
        while _RADIX ** (levels + 1) <= int(left.max()):
            levels += 1
        parts: list[tuple[Int64s, Int64s]] = []
        for level in range(levels, -1, -1):
            width = _RADIX**level
            digits = left // width
            picked = [np.flatnonzero(digits > place) for place in range(int(digits.max()))]
            of_windows = np.concatenate([np.zeros(0, np.int64), *picked])
            rows = [starts[some] + place * width for place, some in enumerate(picked)]
            parts.append((of_windows, np.concatenate([np.zeros(0, np.int64), *rows])))
            starts += digits * width
            left = left - digits * width
        parts.reverse()
        nodes: list[Int64s] = [np.zeros(0, np.int64)]
        for level in range(levels, 0, -1):
            is_used = np.zeros(count, bool)
            is_used[parts[level][1]] = True
            if len(nodes) > 1:
                is_used[(nodes[1][:, None] + _RADIX**level * np.arange(_RADIX)).ravel()] = True
            nodes.insert(1, np.flatnonzero(is_used))
        return nodes, parts


def taken(columns: Columns, rows: Int64s) -> Columns:
    """Some rows of columns."""
    picked = pa.array(rows)
    return [column.take(picked) for column in columns]


def _is_fixed(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or is_variable(kind))


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
