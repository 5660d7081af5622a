"""Queries with their checkpoint and their state in HDFS."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from statelog import Step
from statelog.storage import open_store
from tests.hdfs.cluster import HdfsCluster
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
from tests.spark.support import Job, make_orders, start_driver

pytest_plugins = ("tests.hdfs.plugin",)
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def session(hdfs: HdfsCluster, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """The session, whose workers know the cluster's settings."""
    monkeypatch.setitem(spark.sparkContext.environment, "HADOOP_CONF_DIR", str(hdfs.directory / "conf"))
    return spark


def test_a_query_s_life_in_hdfs_without_a_location(session: SparkSession, hdfs_location: str, tmp_path: Path) -> None:
    job = StoreJob.at(tmp_path, hdfs_location)
    live(session, job, f"{hdfs_location}/other state", f"{hdfs_location}/saved")
    names = [info.name for info in open_store(f"{hdfs_location}/checkpoint").list()]
    assert any(name.startswith("statelog/log/") for name in names)
    assert not list(tmp_path.rglob("*.log"))


def test_a_command_reaches_a_stopped_query_without_spark(
    session: SparkSession, hdfs_location: str, tmp_path: Path
) -> None:
    rewind_by_command(session, StoreJob.at(tmp_path, hdfs_location))


def test_a_branch_beside_its_parent(session: SparkSession, hdfs_location: str, tmp_path: Path) -> None:
    branch_beside_parent(session, StoreJob.at(tmp_path, hdfs_location))


@pytest.mark.extended
@pytest.mark.parametrize("story", [fall_back_from_damage, rename_then_forget])
def test_state_is_set_back_renamed_and_forgotten(
    session: SparkSession, hdfs_location: str, tmp_path: Path, story: Callable[[SparkSession, StoreJob], None]
) -> None:
    story(session, StoreJob.at(tmp_path, hdfs_location))


@pytest.mark.extended
def test_a_driver_that_was_superseded_commits_nothing(
    session: SparkSession, hdfs_location: str, tmp_path: Path
) -> None:
    supersede_a_driver(session, StoreJob.at(tmp_path, hdfs_location), {})


def test_spark_s_file_sink_and_a_clock_that_comes_and_goes(
    session: SparkSession, hdfs_location: str, tmp_path: Path
) -> None:
    write_files_with_a_clock_that_comes_and_goes(session, StoreJob.at(tmp_path, hdfs_location))


def test_state_in_hdfs_and_the_checkpoint_in_a_directory(
    session: SparkSession, hdfs_location: str, tmp_path: Path
) -> None:
    job = replace(Job(tmp_path), location=f"{hdfs_location}/state")
    job.add(make_orders(2, seed=91))
    job.run(job.ledger(session, 2))
    job.add(make_orders(2, seed=92))
    job.run(job.ledger(session, 3))
    job.require_exact()
    assert not list(tmp_path.rglob("*.log"))


@pytest.mark.parametrize("step", [Step.DURABLE, pytest.param(Step.LAST_ACK, marks=pytest.mark.extended)])
def test_a_query_on_a_cluster_s_default_file_system_survives_its_driver(
    hdfs: HdfsCluster, hdfs_location: str, tmp_path: Path, step: Step
) -> None:
    """Its checkpointLocation is a path, and only the environment says that paths are in HDFS."""
    path = hdfs_location.removeprefix(hdfs.location)
    job = StoreJob.at(tmp_path, hdfs_location)
    job.add(make_orders(4, seed=8))
    arguments = {"folder": hdfs_location, "spelled": f"{path}/checkpoint", "parallelism": 2}
    kill = {"at": step, "batch": 2, "marker": make_marker(tmp_path / "kill")}
    driver = start_driver("store_ledger", tmp_path, {**arguments, "kills": [kill]})
    assert driver.wait() == -signal.SIGKILL, driver.end
    driver = start_driver("store_ledger", tmp_path, {**arguments, "parallelism": 3})
    assert driver.wait() == 0, driver.end
    job.require_exact()
    names = [info.name for info in open_store(f"{hdfs_location}/checkpoint").list("statelog/")]
    assert any(name.startswith("statelog/log/") for name in names)
