"""Panes and windows as columns: against groups and windows that are put together one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelog import SlidingWindows
from statelog.aggregates.groups import Groups
from statelog.aggregates.kernels import Columns
from statelog.aggregates.list_kernels import ListKernel
from statelog.operators.keyed.time_columns import TimeRows
from statelog.windows.pane_columns import PaneMerge, Panes, first_ends, group_rows, next_ends
from statelog.windows.sessions import sessions_of
from tests.panes import ends_of, pane_of

GRIDS = st.builds(SlidingWindows, st.integers(1, 30), st.integers(1, 12), st.integers(-20, 20)).map(
    lambda windows: windows.panes()
)
TIMES = st.sets(st.tuples(st.integers(0, 2), st.integers(-60, 60)), max_size=40)
EVERYTHING = (-300, 300)
LISTS = ListKernel(1 << 30)
Window = tuple[int, int]


def _panes(grid: Panes, times: set[tuple[int, int]], far_ms: int = 0) -> list[tuple[int, int]]:
    starts = {(owner, pane_of(grid, time_ms)) for owner, time_ms in times}
    return sorted((owner, start + far_ms * owner) for owner, start in starts if start is not None)


def _rows(panes: list[tuple[int, int]], values: list[Any], kind: pa.DataType) -> TimeRows:
    owners, times = (np.array([pane[place] for pane in panes], np.int64) for place in (0, 1))
    return TimeRows(owners, times, [pa.array(values, kind)])


def _merged(merge: PaneMerge, panes: TimeRows, reduce: Any, bounds: Window = EVERYTHING) -> dict[Window, Any]:
    """The accumulators of the windows that end between two times, by owner and end; they come in that order."""
    found: dict[Window, Any] = {}
    for windows in merge.windows(panes, panes, np.full(len(panes), bounds[0]), bounds[1]):
        held = merge.merged(panes, windows, reduce)[0].to_pylist()
        pairs = list(zip(windows.owners.tolist(), windows.ends_ms.tolist(), strict=True))
        assert not found or max(found) < pairs[0]
        assert pairs == sorted(set(pairs))
        found.update(zip(pairs, held, strict=True))
    return found


def _lists(held: Columns, groups: Groups, owners: Any) -> Columns:
    return LISTS.reduce(held, groups)


def _sums(held: Columns, groups: Groups, owners: Any) -> Columns:
    return [pa.array(groups.float_sums(held[0].to_numpy()))]


@given(grid=GRIDS, times=TIMES, bounds=st.tuples(st.integers(-80, 120), st.integers(-80, 120)) | st.just(EVERYTHING))
def test_windows_have_their_panes_in_order(grid: Panes, times: set[tuple[int, int]], bounds: Window) -> None:
    panes = _panes(grid, times)
    expected: dict[Window, list[int]] = {}
    for owner, start in panes:
        for end in ends_of(grid, start):
            if bounds[0] <= end <= bounds[1]:
                expected.setdefault((owner, end), []).append(start)
    rows = _rows(panes, [[start] for _, start in panes], pa.list_(pa.int64()))
    for max_bytes in (1 << 20, 300, 1):
        assert _merged(PaneMerge(grid, max_bytes), rows, _lists, bounds) == expected


@given(grid=GRIDS, times=TIMES, seed=st.integers(0, 1000), bounds=st.tuples(st.integers(-80, 50), st.integers(0, 120)))
def test_a_window_is_the_same_whichever_others_are_merged(
    grid: Panes, times: set[tuple[int, int]], seed: int, bounds: Window
) -> None:
    """Sums of doubles depend on the order of the merges, to the last bit."""
    rng = random.Random(seed)
    panes = _panes(grid, times)
    rows = _rows(panes, [rng.random() * 10.0 ** rng.randrange(12) for _ in panes], pa.float64())
    everything = _merged(PaneMerge(grid, 1 << 20), rows, _sums)
    some = {key: total for key, total in everything.items() if bounds[0] <= key[1] <= bounds[1]}
    assert _merged(PaneMerge(grid, 1), rows, _sums, bounds) == some
    for (owner, end), total in everything.items():
        inside = [(own, end - grid.size_ms <= at < end) for own, at in panes]
        alone = rows.take(np.array([own == owner and is_inside for own, is_inside in inside]))
        assert _merged(PaneMerge(grid, 1 << 20), alone, _sums, (end, end)) == {(owner, end): total}


def test_windows_of_picked_panes_are_found() -> None:
    grid = SlidingWindows(6, 2).panes()
    panes = _rows([(0, 0), (0, 2), (0, 4), (1, 0), (1, 8)], [[0], [2], [4], [0], [8]], pa.list_(pa.int64()))
    picked = TimeRows(np.array([0, 1]), np.array([4, 8]), [])
    (windows,) = PaneMerge(grid, 1 << 20).windows(panes, picked, np.array([8, 8]), 11)
    assert list(zip(windows.owners.tolist(), windows.ends_ms.tolist(), strict=True)) == [(0, 8), (0, 10), (1, 10)]
    held = PaneMerge(grid, 1 << 20).merged(panes, windows, _lists)[0].to_pylist()
    assert held == [[2, 4], [4], [8]]


@pytest.mark.parametrize("step", [1, 7])
def test_the_number_of_merges_grows_with_the_logarithm(step: int) -> None:
    grid, merged = SlidingWindows(3600, step).panes(), 0

    def count(held: Columns, groups: Groups, owners: Any) -> Columns:
        nonlocal merged
        merged += len(groups.index)
        return [pa.array(groups.sums(held[0].to_numpy()))]

    panes = [(0, start) for start in range(0, 10_000, grid.width_ms)]
    rows = _rows(panes, [start for _, start in panes], pa.int64())
    windows = _merged(PaneMerge(grid, 1 << 30), rows, count, (3600, 10_000))
    assert windows == {(0, end): sum(range(end - 3600, end)) for end in range(3600, 10_001) if (end - 3600) % step == 0}
    assert merged < 4 * 6 * len(panes) + 3 * 6 * len(windows)


@pytest.mark.parametrize("max_bytes", [1, 5_000, 100_000])
def test_what_is_merged_at_once_is_bounded_by_bytes(max_bytes: int) -> None:
    """Here each list is in twenty windows."""
    grid = SlidingWindows(20, 1).panes()
    panes = [(0, start) for start in range(200)]
    rows = _rows(panes, [["x" * 100] for _ in panes], pa.list_(pa.string()))
    most = 0
    merge = PaneMerge(grid, max_bytes)
    for windows in merge.windows(rows, rows, np.full(200, 0), 300):
        most = max(most, merge.merged(rows, windows, _lists)[0].nbytes)
    assert most < max(max_bytes + 1_000, 3_000)


def test_very_many_windows_of_a_pane_come_in_parts() -> None:
    grid = SlidingWindows(10_000_000_000, 1).panes()
    rows = _rows([(0, 5)], [1], pa.int64())
    found = PaneMerge(grid, 1 << 20).windows(rows, rows, np.array([0]), 1 << 61)
    first, second = next(found), next(found)
    assert first.ends_ms[0] == 6
    assert second.ends_ms[0] == first.ends_ms[-1] + 1
    assert len(first.ends_ms) < 1 << 20


@given(grid=GRIDS, times=TIMES, after_ms=st.integers(-100, 200))
def test_the_ends_of_panes(grid: Panes, times: set[tuple[int, int]], after_ms: int) -> None:
    starts = [start for _, start in _panes(grid, times)]
    held = np.array(starts, np.int64)
    assert first_ends(grid, held).tolist() == [ends_of(grid, start)[0] for start in starts]
    for start, end in zip(starts, next_ends(grid, held, after_ms).tolist(), strict=True):
        coming = [one for one in ends_of(grid, start) if one > after_ms]
        assert not coming or end == coming[0]


@pytest.mark.parametrize("step", [1, 10, 1 << 40])
@given(pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=30))
def test_groups_are_those_of_equal_pairs(step: int, pairs: list[tuple[int, int]]) -> None:
    owners = np.array([owner for owner, _ in pairs], np.int64)
    times = np.array([time * step + 3 for _, time in pairs], np.int64)
    groups = group_rows(owners, times, 5, step)
    found = list(zip(groups.owners.tolist(), groups.times_ms.tolist(), strict=True))
    assert found == sorted(set(found)) == sorted({(owner, time * step + 3) for owner, time in pairs})
    assert [found[group] for group in groups.index.tolist()] == [(owner, time * step + 3) for owner, time in pairs]


def test_far_apart_times_of_many_keys_are_told_apart() -> None:
    """Their codes would not fit into 64 bits."""
    grid = SlidingWindows(4, 2).panes()
    panes = [(owner, at) for owner in (0, 1, 1 << 20) for at in (-(1 << 50), 0, 2, 1 << 50)]
    rows = _rows(panes, [[at] for _, at in panes], pa.list_(pa.int64()))
    found = _merged(PaneMerge(grid, 1 << 20), rows, _lists, (-(1 << 60), 1 << 60))
    for owner in (0, 1, 1 << 20):
        assert found[owner, 4] == [0, 2]
        assert found[owner, 2] == [0]
        assert found[owner, (1 << 50) + 4] == [1 << 50]


@given(
    spans=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 9)), max_size=25),
    shift=st.sampled_from([0, -100]),
)
def test_spans_that_meet_are_in_one_session(spans: list[tuple[int, int, int]], shift: int) -> None:
    columns = [np.array([span[place] for span in spans], np.int64) for place in range(3)]
    index, count = sessions_of(columns[0], columns[1] + shift, columns[1] + columns[2] + shift)
    expected: list[list[tuple[int, int, int]]] = []
    for owner, start, length in sorted(spans):
        last = expected[-1] if expected else []
        if last and last[0][0] == owner and start <= max(one[1] + one[2] for one in last):
            last.append((owner, start, length))
        else:
            expected.append([(owner, start, length)])
    assert count == len(expected)
    found = [[span for span, of in zip(spans, index.tolist(), strict=True) if of == one] for one in range(count)]
    assert [sorted(one) for one in found] == [sorted(one) for one in expected]
