"""Aggregates in windows, computed on columns, as each version has stored them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

import statelog
from statelog.testing import Harness
from tests.compat.stored import read_query, write_query
from tests.compat.windows_support import FIRST, SECOND, WINDOWS, in_windows, make_harness, plan, rows_at

FIXTURES: Final = Path(__file__).parent / "windows"


def write(directory: Path) -> None:
    """Write the fixture: one batch, after which every kind of window has rows."""
    for windows in WINDOWS:
        with make_harness(windows) as harness:
            harness.push(rows_at(FIRST), 1_000)
            write_query(directory / windows, harness)


OPEN: Final = {
    "tumbling": [[1, 5], [12], [33], [40]],
    "sliding": [[1, 5], [1, 5, 12], [12], [33], [33], [40], [40]],
    "session": [[1, 5, 12], [33], [40]],
    "count": [[33], [40]],
}
"""The values of each window after the first batch, by hand."""


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
def test_windows_of_a_fixture_are_read_without_the_query(fixture: Path, windows: str, tmp_path: Path) -> None:
    location = shutil.copytree(fixture / windows, tmp_path / "location")  # a reader writes a pin
    rows = statelog.read_state(location, state="windows").read_all().to_pylist()
    values = [sorted(row["value_collect(value)"]) for row in rows]
    assert sorted(values) == OPEN[windows]
    for row, own in zip(rows, values, strict=True):
        found = [row[f"value_{name}"] for name in ("count", "sum(value)", "mean(value)", "max(value)", "last(value)")]
        assert found == [len(own), sum(own), sum(own) / len(own), max(own), max(own)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
@pytest.mark.parametrize("parallelism", [1, 3])
def test_fixture_is_read(fixture: Path, windows: str, parallelism: int) -> None:
    snapshot = read_query(fixture / windows, make_harness(windows), [1_000])
    with Harness.restore(snapshot, plan(windows).operator, parallelism=parallelism) as harness:
        found = harness.push(rows_at(SECOND), 2_000)
        found += [] if windows == "count" else harness.advanceWatermark(1_000)
    last: Callable[[list[int]], int] = (lambda values: values[-1]) if windows == "count" else max
    assert sorted(((*row[-7:-2], sorted(row[-2]), row[-1]) for row in map(tuple, found)), key=str) == sorted(
        (
            (
                len(values),
                sum(values),
                sum(values) / len(values),
                max(values),
                len(values),
                sorted(values),
                last(values),
            )
            for values in in_windows(windows)
        ),
        key=str,
    )
