"""A job whose checkpointLocation is in a store, and stories of its files there: for HDFS and buckets alike."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import statelog
from statelog import Options
from statelog.storage import open_store
from tests.spark.support import LEDGER, ORDERS, Job, Ledger, ledger_model, make_orders


@dataclass(frozen=True)
class StoreJob(Job):
    """A job with input and output in directories of this host, and without a location of its own for the state."""

    folder: str = ""
    """The location above that of Spark's checkpoint."""
    spelled: str = ""
    """The checkpointLocation as the query gets it, if otherwise."""

    @property
    def checkpoint_location(self) -> str:
        return self.spelled or f"{self.folder}/checkpoint"

    def names(self, folder: str = "") -> list[str]:
        """The objects in a folder of the checkpointLocation, without Spark; not the empty ones that mark folders."""
        return [info.name for info in open_store(f"{self.folder}/checkpoint").list(folder) if info.size_bytes]

    def ends(self) -> dict[int, int]:
        store = open_store(f"{self.folder}/checkpoint")
        names = [name for name in self.names("offsets/") if name.removeprefix("offsets/").isdecimal()]
        return {int(name[8:]): json.loads(store.read(name).splitlines()[2])["logOffset"] + 1 for name in names}

    def read(self, session: SparkSession, schema: str = ORDERS) -> DataFrame:
        return session.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(f"file:{self.input}")

    def elsewhere(self, name: str) -> Self:
        job = super().elsewhere(name)
        assert isinstance(job, type(self))
        return replace(job, folder=f"{self.folder}/{name}")

    @classmethod
    def at(cls, root: Path, folder: str, spelled: str = "") -> Self:
        """A job with its checkpoint below a location."""
        return cls(root, folder=folder, spelled=spelled)


def rewind_by_command(session: SparkSession, job: StoreJob) -> None:
    """Run a query, take a batch back by the command, which has no Spark, and go on."""
    job.add(make_orders(3, seed=13))
    job.run(job.ledger(session, 2))
    command = (sys.executable, "-m", "statelog", "rewind", job.checkpoint_location, "--to", "1", "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["taken_back"] == [2]
    job.add(make_orders(1, seed=14))
    job.run(job.ledger(session, 2))
    job.require_exact()


def branch_beside_parent(session: SparkSession, job: StoreJob) -> None:
    """Branch a query; both go on by themselves."""
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


def write_files_with_a_clock_that_comes_and_goes(session: SparkSession, job: StoreJob) -> None:
    """Spark's file sink and statelog's clock: both change or read files of Spark's when the query starts."""
    folder = f"{job.folder}/written"

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
