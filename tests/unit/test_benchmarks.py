"""The benchmarks' frame: what may be reported, and what the command line does with it. No Spark here."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from benchmarks import commit, count, growth, memory, operations, recovery, recovery_side, state
from benchmarks.child import kill_child_when, run_in_child
from benchmarks.distribution import Distribution
from benchmarks.frame import Benchmark, Result, Target, alternate, command_line, require_space, scratch
from benchmarks.state_expected import EXPECTED, InputBatch
from benchmarks.state_kinds import KINDS
from benchmarks.state_rows import OUTPUT
from benchmarks.streaming import QueryRun
from benchmarks.subtask import Subtask
from statelog.convert.times import TimeMode


def near(value: float) -> Any:
    """What equals a number that was measured, if it is near."""
    return pytest.approx(value)


def shuffled(count: int) -> list[float]:
    """1 to `count` in random order: by nearest rank, the p-th percentile is the number itself."""
    numbers = [float(number) for number in range(1, count + 1)]
    random.Random(count).shuffle(numbers)
    return numbers


class TestDistribution:
    @pytest.mark.parametrize(
        ("samples", "p99", "p999"),
        [
            (1, None, None),
            (299, None, None),
            (300, 297, None),
            (1_000, 990, None),
            (9_999, 9_900, None),
            (10_000, 9_900, 9_990),
            (12_345, 12_222, 12_333),
        ],
    )
    def test_a_percentile_needs_enough_samples(self, samples: int, p99: float | None, p999: float | None) -> None:
        distribution = Distribution.of(shuffled(samples))

        assert distribution.percentile("p99") == p99
        assert distribution.percentile("p99.9") == p999

    def test_with_few_samples_json_has_maximum_and_number(self) -> None:
        assert Distribution.of(shuffled(18)).to_json() == {"samples": 18, "median": 9.5, "max": 18}

    def test_with_many_samples_json_has_the_percentiles_too(self) -> None:
        expected = {"samples": 10_000, "median": 5000.5, "p99": 9900, "p99.9": 9990, "max": 10_000}

        assert Distribution.of(shuffled(10_000)).to_json() == expected


class TestTarget:
    @pytest.mark.parametrize(
        ("value", "sense", "met"),
        [
            (25.0, "at_least", True),
            (24.99, "at_least", False),
            (25.01, "at_most", False),
            (25.0, "at_most", True),
            (None, "at_least", False),
            (None, "at_most", False),
        ],
    )
    def test_is_met_on_its_side_of_the_limit(self, value: float | None, sense: Any, met: bool) -> None:
        target = Target("speed", value, 25, sense)

        assert target.met is met
        assert target.to_json() == {"name": "speed", "value": value, "limit": 25, "sense": sense, "met": met}
        assert str(target).startswith("met: " if met else "MISSED: ")


class FakeBenchmark:
    """A benchmark that returns what it is told to."""

    def __init__(self, *targets: Target, failure: Exception | None = None) -> None:
        self._targets = list(targets)
        self._failure = failure
        self.calls: list[dict[str, Any]] = []
        self.benchmark = Benchmark(
            name="fake",
            description="Measures nothing.",
            options=[click.Option(["--size"], type=int, default=7)],
            run=self.run,
        )

    def run(self, **parameters: Any) -> Result:
        self.calls.append(parameters)
        if self._failure is not None:
            raise self._failure
        return Result({"speed": 3.5}, self._targets, ["side", "speed"], [["A", "3.5"]], ["a remark"])

    def invoke(self, *arguments: str) -> Any:
        return CliRunner().invoke(command_line([self.benchmark]), arguments)


class TestCommandLine:
    def test_lists_names_and_descriptions(self) -> None:
        answer = FakeBenchmark().invoke("--list")

        assert answer.exit_code == 0
        assert answer.output.split(maxsplit=1) == ["fake", "Measures nothing.\n"]

    def test_a_missed_target_is_printed_and_no_failure(self) -> None:
        targets = [Target("speed", 3.5, 2, "at_least"), Target("delay", 9.0, 5, "at_most")]

        answer = FakeBenchmark(*targets).invoke("fake")

        assert answer.exit_code == 0
        assert "met: speed: 3.5 (at least 2)" in answer.output
        assert "MISSED: delay: 9 (at most 5)" in answer.output
        assert "a remark" in answer.output

    def test_json_holds_machine_parameters_figures_and_targets(self, tmp_path: Path) -> None:
        path = tmp_path / "result.json"

        FakeBenchmark(Target("delay", 9.0, 5, "at_most")).invoke("fake", "--size", "3", "--json", str(path))

        report = json.loads(path.read_text())
        assert report["benchmark"] == "fake"
        assert report["parameters"] == {"size": 3}
        assert report["figures"] == {"speed": 3.5}
        assert report["targets"] == [{"name": "delay", "value": 9.0, "limit": 5, "sense": "at_most", "met": False}]
        assert report["machine"].keys() >= {"cores", "cpu", "memory_bytes", "python", "java", "spark"}

    def test_defaults_reach_the_benchmark(self) -> None:
        fake = FakeBenchmark()

        fake.invoke("fake")

        assert fake.calls == [{"size": 7}]

    @pytest.mark.parametrize("failure", [click.ClickException("the child failed"), RuntimeError("a bug")])
    def test_a_failure_is_an_exit_code_and_leaves_no_json(self, failure: Exception, tmp_path: Path) -> None:
        path = tmp_path / "result.json"

        answer = FakeBenchmark(failure=failure).invoke("fake", "--json", str(path))

        assert answer.exit_code != 0
        assert not path.exists()

    def test_a_json_file_that_cannot_be_written_is_refused_before_the_run(self, tmp_path: Path) -> None:
        fake = FakeBenchmark()

        answer = fake.invoke("fake", "--json", str(tmp_path / "missing" / "result.json"))

        assert answer.exit_code != 0
        assert fake.calls == []


def test_sides_alternate() -> None:
    order: list[str] = []

    def side(name: str) -> int:
        order.append(name)
        return len(order)

    results = alternate({name: partial(side, name) for name in "ABC"}, 6)

    rounds = ["".join(order[first : first + 3]) for first in range(0, 18, 3)]
    assert rounds[0] == "ABC"
    assert {"".join(sorted(each)) for each in rounds} == {"ABC"}
    assert {before for before, after in itertools.pairwise(order) if after == "B"} >= {"A", "C"}, "not always after A"
    assert results == {name: [place for place, each in enumerate(order, 1) if each == name] for name in "ABC"}


class TestScratch:
    def test_is_removed_also_after_a_failure(self, tmp_path: Path) -> None:
        def fail() -> None:
            with scratch(tmp_path) as place:
                (place / "file").write_text("x")
                raise RuntimeError

        with pytest.raises(RuntimeError):
            fail()

        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_is_refused_with_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(click.ClickException, match=r"GB free.*needs 1250000000\.0 GB\. Do less\."):
            require_space(tmp_path, 10**18, "Do less.")


class TestChild:
    def test_returns_what_the_function_returns(self, tmp_path: Path) -> None:
        assert run_in_child("builtins:dict", {"a": 1, "b": [None, "x"]}, tmp_path) == {"a": 1, "b": [None, "x"]}

    def test_a_failure_shows_the_end_of_the_output(self, tmp_path: Path) -> None:
        with pytest.raises(click.ClickException, match="FileNotFoundError"):
            run_in_child("builtins:open", {"file": str(tmp_path / "missing")}, tmp_path)

    def test_a_kill_reaches_descendants_with_a_process_group_of_their_own(self, tmp_path: Path) -> None:
        pid_file = tmp_path / "pid"
        command = ["sh", "-c", f"sleep 300 & echo $! >{pid_file}; wait"]

        def is_over() -> bool:
            return pid_file.exists() and pid_file.read_text().endswith("\n")

        kill_child_when(is_over, "subprocess:run", {"args": command, "process_group": 0}, tmp_path, {}, 60)

        with contextlib.suppress(FileNotFoundError):  # it may be there until its new parent has seen its end
            assert Path(f"/proc/{int(pid_file.read_text())}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def test_a_child_that_ends_before_its_kill_is_a_failure(self, tmp_path: Path) -> None:
        with pytest.raises(click.ClickException, match="builtins:print failed with exit code 0"):
            kill_child_when(lambda: False, "builtins:print", {}, tmp_path, {}, 60)


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

    def test_figures_and_targets(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        result = run_count(monkeypatch, tmp_path, keys=1_000_000)

        sides = result.figures["sides"]
        # Medians of the batches from the third on: 250, 400, 400 and 2,000 ms.
        assert sides[count.CEILING]["rows_per_s"] == pytest.approx(800_000)
        assert sides[count.STATELOG]["rows_per_s"] == pytest.approx(500_000)
        assert sides[count.SPARK]["rows_per_s"] == pytest.approx(10_000)
        assert result.figures["statelog_to_ceiling_rows_per_s"] == pytest.approx(0.625)
        assert [(target.value, target.met) for target in result.targets] == [
            (near(50), True),
            (near(41), True),
        ]

    def test_too_few_changed_keys_leave_the_target_unmeasured(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        result = run_count(monkeypatch, tmp_path, keys=10_000)

        assert [target.value for target in result.targets] == [pytest.approx(50), None]

    def test_warming_up_must_leave_batches(self, tmp_path: Path) -> None:
        with pytest.raises(click.UsageError, match="4 batches leave nothing after 4"):
            count.run(**{**COUNT_OPTIONS, "warm_up": 4, "directory": tmp_path, "keys": 10})


COUNT_OPTIONS: dict[str, Any] = {
    "rows_per_batch": 200_000,
    "batches": 6,
    "spark_rows_per_batch": 20_000,
    "spark_batches": 4,
    "parallelism": 2,
    "warm_up": 2,
    "rounds": 1,
}


def run_count(monkeypatch: pytest.MonkeyPatch, directory: Path, keys: int) -> Result:
    """Run ``count`` on children that only say what they measured."""
    batch_ms = {count.CEILING: 250, count.STATELOG: 400, count.SPARK: 2_000}

    def child(function: str, arguments: dict[str, Any], _: Path) -> dict[str, Any]:
        side, batches = arguments["side"], range(arguments["batches"])
        checkpoint = {"changes": 90_100, "changed_bytes": 10, "subtask_s": 0.030, "commit_s": 0.011}
        return {
            "batches": [
                {"batch": batch, "triggerExecution": 9_999 if batch < 2 else batch_ms[side]} for batch in batches
            ],
            "checkpoints": [{"batch": batch, **checkpoint} for batch in batches if side == count.STATELOG],
            "files_live": 1,
            "bytes_live": 2,
            "files_seen": 3,
            "bytes_seen": 4,
        }

    monkeypatch.setattr(count, "run_in_child", child)
    return count.run(**COUNT_OPTIONS, keys=keys, directory=directory)


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
            delay_ms=DELAY_MS,
            checks=batch == STATE_BATCHES - 1,
        )


def state_columns(batch: InputBatch, names: tuple[str, ...]) -> dict[str, pa.Array]:
    columns = {
        "key": pa.array(batch.keys),
        "item": pa.array(batch.items),
        "time": pa.array(batch.times_ms, pa.timestamp("ms")).cast(pa.timestamp("us", tz="UTC")),
        "time_ms": pa.array(batch.times_ms),
        "checks": pa.array([batch.checks] * len(batch.keys)),
    }
    return {name: columns[name] for name in ("key", *names)}


class TestStateProcessors:
    @pytest.mark.parametrize(
        ("kind", "mode"),
        [(kind, mode) for kind in KINDS for mode in ("row", "pandas") if kind != "window" or mode == "row"],
    )
    def test_return_what_is_expected_without_state(self, kind: str, mode: str) -> None:
        what = KINDS[kind]
        make: Any = what.takes_rows if mode == "row" else what.takes_frames
        subtask = Subtask(make(), OUTPUT, TimeMode.parse(what.time_mode), uses_frames=mode == "pandas")

        found = []
        now_ms = 0
        for batch in state_input():
            rows = subtask.run(state_columns(batch, what.columns), now_ms=now_ms).rows()
            sums = [sum(row["n"] for row in rows), sum(row["key"] * row["n"] for row in rows)]
            found.append(dict(zip(("keys", "total", "weighted"), [len(rows), *sums], strict=True)))
            now_ms = int(batch.times_ms.max()) - DELAY_MS

        assert found == list(EXPECTED[kind](state_input()))

    def test_expected_counts_by_hand(self) -> None:
        nothing = np.zeros(3, np.int64)
        batches = [
            InputBatch(np.array([7, 7, 2]), np.array([1, 1, 5]), nothing, 0, False),
            InputBatch(np.array([7, 2, 2]), np.array([1, 5, 6]), nothing, 0, True),
        ]

        assert [list(EXPECTED[kind](batches)) for kind in ("value", "list", "map", "timer")] == [
            [{"keys": 2, "total": 3, "weighted": 16}, {"keys": 2, "total": 6, "weighted": 27}],
            [{"keys": 2, "total": 3, "weighted": 16}, {"keys": 2, "total": 6, "weighted": 27}],
            [{"keys": 2, "total": 4, "weighted": 23}, {"keys": 2, "total": 6, "weighted": 27}],
            [{"keys": 2, "total": 2, "weighted": 9}, {"keys": 2, "total": 2, "weighted": 9}],
        ]

    def test_a_wrong_batch_is_an_error(self) -> None:
        batches = [{"batchId": number, "observedMetrics": {"check": {"keys": 2, "total": None}}} for number in range(2)]
        done = QueryRun(batches, {})

        done.require("statelog", [{"keys": 2, "total": 0}] * 2)
        with pytest.raises(RuntimeError, match="batch 1 returned .*'keys': 2, .* should return .*'keys': 3"):
            done.require("statelog", [{"keys": 2, "total": 0}, {"keys": 3, "total": 0}])


STATE_OPTIONS: dict[str, Any] = {
    "part": "kinds",
    "kind": (),
    "mode": "both",
    "rows_per_batch": 100_000,
    "batches": 8,
    "spark_rows_per_batch": 5_000,
    "spark_batches": 4,
    "equal_sizes": False,
    "keys": 1_000_000,
    "entry_keys": 20_000,
    "parallelism": 2,
    "warm_up": 2,
    "rounds": 1,
    "operation_keys": 100,
    "entries": (5, 40),
    "repetitions": 2,
}


class TestState:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """What the children are asked to run; statelog's batches take 500 ms, and Spark's 1,000."""
        asked: list[dict[str, Any]] = []

        def child(function: str, arguments: dict[str, Any], _: Path) -> dict[str, Any]:
            asked.append(arguments)
            durations = {state.STATELOG: 500, state.SPARK: 1_000}
            return {
                "batches": [
                    {"batch": batch, "triggerExecution": 9_999 if batch < 2 else durations[arguments["side"]]}
                    for batch in range(arguments["batches"])
                ],
                "checkpoints": [],
                "files_live": 1,
                "bytes_live": 2,
                "files_seen": 3,
                "bytes_seen": 4,
            }

        monkeypatch.setattr(state, "run_in_child", child)
        return asked

    def test_all_kinds_and_modes_run_beside_spark(self, asked: list[dict[str, Any]], tmp_path: Path) -> None:
        result = state.run(**STATE_OPTIONS, directory=tmp_path)

        assert [(each["kind"], each["mode"], each["side"]) for each in asked] == [
            (kind, mode, side)
            for kind in ("value", "list", "map", "timer", "ttl", "window")
            for mode in ("row", "pandas")
            if (kind, mode) != ("window", "pandas")
            for side in (state.STATELOG, state.SPARK)
        ]
        assert {each["kind"]: each["keys"] for each in asked} == {
            "value": 1_000_000,
            "list": 20_000,
            "map": 20_000,
            "timer": 1_000_000,
            "ttl": 1_000_000,
            "window": 20_000,
        }
        # 100,000 rows in half a second, 5,000 in one.
        assert [(target.value, target.met) for target in result.targets] == [(near(40), True)] * 11
        assert result.figures["statelog_to_spark_rows_per_s"]["map, pandas"] == pytest.approx(40)

    def test_equal_sizes_are_sparks(self, asked: list[dict[str, Any]], tmp_path: Path) -> None:
        options = {**STATE_OPTIONS, "equal_sizes": True, "kind": ("map",), "mode": "pandas"}

        result = state.run(**options, directory=tmp_path)

        assert [(each["rows_per_batch"], each["batches"]) for each in asked] == [(5_000, 8), (5_000, 4)]
        assert [(target.value, target.met) for target in result.targets] == [(near(2), False)]

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [({"warm_up": 4}, "4 batches leave nothing after 4"), ({"kind": ("window",), "mode": "pandas"}, "rows only")],
    )
    def test_nothing_to_measure_is_refused(
        self, wrong: dict[str, Any], message: str, asked: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        with pytest.raises(click.UsageError, match=message):
            state.run(**{**STATE_OPTIONS, **wrong}, directory=tmp_path)

        assert asked == []


class TestOperations:
    def test_measures_every_operation_in_a_process_of_its_own(self, tmp_path: Path) -> None:
        result = state.run(**{**STATE_OPTIONS, "part": "ops"}, directory=tmp_path)

        costs = result.figures["operations"]
        assert {"value get", "list append", "map put", "timer register", "timer fire"} < costs.keys()
        assert all(len(cost["us_by_repetition"]) % 2 == 0 for cost in costs.values())
        # A fired timer has no empty batch taken off, so its cost cannot be noise only.
        assert costs["timer fire"]["us"] > 0
        assert [by_size.keys() for by_size in result.figures["growth"].values()] == [{"5", "40"}] * 3
        assert [target.limit for target in result.targets] == [1.3, 1.3]

    def test_growth_is_the_median_ratio_of_the_repetitions(self) -> None:
        cost = {"process_us": 1.0, "changeset_us": 1.0}
        few = {**cost, "us": 2.0, "us_by_repetition": [2.0, 4.0, 2.0]}
        many = {**cost, "us": 3.0, "us_by_repetition": [2.5, 4.8, 6.0]}
        growth = {"10": few, "1000": {**few, "us_by_repetition": [9.0] * 3}, "100000": many}
        measured = {"operations": {}, "growth": {"list append": growth, "map put": {"10": few}}}

        targets = operations.as_result(measured).targets

        assert [(target.value, target.met) for target in targets] == [(pytest.approx(1.25), True), (None, False)]


RECOVERY_OPTIONS: dict[str, Any] = {
    "keys": 1_000,
    "value_bytes": 100,
    "build_batches": 4,
    "rows_per_batch": 10,
    "small_batches": 3,
    "batches": 3,
    "parallelism": 2,
    "other_parallelism": 3,
    "spark": "deduplication",
    "rounds": 3,
}


class TestRecovery:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """What the restarts are asked for; the processes only leave some files behind, and say what they measured."""
        asked: list[dict[str, Any]] = []

        def build(_: Any, __: str, arguments: dict[str, Any], work: Path, *more: Any) -> None:
            for name in ("checkpoint", "local"):
                (work / name).mkdir()
                (work / name / "side").write_text(arguments["side"])
                (work / name / "built").write_text(str(arguments["parallelism"]))

        def restart(_: str, arguments: dict[str, Any], work: Path, __: Any) -> dict[str, Any]:
            assert (work / "checkpoint" / "side").read_text() == arguments["side"]
            (work / "checkpoint" / "side").write_text("gone on with")
            built = int((work / "checkpoint" / "built").read_text())
            asked.append({**arguments, "built": built, "keeps_local": (work / "local").exists()})
            restore_s = 0.5 if arguments["side"] == recovery_side.CHANGELOG_OFF else 0.4
            if arguments["side"] == recovery_side.DEDUPLICATION:
                restore_s = 1.2
            if arguments["parallelism"] == 3:
                restore_s = 0.6
            if built == 3:
                restore_s = 0.44
            if (work / "local").exists():
                restore_s = 0.02
            parts = {"start_up_s": 5, "log_s": 0.1, "restore_s": restore_s, "processing_s": 2, "later_batch_s": 1}
            return {**parts, "total_s": 7.1 + restore_s, "restored_bytes": 1}

        monkeypatch.setattr(recovery, "kill_child_when", build)
        monkeypatch.setattr(recovery, "run_in_child", restart)
        monkeypatch.setattr(
            recovery,
            "_stored",
            lambda side, _: {
                "batch": 6,
                "base_through": 4,
                "base_bytes": 10,
                "changes_bytes": 5 if "on" in side else 0,
            },
        )
        return asked

    def test_every_restart_starts_from_what_the_killed_process_left(
        self, asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: 3)
        result = recovery.run(**RECOVERY_OPTIONS, directory=tmp_path)

        restarts = [(each["side"], each["built"], each["parallelism"], each["keeps_local"]) for each in asked]
        assert len(restarts) == 18
        assert Counter(restarts) == dict.fromkeys(restarts[:6], 3)
        assert restarts[:6] == [
            (recovery_side.CHANGELOG_ON, 2, 2, False),
            (recovery_side.CHANGELOG_OFF, 2, 2, False),
            (recovery_side.CHANGELOG_ON, 2, 2, True),
            (recovery_side.CHANGELOG_ON, 3, 2, False),
            (recovery_side.CHANGELOG_ON, 2, 3, False),
            (recovery_side.DEDUPLICATION, 2, 2, False),
        ]
        assert [(target.value, target.met) for target in result.targets] == [
            (near(0.8), True),
            (near(3), True),
            (near(0.05), True),
            (near(1.1), True),
            (near(1.5), False),
        ]
        assert list(tmp_path.iterdir()) == []

    def test_without_changes_after_a_materialization_there_is_no_ratio(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor is there a target for more subtasks than cores."""
        monkeypatch.setattr(os, "cpu_count", lambda: 2)
        variants = recovery.variants_of(recovery_side.PROCESSOR, 2, 3)
        measured = {name: [{"restore_s": 1.0}] for name in variants}

        targets = recovery.targets_of(measured, variants, {"base_bytes": 10, "changes_bytes": 0})

        assert [target.value for target in targets] == [None, 1, 1, 1]


