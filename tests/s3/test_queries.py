"""A query whose state is in a bucket."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog import Options, Step
from statelog.spark.driver.endpoint import require_endpoint
from statelog.storage import open_store
from tests.s3.server import RadosGateway
from tests.spark.faults import make_marker
from tests.spark.file_systems import SHELF, mounted
from tests.spark.long_life import live
from tests.spark.support import Job, ledger_model, make_orders, start_driver

pytest_plugins = ("tests.s3.plugin",)
pytestmark = pytest.mark.spark


@pytest.fixture
def bucket_session(s3_server: RadosGateway, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """The session, whose driver and workers know the server."""
    for name, value in s3_server.environment.items():
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
        monkeypatch.setenv(name, value)
    return spark


def test_a_query_goes_on_from_a_bucket(
    bucket_session: SparkSession, s3_server: RadosGateway, s3_location: str, tmp_path: Path
) -> None:
    job = replace(Job(tmp_path), location=s3_location)
    job.add(make_orders(2, seed=91))
    job.run(job.ledger(bucket_session, 2))
    job.add(make_orders(2, seed=92))
    # On another host: nothing is there but the bucket. And as many files as there can be.
    job.run(job.ledger(bucket_session, 3, Options(local_directory=str(tmp_path / "local"), file_merging="off")))

    job.require_exact()
    names = [info.name for info in open_store(s3_location).list()]
    assert any(name.startswith("log/") for name in names)
    assert not list(tmp_path.rglob("*.log"))
    secrets = [s3_server.environment["AWS_SECRET_ACCESS_KEY"].encode(), require_endpoint(bucket_session)[1].secret]
    stored = [open_store(s3_location).read(name) for name in names]
    stored += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(stored) > 20
    assert not [data for data in stored if any(secret in data for secret in secrets)], "a secret was stored"


@pytest.mark.parametrize("scheme", [pytest.param("", marks=pytest.mark.extended), SHELF])
def test_a_query_s_life_with_state_in_a_bucket_and_the_checkpoint_elsewhere(
    bucket_session: SparkSession, s3_location: str, tmp_path: Path, scheme: str
) -> None:
    with mounted(bucket_session, scheme, tmp_path) if scheme else nullcontext() as place:
        job = Job(tmp_path, location=f"{s3_location}/state", mount=place)
        live(bucket_session, job, f"{s3_location}/other", f"{s3_location}/saved")


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("step", "scheme"), [(Step.LAST_ACK, SHELF), (Step.DURABLE, "")])
def test_a_driver_killed_with_state_in_a_bucket_loses_nothing(
    bucket_session: SparkSession, s3_location: str, tmp_path: Path, step: Step, scheme: str
) -> None:
    job = Job(tmp_path, location=s3_location).add(make_orders(4, seed=8))
    kill = {"at": step, "batch": 2, "marker": make_marker(tmp_path / "kill")}
    arguments = {"parallelism": 2, "kills": [kill], "location": s3_location, "scheme": scheme}
    driver = start_driver("ledger", tmp_path, arguments)
    assert driver.wait() == -signal.SIGKILL, driver.end
    with mounted(bucket_session, scheme, tmp_path) if scheme else nullcontext() as place:
        job = replace(job, mount=place)
        job.run(job.ledger(bucket_session, 3))
    job.require_exact()


def test_a_savepoint_in_a_bucket(bucket_session: SparkSession, s3_location: str, tmp_path: Path) -> None:
    orders = make_orders(3, seed=93)
    job = replace(Job(tmp_path), location=f"{s3_location}/state").add(orders[:2])
    job.run(job.ledger(bucket_session, 2))
    target, other = f"{s3_location}/savepoint", job.elsewhere("other")
    statelog.savepoint(job.checkpoint, target, location=job.location)
    other = replace(other, location=f"{s3_location}/other")
    statelog.restore(target, other.checkpoint, location=other.location, claim=True)
    assert open_store(target).list() == []
    job.add(orders[2:])
    other.run(other.ledger(bucket_session, 3))
    assert other.results() == {2: ledger_model(orders)[2]}
