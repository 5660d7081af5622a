"""Asks every executor, in a Spark job of its own, and reads the reports."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from pyspark import RDD
from pyspark.sql import SparkSession

from statelog.spark.driver import executor_internals
from statelog.tools.doctor.finding import DRIVER, START_CHECKS, Check, Finding, Findings, Place, run_limited
from statelog.tools.doctor.location import Marks
from statelog.tools.doctor.versions import Installed, package_findings, requirements

CHECK: Final = "executors"

_MOST: Final = 100
"""Executors that are asked."""
_AT_ONCE: Final = 16
_START_S: Final = 10.0
"""How long to wait for as many executors as are wanted."""
_TOLD_S: Final = 5.0
"""How long to wait until Spark reports where a task ran."""
_POLL_S: Final = 0.1
_LONGEST: Final = 400

_LOST: Final = re.compile(r"\((\S+) executor (\w+)\)")
_VERSIONS: Final = re.compile(r"PYTHON_VERSION_MISMATCH\]?\s*(.+)")
_PROGRAM: Final = re.compile(r'Cannot run program "([^"]+)"[^:]*:?\s*([^\n]*)')
_MODULE: Final = re.compile(r"No module named '?([\w.]+)'?")
_CAUSE: Final = re.compile(r"^(?:Caused by: )?([\w.$]+(?:Exception|Error)): ?(.*)$", re.MULTILINE)
_PYTHON: Final = (
    "Set PYSPARK_PYTHON (or spark.pyspark.python) to an interpreter that is on every host and has the driver's minor"
    " version, PySpark and statelog, before the session is created; or put them into the image."
)
_NO_EXECUTOR: Final = (
    "The application has no executor that can run a task. Check in Spark's web UI, or in the cluster's, whether cores"
    " and memory are free, whether executors end immediately, and whether they can reach the driver."
)


_STUCK: Final = (
    "A task on this executor has not ended. Check the executor's log, and a thread dump of its Python workers (py-spy),"
    " to see what the task is waiting for."
)


@dataclass
class Reports:
    """What the executors have reported."""

    findings: list[Finding] = field(default_factory=list)
    marks: list[tuple[Place, Marks]] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)
    """The executors that have answered, as places name them."""


class Executors:
    """Runs a function of :func:`executor_function` on every executor on which Spark runs a task.

    Each executor has its own job, so that the failure of one is not a failure of the others.
    """

    def __init__(
        self, session: SparkSession, function: Callable[[Any], Iterator[str]], driver: Installed, table: str
    ) -> None:
        self._session = session
        self._context = session.sparkContext
        self._function = function
        self._driver = driver
        self._table = table
        self._place = Place(DRIVER, driver.host)
        self._group = f"statelog-doctor-{secrets.token_hex(4)}"

    def ask(self, timeout_s: float) -> Reports:
        """Ask all executors; the limit is that of a check on one executor."""
        first = self._check(self._place, "first", self._first_job, _NO_EXECUTOR)
        reports = Reports(run_limited([first], START_CHECKS * timeout_s))
        if reports.findings:
            return reports
        ids = executor_internals.executors(self._session)
        chosen = ids[:_MOST]
        difference: Exception | None = None
        try:
            places, numbers = self._places(chosen), executor_internals.numbers_on(self._session, chosen)
        except Exception as error:
            difference, places = error, [Place("executor", "")] * max(len(chosen), 1)
            numbers = self._context.parallelize(range(len(places)), len(places))
        checks = [
            self._check(place, str(number), partial(self._ask_one, numbers, number, place, reports), _STUCK)
            for number, place in enumerate(places)
        ]
        for start in range(0, len(checks), _AT_ONCE):
            reports.findings += run_limited(checks[start : start + _AT_ONCE], 2 * timeout_s)
        if difference is None:
            reports.findings += not_asked(places, reports, len(ids), self._place)
        else:
            reports.findings.append(_not_apache(self._place, difference))
        return reports

    def _places(self, executors: Sequence[str]) -> list[Place]:
        if not executors:
            return [Place(f"executor {DRIVER}", self._driver.host)]  # a local master's
        hosts = executor_internals.executor_hosts(self._session)
        return [Place(f"executor {one}", hosts.get(one, "")) for one in executors]

    def _check(self, place: Place, name: str, run: Callable[[], Findings], stuck: str) -> Check:
        group = f"{self._group}-{name}"

        def in_group() -> Findings:
            self._context.setJobGroup(group, f"statelog doctor: {place.where}", interruptOnCancel=True)
            yield from run()

        return Check(CHECK, place, in_group, stuck, lambda: self._context.cancelJobGroup(group))

    def _first_job(self) -> Findings:
        """Make Spark start executors, including those of dynamic allocation; the job runs no Python."""
        tasks = min(max(self._context.defaultParallelism, 1), _MOST)
        self._session.range(0, tasks, 1, tasks).count()
        wanted = int(self._context.getConf().get("spark.executor.instances", "0") or 0)
        for _ in range(round(_START_S / _POLL_S)):
            if not 0 < len(executor_internals.executors(self._session)) < wanted:
                break
            time.sleep(_POLL_S)
        yield from ()

    def _ask_one(self, numbers: RDD[int], number: int, place: Place, reports: Reports) -> Findings:
        try:
            [text] = self._context.runJob(numbers, self._function, [number])
        except Exception as error:
            reports.answered.add(place.where)
            yield failed_task(place, str(error))
            return
        report = json.loads(text)
        where = self._place_of(report, place)
        reports.answered.add(where.where)
        yield from read_report(report, where, self._driver, self._table, reports.marks)

    def _place_of(self, report: dict[str, Any], wished: Place) -> Place:
        """The place of a report: Spark may have run the task on another executor than the one that was wanted."""
        host = str(report["installed"]["host"])
        try:
            for _ in range(round(_TOLD_S / _POLL_S)):
                found = executor_internals.executor_of(self._session, report["stage"], report["task"])
                if found is not None:
                    return Place(f"executor {found[0]}", host)
                time.sleep(_POLL_S)
        except Exception:  # not Apache Spark's status store
            return Place("executor", host)
        return Place(wished.where, host)


def _not_apache(place: Place, error: Exception) -> Finding:
    return place.warning(
        CHECK,
        "Tasks cannot be sent to a specific executor, because this Spark differs from Apache Spark"
        f" ({type(error).__name__}).",
        "Set Options(placement='off') for the operators. In this check, tasks ran wherever Spark placed them.",
    )


def read_report(
    report: dict[str, Any], place: Place, driver: Installed, table: str, marks: list[tuple[Place, Marks]]
) -> Iterator[Finding]:
    """The findings of an executor's report; what it has left in the location is added to `marks`."""
    installed = Installed(**report["installed"])
    if "import_error" in report:
        yield place.error(
            "import",
            f"The Python workers run {installed.executable}, which cannot import statelog: {report['import_error']}.",
            f"Install statelog {driver.versions['statelog']} there with its dependencies. {_PYTHON}",
        )
    else:
        yield place.ok("import", f"{installed.executable} imports statelog.")
    yield from package_findings(installed, place, driver, requirements(), table)
    yield from (replace(Finding(*one), where=place.where, host=place.host) for one in report.get("findings", ()))
    marks += [(place, Marks(*one)) for one in report.get("marks", ())]


