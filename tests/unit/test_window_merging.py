"""Merging the panes of overlapping windows: against merging each window's panes one by one."""

from __future__ import annotations

import random
import weakref
from functools import reduce
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelog import SlidingWindows
from statelog.aggregates.pane_grid import Panes
from statelog.windows.merging import WindowMerge, filled_windows

Row = tuple[Any, ...]
GRIDS = st.builds(SlidingWindows, st.integers(1, 30), st.integers(1, 12), st.integers(-20, 20)).map(
    lambda windows: windows.panes()
)
TIMES = st.sets(st.integers(-60, 60), max_size=25)


def _joined(one: Row, other: Row) -> Row:
    return (one[0] + other[0],)


def _panes(grid: Panes, times: set[int]) -> dict[int, Row]:
    starts = {grid.pane_of(time_ms) for time_ms in times} - {None}
    return {start: ([start],) for start in sorted(start for start in starts if start is not None)}


def _by_hand(grid: Panes, panes: dict[int, Row], ends: set[int]) -> list[tuple[int, Row]]:
    """Each window's panes in order."""
    found: list[tuple[int, Row]] = []
    for end in range(-200, 200):
        inside = [start for start in panes if end - grid.size_ms <= start < end]
        if (end - grid.size_ms - grid.offset_ms) % grid.slide_ms == 0 and inside and end in ends:
            found.append((end, (inside,)))
    return found


@given(grid=GRIDS, times=TIMES, ends=st.sets(st.integers(-80, 120)) | st.just(set(range(-200, 200))))
def test_windows_have_their_panes_in_order(grid: Panes, times: set[int], ends: set[int]) -> None:
    panes = _panes(grid, times)
    expected = _by_hand(grid, panes, ends)
    assert list(filled_windows(panes.items(), ends, grid)) == [end for end, _ in expected]
    for max_bytes in (1 << 20, 300, 0):
        assert list(WindowMerge(grid, _joined, max_bytes).windows(panes.items(), ends)) == expected


@given(grid=GRIDS, times=TIMES, seed=st.integers(0, 1000), ends=st.sets(st.integers(-80, 120)))
def test_a_window_is_the_same_whichever_others_are_merged(
    grid: Panes, times: set[int], seed: int, ends: set[int]
) -> None:
    """Sums of doubles depend on the order of the merges, to the last bit."""
    rng = random.Random(seed)
    panes = {start: (rng.random() * 10 ** rng.randrange(12),) for start in _panes(grid, times)}

    def of(ends: set[int], panes: dict[int, Row], max_bytes: int = 1 << 20) -> dict[int, Row]:
        return dict(WindowMerge(grid, _joined, max_bytes).windows(panes.items(), ends))

    everything = of(set(range(-200, 200)), panes)
    assert of(ends, panes, 0) == {end: row for end, row in everything.items() if end in ends}
    for end, row in everything.items():
        inside = {start: pane for start, pane in panes.items() if end - grid.size_ms <= start < end}
        assert of({end}, inside) == {end: row}


@pytest.mark.parametrize("step", [1, 7])
def test_many_windows_take_a_few_merges_each(step: int) -> None:
    grid, merges = SlidingWindows(3600, step).panes(), 0

    def merge(one: Row, other: Row) -> Row:
        nonlocal merges
        merges += 1
        return (one[0] + other[0],)

    panes = {start: (start,) for start in range(0, 10_000, grid.width_ms)}
    windows = list(WindowMerge(grid, merge).windows(panes.items(), range(3600, 10_001)))
    assert windows == [(end, (sum(range(end - 3600, end)),)) for end, _ in windows]
    assert [end for end, _ in windows] == [end for end in range(3600, 10_001) if (end - 3600) % step == 0]
    assert merges <= 2 * len(panes) + len(windows)


def test_a_single_window_takes_a_merge_per_pane() -> None:
    grid, merges = SlidingWindows(100, 10).panes(), 0

    def merge(one: Row, other: Row) -> Row:
        nonlocal merges
        merges += 1
        return (one[0] + other[0],)

    panes = {start: (1,) for start in range(0, 300, 10)}
    assert list(WindowMerge(grid, merge).windows(list(panes.items())[4:14], {140})) == [(140, (10,))]
    assert merges == 9
    assert reduce(_joined, [(1,)] * 10) == (10,)


class Large:
    """The starts of panes, which take a kilobyte; it counts the objects of its class."""

    alive: ClassVar[weakref.WeakSet[Large]] = weakref.WeakSet()

    def __init__(self, starts: list[int]) -> None:
        self.starts = starts
        Large.alive.add(self)

    def __sizeof__(self) -> int:
        return 1000


@pytest.mark.parametrize(("max_bytes", "most"), [(0, 3), (2_100, 4), (5_000, 6), (1 << 20, 31)])
def test_large_accumulators_are_not_all_held_at_once(max_bytes: int, most: int) -> None:
    grid, peak = SlidingWindows(64, 2).panes(), 0

    def merge(one: Row, other: Row) -> Row:
        nonlocal peak
        merged = (Large(one[0].starts + other[0].starts),)
        peak = max(peak, len(Large.alive))
        return merged

    panes = [(start, (Large([start]),)) for start in range(2, 64, 2)]
    windows = WindowMerge(grid, merge, max_bytes).windows(panes, range(200))
    found = [(end, row[0].starts) for end, row in windows]
    assert found == [(end, [start for start, _ in panes if end - 64 <= start < end]) for end in range(4, 64 + 63, 2)]
    assert peak - len(panes) == most
