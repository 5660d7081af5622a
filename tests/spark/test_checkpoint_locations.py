"""Spark's files at checkpointLocations that Spark reaches through Hadoop: read, saved, restored and rewound there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import statelog
from statelog import ConfigurationError, ErrorKind, StorageError
from statelog.savepoints.spark_files import DirectoryFiles, SparkFiles, StoreFiles
from statelog.spark.checkpoint_location import open_checkpoint
from statelog.spark.hadoop_files import HadoopFiles
from statelog.storage import LocalStore
from tests.savepoints.spark_files_contract import TEXT, SparkFilesContract
from tests.spark.support import Job, ledger_model, make_orders

pytestmark = pytest.mark.spark

LINK = "fs.viewfs.mounttable.statelog.link./here"


class TestHadoopFiles(SparkFilesContract):
    has_checksums = True

    @pytest.fixture(params=["", "file:", "file://"])
    def files(self, spark: SparkSession, root: Path, request: pytest.FixtureRequest) -> SparkFiles:
        root.mkdir(parents=True)
        return HadoopFiles(spark, f"{request.param}{root}")

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
        assert not list(root.glob("offsets/*"))
        local.write("offsets/3", b"the last one")
        assert files.read("offsets/3") == b"the last one"


@pytest.fixture(name="mounted")
def mount(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """A file system that is none of Python's: Hadoop's view of a directory."""
    spark.conf.set(LINK, f"file:{tmp_path}")
    yield "viewfs://statelog/here"
    spark.conf.unset(LINK)


def test_a_directory_is_read_and_written_here_although_there_is_a_session(spark: SparkSession, tmp_path: Path) -> None:
    for location in (tmp_path, f"file:{tmp_path}", f"file://{tmp_path}"):
        assert isinstance(open_checkpoint(str(location), spark).files, DirectoryFiles), "which syncs what it does"


def test_a_bucket_that_hadoop_does_not_know_is_read_here(spark: SparkSession) -> None:
    assert type(open_checkpoint("az://container/checkpoint", spark).files) is StoreFiles


def test_a_file_system_that_hadoop_does_not_know_is_refused(spark: SparkSession) -> None:
    with pytest.raises(
        ConfigurationError, match="scheme nowhere, and the session's Hadoop does not know it"
    ) as refused:
        statelog.rewind("nowhere://host/checkpoint")
    assert refused.value.kind is ErrorKind.UNSUPPORTED_FEATURE


def test_a_file_system_that_does_not_answer_is_an_error_of_the_store(spark: SparkSession) -> None:
    with pytest.raises(StorageError, match=r"hdfs://localhost:1/checkpoint/offsets failed: java\.net\.ConnectExc"):
        statelog.rewind("hdfs://localhost:1/checkpoint", location="/nowhere")


def run(job: Job, session: SparkSession, checkpoint: str) -> None:
    """Run a job with its checkpointLocation under another name."""
    writer = job.ledger(session, 2).writeStream.outputMode("update").foreachBatch(job.save)
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()


def test_a_query_elsewhere_is_saved_rewound_and_restored(spark: SparkSession, mounted: str, tmp_path: Path) -> None:
    orders = make_orders(5, seed=31)
    job = Job(tmp_path / "first", location=str(tmp_path / "state")).add(orders[:3])
    checkpoint = f"{mounted}/first/checkpoint"
    assert job.checkpoint == tmp_path / "first" / "checkpoint"
    run(job, spark, checkpoint)
    assert (job.checkpoint / "commits" / "2").exists(), "Spark reaches the directory by the other name"

    for needs_location in (lambda: statelog.rewind(checkpoint), lambda: statelog.savepoint(checkpoint, tmp_path / "x")):
        with pytest.raises(ConfigurationError, match="keeps no state in a place of the scheme viewfs") as refused:
            needs_location()
        assert "location=" in refused.value.hint
    assert statelog.rewind(checkpoint, location=job.location).taken_back == []

    saved = statelog.savepoint(checkpoint, tmp_path / "savepoint", location=job.location)
    assert saved.batch == 2
    assert saved.rows == statelog.savepoint(job.checkpoint, tmp_path / "same", location=job.location).rows

    [log] = (job.state / "log").iterdir()
    log.write_bytes(log.read_bytes()[:-5])  # the last checkpoint is lost
    done = statelog.rewind(checkpoint, location=job.location)
    assert (done.taken_back, done.removed) == ([2], ["commits/2"])
    assert done.moved_to == f"{checkpoint}/statelog-rewound/1"
    assert (job.checkpoint / "statelog-rewound" / "1" / "commits" / "2").exists()
    job.add(orders[3:])
    run(job, spark, checkpoint)
    answers = ledger_model(orders)
    assert job.results() == {batch: answers[batch] for batch in range(5)}

    other = replace(job.elsewhere("second"), location=str(tmp_path / "other state"))
    restored = f"{mounted}/{other.checkpoint.relative_to(tmp_path)}"
    with pytest.raises(ConfigurationError, match="keeps no state"):
        statelog.restore(tmp_path / "savepoint", restored)
    assert statelog.restore(tmp_path / "savepoint", restored, location=other.location).next_batch == 3
    with pytest.raises(ConfigurationError, match="holds a checkpoint of a Spark query already"):
        statelog.restore(tmp_path / "savepoint", restored, location=other.location)
    run(other, spark, restored)
    assert other.results() == {batch: answers[batch] for batch in (3, 4)}
