"""The workloads value-state and window: what their queries return, and the figures of their sides."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import value_state, window
from benchmarks.operations import Subtask
from benchmarks.processors import OUTPUT, CountInPayload, CountSlidingRows
from benchmarks.value_state import ValueStateSide
from benchmarks.window import WindowSide, expected_windows
from benchmarks.workload import EventBatch, planned_batches, slow_store, stored_bytes
from benchmarks.workload_figures import OFF, ON, S3_OFF, S3_ON, SPARK_OFF, SPARK_ON, targets_of
from statelog.storage import LocalStore

SIDE: dict[str, Any] = {
    "side": "changelog on",
    "parallelism": 2,
    "changelog": True,
    "has_delays": False,
    "is_quick": False,
    "rate": 1_000.0,
    "seconds": 3.0,
    "warm_up": 1.0,
    "keys": 20,
    "skew": "uniform",
    "value_bytes": 16,
    "built_events": 0,
    "materialization_s": 20.0,
}
VALUES = ValueStateSide(**SIDE, spark="processor")
WINDOWS = WindowSide(**SIDE, window_ms=1_000, slide_ms=250)


def batches_of(sizes: list[tuple[int, int]]) -> list[EventBatch]:
    """Batches of so many events, each so many milliseconds after the one before."""
    batches: list[EventBatch] = []
    time_ms, first = 10_000, 0
    for events, after_ms in sizes:
        time_ms += after_ms
        batches.append(EventBatch(len(batches), time_ms, first, first + events))
        first += events
    return batches


def rows_of(side: Any, batch: EventBatch) -> list[tuple[int, bytes]]:
    return [(key, b"p" * side.value_bytes) for key in side.keys_of(batch).tolist()]


SIZES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 2_500)), min_size=1, max_size=12)


@given(SIZES)
def test_value_state_returns_what_is_expected(sizes: list[tuple[int, int]]) -> None:
    batches = batches_of(sizes)
    subtask = Subtask(CountInPayload(), "key long, payload binary", OUTPUT)

    found = []
    for batch in batches:
        rows = subtask.run(subtask.data(rows_of(VALUES, batch))).rows
        weighted = sum(row.key * row.n for row in rows)
        found.append({"keys": len(rows), "total": sum(row.n for row in rows), "weighted": weighted})

    assert found == list(VALUES.expected(batches))


class KeptPayload(CountInPayload):
    """Returns what is kept."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        list(super().handleInputRows(key, rows, timerValues))
        yield (key[0], self._kept.get()[0])


def test_value_state_keeps_the_last_payload_with_the_count_in_it() -> None:
    subtask = Subtask(KeptPayload(), "key long, payload binary", "key long, kept binary")
    subtask.run(subtask.data([(1, bytes(range(16))), (2, b"z" * 16)]))

    [row] = subtask.run(subtask.data([(1, b"a" * 16), (1, b"abcdefghijklmnop")])).rows

    assert row.kept == bytes([3, 0, 0, 0, 0, 0, 0, 0]) + b"ijklmnop"


def windows_by_hand(batches: list[EventBatch]) -> list[dict[str, int]]:
    """Each event in each of its windows; a window is returned by the first batch at or after its end."""
    held: dict[int, list[int]] = defaultdict(list)
    returned = []
    for batch in batches:
        start_ms = batch.time_ms - batch.time_ms % WINDOWS.slide_ms
        for start in range(start_ms, start_ms - WINDOWS.window_ms, -WINDOWS.slide_ms):
            held[start] += WINDOWS.keys_of(batch).tolist()
        ended = [start for start in held if start + WINDOWS.window_ms <= batch.time_ms]
        keys = [key for start in ended for key in held.pop(start)]
        # Of a key with n events n rows are counted, so the sum of key times n is that of the keys.
        returned.append({"n": len(keys), "bytes": len(keys) * WINDOWS.value_bytes, "weighted": sum(keys)})
    return returned


@given(SIZES)
def test_windows_are_expected_as_by_hand(sizes: list[tuple[int, int]]) -> None:
    batches = batches_of(sizes)

    assert list(WINDOWS.expected(batches)) == windows_by_hand(batches)


@given(SIZES)
def test_sliding_windows_by_hand_return_what_is_expected(sizes: list[tuple[int, int]]) -> None:
    batches = batches_of(sizes)
    processor = CountSlidingRows(WINDOWS.window_ms, WINDOWS.slide_ms)
    subtask = Subtask(processor, "key long, payload binary", "key long, n long, bytes long", "ProcessingTime")

    found = []
    for batch in batches:
        rows = subtask.run(subtask.data(rows_of(WINDOWS, batch)), now_ms=batch.time_ms).rows
        n, size = sum(row.n for row in rows), sum(row.bytes for row in rows)
        weighted = sum(row.key * row.n for row in rows)
        found.append({"n": n, "bytes": size, "weighted": weighted})

    assert found == list(WINDOWS.expected(batches))


