"""The doctor's executors: the way to the driver's port, clocks, reports, and tasks that Spark could not run."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from pyspark import cloudpickle

from statelog import Finding, Observer, Options
from statelog.clock import Clock, SystemClock
from statelog.rpc.calls import RpcClient, RpcServer
from statelog.rpc.messages import Ping, Pinged, Reply, Request
from statelog.spark.driver.endpoint import Endpoint
from statelog.spark.worker.worker import DriverAddress, DriverStores
from statelog.storage import LocalStore
from statelog.storage.open import REGISTERED
from statelog.testing.query import ManualClock
from statelog.tools.doctor.executor_work import ExecutorWork, check_driver_port, clock_finding, executor_function
from statelog.tools.doctor.executors import Reports, failed_task, not_asked, read_report
from statelog.tools.doctor.finding import Place
from statelog.tools.doctor.location import Marks, Probe
from statelog.tools.doctor.versions import Installed, teller
from tests.stores import WholeObjects

EXECUTOR = Place("executor 1", "there")
SECRET = b"s" * 32
NOW_S = 1_780_000_000.0
INSTALLED = Installed(**teller()())
NO_PYTHON = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.runJob.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent \
failure: Lost task 0.3 in stage 0.0 (TID 3) (10.0.0.7 executor 4): java.io.IOException: Cannot run program \
"/nowhere/python": error=2, No such file or directory
\tat java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)
"""
"""As Spark 4.3.0 says it."""


@contextmanager
def driver(now_s: Callable[[], float] = lambda: NOW_S) -> Iterator[DriverAddress]:
    def handle(request: Request, payload: bytes) -> Reply:
        assert isinstance(request, Ping)
        return Pinged(now_s())

    server = RpcServer("127.0.0.1", 0, SECRET, handle)
    try:
        yield DriverAddress("127.0.0.1", server.port, SECRET)
    finally:
        server.close()


def of_port(address: DriverAddress, clock: Clock | None = None, timeout_s: float = 600) -> list[Finding]:
    return list(check_driver_port(address, EXECUTOR, clock or ManualClock(NOW_S), timeout_s))


# ---- The driver's port, and clocks ----


def test_a_port_that_answers_is_ok() -> None:
    with driver() as address:
        found = of_port(address)
    assert [(one.level, one.check, one.where) for one in found] == [
        ("ok", "driver-port", "executor 1"),
        ("ok", "clock", "executor 1"),
    ]
    assert f"127.0.0.1:{address.port} answers" in found[0].found


def test_the_endpoint_of_queries_answers() -> None:
    endpoint = Endpoint("127.0.0.1")
    found = of_port(DriverAddress("127.0.0.1", endpoint.port, endpoint.secret))
    assert found[0].level == "ok"
    assert found[1].found.endswith("the driver's.")


@pytest.mark.parametrize(("ahead_s", "level"), [(4.9, "ok"), (-4.9, "ok"), (5.1, "warning"), (-5.1, "warning")])
def test_clocks_that_differ(ahead_s: float, level: str) -> None:
    with driver() as address:
        found = of_port(address, ManualClock(NOW_S + ahead_s))[1]
    assert (found.level, found.check) == (level, "clock")
    if level == "warning":
        assert f"5.1 s {'ahead of' if ahead_s > 0 else 'behind'} the driver's" in found.found
        assert "NTP" in found.remedy


def test_a_slow_answer_is_no_difference_of_clocks() -> None:
    assert clock_finding(8, 6.1, EXECUTOR).level == "ok"
    assert clock_finding(8, 6, EXECUTOR).level == "ok"
    assert clock_finding(-8, 5.9, EXECUTOR).level == "warning"


def test_the_fastest_of_some_answers_counts() -> None:
    """The driver reads its clock in the middle of each call."""
    clock, seconds = ManualClock(NOW_S), iter([3.0, 0.5, 0.25, 1.0, 2.0])

    def now_s() -> float:
        half_s = next(seconds) / 2
        clock.advance(half_s)
        answer_s = clock.now_s()
        clock.advance(half_s)
        return answer_s - 1

    with driver(now_s) as address:
        port, difference = of_port(address, clock)
    assert port.found.endswith("answers in 250.0 ms.")
    assert difference.found == "The clock is 1.000 s off the driver's."


