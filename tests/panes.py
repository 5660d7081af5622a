"""Panes and their windows one by one, for comparison with columns of them."""

from __future__ import annotations

from statelog.windows.pane_columns import Panes


def pane_of(grid: Panes, time_ms: int) -> int | None:
    """Start of the pane that contains a time; None between two windows."""
    start = time_ms - (time_ms - grid.offset_ms) % grid.step_ms
    return start if time_ms < start + grid.width_ms else None


def ends_of(grid: Panes, pane: int) -> list[int]:
    """Ends of the windows that contain a pane, ascending."""
    starts = range(pane - grid.size_ms + 1, pane + 1)
    return [start + grid.size_ms for start in starts if (start - grid.offset_ms) % grid.slide_ms == 0]