def test_a_window_ends_with_the_batch_at_its_end() -> None:
    batches = batches_of([(5, 0), (7, 999), (1, 1)])

    assert [each["n"] for each in expected_windows(batches, [0, 0, 0], 1_000, 1_000, 16)] == [0, 0, 12]


class TestSparksFiles:
    def test_batches_are_read_from_the_offsets(self, tmp_path: Path) -> None:
        folder = tmp_path / "offsets"
        folder.mkdir()
        for number, end in enumerate((100, 100, 350), 7):
            metadata = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 1_000 * number})
            (folder / str(number)).write_text(f"v1\n{metadata}\n{json.dumps({'events': end})}")
        (folder / ".9.crc").write_bytes(b"\xff")

        # How many events were before batch 7 is no longer known.
        later = {8: EventBatch(8, 8_000, 100, 100), 9: EventBatch(9, 9_000, 100, 350)}
        assert planned_batches(tmp_path, 0) == planned_batches(tmp_path, 8) == later
        assert planned_batches(tmp_path, 9) == {9: later[9]}
        assert planned_batches(tmp_path, 10) == planned_batches(tmp_path / "none", 0) == {}

    def test_a_restart_needs_the_newest_snapshot_and_the_changelogs_since(self, tmp_path: Path) -> None:
        for partition, versions in (("0", (3, 12)), ("1", ())):
            folder = tmp_path / partition
            folder.mkdir()
            for version in versions:
                tables = [{"localFileName": "1.sst", "sizeBytes": 100 * version}, {"sizeBytes": 7}]
                with zipfile.ZipFile(folder / f"{version}.zip", "w") as archive:
                    archive.writestr("metadata", f"v1\n{json.dumps({'sstFiles': tables})}")
            for version in range(1, 15):
                (folder / f"{version}.changelog").write_bytes(b"x" * version)

        snapshot = (tmp_path / "0" / "12.zip").stat().st_size + 1_200 + 7
        assert stored_bytes(tmp_path) == snapshot + 13 + 14 + sum(range(1, 15))


def test_the_slow_store_is_that_of_the_location(tmp_path: Path) -> None:
    slow_store(f"flip158:{tmp_path}").put("x", b"1")

    assert LocalStore(str(tmp_path)).read("x") == b"1"


def measured(side: Any, checkpoint_s: list[float], full_bytes: int = 10) -> dict[str, Any]:
    """The measurements of a side whose batches take a second each, the first two of them before the measured time."""
    progress = [
        {
            "batchId": number,
            "timestamp": f"2026-01-01T00:{number // 60:02}:{number % 60:02}.000Z",
            "numInputRows": int(side.rate),
            "durationMs": {"triggerExecution": 1_000},
            "stateOperators": [{"commitTimeMs": 2_000 * took_s, "numShufflePartitions": 2}],
        }
        for number, took_s in enumerate([99.0, 99.0, *checkpoint_s])
    ]
    checkpoints = [
        {
            "batch": number,
            "subtask_s": took_s / 4,
            "commit_s": took_s * 3 / 4,
            "changed_bytes": 3,
            "materialized_bytes": 2,
            "base_bytes": full_bytes - 1,
            "log_bytes": 1,
            "measured": {"upload_hedges": 1},
        }
        for number, took_s in enumerate([99.0, 99.0, *checkpoint_s])
        if not side.is_spark
    ]
    return {
        "measured_from_s": 1767225602.0,
        "progress": progress,
        "checkpoints": checkpoints,
        "bytes_seen": 50 * len(progress),
        "full_bytes": full_bytes,
        "restart": {"total_s": 9.0, "start_up_s": 5.0, "log_s": 0.5, "restore_s": 1.0},
    }