def test_the_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, close = list[RpcClient](), RpcClient.close

    def note(client: RpcClient) -> None:
        closed.append(client)
        close(client)

    monkeypatch.setattr(RpcClient, "close", note)
    with driver() as address:
        of_port(address)
    assert len(closed) == 1


def test_a_driver_that_does_not_answer_is_an_error_within_the_time_limit() -> None:
    begun_s = time.monotonic()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        [found] = of_port(DriverAddress("127.0.0.1", silent.getsockname()[1], SECRET), SystemClock(), 0.2)
    assert found.level == "error"
    assert time.monotonic() - begun_s < 8


def test_a_driver_that_hangs_is_an_error_within_the_time_limit() -> None:
    go_on = threading.Event()

    def hang() -> float:
        go_on.wait()
        return NOW_S

    with driver(hang) as address:
        try:
            [found] = of_port(address, SystemClock(), 0.3)
        finally:
            go_on.set()
    assert found.level == "error"


def test_an_unreachable_port_names_host_and_port_and_the_remedy() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.2", 0))
        port = bound.getsockname()[1]
        [found] = of_port(DriverAddress("127.0.0.2", port, SECRET))
    assert (found.level, found.check) == ("error", "driver-port")
    assert f"127.0.0.2:{port}" in found.found
    assert "Connection refused" in found.found
    assert "spark.driver.host, or spark.statelog.coordinator.host" in found.remedy


def test_an_address_that_is_no_loopback_asks_for_firewalls() -> None:
    [found] = of_port(DriverAddress("no.such.host.invalid", 9, SECRET))
    assert "no.such.host.invalid:9" in found.found
    for text in ("spark.statelog.coordinator.host and .port", "firewalls", "spark.driver.bindAddress"):
        assert text in found.remedy


@pytest.mark.parametrize(
    ("port", "reason"),
    [("99999", "bind(): port must be 0-65535"), ("any", "invalid literal"), ("1", "Cannot assign requested")],
)
def test_an_address_that_the_driver_cannot_have(port: str, reason: str) -> None:
    script = """
import sys, types
from statelog.errors import ConfigurationError
from statelog.spark.driver.endpoint import require_endpoint
conf = {"spark.statelog.coordinator.host": "192.0.2.1", "spark.statelog.coordinator.port": sys.argv[1]}
context = types.SimpleNamespace(master="yarn", applicationId="app", getConf=lambda: conf)
try:
    require_endpoint(types.SimpleNamespace(sparkContext=context))
except ConfigurationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script, port], check=True, capture_output=True, text=True)
    assert f"cannot listen on 192.0.2.1:{port}: {reason}" in done.stdout
    assert "spark.statelog.coordinator.host and .port" in done.stdout


def test_another_service_on_the_port_is_an_error() -> None:
    with driver() as address:
        [found] = of_port(DriverAddress(address.host, address.port, b"other" * 8))
    assert found.level == "error"


# ---- Reports ----


def report(**more: object) -> dict[str, object]:
    return {"installed": teller()(), "stage": 1, "task": 2, **more}


def test_the_findings_of_a_report_get_the_executors_place() -> None:
    marks: list[tuple[Place, Marks]] = []
    findings = [["warning", "clock", "", "", "late", "set it"]]
    told = json.loads(json.dumps(report(findings=findings, marks=[["probe/x", True]])))
    found = list(read_report(told, EXECUTOR, INSTALLED, "runs", marks))
    assert found[-1] == Finding("warning", "clock", "executor 1", "there", "late", "set it")
    assert [one.check for one in found] == ["import", "packages", "clock"]
    assert {one.where for one in found} == {"executor 1"}
    assert marks == [(EXECUTOR, Marks("probe/x", True))]


def test_workers_that_cannot_import_statelog_are_an_error(tmp_path: Path) -> None:
    """The function runs in an interpreter without statelog, and tells what is there."""
    function = executor_function(ExecutorWork(None, None, Options(), 10, b""))
    (tmp_path / "function").write_bytes(cloudpickle.dumps(function))  # type: ignore[no-untyped-call]  # pyspark's copy has no types
    script = """
import pickle, sys, types
sys.modules["statelog"] = None  # as if it were not installed
import pyspark
task = types.SimpleNamespace(stageId=lambda: 1, taskAttemptId=lambda: 2)
pyspark.TaskContext.get = staticmethod(lambda: task)
[text] = pickle.load(open(sys.argv[1], "rb"))([])
print(text)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "function")]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert told["installed"]["versions"]["statelog"] == ""
    found = list(read_report(told, EXECUTOR, INSTALLED, "runs", []))
    assert [(one.level, one.check) for one in found if one.level != "ok"] == [("error", "import")]
    assert sys.executable in found[0].found
    assert "statelog" in found[0].found
    assert "PYSPARK_PYTHON" in found[0].remedy