def failed_task(place: Place, text: str) -> Finding:
    """The finding for a task that Spark could not run, from the text of Spark's error; `place` if that names none."""
    if lost := _LOST.search(text):
        place = Place(f"executor {lost[2]}", lost[1])
    if versions := _VERSIONS.search(text):
        return place.error("python", versions[1][:_LONGEST], _PYTHON)
    if program := _PROGRAM.search(text):
        return place.error("python", f"{program[1]} cannot be run: {program[2][:_LONGEST]}.", _PYTHON)
    if module := _MODULE.search(text):
        return place.error("import", f"The interpreter of the Python workers has no module {module[1]}.", _PYTHON)
    causes = _CAUSE.findall(text)
    kind, message = causes[-1] if causes else ("", (text.strip().splitlines() or [""])[0])
    return place.error(
        CHECK,
        f"A task failed: {kind.rpartition('.')[2]}: {message[:_LONGEST]}",
        "See the executor's log for the whole error.",
    )


def not_asked(places: Sequence[Place], reports: Reports, executors: int, driver: Place) -> Iterator[Finding]:
    """Report the executors that no task has reached."""
    told_of = {one.where for one in reports.findings}
    left = [one.where for one in places if one.where not in reports.answered | told_of]
    left += [f"{executors - len(places)} more"] if executors > len(places) else []
    if left:
        yield driver.warning(
            CHECK,
            f"Not checked: {', '.join(left)}. They were busy or ended, so Spark ran their tasks elsewhere"
            f", or there are more than {_MOST}.",
            "Check again when they are idle. A task waits for its executor as long as spark.locality.wait says.",
        )
    else:
        yield driver.ok(CHECK, f"Spark has run a task on every executor ({len(places)}).")