class TestFigures:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """The sides that are run; checkpoints of 0.001, 0.002, ... s, and 10 times as long without the changelog."""
        asked: list[Any] = []

        def run(side: Any, place: Path) -> dict[str, Any]:
            asked.append(side)
            factor = 1 if side.changelog else 10
            return measured(side, [factor * number / 1000 for number in range(1, 401)])

        monkeypatch.setattr(ValueStateSide, "run", run)
        monkeypatch.setattr(WindowSide, "run", run)
        return asked

    def test_all_sides(self, asked: list[Any], tmp_path: Path) -> None:
        result = value_state.run(value_state.Settings(), tmp_path)

        assert [(each.side, each.changelog, each.has_delays, each.is_spark, each.rate) for each in asked] == [
            (ON, True, False, False, 20_000),
            (OFF, False, False, False, 20_000),
            (SPARK_ON, True, False, True, 1_000),
            (SPARK_OFF, False, False, True, 1_000),
            (S3_ON, True, True, False, 20_000),
            (S3_OFF, False, True, False, 20_000),
        ]
        on, off, spark = (result.figures["sides"][name] for name in (ON, OFF, SPARK_ON))
        assert on["checkpoint_ms"] == pytest.approx({"p50": 200, "p90": 360, "p99": 396, "max": 400})
        assert off["checkpoint_ms"]["p99"] == pytest.approx(3_960)
        # The tasks' mean.
        assert spark["checkpoint_ms"] == pytest.approx(on["checkpoint_ms"])
        assert (on["events"], on["checkpoints"], on["events_per_s"]) == (8_000_000, 400, pytest.approx(20_000))
        assert (on["new_bytes"], on["full_bytes"], on["recovery_s"]) == (5, 10, 4)
        assert (spark["new_bytes"], spark["full_bytes"]) == (50, 10)
        assert [plot.lines.keys() for plot in result.plots] == [
            {ON, OFF, SPARK_ON, SPARK_OFF, S3_ON, S3_OFF},
            {ON, OFF, SPARK_ON, SPARK_OFF, S3_ON, S3_OFF},
            {ON, OFF, SPARK_ON, SPARK_OFF, S3_ON, S3_OFF},
            {ON, OFF, S3_ON, S3_OFF},
        ]
        assert list(result.plots[0].lines[ON][-1]) == pytest.approx([100, 400])
        assert not any("keep up" in line for line in result.remarks)
        # The state is too small for a ratio, and there are too few checkpoints for a p99.9.
        assert [target.value for target in result.targets] == [None, None, pytest.approx(0.396), None]

    def test_quick_has_fewer_sides_and_one_restart(self, asked: list[Any], tmp_path: Path) -> None:
        window.run(window.Settings(quick=True), tmp_path)

        assert [each.side for each in asked] == [ON, SPARK_ON, S3_ON, S3_OFF]
        assert all(each.is_quick and each.seconds == 5 and each.window_ms == 10_000 for each in asked)

    def test_an_aggregation_gets_the_whole_rate(self, asked: list[Any], tmp_path: Path) -> None:
        settings = value_state.Settings(spark="aggregation", side=("spark-off",), built_events=7)

        result = value_state.run(settings, tmp_path)

        assert [(each.side, each.rate, each.spark, each.built_events) for each in asked] == [
            (SPARK_OFF, 20_000, "aggregation", 0)
        ]
        # The sizes of Spark's state are not known by batch.
        assert len(result.plots) == 3

    def test_a_side_that_falls_behind_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def run(side: Any, place: Path) -> dict[str, Any]:
            return measured(WINDOWS, [0.001] * 10)

        monkeypatch.setattr(WindowSide, "run", run)
        result = window.run(window.Settings(rate=1_100, side=("on",)), tmp_path)

        assert any("changelog on does not keep up: 1,000 of 1,100" in line for line in result.remarks)
        assert any("fewer than 300" in line and "3,000 seconds" in line for line in result.remarks)

    def test_nothing_measured_is_an_error(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(WindowSide, "run", lambda *_: measured(WINDOWS, []))

        with pytest.raises(click.ClickException, match="no batch began"):
            window.run(window.Settings(side=("on",)), tmp_path)


class TestTargets:
    @staticmethod
    def outcomes(on: dict[str, Any], off: dict[str, Any]) -> list[tuple[float | None, bool]]:
        return [
            (target.value and round(target.value, 6), target.met) for target in targets_of({S3_ON: on, S3_OFF: off})
        ]

    def test_of_a_large_state(self) -> None:
        on = {"checkpoint_ms": {"p99": 1_000, "p99.9": 1_500}, "p99.9_at_most_ms": 1_500, "full_bytes": 0}
        off = {"checkpoint_ms": {"p99": 10_000, "p99.9": 14_000}, "full_bytes": 10**9}

        assert self.outcomes(on, off) == [(10, True), (9.333333, False), (1, True), (1.5, True)]

    def test_without_a_percentile_its_bound_counts(self) -> None:
        on = {"checkpoint_ms": {"p99": 1_200}, "p99.9_at_most_ms": 1_600, "full_bytes": 0}
        off = {"checkpoint_ms": {"p99": 16_000}, "full_bytes": 10**9}

        assert self.outcomes(on, off) == [(13.333333, True), (10, True), (1.2, False), (1.6, True)]

    def test_a_small_state_has_no_ratios(self) -> None:
        on = {"checkpoint_ms": {"p99": 1_000}, "p99.9_at_most_ms": 1_500, "full_bytes": 0}
        off = {"checkpoint_ms": {"p99": 16_000}, "full_bytes": 10**9 - 1}

        assert [value for value, _ in self.outcomes(on, off)] == [None, None, 1, 1.5]


@pytest.mark.extended
@pytest.mark.spark
def test_a_query_is_killed_and_goes_on_with_what_its_events_give(tmp_path: Path) -> None:
    side = dataclasses.replace(WINDOWS, is_quick=True, seconds=2.0, warm_up=0.0)

    measured = side.run(tmp_path)

    assert measured["progress"]
    assert {each["batch"] for each in measured["checkpoints"]} >= {each["batchId"] for each in measured["progress"]}
    assert measured["restart"]["batch"] >= len(measured["progress"]) - 1
    assert measured["restart"]["restored_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
