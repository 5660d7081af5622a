"""Queries whose checkpointLocation is in a bucket, which Spark reaches by S3A, with their state beside it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from statelog import Step
from statelog.storage import open_store
from tests.jars import S3A, spark_jars
from tests.s3.server import RadosGateway
from tests.s3a.settings import MANAGER, MANAGERS, s3a_settings
from tests.spark.faults import make_marker
from tests.spark.long_life import live
from tests.spark.store_jobs import (
    StoreJob,
    branch_beside_parent,
    fall_back_from_damage,
    rename_then_forget,
    rewind_by_command,
    supersede_a_driver,
    write_files_with_a_clock_that_comes_and_goes,
)
from tests.spark.support import make_orders, start_driver

pytest_plugins = ("tests.s3.plugin", "tests.s3a.plugin")
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Configure = Callable[[Mapping[str, str]], SparkSession]


@pytest.fixture(params=[pytest.param("rename", marks=pytest.mark.extended), "abort"])
def manager(request: pytest.FixtureRequest) -> str:
    return str(MANAGERS[request.param])


@pytest.fixture
def session(
    configure_s3a: Configure,
    s3_server: RadosGateway,
    manager: str,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[SparkSession]:
    """The session, whose driver and workers know the server."""
    before = spark.conf.get(MANAGER)
    assert before is not None
    for name, value in s3_server.environment.items():
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
    session = configure_s3a({})
    session.conf.set(MANAGER, manager)
    yield session
    session.conf.set(MANAGER, before)


def test_a_query_s_life_without_a_location(session: SparkSession, s3a_location: str, tmp_path: Path) -> None:
    job = StoreJob.at(tmp_path, s3a_location)
    live(session, job, f"{s3a_location}/other state", f"{s3a_location}/saved")
    assert any(name.startswith("statelog/log/") for name in job.names())
    assert not list(tmp_path.rglob("*.log"))


@pytest.mark.extended
def test_a_command_reaches_a_stopped_query_without_spark(
    session: SparkSession, s3a_location: str, tmp_path: Path
) -> None:
    rewind_by_command(session, StoreJob.at(tmp_path, s3a_location))


@pytest.mark.extended
def test_a_branch_beside_its_parent(session: SparkSession, s3a_location: str, tmp_path: Path) -> None:
    branch_beside_parent(session, StoreJob.at(tmp_path, s3a_location))


@pytest.mark.extended
@pytest.mark.parametrize("story", [fall_back_from_damage, rename_then_forget])
def test_state_is_set_back_renamed_and_forgotten(
    session: SparkSession, s3a_location: str, tmp_path: Path, story: Callable[[SparkSession, StoreJob], None]
) -> None:
    story(session, StoreJob.at(tmp_path, s3a_location))


@pytest.mark.extended
def test_a_driver_that_was_superseded_commits_nothing(
    session: SparkSession, s3_server: RadosGateway, s3a_location: str, tmp_path: Path, manager: str
) -> None:
    settings = {f"spark.hadoop.{name}": value for name, value in s3a_settings(s3_server).items()}
    settings |= {**spark_jars(S3A), MANAGER: manager}
    supersede_a_driver(session, StoreJob.at(tmp_path, s3a_location), {"settings": settings, "uses_s3a": True})


def test_spark_s_file_sink_and_a_clock_that_comes_and_goes(
    session: SparkSession, s3a_location: str, tmp_path: Path
) -> None:
    write_files_with_a_clock_that_comes_and_goes(session, StoreJob.at(tmp_path, s3a_location))


@pytest.mark.parametrize(
    ("manager_name", "step", "batch", "kills_jvm"),
    [
        ("abort", Step.DURABLE, 2, False),
        pytest.param("rename", Step.LAST_ACK, 1, False, marks=pytest.mark.extended),
        pytest.param("abort", Step.DURABLE, 1, True, marks=pytest.mark.extended),
        pytest.param("rename", Step.DURABLE, 2, True, marks=pytest.mark.extended),
    ],
)
def test_a_query_with_hadoop_s_credentials_survives_its_driver(
    s3_server: RadosGateway,
    s3a_location: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    manager_name: str,
    step: Step,
    batch: int,
    kills_jvm: bool,
) -> None:
    """The driver's Python process or its JVM is killed. Credentials are in Spark's settings only, and nowhere shown."""
    job, events = StoreJob.at(tmp_path, s3a_location), tmp_path / "events"
    job.add(make_orders(4, seed=8))
    events.mkdir()
    settings = {f"spark.hadoop.{name}": value for name, value in s3a_settings(s3_server).items()}
    settings |= {**spark_jars(S3A), MANAGER: MANAGERS[manager_name]}
    settings |= {"spark.eventLog.enabled": "true", "spark.eventLog.dir": f"file:{events}"}
    arguments = {"folder": s3a_location, "settings": settings, "uses_s3a": True}
    kill = {"at": step, "batch": batch, "marker": make_marker(tmp_path / "kill")}
    kill |= {"pid_file": str(tmp_path / "jvm-0.pid")} if kills_jvm else {}
    with monkeypatch.context() as patch:
        for name in s3_server.environment:
            patch.delenv(name)
        driver = start_driver("store_ledger", tmp_path, {**arguments, "parallelism": 2, "kills": [kill]})
        assert driver.wait() == (1 if kills_jvm else -signal.SIGKILL), driver.end
        driver = start_driver("store_ledger", tmp_path, {**arguments, "parallelism": 3})
        assert driver.wait() == 0, driver.end
    job.require_exact()
    assert any(name.startswith("statelog/log/") for name in job.names())

    secret, store = s3_server.environment["AWS_SECRET_ACCESS_KEY"].encode(), open_store(f"{s3a_location}/checkpoint")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.is_relative_to(events) for path in written)
    assert "== Physical Plan ==" in driver.text
    assert "INFO:" in driver.text, "the driver's log"
    assert not [path for path in written if secret in path.read_bytes()], "the secret was written"
    assert not [name for name in job.names() if secret in store.read(name)], "the secret was stored"