GROWTH_OPTIONS: dict[str, Any] = {
    "keys": (10_000, 1_000),
    "rows_per_batch": 500,
    "rounds": 8,
    "warm_up": 1,
    "materialization_keys": 2_000,
    "parallelism": 2,
}


class TestGrowth:
    def test_a_slow_moment_of_the_machine_does_not_count(self) -> None:
        small = [1.0, 1.0, 9.0, 1.0, 1.0]
        large = [1.2, 1.2, 9.2, 1.2, 5.0]

        assert growth.growth(small, large) == pytest.approx(1.2)
        assert growth.longer_s(small, large) == pytest.approx(0.2)

    def test_pairs_are_those_with_a_materialization(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def child(_: str, arguments: dict[str, Any], __: Path) -> dict[str, Any]:
            measured = {}
            for name, query in arguments["queries"].items():
                scale = 1.25 if query["keys"] == 10_000 else 1.0
                batch = {"commit_s": 0.004, "subtask_s": 0.02, "batch_s": 0.4 * scale, "restore_s": 0.001}
                measured[name] = [
                    {**batch, "changes": 500, "has_job": False, "has_slice": False} for _ in range(arguments["rounds"])
                ]
            for number, batch in enumerate(measured.get(growth.RUNNING, [])):
                batch["has_job"] = number >= 2
                batch["has_slice"] = number >= 3
                batch["batch_s"] += 0.3 if number >= 3 else 9
                batch["commit_s"] = 0.0044
            return measured

        monkeypatch.setattr(growth, "run_in_child", child)
        result = growth.run(**GROWTH_OPTIONS, directory=tmp_path)

        assert [(target.name, target.value, target.met) for target in result.targets] == [
            ("commit time: 10,000 keys / 1,000 keys", near(1), True),
            ("the subtasks' part: 10,000 keys / 1,000 keys", near(1), True),
            ("batch: 10,000 keys / 1,000 keys", near(1.25), True),
            ("commit time: with a materialization / without", near(1.1), True),
            ("batch: longer with a slice of a materialization, ms", near(300), False),
        ]
        assert [row[1] for row in result.rows] == ["8", "8", "6", "6"]

    def test_too_few_batches_with_a_materialization_leave_the_targets_unmeasured(self) -> None:
        batch = {"commit_s": 1.0, "subtask_s": 1.0, "batch_s": 1.0, "has_slice": True}

        targets = growth.targets_of({"1 key": [batch]}, {growth.RUNNING: [batch] * 4, growth.NOT_RUNNING: [batch] * 4})

        assert [target.value for target in targets] == [None, None]

    def test_more_changes_than_keys_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(click.UsageError, match="more than the fewest keys"):
            growth.run(**{**GROWTH_OPTIONS, "rows_per_batch": 1_001}, directory=tmp_path)


@pytest.mark.parametrize(
    ("file_merging", "calls", "files"), [("across", "rpc", 1), ("across", "direct", 1), ("within", "rpc", 5)]
)
def test_commit_measures_real_checkpoints(file_merging: str, calls: str, files: int, tmp_path: Path) -> None:
    result = commit.run(
        store="local",
        file_merging=file_merging,
        checkpoints=20,
        subtasks=(3,),
        changeset_bytes=1_000,
        total_bytes=0,
        calls=calls,
        fresh_every=8,
        directory=tmp_path,
    )

    measured = result.figures["runs"]["3 subtasks"]
    # The last of the locations has the last 4 checkpoints, and as objects the claim besides.
    assert measured["files"] == files
    assert 12_000 < measured["bytes"] < 24_000
    assert measured["commit_ms"]["samples"] == measured["coordinator_commit_ms"]["samples"] == 20
    assert list(tmp_path.iterdir()) == []


def test_commit_with_the_same_bytes_for_any_number_of_subtasks(tmp_path: Path) -> None:
    result = commit.run(
        store="local",
        file_merging="across",
        checkpoints=5,
        subtasks=(1, 4),
        changeset_bytes=1,
        total_bytes=8_000,
        calls="direct",
        fresh_every=0,
        directory=tmp_path,
    )

    assert [each["changeset_bytes"] for each in result.figures["runs"].values()] == [8_000, 2_000]
    [target] = result.targets
    assert (target.limit, target.sense) == (1.5, "at_most")
    assert target.value is not None
    assert target.value >= 1


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

    def test_the_largest_sum_is_held_against_the_limit(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        calls: list[tuple[str, dict[str, Any]]] = []

        def child(function: str, arguments: dict[str, Any], _: Path, watch: Any = None) -> Any:
            calls.append((function.rpartition(":")[2], arguments))
            progress = [{"durationMs": {"triggerExecution": 500}, "numInputRows": 30}] * arguments.get("batches", 0)
            return {"progress": progress, "checkpoints": [{"materialized": 2}]}

        monkeypatch.setattr(memory, "run_in_child", child)
        monkeypatch.setattr(memory.Sampler, "peak_bytes", 1_200_000_000)
        asked = {"keys": 100, "value_bytes": 10, "rows_per_batch": 30, "updates": 45, "parallelism": 2}
        result = memory.run(**asked, table="runs", directory=tmp_path)

        assert [name for name, _ in calls] == ["run", "check"]
        assert calls[0][1]["batches"] == 6
        assert len(calls[1][1]["progress"]) == 6
        [target] = result.targets
        assert (target.value, target.limit, target.met) == (1.2e9, 1e9, False)
        assert result.figures["rows_per_s"] == 60
