"""The benchmark of the space that windows take: its figures, and the output it expects. No Spark here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import window_space
from benchmarks.window_space import CHANGELOG_OFF, CHANGELOG_ON, WindowSide

MB = 1_000_000


def run(monkeypatch: pytest.MonkeyPatch, directory: Path, log_mb: list[int], **options: Any) -> Any:
    """Run it on sides whose state takes 10 MB, with a log of these sizes, and 12 MB without the changelog."""

    def measured(self: WindowSide, place: Path) -> dict[str, Any]:
        is_on = self.side == CHANGELOG_ON
        sizes = [99] * self.batches if is_on else [2] * self.batches
        if is_on:
            sizes[-len(log_mb) :] = log_mb
        checkpoints = [
            {
                "batch": batch,
                "base_bytes": 10 * MB if is_on else 10 * MB + size * MB,
                "log_bytes": size * MB if is_on else 0,
                "changed_bytes": MB,
                "materialized": int(is_on and size == min(log_mb)),
                "materialized_bytes": 0,
                "stored_bytes": 20 * MB,
            }
            for batch, size in enumerate(sizes)
        ]
        ran = [{"batch": batch, "triggerExecution": 500} for batch in range(self.batches)]
        return {"checkpoints": checkpoints, "batches": ran, "bytes_live": 30 * MB}

    monkeypatch.setattr(WindowSide, "run", measured)
    asked = {"window_batches": 3, "batches": 9, "warm_up": 4, **options}
    return window_space.run(window_space.Settings(**asked), directory)


def test_medians_and_maxima_of_full_checkpoints_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = run(monkeypatch, tmp_path, log_mb=[2, 5, 6, 8, 14])

    assert [(target.value, target.met) for target in result.targets] == [
        (pytest.approx(16 / 12), True),
        (pytest.approx(24 / 12), False),
    ]
    assert [row["full MB"] for row in result.rows] == ["16.0 (max 24.0)", "12.0 (max 12.0)"]
    assert result.figures["sides"][CHANGELOG_ON]["log_bytes"] == {"samples": 5, "median": 6 * MB, "max": 14 * MB}


def test_says_that_nothing_was_materialized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = run(monkeypatch, tmp_path, log_mb=[1, 5, 6, 7, 8])
    both = run(monkeypatch, tmp_path, log_mb=[1, 5, 1, 5, 6])

    assert "was not materialized" in one.remarks[-1]
    assert "was not materialized" not in " ".join(both.remarks)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"batches": 4}, "leave nothing after 4"), ({"window_batches": 4}, "no window of 4 batches has been removed")],
)
def test_a_run_that_ends_too_soon_is_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(click.UsageError, match=message):
        run(monkeypatch, tmp_path, log_mb=[1], **options)


@pytest.mark.parametrize(("size", "slide"), [(20, 1), (6, 2), (6, 4), (3, 3), (1, 1)])
def test_expected_windows_are_those_between_two_watermarks(size: int, slide: int) -> None:
    sums = [(7 * batch) % 11 for batch in range(50)]

    settings = window_space.Settings(rows_per_batch=10, value_bytes=100, window_batches=size, slide_batches=slide)

    expected = list(WindowSide.of(settings, side=CHANGELOG_OFF).expected_windows(sums))

    for batch, found in enumerate(expected):
        returned = [
            (start, start + size)
            for start in range(-size * slide, 100)
            if start % slide == 0 and batch - 2 < start + size <= batch - 1
        ]
        held = [number for number in range(50) for start, end in returned if start <= number < end]
        n = 10 * len(held)
        assert found == {"n": n, "bytes": 100 * n, "weighted": sum(sums[number] for number in held)}
