"""Queries with their checkpoint and their state in HDFS."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import statelog
from statelog import Options, Step
from statelog.storage import open_store
from tests.hdfs.cluster import HdfsCluster
from tests.hdfs.queries import HdfsJob
from tests.spark.faults import make_marker
from tests.spark.long_life import live
from tests.spark.support import LEDGER, Job, Ledger, ledger_model, make_orders, start_driver

pytest_plugins = ("tests.hdfs.plugin",)
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def session(hdfs: HdfsCluster, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """The session, whose workers know the cluster's settings."""
    monkeypatch.setitem(spark.sparkContext.environment, "HADOOP_CONF_DIR", str(hdfs.directory / "conf"))
    return spark


def test_a_query_s_life_in_hdfs_without_a_location(session: SparkSession, hdfs_location: str, tmp_path: Path) -> None:
    job = HdfsJob.at(tmp_path, hdfs_location)
    live(session, job, f"{hdfs_location}/other state", f"{hdfs_location}/saved")
    names = [info.name for info in open_store(f"{hdfs_location}/checkpoint").list()]
    assert any(name.startswith("statelog/log/") for name in names)
    assert not list(tmp_path.rglob("*.log"))


def test_a_command_reaches_a_stopped_query_without_spark(
    session: SparkSession, hdfs_location: str, tmp_path: Path
) -> None:
    job = HdfsJob.at(tmp_path, hdfs_location)
    job.add(make_orders(3, seed=13))
    job.run(job.ledger(session, 2))
    command = (sys.executable, "-m", "statelog", "rewind", job.checkpoint_location, "--to", "1", "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["taken_back"] == [2]
    job.add(make_orders(1, seed=14))
    job.run(job.ledger(session, 2))
    job.require_exact()


def test_a_branch_beside_its_parent(session: SparkSession, hdfs_location: str, tmp_path: Path) -> None:
    job = HdfsJob.at(tmp_path, hdfs_location)
    orders = make_orders(4, seed=17)
    job.add(orders[:2])
    job.run(job.ledger(session, 2))
    branch = job.elsewhere("branch")
    assert statelog.branch(job.checkpoint_location, branch.checkpoint_location).next_batch == 2
    job.add(orders[2:])
    job.run(job.ledger(session, 3))
    branch.run(branch.ledger(session, 2))
    job.require_exact()
    answers = ledger_model(orders)
    assert branch.results() == {batch: answers[batch] for batch in (2, 3)}


def test_spark_s_file_sink_and_a_clock_that_comes_and_goes(
    session: SparkSession, hdfs_location: str, tmp_path: Path
) -> None:
    """Both change or read files of Spark's in HDFS when the query starts."""
    job, folder = HdfsJob.at(tmp_path, hdfs_location), f"{hdfs_location}/written"

    def run(heartbeat_s: float | None) -> None:
        rows = statelog.key_by(
            job.read(session), "user", parallelism=2, options=Options(heartbeat_s=heartbeat_s)
        ).transformWithState(Ledger(), LEDGER, "append", "None")
        writer = rows.writeStream.format("json").option("path", folder)
        writer = writer.option("checkpointLocation", job.checkpoint_location)
        writer.trigger(availableNow=True).start().awaitTermination()

    for number, heartbeat_s in enumerate((None, 3600.0, None)):
        job.add(make_orders(2, seed=20 + number))
        run(heartbeat_s)
    last = max(job.ends())
    assert statelog.rewind(job.checkpoint_location, to=last - 1).taken_back == [last]
    job.add(make_orders(1, seed=30))
    with pytest.raises(StreamingQueryException, match=f"has batches up to {last}"):
        run(None)
    open_store(folder).delete([f"_spark_metadata/{last}"])
    run(None)
    written = session.read.schema(LEDGER).json(folder).collect()
    answers = ledger_model(job.batches_of_spark())
    assert sorted(list(row) for row in written) == sorted(row for rows in answers.values() for row in rows)


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
    job = HdfsJob.at(tmp_path, hdfs_location)
    job.add(make_orders(4, seed=8))
    arguments = {"folder": hdfs_location, "spelled": f"{path}/checkpoint", "parallelism": 2}
    kill = {"at": step, "batch": 2, "marker": make_marker(tmp_path / "kill")}
    driver = start_driver("hdfs_ledger", tmp_path, {**arguments, "kill": kill})
    assert driver.wait() == -signal.SIGKILL, driver.end
    driver = start_driver("hdfs_ledger", tmp_path, {**arguments, "parallelism": 3})
    assert driver.wait() == 0, driver.end
    job.require_exact()
    names = [info.name for info in open_store(f"{hdfs_location}/checkpoint").list("statelog/")]
    assert any(name.startswith("statelog/log/") for name in names)
