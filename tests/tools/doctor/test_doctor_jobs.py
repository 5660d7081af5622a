"""The doctor's jobs on executors, with a context in Spark's place: whom it asks, and what it makes of the answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from statelog.spark.driver import executor_internals
from statelog.tools.doctor.executors import Executors, Reports
from statelog.tools.doctor.finding import Finding
from statelog.tools.doctor.location import Marks
from statelog.tools.doctor.versions import Installed, teller

INSTALLED = Installed(**teller()())


class Context:
    """A Spark context, and its session.

    Parameters
    ----------
    executors : sequence of str
        The executors; empty for a local master.
    """

    defaultParallelism = 3

    def __init__(self, executors: Sequence[str]) -> None:
        self.executors = list(executors)
        self.ran_on: dict[str, tuple[str, str] | None] = {one: (one, f"host-{one}") for one in executors}
        """Where the task that was wished on an executor has run; None if Spark does not tell yet."""
        self.fails: dict[str, Exception] = {}
        self.may_start = threading.Event()
        """Whether the first job gets an executor."""
        self.may_start.set()
        self.conf: dict[str, str] = {}
        self.groups: dict[int, str] = {}
        """Of the threads that run jobs."""
        self.jobs: list[tuple[str, str]] = []
        """Group and executor of each job."""
        self.cancelled: list[str] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    @property
    def sparkContext(self) -> Context:
        return self

    def getConf(self) -> dict[str, str]:
        return self.conf

    def range(self, start: int, end: int, step: int, partitions: int) -> Context:
        assert (start, step, partitions) == (0, 1, end)
        self.first_tasks = end
        return self

    def count(self) -> None:
        self.may_start.wait()

    def parallelize(self, numbers: Sequence[int], partitions: int) -> list[str]:
        assert list(numbers) == list(range(partitions))
        return [self.executors[number] if self.executors else "" for number in numbers]

    def setJobGroup(self, group: str, text: str, *, interruptOnCancel: bool) -> None:
        assert interruptOnCancel
        assert text.startswith("statelog doctor: ")
        self.groups[threading.get_ident()] = group

    def cancelJobGroup(self, group: str) -> None:
        self.cancelled.append(group)
        self.may_start.set()

    def runJob(self, executors: list[str], function: Callable[[Any], Iterator[str]], parts: list[int]) -> list[str]:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        [executor] = [executors[part] for part in parts]
        self.jobs.append((self.groups[threading.get_ident()], executor))
        time.sleep(0.02)
        with self._lock:
            self.at_once -= 1
        if executor in self.fails:
            raise self.fails[executor]
        return list(function(executor))


def report(executor: str) -> Iterator[str]:
    """What an executor answers; the stage stands for the executor."""
    finding = ["ok", "clock", "", "", f"The clock of '{executor}' is right.", ""]
    told = {"installed": vars(INSTALLED), "stage": executor, "task": 1, "findings": [finding]}
    yield json.dumps({**told, "marks": [[f"probe/{executor}", True]]})


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reports]:
    """Asks the executors of a context; Spark's private parts may be replaced."""

    def asked(context: Any, timeout_s: float = 60, **replaced: Callable[..., Any]) -> Reports:
        parts: dict[str, Callable[..., Any]] = {
            "executors": lambda _: sorted(context.executors),
            "executor_hosts": lambda _: {one: f"host-{one}" for one in context.executors if one != "9"},
            "numbers_on": lambda _, executors: list(executors) or [""],
            "executor_of": lambda _, stage, task: context.ran_on.get(stage),
        }
        for name, part in {**parts, **replaced}.items():
            monkeypatch.setattr(executor_internals, name, part)
        return Executors(context, report, INSTALLED, "runs").ask(timeout_s)

    return asked


def clocks(reports: Reports) -> list[tuple[str, str]]:
    """Place and text of what the executors have found."""
    return [(one.where, one.found) for one in reports.findings if one.check == "clock"]


def of_jobs(reports: Reports) -> list[Finding]:
    return [one for one in reports.findings if one.check == "executors"]


