"""The figures that benchmarks make of their sides' measurements, and the output they expect. No Spark here."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from cProfile import Profile
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from benchmarks import commit, count, growth, memory, operations, recovery, skew, state
from benchmarks.frame import Result, scratch
from benchmarks.operations import Subtask
from benchmarks.processors import OUTPUT
from benchmarks.profiling import seconds_by_module
from benchmarks.query import BatchSide, require
from benchmarks.state import EXPECTED, KINDS, InputBatch
from benchmarks.tail import latency_of
from statelog.history.footprint import log_file
from statelog.history.query_history import read_history
from statelog.storage import LocalStore
from tests.stored_query import StoredQuery

FILES = {"files_live": 1, "bytes_live": 2, "files_seen": 3, "bytes_seen": 4}


def measured(side: BatchSide, duration_ms: int, **checkpoint: Any) -> dict[str, Any]:
    """The measurements of a side whose batches take so long, and the first two of them longer."""
    durations = [9_999, 9_999, *[duration_ms] * (side.batches - 2)]
    return {
        "batches": [{"batch": batch, "triggerExecution": took_ms} for batch, took_ms in enumerate(durations)],
        "checkpoints": [{"batch": batch, **checkpoint} for batch in range(side.batches) if checkpoint],
        **FILES,
    }


def outcomes(result: Result) -> list[tuple[float | None, bool]]:
    """The values of the targets, and whether they were met."""
    return [(target.value and round(target.value, 6), target.met) for target in result.targets]


class TestCount:
    def test_rows_for_changed_keys_by_simulation(self) -> None:
        rows = count.rows_for_changed_keys(4_500, 50_000)
        assert rows is not None
        source = random.Random(1)

        seen = [len({source.randrange(50_000) for _ in range(rows)}) for _ in range(20)]

        assert statistics.mean(seen) == pytest.approx(4_500, rel=0.005)
        assert count.changed_keys(rows, 50_000) == pytest.approx(4_500, rel=0.001)

    def test_too_few_keys_for_so_many_changes(self) -> None:
        assert count.rows_for_changed_keys(90_000, 90_000) is None

    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
        """Runs it, with a number of keys, on sides that only say what they measured."""
        batch_ms = {count.CEILING: 250, count.STATELOG: 400, count.SPARK: 3_200}
        checkpoint = {"changes": 90_100, "changed_bytes": 10, "subtask_s": 0.030, "commit_s": 0.011}

        def run_side(side: count.CountSide, place: Path) -> dict[str, Any]:
            return measured(side, batch_ms[side.side], **(checkpoint if side.side == count.STATELOG else {}))

        monkeypatch.setattr(count.CountSide, "run", run_side)
        settings = {"rows_per_batch": (200_000,), "batches": 6, "warm_up": 2}
        return lambda keys, **more: count.run(count.Settings(keys=keys, **{**settings, **more}), tmp_path)

    def test_figures_and_targets(self, run: Callable[..., Result]) -> None:
        result = run(1_000_000)

        sides = result.figures["sides"]
        # Medians of the batches from the third on: 250, 400, 400 and 3,200 ms.
        assert sides[count.side_name(count.CEILING, 200_000)]["rows_per_s"] == pytest.approx(800_000)
        assert sides[count.side_name(count.STATELOG, 200_000)]["rows_per_s"] == pytest.approx(500_000)
        assert sides[count.side_name(count.SPARK, 200_000)]["rows_per_s"] == pytest.approx(62_500)
        assert result.figures["statelog_to_ceiling_rows_per_s"] == {"200,000": pytest.approx(0.625)}
        assert outcomes(result) == [(8, False), (41, True)]

    def test_too_few_changed_keys_leave_the_target_unmeasured(self, run: Callable[..., Result]) -> None:
        assert outcomes(run(10_000)) == [(8, False), (None, False)]

    def test_all_sides_have_the_same_sizes_and_sparks_fewer_large_batches(self, run: Callable[..., Result]) -> None:
        result = run(1_000_000, rows_per_batch=(200_000, 20_000), warm_up=20, batches=40)

        sides = result.figures["sides"]
        measured = {
            (side["side"], side["rows_per_batch"]): (side["batches"], side["batches_left_out"])
            for name, side in sides.items()
            if "changed" not in name
        }
        assert measured == {
            (side, rows): (4, 2) if (side, rows) == (count.SPARK, 200_000) else (40, 20)
            for side in (count.CEILING, count.STATELOG, count.SPARK)
            for rows in (20_000, 200_000)
        }
        assert list(result.figures["statelog_to_spark_rows_per_s"]) == ["20,000", "200,000"]

    def test_mixed_columns_are_held_against_longs(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        batch_ms = {count.LONGS: 400, count.MIXED: 520}
        monkeypatch.setattr(count.KeepSide, "run", lambda side, place: measured(side, batch_ms[side.side]))

        result = count.run(count.Settings(batches=6, warm_up=2, columns="mixed"), tmp_path)

        assert outcomes(result) == [(1.3, True)]

    def test_warming_up_must_leave_batches(self, tmp_path: Path) -> None:
        for settings in (count.Settings(spark_batches=4, warm_up=4), count.Settings(batches=4, warm_up=4)):
            with pytest.raises(click.UsageError, match="4 batches leave nothing after 4"):
                count.run(settings, tmp_path)


STATE_BATCHES = 6
DELAY_MS = 2000


def state_input() -> Iterator[InputBatch]:
    """Small batches, a second apart, of rows that are up to two seconds old; the last one checks lists."""
    source = np.random.default_rng(5)
    for batch in range(STATE_BATCHES):
        yield InputBatch(
            keys=source.integers(0, 40, 120),
            items=source.integers(0, 16, 120),
            times_ms=1_000_000 + 1000 * batch - source.integers(0, 2000, 120),
            checks=batch == STATE_BATCHES - 1,
        )


COLUMNS = "key long, item long, time timestamp, time_ms long, checks boolean"


def state_rows(batch: InputBatch) -> list[tuple[Any, ...]]:
    """Rows of `COLUMNS`."""
    times = batch.times_ms.astype("datetime64[ms]").tolist()
    checks = [batch.checks] * len(times)
    return list(zip(batch.keys.tolist(), batch.items.tolist(), times, batch.times_ms.tolist(), checks, strict=True))


class TestStateProcessors:
    @pytest.mark.parametrize(
        ("kind", "mode"),
        [(kind, mode) for kind in KINDS for mode in ("row", "pandas") if kind != "window" or mode == "row"],
    )
    def test_return_what_is_expected_without_state(self, kind: str, mode: str) -> None:
        what = KINDS[kind]
        uses_frames = mode == "pandas"
        subtask = Subtask(what.make(uses_frames), COLUMNS, OUTPUT, what.time_mode, uses_frames=uses_frames)

        found = []
        now_ms = 0
        for batch in state_input():
            rows = subtask.run(subtask.data(state_rows(batch)), now_ms=now_ms).rows
            weighted = sum(row.key * row.n for row in rows)
            found.append({"keys": len(rows), "total": sum(row.n for row in rows), "weighted": weighted})
            now_ms = int(batch.times_ms.max()) - DELAY_MS

        assert found == list(EXPECTED[kind](state_input(), 40))

    def test_expected_counts_by_hand(self) -> None:
        nothing = np.zeros(3, np.int64)
        batches = [
            InputBatch(np.array([7, 7, 2]), np.array([1, 1, 5]), nothing, False),
            InputBatch(np.array([7, 2, 2]), np.array([1, 5, 6]), nothing, True),
        ]

        assert [list(EXPECTED[kind](batches, 8)) for kind in ("value", "list", "map", "timer")] == [
            [{"keys": 2, "total": 3, "weighted": 16}, {"keys": 2, "total": 6, "weighted": 27}],
            [{"keys": 2, "total": 3, "weighted": 16}, {"keys": 2, "total": 6, "weighted": 27}],
            [{"keys": 2, "total": 4, "weighted": 23}, {"keys": 2, "total": 6, "weighted": 27}],
            [{"keys": 2, "total": 2, "weighted": 9}, {"keys": 2, "total": 2, "weighted": 9}],
        ]

    def test_a_wrong_batch_is_an_error(self) -> None:
        batches = [{"batchId": number, "observedMetrics": {"check": {"keys": 2, "total": None}}} for number in range(2)]

        require("statelog", batches, [{"keys": 2, "total": 0}] * 2)
        with pytest.raises(RuntimeError, match="batch 1 returned .*'keys': 2, .* should return .*'keys': 3"):
            require("statelog", batches, [{"keys": 2, "total": 0}, {"keys": 3, "total": 0}])


class TestState:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[state.StateSide]:
        """The sides that are run; statelog's batches take 500 ms, and Spark's 1,000."""
        asked: list[state.StateSide] = []

        def run(side: state.StateSide, place: Path) -> dict[str, Any]:
            asked.append(side)
            return measured(side, 1_000 if side.is_spark else 500)

        monkeypatch.setattr(state.StateSide, "run", run)
        return asked

    def test_all_kinds_and_modes_run_beside_spark(self, asked: list[state.StateSide], tmp_path: Path) -> None:
        result = state.run(state.Settings(), tmp_path)

        assert [(each.kind, each.mode, each.side) for each in asked] == [
            (kind, mode, side)
            for kind in ("value", "list", "map", "timer", "ttl", "window")
            for mode in ("row", "pandas")
            if (kind, mode) != ("window", "pandas")
            for side in (state.STATELOG, state.SPARK)
        ]
        assert {each.kind: each.keys for each in asked} == {
            "value": 1_000_000,
            "list": 20_000,
            "map": 20_000,
            "timer": 1_000_000,
            "ttl": 1_000_000,
            "window": 20_000,
        }
        # 100,000 rows in half a second, 5,000 in one.
        assert outcomes(result) == [(40, True)] * 11
        assert result.figures["statelog_to_spark_rows_per_s"]["pandas"]["map"] == pytest.approx(40)

    def test_equal_sizes_are_sparks(self, asked: list[state.StateSide], tmp_path: Path) -> None:
        result = state.run(state.Settings(equal_sizes=True, kind=("map",), mode="pandas"), tmp_path)

        assert [(each.rows_per_batch, each.batches) for each in asked] == [(5_000, 8), (5_000, 4)]
        assert outcomes(result) == [(2, False)]

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [({"warm_up": 4}, "4 batches leave nothing after 4"), ({"kind": ("window",), "mode": "pandas"}, "rows only")],
    )
    def test_nothing_to_measure_is_refused(
        self, wrong: dict[str, Any], message: str, asked: list[state.StateSide], tmp_path: Path
    ) -> None:
        with pytest.raises(click.UsageError, match=message):
            state.run(state.Settings(**wrong), tmp_path)

        assert asked == []


class TestOperations:
    def test_measures_every_operation_in_a_process_of_its_own(self, tmp_path: Path) -> None:
        result = state.run(state.Settings(part="ops", operation_keys=100, entries=(5, 40), repetitions=2), tmp_path)

        costs = result.figures["operations"]
        assert {"value get", "list append", "map put", "timer register", "timer fire"} < costs.keys()
        assert all(len(cost["us_by_repetition"]) % 2 == 0 for cost in costs.values())
        # A fired timer has no empty batch taken off, so its cost cannot be noise only.
        assert costs["timer fire"]["us"] > 0
        assert [by_size.keys() for by_size in result.figures["growth"].values()] == [{5, 40}] * 3
        assert [target.limit for target in result.targets] == [1.3, 1.3]

    def test_growth_is_the_median_ratio_of_the_repetitions(self) -> None:
        cost = {"process_us": 1.0, "changeset_us": 1.0}
        few = {**cost, "us": 2.0, "us_by_repetition": [2.0, 4.0, 2.0]}
        many = {**cost, "us": 3.0, "us_by_repetition": [2.5, 4.8, 6.0]}
        growth = {10: few, 1_000: {**few, "us_by_repetition": [9.0] * 3}, 100_000: many}
        measured = {"operations": {}, "growth": {"list append": growth, "map put": {10: few}}}

        assert outcomes(operations.as_result(measured)) == [(1.25, True), (None, False)]


class TestRecovery:
    def test_every_restart_starts_from_what_the_killed_process_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The processes only leave some files behind, and say what they measured."""
        restarts: list[tuple[str, int, int, bool]] = []

        def build(_: Any, call: Any, work: Path, *__: Any) -> None:
            side = call.func.__self__
            for name in ("checkpoint", "local"):
                (work / name).mkdir()
                (work / name / "side").write_text(side.side)
                (work / name / "built").write_text(str(side.parallelism))

        def restart(call: Any, work: Path, _: Any) -> dict[str, Any]:
            side = call.func.__self__
            assert (work / "checkpoint" / "side").read_text() == side.side
            (work / "checkpoint" / "side").write_text("gone on with")
            built = int((work / "checkpoint" / "built").read_text())
            has_local = (work / "local").exists()
            restarts.append((side.side, built, side.parallelism, has_local))
            restore_s = {recovery.CHANGELOG_OFF: 0.5, recovery.DEDUPLICATION: 1.2}.get(side.side, 0.4)
            if side.parallelism == 3:
                restore_s = 0.6
            if built == 3:
                restore_s = 0.44
            if has_local:
                restore_s = 0.02
            parts = {"start_up_s": 5, "log_s": 0.1, "restore_s": restore_s, "processing_s": 2, "later_batch_s": 1}
            return {**parts, "total_s": 7.1 + restore_s, "restored_bytes": 1}

        monkeypatch.setattr(recovery, "kill_child_when", build)
        monkeypatch.setattr(recovery, "run_in_child", restart)
        stored = {"batch": 6, "base_through": 4, "base_bytes": 10, "changes_bytes": 5}
        monkeypatch.setattr(recovery, "stored", lambda *_: stored)
        monkeypatch.setattr(os, "cpu_count", lambda: 3)
        result = recovery.run(recovery.Settings(keys=1_000), tmp_path)

        assert len(restarts) == 18
        assert Counter(restarts) == dict.fromkeys(restarts[:6], 3)
        assert restarts[:6] == [
            (recovery.CHANGELOG_ON, 2, 2, False),
            (recovery.CHANGELOG_OFF, 2, 2, False),
            (recovery.CHANGELOG_ON, 2, 2, True),
            (recovery.CHANGELOG_ON, 3, 2, False),
            (recovery.CHANGELOG_ON, 2, 3, False),
            (recovery.DEDUPLICATION, 2, 2, False),
        ]
        assert outcomes(result) == [(0.8, True), (3, True), (0.05, True), (1.1, True), (1.5, False)]

    def test_the_extent_of_a_stored_state(self, tmp_path: Path) -> None:
        query = StoredQuery(tmp_path).run(["main"], range(4))
        side = recovery.variants_of(recovery.Settings())[recovery.CHANGELOG_ON]

        found = recovery.stored(side, query.checkpoint)

        history = read_history(LocalStore(query.location)).of("main")
        assert history is not None
        segments = [segment for checkpoint in history.checkpoints for segment in checkpoint.segments]
        changes = {"base_through": -1, "base_bytes": 0, "changes_bytes": sum(each.length for each in segments)}
        assert found == {"batch": 3, **changes}
        with pytest.raises(click.ClickException, match="has left no checkpoint behind"):
            recovery.stored(side, tmp_path / "other")

    def test_without_changes_after_a_materialization_there_is_no_ratio(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor is there a target for more subtasks than cores."""
        monkeypatch.setattr(os, "cpu_count", lambda: 2)
        variants = recovery.variants_of(recovery.Settings(spark="processor"))
        measured = {name: [{"restore_s": 1.0}] for name in variants}

        targets = recovery.targets_of(measured, variants, {"base_bytes": 10, "changes_bytes": 0})

        assert [target.value for target in targets] == [None, 1, 1, 1]


GROWTH = growth.Settings(keys=(10_000, 1_000), rows_per_batch=500, rounds=8, materialization_keys=2_000)


class TestGrowth:
    def test_a_slow_moment_of_the_machine_does_not_count(self) -> None:
        small = [1.0, 1.0, 9.0, 1.0, 1.0]
        large = [1.2, 1.2, 9.2, 1.2, 5.0]

        assert growth.growth(small, large) == pytest.approx(1.2)
        assert growth.longer_s(small, large) == pytest.approx(0.2)

    def test_pairs_are_those_with_a_materialization(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def run(self: growth.GrowthSide, place: Path) -> dict[str, Any]:
            measured = {}
            for name, query in self.queries.items():
                scale = 1.25 if query["keys"] == 10_000 else 1.0
                batch = {"commit_s": 0.004, "subtask_s": 0.02, "batch_s": 0.4 * scale, "restore_s": 0.001}
                measured[name] = [
                    {**batch, "changes": 500, "has_job": False, "has_slice": False} for _ in range(self.rounds)
                ]
            for number, batch in enumerate(measured.get(growth.RUNNING, [])):
                batch["has_job"] = number >= 2
                batch["has_slice"] = number >= 3
                batch["batch_s"] += 0.3 if number >= 3 else 9
                batch["commit_s"] = 0.0044
            return measured

        monkeypatch.setattr(growth.GrowthSide, "run", run)
        result = growth.run(GROWTH, tmp_path)

        assert outcomes(result) == [(1, True), (1, True), (1.25, True), (1.1, True), (300, False)]
        assert [target.name for target in result.targets] == [
            "commit time: 10,000 keys / 1,000 keys",
            "the subtasks' part: 10,000 keys / 1,000 keys",
            "batch: 10,000 keys / 1,000 keys",
            "commit time: with a materialization / without",
            "batch: longer with a slice of a materialization, ms",
        ]
        assert [row["batches"] for row in result.rows] == ["8", "8", "6", "6"]

    def test_too_few_batches_with_a_materialization_leave_the_targets_unmeasured(self) -> None:
        batch = {"commit_s": 1.0, "subtask_s": 1.0, "batch_s": 1.0, "has_slice": True}

        targets = growth.targets_of({"1 key": [batch]}, {growth.RUNNING: [batch] * 4, growth.NOT_RUNNING: [batch] * 4})

        assert [target.value for target in targets] == [None, None]

    def test_more_changes_than_keys_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(click.UsageError, match="more than the fewest keys"):
            growth.run(dataclasses.replace(GROWTH, rows_per_batch=1_001), tmp_path)


class TestCommit:
    @pytest.mark.parametrize(
        ("file_merging", "calls", "files"), [("across", "rpc", 1), ("across", "direct", 1), ("within", "tls", 5)]
    )
    def test_measures_real_checkpoints(self, file_merging: str, calls: str, files: int, tmp_path: Path) -> None:
        settings = commit.Settings(
            file_merging=file_merging,
            checkpoints=20,
            subtasks=(3,),
            operators=(1, 5),
            changeset_bytes=1_000,
            calls=calls,
            fresh_every=8,
        )

        result = commit.run(settings, tmp_path)

        for name, operators in (("3 subtasks, 1 operator", 1), ("3 subtasks, 5 operators", 5)):
            measured = result.figures["runs"][name]
            # The last of the locations has the last 4 checkpoints, and as objects the claim besides.
            assert measured["files"] == files
            # A section takes some hundred bytes, and so does each of its segments.
            assert 12_000 < measured["bytes"] < 24_000 + (operators - 1) * 4 * 3 * 400
            assert measured["changeset_bytes"] == 1_000 // operators
            assert measured["writes_per_checkpoint"] == 1
            for part in ("commit_ms", "coordinator_commit_ms", "checkpoint_ms", "begins_ms", "acks_ms", "writes_ms"):
                assert measured[part]["samples"] == 20
        writes, time_of_writes = result.targets
        assert (writes.name, writes.value, writes.met) == ("3 subtasks, 5 operators: writes per checkpoint", 1, True)
        assert time_of_writes.limit == 1.3

    def test_the_same_bytes_for_any_number_of_subtasks(self, tmp_path: Path) -> None:
        settings = commit.Settings(checkpoints=5, subtasks=(1, 4), total_bytes=8_000, calls="direct")

        result = commit.run(settings, tmp_path)

        assert [each["changeset_bytes"] for each in result.figures["runs"].values()] == [8_000, 2_000]
        [target] = result.targets
        assert (target.limit, target.sense) == (1.5, "at_most")
        assert target.value is not None
        assert target.value >= 1

    def test_each_write_takes_its_injected_latency(self, tmp_path: Path) -> None:
        settings = commit.Settings(
            checkpoints=3, subtasks=(2,), operators=(1, 5), calls="direct", latency_scale=0.1, rounds=2
        )

        result = commit.run(settings, tmp_path)

        assert result.figures["file_merging"] == "within"
        for each in result.figures["runs"].values():
            # The first object of a log is the claim.
            injected_ms = [100 * latency_of(log_file(number), 1) for number in (2, 3, 4)]
            assert each["writes_ms"]["samples"] == 6
            assert each["writes_ms"]["median"] >= statistics.median(injected_ms)
            assert min(each["writes_ms_by_round"]) >= statistics.median(injected_ms)

    def test_figures_are_those_of_all_rounds(self) -> None:
        """Medians of pooled samples, the median rate; and the ratios of the writes are those of the rounds."""

        def measured(writes: int, write_s: float, checkpoint_s: float) -> dict[str, Any]:
            return {
                "commit_s": [0.1, 0.2, 0.3, 0.4],
                "coordinator_commit_s": [0.1] * 4,
                "checkpoint_s": [checkpoint_s] * 4,
                "begins_s": [0.01] * 4,
                "acks_s": [0.02] * 4,
                "writes": [writes] * 4,
                "writes_s": [write_s] * 4,
                "others": [2] * 4,
                "rss_before_bytes": 10,
                "rss_after_bytes": 15,
                "profile_s": {},
            }

        one = commit.figures_of([measured(1, 0.010, 0.5), measured(1, 0.012, 0.25), measured(1, 0.050, 0.25)], 2)
        five = commit.figures_of([measured(1, 0.012, 0.5), measured(1, 0.018, 0.5), measured(5, 0.055, 0.5)], 2)

        assert one["commit_ms"]["samples"] == 12
        assert (one["first_tenth_median_ms"], one["last_tenth_median_ms"]) == pytest.approx((200, 300))
        assert one["checkpoints_per_s"] == 4
        assert one["rss_growth_bytes"] == 5
        assert five["writes_per_checkpoint"] == pytest.approx(7 / 3)
        assert five["other_requests_per_checkpoint"] == 2
        targets = commit.targets_of({(64, 1): one, (64, 5): five}, has_equal_bytes=False)
        assert [(target.name, round(target.value or 0, 6), target.met) for target in targets] == [
            ("64 subtasks, 5 operators: writes per checkpoint", 2.333333, False),
            ("64 subtasks, 5 operators: writes per checkpoint, time / with 1", 1.2, True),
        ]

    def test_subtasks_are_compared_with_equal_operators(self) -> None:
        def figures(commit_ms: float) -> dict[str, Any]:
            return {"commit_ms": {"median": commit_ms}, "writes_ms_by_round": [1.0], "writes_per_checkpoint": 1}

        by_shape = {(2, 1): figures(2), (64, 1): figures(3), (2, 5): figures(99), (64, 5): figures(99)}
        subtasks, *operators = commit.targets_of(by_shape, has_equal_bytes=True)

        assert (subtasks.value, subtasks.limit) == (1.5, 1.5)
        assert len(operators) == 4

    def test_a_profile_is_of_one_thread(self, tmp_path: Path) -> None:
        with pytest.raises(click.UsageError, match="needs --calls direct"):
            commit.run(commit.Settings(profile=True), tmp_path)

    def test_a_profile_names_the_modules(self, tmp_path: Path) -> None:
        settings = commit.Settings(checkpoints=20, subtasks=(2,), calls="direct", profile=True)

        result = commit.run(settings, tmp_path)

        by_module = result.figures["runs"]["2 subtasks, 1 operator"]["profile_s"]
        assert {"statelog.coordinator.coordinator", "statelog.log.entry", "statelog.storage.local"} < by_module.keys()
        assert "own time: " in result.remarks[-1]


def test_functions_in_c_count_for_the_module_that_calls_them() -> None:
    def work() -> None:
        for _ in range(20):
            skew.skewed_keys(1_000, np.arange(1_000, dtype=np.uint64), np.arange(1_000), skew.ZIPF)
            time.sleep(0.001)

    with Profile() as profile:
        work()

    by_module = seconds_by_module(profile)

    assert by_module[__name__] >= 0.02
    assert by_module["benchmarks.skew"] > 0
    assert commit.shares_of({"profile_s": {"a": 1.0, "b": 3.0}}) == "75% b, 25% a"


class TestMemory:
    def test_only_anonymous_memory_of_python_counts(self) -> None:
        """A process with 50 MB, one that it has forked with 20 MB more, a mapped file of 80 MB, and no Python."""
        program = """
import mmap, os, pathlib, subprocess, sys, time
held = b"x" * (50 << 20)
others = [subprocess.Popen(["sleep", "60"])]
if os.fork() == 0:
    more = b"y" * (20 << 20)
    with open("file", "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sum(pages[::4096])
    pathlib.Path("ready").touch()
    time.sleep(60)
time.sleep(60)
"""
        sampler = memory.Sampler()
        with scratch(None) as place:  # not in a file system in memory
            (place / "file").write_bytes(bytes(80 << 20))
            child = subprocess.Popen([sys.executable, "-c", program], cwd=place, start_new_session=True)
            try:
                end_s = time.monotonic() + 100
                while not (place / "ready").exists() and time.monotonic() < end_s:
                    time.sleep(0.05)
                sampler.look(child.pid)
            finally:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait(30)
        assert sampler.processes == 2
        assert 50 << 20 <= sampler.driver_bytes < 75 << 20
        assert 70 << 20 <= sampler.worker_bytes == sampler.largest_worker_bytes < 95 << 20  # a fork's pages count twice
        assert sampler.peak_bytes == sampler.driver_bytes + sampler.worker_bytes
        assert sampler.file_bytes >= 80 << 20

    def test_a_process_that_has_just_ended_has_no_memory(self) -> None:
        """Linux still lists it, without the lines on its memory."""
        assert memory.memory_of("Name:\tpython3\nState:\tX (dead)\n") is None
        status = "RssAnon:\t      10 kB\nRssFile:\t       20 kB\nRssShmem:\t       0 kB\n"
        assert memory.memory_of(status) == {"RssAnon": 10240, "RssShmem": 0, "RssFile": 20480}

    def test_the_largest_sum_is_held_against_the_limit(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        calls: list[Any] = []

        def in_child(call: Any, place: Path, **_: Any) -> Any:
            calls.append(call)
            progress = [{"durationMs": {"triggerExecution": 500}, "numInputRows": 30}] * call.func.__self__.batches
            return {"progress": progress, "checkpoints": [{"materialized": 2}]}

        monkeypatch.setattr(memory, "run_in_child", in_child)
        monkeypatch.setattr(memory.Sampler, "peak_bytes", 1_200_000_000)
        result = memory.run(memory.Settings(keys=100, value_bytes=10, rows_per_batch=30, updates=45), tmp_path)

        assert [call.func.__name__ for call in calls] == ["measure", "check"]
        assert len(calls[1].args[1]) == 6
        [target] = result.targets
        assert (target.value, target.limit, target.met) == (1.2e9, 1e9, False)
        assert result.figures["rows_per_s"] == 60
