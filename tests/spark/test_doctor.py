"""The doctor in a real application: tasks that reach the driver and the location, or not, and no remains."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog import Finding, Options
from statelog.__main__ import main
from statelog.spark.driver import executor_internals
from tests.spark.faults import wait_until
from tests.stores import KeptStore

pytestmark = pytest.mark.spark

CHECKS_OF_EXECUTORS = {"import", "packages", "local-disk", "driver-port", "clock", "location"}


class HangingStore(KeptStore):
    """Answers in the driver, and not in the Python workers."""

    def __init__(self, location: str) -> None:
        driver, _, path = location.removeprefix("hanging:").partition(":")
        super().__init__(f"kept:{path}")
        self._hangs = str(os.getpid()) != driver

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if self._hangs:
            time.sleep(60)
        return super().read(name, offset=offset, length=length)


def problems(found: list[Finding]) -> list[Finding]:
    return [one for one in found if one.level != "ok"]


def is_idle(spark: SparkSession) -> bool:
    return not spark.sparkContext.statusTracker().getActiveJobsIds()


@contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Change a setting that is read from the context."""
    context: Any = spark.sparkContext
    context._conf.set(name, value)
    try:
        yield
    finally:
        context._conf._jconf.remove(name)


@pytest.mark.smoke
def test_a_fit_application_has_no_problems_and_nothing_remains(spark: SparkSession, tmp_path: Path) -> None:
    location = tmp_path / "not" / "made" / "yet"
    found = statelog.doctor(location, options=Options(local_directory=str(tmp_path)))
    assert problems(found) == []
    assert {one.check for one in found if one.where == "executor driver"} == CHECKS_OF_EXECUTORS
    assert {one.check for one in found if one.where == "driver"} >= {"spark", "placement", "encryption", "executors"}
    assert any(one.check == "location-shared" for one in found)
    assert next(one.found for one in found if one.check == "local-disk").startswith(f"{tmp_path} is writable")
    assert list(tmp_path.iterdir()) == []
    assert is_idle(spark)


def test_the_command_uses_the_session_that_is_there(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["doctor", str(tmp_path / "state")]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "0 errors, 0 warnings" in capsys.readouterr().out
    assert spark.range(3).count() == 3


def test_a_directory_that_executors_do_not_share_is_an_error(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path leads the driver and the workers, which have other working directories, to different directories."""
    workers_directory = Path(f"{tmp_path.name}-state").absolute()
    monkeypatch.chdir(tmp_path)
    [found] = problems(statelog.doctor(f"/proc/self/cwd/{workers_directory.name}"))
    assert (found.level, found.check, found.where) == ("error", "location-shared", "executor driver")
    assert "mount under one path" in found.remedy
    assert not workers_directory.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_tasks_do_not_reach_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    with setting(spark, "spark.statelog.coordinator.host", "127.0.0.3"):
        [found] = problems(statelog.doctor(tmp_path / "state"))
    assert (found.level, found.check, found.where) == ("error", "driver-port", "executor driver")
    assert "127.0.0.3:" in found.found
    assert "spark.statelog.coordinator.host" in found.remedy


def test_a_spark_with_other_private_parts_is_checked_as_far_as_possible(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such field")

    monkeypatch.setattr(executor_internals, "numbers_on", missing)
    monkeypatch.setattr(executor_internals, "executor_of", missing)
    found = statelog.doctor(tmp_path / "state")
    [problem] = problems(found)
    assert (problem.level, problem.check) == ("warning", "executors")
    assert "placement='off'" in problem.remedy
    assert {one.check for one in found if one.where == "executor"} == CHECKS_OF_EXECUTORS


def test_an_executor_that_hangs_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    statelog.register_store("hanging", HangingStore)
    # The first import takes seconds.
    numbers = spark.sparkContext.parallelize(range(2), 2)
    numbers.map(lambda _: str(importlib.import_module("statelog.tools.doctor.executor_work"))).collect()
    [found] = problems(statelog.doctor(f"hanging:{os.getpid()}:{tmp_path}/state", timeout_s=6))
    assert (found.level, found.check, found.where) == ("error", "location", "executor driver")
    assert found.found == "The check was not finished after 6 s."
    assert "this host can reach the store" in found.remedy
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_interruption_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """It comes while a job waits for an executor."""
    statelog.register_store("hanging", HangingStore)
    state = tmp_path / "state"

    def interrupt() -> None:
        wait_until(lambda: any(state.glob("probe/*/witness")) and not is_idle(spark), "the job of an executor", 60)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        statelog.doctor(f"hanging:{os.getpid()}:{state}")
    assert list(state.iterdir()) == []
    wait_until(lambda: is_idle(spark), "the end of the jobs", 30)
