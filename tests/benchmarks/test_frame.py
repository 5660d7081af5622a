"""The benchmarks' frame: figures, targets, child processes and the command line. No Spark here."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import BENCHMARKS
from benchmarks.child import kill_child_when, run_in_child
from benchmarks.figures import percentiles, summary, upper_bound
from benchmarks.frame import Plot, Result, Target, Unavailable, alternate, command_line, option, require_space, scratch


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
        expected = {name: value for name, value in (("p99", p99), ("p99.9", p999)) if value is not None}

        assert percentiles(shuffled(samples), ("p99", "p99.9")) == expected

    def test_with_few_samples_json_has_maximum_and_number(self) -> None:
        assert summary(shuffled(18)) == {"samples": 18, "median": 9.5, "max": 18}

    def test_with_many_samples_json_has_the_percentiles_too(self) -> None:
        expected = {"samples": 10_000, "median": 5000.5, "p99": 9900, "p99.9": 9990, "max": 10_000}

        assert summary(shuffled(10_000)) == expected


class TestUpperBound:
    @pytest.mark.parametrize(
        ("samples", "name", "bound"),
        [
            (298, "p99", None),
            (299, "p99", 299),
            (300, "p99", 297),
            (2_994, "p99.9", None),
            (2_995, "p99.9", 2_995),
            (9_999, "p99.9", 9_999),
            (10_000, "p99.9", 9_990),
        ],
    )
    def test_is_the_percentile_or_above_it(self, samples: int, name: str, bound: float | None) -> None:
        assert upper_bound(shuffled(samples), name) == bound

    def test_the_maximum_is_above_the_percentile_as_often_as_it_should_be(self) -> None:
        source = random.Random(7)
        above = sum(max(source.random() for _ in range(299)) > 0.99 for _ in range(2_000))

        assert above / 2_000 == pytest.approx(0.95, abs=0.02)


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


@dataclass(frozen=True)
class Settings:
    size: int = option(7, "How much.")
    names: tuple[str, ...] = option((), "Of what.", click.Choice(["a", "b"]))
    share: float = option(0.5, "Which part.", click.FloatRange(0, 1, min_open=True))


class FakeBenchmark:
    """A benchmark that returns what it is told to."""

    def __init__(self, *targets: Target, failure: Exception | None = None, name: str = "fake") -> None:
        self._name = name
        self._targets = list(targets)
        self._failure = failure
        self.calls: list[Settings] = []

    def run(self, settings: Settings, place: Path) -> Result:
        assert list(place.iterdir()) == []
        self.calls.append(settings)
        if self._failure is not None:
            raise self._failure
        plot = Plot("speed over time", "s", "m/s", {"A": [(0.0, 3.0), (1.0, 4.0)]}, is_logarithmic=True)
        return Result({"speed": 3.5}, self._targets, [{"side": "A", "speed": "3.5"}], ["a remark"], [plot])

    def module(self) -> Any:
        return SimpleNamespace(
            __name__=f"benchmarks.{self._name}",
            __doc__="Measures nothing.",
            Settings=Settings,
            QUICK=[Settings(1), Settings(2)],
            run=self.run,
        )

    def invoke(self, *arguments: str) -> Any:
        return CliRunner().invoke(command_line([self.module()]), arguments)


class TestCommandLine:
    def test_lists_names_and_descriptions(self) -> None:
        answer = FakeBenchmark().invoke("--list")

        assert answer.exit_code == 0
        assert [line.split(maxsplit=1) for line in answer.output.splitlines()] == [
            ["fake", "Measures nothing."],
            ["all", "Run all benchmarks, one after the other."],
        ]

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
        assert report["parameters"] == {"size": 3, "names": [], "share": 0.5, "directory": None}
        assert report["figures"] == {"speed": 3.5}
        assert report["targets"] == [{"name": "delay", "value": 9.0, "limit": 5, "sense": "at_most", "met": False}]
        assert report["machine"].keys() >= {"cores", "cpu", "memory_bytes", "python", "java", "spark"}

    def test_a_report_is_a_page_with_plots(self, tmp_path: Path) -> None:
        folder = tmp_path / "new" / "report"

        answer = FakeBenchmark(Target("delay", 9.0, 5, "at_most")).invoke("fake", "--report", str(folder))

        assert answer.exit_code == 0
        page = (folder / "fake.md").read_text()
        assert page.startswith("fake: Measures nothing.\n")
        assert "| side | speed |\n| --- | --- |\n| A | 3.5 |\n\n- a remark\n- MISSED: delay: 9 (at most 5)\n" in page
        assert page.endswith("\n![speed over time](fake-speed-over-time.png)\n")
        assert (folder / "fake-speed-over-time.png").read_bytes().startswith(b"\x89PNG")

    def test_defaults_reach_the_benchmark(self) -> None:
        fake = FakeBenchmark()

        fake.invoke("fake")

        assert fake.calls == [Settings(7, (), 0.5)]

    @pytest.mark.parametrize("wrong", [["--size", "0"], ["--names", "c"], ["--share", "0"], ["--share", "1.5"]])
    def test_a_value_out_of_range_is_refused(self, wrong: list[str]) -> None:
        fake = FakeBenchmark()

        assert fake.invoke("fake", *wrong).exit_code == 2
        assert fake.invoke("fake", "--names", "b", "--names", "a", "--share", "1").exit_code == 0
        assert fake.calls == [Settings(7, ("b", "a"), 1)]

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


class TestAll:
    def test_runs_every_benchmark_with_all_its_quick_settings(self, tmp_path: Path) -> None:
        one, other = FakeBenchmark(name="one"), FakeBenchmark(Target("delay", 9.0, 5, "at_most"), name="an_other")

        answer = CliRunner().invoke(
            command_line([one.module(), other.module()]), ["all", "--quick", "--json", str(tmp_path / "new")]
        )

        assert answer.exit_code == 0
        assert one.calls == other.calls == [Settings(1), Settings(2)]
        assert sorted(file.name for file in (tmp_path / "new").iterdir()) == [
            "an-other.json",
            "an-other2.json",
            "one.json",
            "one2.json",
        ]
        assert json.loads((tmp_path / "new" / "an-other2.json").read_text())["parameters"]["size"] == 2
        assert "MISSED: delay: 9 (at most 5)" in answer.output

    def test_without_quick_they_have_their_defaults(self) -> None:
        fake = FakeBenchmark()

        assert CliRunner().invoke(command_line([fake.module()]), ["all"]).exit_code == 0
        assert fake.calls == [Settings()]

    def test_a_failure_does_not_keep_the_others_from_running(self) -> None:
        broken = FakeBenchmark(failure=RuntimeError("a bug"), name="broken")
        lacking = FakeBenchmark(failure=Unavailable("no server"), name="lacking")
        fake = FakeBenchmark()

        answer = CliRunner().invoke(command_line([broken.module(), lacking.module(), fake.module()]), ["all"])

        assert answer.exit_code == 1
        assert "broken failed; see above" in answer.output
        assert "RuntimeError: a bug" in answer.output
        assert "skipped: no server" in answer.output
        assert fake.calls == [Settings()]

    def test_what_is_only_lacking_is_no_failure(self) -> None:
        lacking = FakeBenchmark(failure=Unavailable("no server"))

        assert CliRunner().invoke(command_line([lacking.module()]), ["all", "--quick"]).exit_code == 0


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda each: each.__name__)
def test_every_benchmark_has_quick_settings(benchmark: Any) -> None:
    """They are of the right kind, other than the defaults, and values that the command line would take."""
    command = command_line([benchmark]).commands[benchmark.__name__.rpartition(".")[2].replace("_", "-")]
    options = {parameter.name: parameter for parameter in command.params}

    assert benchmark.QUICK
    for settings in benchmark.QUICK:
        assert isinstance(settings, benchmark.Settings)
        assert settings != benchmark.Settings()
        for name, value in vars(settings).items():
            for each in value if isinstance(value, tuple) else [value]:
                assert options[name].type.convert(each, options[name], None) == each


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
        assert run_in_child(partial(dict, a=1, b=[None, "x"]), tmp_path) == {"a": 1, "b": [None, "x"]}

    def test_a_failure_shows_the_end_of_the_output(self, tmp_path: Path) -> None:
        with pytest.raises(click.ClickException, match="FileNotFoundError"):
            run_in_child(partial(open, tmp_path / "missing"), tmp_path)

    def test_a_kill_reaches_descendants_with_a_process_group_of_their_own(self, tmp_path: Path) -> None:
        pid_file = tmp_path / "pid"
        command = ["sh", "-c", f"sleep 300 & echo $! >{pid_file}; wait"]

        def is_over() -> bool:
            return pid_file.exists() and pid_file.read_text().endswith("\n")

        kill_child_when(is_over, partial(subprocess.run, command, process_group=0), tmp_path, {}, 60)

        with contextlib.suppress(FileNotFoundError):  # it may be there until its new parent has seen its end
            assert Path(f"/proc/{int(pid_file.read_text())}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def test_a_child_that_ends_before_its_kill_is_a_failure(self, tmp_path: Path) -> None:
        with pytest.raises(click.ClickException, match="builtins:print failed with exit code 0"):
            kill_child_when(lambda: False, partial(print), tmp_path, {}, 60)