def test_every_executor_is_asked_in_a_job_of_its_own(ask: Callable[..., Reports]) -> None:
    context = Context(["1", "2", "9"])
    reports = ask(context)
    assert clocks(reports) == [(f"executor {one}", f"The clock of '{one}' is right.") for one in ("1", "2", "9")]
    found_marks = sorted(reports.marks, key=lambda one: one[0].where)
    assert [(place.where, marks) for place, marks in found_marks] == [
        (f"executor {one}", Marks(f"probe/{one}", won=True)) for one in ("1", "2", "9")
    ]
    assert {place.host for place, _ in reports.marks} == {INSTALLED.host}
    [found] = of_jobs(reports)
    assert (found.level, found.where) == ("ok", "driver")
    assert len({group for group, _ in context.jobs}) == 3
    assert context.first_tasks == 3


def test_a_local_master_has_one_executor_the_driver(ask: Callable[..., Reports]) -> None:
    context = Context([])
    context.defaultParallelism = 0
    context.ran_on[""] = ("driver", "here")
    assert clocks(ask(context)) == [("executor driver", "The clock of '' is right.")]
    assert context.first_tasks == 1


def test_the_failure_of_one_executor_is_none_of_the_others(ask: Callable[..., Reports]) -> None:
    context = Context(["1", "2", "3"])
    context.fails["2"] = RuntimeError("Error from python worker: No module named pyspark")
    reports = ask(context)
    assert [where for where, _ in clocks(reports)] == ["executor 1", "executor 3"]
    [failed] = [one for one in reports.findings if one.level == "error"]
    assert (failed.where, failed.host, failed.check) == ("executor 2", "host-2", "import")
    assert [one.level for one in of_jobs(reports)] == ["ok"], "it was reached"


def test_a_task_that_runs_elsewhere_tells_of_that_executor(ask: Callable[..., Reports]) -> None:
    context = Context(["1", "2"])
    context.ran_on["2"] = ("1", "host-1")
    reports = ask(context)
    assert {where for where, _ in clocks(reports)} == {"executor 1"}
    [found] = of_jobs(reports)
    assert (found.level, found.found.split(".")[0]) == ("warning", "Not checked: executor 2")


def test_spark_may_tell_later_where_a_task_ran(ask: Callable[..., Reports], monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(["1"])
    context.ran_on["1"] = None
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            context.ran_on["1"] = ("7", "host-7")

    monkeypatch.setattr("statelog.tools.doctor.executors.time.sleep", sleep)
    assert [where for where, _ in clocks(ask(context))] == ["executor 7"]
    context.ran_on["1"] = None
    assert [where for where, _ in clocks(ask(context))] == ["executor 1"], "it never tells"
    assert len(slept) < 100


def test_another_spark_runs_the_tasks_anywhere(ask: Callable[..., Reports]) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such field")

    for executors in (["1", "2"], []):
        context = Context(executors)
        reports = ask(context, numbers_on=missing, executor_of=missing)
        assert [where for where, _ in clocks(reports)] == ["executor"] * max(len(executors), 1)
        [found] = of_jobs(reports)
        assert (found.level, found.where) == ("warning", "driver")
        assert "AttributeError" in found.found


def test_an_application_without_executors_is_an_error(ask: Callable[..., Reports]) -> None:
    context = Context(["1"])
    context.may_start.clear()
    reports = ask(context, 0.02)
    [found] = reports.findings
    assert (found.level, found.check, found.where) == ("error", "executors", "driver")
    assert found.found == "The check was not finished after 0.1 s."
    assert "has no executor that can run a task" in found.remedy
    assert not context.jobs
    [group] = context.cancelled
    assert group in context.groups.values()


def test_executors_that_are_still_starting_are_waited_for(
    ask: Callable[..., Reports], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context(["1"])
    context.conf["spark.executor.instances"] = "2"
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 5:
            context.executors.append("2")
            context.ran_on["2"] = ("2", "host-2")

    monkeypatch.setattr("statelog.tools.doctor.executors.time.sleep", sleep)
    assert len(clocks(ask(context))) == 2
    context.conf["spark.executor.instances"] = "3"
    assert len(clocks(ask(context))) == 2, "the third never starts"
    assert 100 < len(slept) < 200


def test_of_many_executors_the_first_hundred_are_asked_some_at_a_time(ask: Callable[..., Reports]) -> None:
    context = Context([f"{number:03}" for number in range(103)])
    context.defaultParallelism = 824
    reports = ask(context)
    assert len(clocks(reports)) == len({executor for _, executor in context.jobs}) == 100
    [found] = of_jobs(reports)
    assert (found.level, found.found.split(".")[0]) == ("warning", "Not checked: 3 more")
    assert 2 <= context.most_at_once <= 16
    assert context.first_tasks == 100
