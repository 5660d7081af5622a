"""Spark's files at checkpointLocations that Spark reaches through Hadoop: read, saved, restored and rewound there."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog import ConfigurationError, ErrorKind, Step, StorageError
from statelog.spark.checkpoint.checkpoint import DirectoryFiles, SparkFiles, StoreFiles
from statelog.spark.checkpoint.location import HadoopFiles, open_checkpoint
from statelog.storage import LocalStore
from tests.queries.spark_files_contract import TEXT, SparkFilesContract
from tests.spark.faults import make_marker
from tests.spark.file_systems import KEEPING, SHELF, VIEW, mounted
from tests.spark.long_life import live
from tests.spark.support import Job, make_orders, start_driver

pytestmark = pytest.mark.spark


class TestHadoopFiles(SparkFilesContract):
    has_checksums = True

    @pytest.fixture(params=["", SHELF, KEEPING])
    def files(
        self, spark: SparkSession, tmp_path: Path, root: Path, request: pytest.FixtureRequest
    ) -> Iterator[SparkFiles]:
        root.mkdir(parents=True)
        with mounted(spark, request.param, tmp_path) if request.param else nullcontext() as place:
            yield HadoopFiles(spark, place.of(root) if place else str(root))

    @pytest.mark.parametrize("has_rename", [True, False])
    def test_what_one_implementation_wrote_another_one_reads(
        self, files: SparkFiles, root: Path, has_rename: bool
    ) -> None:
        local = DirectoryFiles(LocalStore(root), root) if has_rename else StoreFiles(LocalStore(root))
        files.write("offsets/3", TEXT)
        assert local.read("offsets/3") == TEXT
        local.write("offsets/3", b"a later one")
        assert files.read("offsets/3") == b"a later one"
        files.write("offsets/3", TEXT)
        local.move("offsets/3", "aside/offsets/3")
        assert files.read("aside/offsets/3") == TEXT
        assert not list(root.glob("offsets/[!.]*"))
        local.write("offsets/3", b"the last one")
        assert files.read("offsets/3") == b"the last one"


def test_a_directory_is_read_and_written_here_although_there_is_a_session(spark: SparkSession, tmp_path: Path) -> None:
    for location in (tmp_path, f"file:{tmp_path}", f"file://{tmp_path}"):
        assert isinstance(open_checkpoint(str(location), spark).files, DirectoryFiles), "which syncs what it does"


def test_a_bucket_that_hadoop_does_not_know_is_read_here(spark: SparkSession) -> None:
    assert type(open_checkpoint("az://container/checkpoint", spark).files) is StoreFiles


def test_a_file_system_that_hadoop_does_not_know_is_refused(spark: SparkSession) -> None:
    with pytest.raises(
        ConfigurationError, match="scheme nowhere, but the session's Hadoop does not know it"
    ) as refused:
        statelog.rewind("nowhere://host/checkpoint")
    assert refused.value.kind is ErrorKind.UNSUPPORTED_FEATURE


def test_a_file_system_that_does_not_answer_is_an_error_of_the_store(spark: SparkSession) -> None:
    with pytest.raises(StorageError, match=r"hdfs://localhost:1/checkpoint/offsets failed: java\.net\.ConnectExc"):
        statelog.rewind("hdfs://localhost:1/checkpoint", location="/nowhere")


@pytest.mark.parametrize("scheme", [SHELF, *(pytest.param(one, marks=pytest.mark.extended) for one in (VIEW, KEEPING))])
def test_a_query_s_life_elsewhere(spark: SparkSession, tmp_path: Path, scheme: str) -> None:
    with mounted(spark, scheme, tmp_path) as place:
        job = Job(tmp_path, location=str(tmp_path / "state"), mount=place)
        live(spark, job, str(tmp_path / "other state"), str(tmp_path / "saved"))


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [Step.LAST_ACK, Step.DURABLE])
def test_a_driver_killed_elsewhere_loses_nothing(spark: SparkSession, tmp_path: Path, step: Step) -> None:
    location = str(tmp_path / "state")
    job = Job(tmp_path, location=location).add(make_orders(4, seed=8))
    kill = {"at": step, "batch": 2, "marker": make_marker(tmp_path / "kill")}
    arguments = {"parallelism": 2, "kills": [kill], "location": location, "scheme": SHELF}
    driver = start_driver("ledger", tmp_path, arguments)
    assert driver.wait() == -signal.SIGKILL, driver.end
    with mounted(spark, SHELF, tmp_path) as place:
        job = replace(job, mount=place)
        job.run(job.ledger(spark, 3))
    job.require_exact()


def test_without_a_location_for_the_state_one_is_asked_for(spark: SparkSession, tmp_path: Path) -> None:
    with mounted(spark, VIEW, tmp_path) as place:
        job = Job(tmp_path, location=str(tmp_path / "state"), mount=place).add(make_orders(1, seed=31))
        job.run(job.ledger(spark, 2))
        checkpoint = job.checkpoint_location
        for needs_location in (
            lambda: statelog.rewind(checkpoint),
            lambda: statelog.savepoint(checkpoint, tmp_path / "saved"),
        ):
            with pytest.raises(ConfigurationError, match="no state in locations with the scheme viewfs") as refused:
                needs_location()
            assert "location=" in refused.value.hint
        statelog.savepoint(checkpoint, tmp_path / "saved", location=job.location)
        with pytest.raises(ConfigurationError, match="keeps no state"):
            statelog.restore(tmp_path / "saved", place.of(tmp_path / "restored"))
        with pytest.raises(ConfigurationError, match="already holds a checkpoint of a Spark query"):
            statelog.restore(tmp_path / "saved", checkpoint, location=str(tmp_path / "other state"))
        failing = replace(job, root=tmp_path / "new", location=None, input_folder=job.input)
        assert "Pass location=" in failing.fail(failing.ledger(spark, 2))