def test_an_observer_need_not_be_picklable() -> None:
    class Locked(Observer):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    executor_function(ExecutorWork(None, None, Options(observer=Locked()), 10, b""))


class ClosedStore(WholeObjects):
    """A store of the scheme ``closed``, which notes that it was closed."""

    closed: ClassVar[list[str]] = []

    def __init__(self, location: str) -> None:
        super().__init__(LocalStore(location.removeprefix("closed:")))
        self._location = location

    def close(self) -> None:
        self.closed.append(self._location)
        super().close()


@pytest.fixture
def stores() -> Iterator[bytes]:
    """The driver's registered stores, which this process does not know yet."""
    factory = cloudpickle.dumps(ClosedStore)  # type: ignore[no-untyped-call]  # pyspark's copy has no types
    yield pickle.dumps(DriverStores({"closed": factory}, None))
    REGISTERED.pop("closed", None)


def test_an_executor_makes_all_checks_and_closes_its_store(tmp_path: Path, stores: bytes) -> None:
    probe, options = Probe(f"closed:{tmp_path}/state", "probe/doctor-1"), Options(local_directory=str(tmp_path))
    LocalStore(tmp_path / "state").put(probe.witness, probe.content)
    with driver(time.time) as address:
        told = ExecutorWork(address, probe, options, 60, stores).run("there")
    checks = [(level, check, where, host) for level, check, where, host, *_ in told["findings"]]
    assert checks == [("ok", check, "", "there") for check in ("local-disk", "driver-port", "clock", "location")]
    [(written, won)] = told["marks"]
    assert (LocalStore(tmp_path / "state").read(written), won) == (probe.content, True)
    assert ClosedStore.closed == [probe.location]


def test_an_executor_makes_those_checks_that_the_driver_could(tmp_path: Path) -> None:
    told = ExecutorWork(None, None, Options(local_directory=str(tmp_path)), 60, b"").run("there")
    assert [check for _, check, *_ in told["findings"]] == ["local-disk"]


def test_an_unreachable_port_is_told_within_the_time_limit_of_all_checks(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = DriverAddress("127.0.0.1", silent.getsockname()[1], SECRET)
        told = ExecutorWork(address, None, Options(local_directory=str(tmp_path)), 1, b"").run("there")
    [_, (level, check, _, _, found, _)] = told["findings"]
    assert (level, check) == ("error", "driver-port")
    assert "not finished" not in found


# ---- Tasks that Spark could not run ----


@pytest.mark.parametrize(
    ("text", "check", "told"),
    [
        (NO_PYTHON, "python", "/nowhere/python cannot be run: error=2, No such file or directory."),
        (
            "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has"
            " different version: 3.10 than that in driver: 3.11, PySpark cannot run with different\nmore",
            "python",
            "Python in worker has different version: 3.10 than that in driver: 3.11",
        ),
        ("Error from python worker:\n  /usr/bin/python3: No module named pyspark\n", "import", "has no module pyspark"),
        (
            "Caused by: java.lang.IllegalStateException: odd\n\tat x",
            "executors",
            "A task failed: IllegalStateException: odd",
        ),
        ("", "executors", "A task failed"),
    ],
)
def test_a_failed_task_is_a_finding_without_a_traceback(text: str, check: str, told: str) -> None:
    found = failed_task(EXECUTOR, text)
    assert (found.level, found.check) == ("error", check)
    assert told in found.found
    assert "\n" not in found.found
    assert found.remedy
    assert (found.where, found.host) == (("executor 4", "10.0.0.7") if text == NO_PYTHON else ("executor 1", "there"))


def test_executors_that_no_task_has_reached_are_named() -> None:
    places = [Place(f"executor {number}", "") for number in range(3)]
    reports = Reports([places[1].error("executors", "failed", "fix")], [], {"executor 0"})
    [found] = not_asked(places, reports, 5, Place("driver", "here"))
    assert found.level == "warning"
    assert "Not checked: executor 2, 2 more." in found.found
    [found] = not_asked(places[:2], reports, 2, Place("driver", "here"))
    assert found.level == "ok"
