"""Makes the accumulators of overlapping windows from those of their panes, with few merges per window."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from statelog.aggregates.pane_grid import Panes
from statelog.runs.byte_slices import BUDGET

Row = tuple[Any, ...]
Pane = tuple[int, Row]
"""The start of a pane, and its accumulator."""


def filled_windows(panes: Iterable[Pane], ends: Container[int], grid: Panes) -> Iterator[int]:
    """The ends of the windows that have a pane, as far as they are in `ends`; panes and ends are in order of time."""
    next_end: int | None = None
    for start, _ in panes:
        of_pane = grid.ends_of(start)
        first = of_pane[0] if next_end is None else max(of_pane[0], next_end)
        yield from (end for end in range(first, of_pane[-1] + 1, grid.slide_ms) if end in ends)
        next_end = of_pane[-1] + grid.slide_ms


@dataclass(frozen=True)
class WindowMerge:
    """Merges the panes of windows of one size and slide.

    Time is cut into blocks as long as a window, so each window is the last part of one block and the first part of the
    next. All last parts of a block are made in one pass from its last pane back to its first, all first parts in one
    pass forward. So a window takes a merge of its own besides, however many panes it has. This is the algorithm of van
    Herk (1992) and of Gil and Werman (1993) for running minima.

    Which panes are merged, and in which order, follows from the window and its panes alone. The other windows that are
    returned with it, and so the cut between batches, make no difference. Sums of doubles are the same in every
    repetition, also after a restart.
    """

    grid: Panes
    merge: Callable[[Row, Row], Row]
    """Merges two accumulators, the earlier one first; it is associative."""
    max_bytes: int = BUDGET.slice_bytes
    """Of last parts that take more than this not all are held at once, but some are made several times."""

    def windows(self, panes: Iterable[Pane], ends: Container[int]) -> Iterator[Pane]:
        """The ends of the windows that have a pane, as far as they are in `ends`, and their accumulators.

        Panes and windows are in order of time.
        """
        size_ms, offset_ms = self.grid.size_ms, self.grid.offset_ms
        last_block: list[Pane] = []
        boundary: int | None = None
        for number, block in groupby(panes, lambda pane: (pane[0] - offset_ms) // size_ms):
            start = offset_ms + number * size_ms
            if boundary not in (None, start):
                yield from self._across(boundary, last_block, [], ends)
                last_block = []
            next_block = list(block)
            yield from self._across(start, last_block, next_block, ends)
            last_block, boundary = next_block, start + size_ms
        if boundary is not None:
            yield from self._across(boundary, last_block, [], ends)

    def _across(
        self, boundary: int, before: Sequence[Pane], behind: Sequence[Pane], ends: Container[int]
    ) -> Iterator[Pane]:
        """The windows that begin in the block before a boundary or at it, and end in the block behind it."""
        size_ms, slide_ms = self.grid.size_ms, self.grid.slide_ms
        first = boundary - size_ms + 1
        first += (self.grid.offset_ms - first) % slide_ms
        starts = [start for start, _ in before]
        wanted: list[tuple[int, int]] = []
        for start in range(first, boundary + 1, slide_ms):
            place = bisect_left(starts, start)
            if start + size_ms in ends and (place < len(before) or (behind and behind[0][0] < start + size_ms)):
                wanted.append((start + size_ms, place))
        places = sorted({place for _, place in wanted if place < len(before)})
        last_parts = self._last_parts(before, places)
        last_part: tuple[int, Row] = (-1, ())
        first_part: Row | None = None
        taken = 0
        for end, place in wanted:
            while taken < len(behind) and behind[taken][0] < end:
                accumulator = behind[taken][1]
                first_part = accumulator if first_part is None else self.merge(first_part, accumulator)
                taken += 1
            if place == len(before):
                assert first_part is not None
                yield end, first_part
                continue
            if last_part[0] != place:
                last_part = next(last_parts)
            yield end, last_part[1] if first_part is None else self.merge(last_part[1], first_part)

    def _last_parts(self, block: Sequence[Pane], places: Sequence[int]) -> Iterator[tuple[int, Row]]:
        """The merged panes of a block from each of these places on, which ascend."""
        while places:
            wanted = set(places)
            held: deque[tuple[int, Row]] = deque()
            held_bytes = 0
            merged: Row | None = None
            for place in range(len(block) - 1, places[0] - 1, -1):
                accumulator = block[place][1]
                merged = accumulator if merged is None else self.merge(accumulator, merged)
                if place in wanted:
                    held.appendleft((place, merged))
                    held_bytes += _size(merged)
                    while held_bytes > self.max_bytes and len(held) > 1:
                        held_bytes -= _size(held.pop()[1])
            places = places[len(held) :]
            yield from held


def _size(row: Row) -> int:
    """About how many bytes an accumulator takes; elements of lists count as references, as merged lists share them."""
    return sum(map(sys.getsizeof, row))
