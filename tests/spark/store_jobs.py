"""A job whose checkpointLocation is in a store, and stories of its files there: for HDFS and buckets alike."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import statelog
from statelog import Options, Step
from statelog.errors import FencedError, error_in_text
from statelog.storage import open_store
from tests.spark.faults import wait_until
from tests.spark.support import LEDGER, ORDERS, Job, Ledger, ledger_model, make_orders, start_driver


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


def fall_back_from_damage(session: SparkSession, job: StoreJob) -> None:
    """Damage the newest changes of a stopped query; it falls back to the batch before, and goes on."""
    options = Options(inline_budget_bytes=0, local_directory=str(job.root / "local"))
    job.add(make_orders(2, seed=41))
    job.run(job.ledger(session, 2, options))
    before = set(job.names("statelog/"))
    job.add(make_orders(1, seed=42))
    job.run(job.ledger(session, 2, options))
    store = open_store(f"{job.folder}/checkpoint")
    name = next(name for name in job.names("statelog/") if name not in before and "/log/" not in name)
    damaged = bytearray(store.read(name))
    damaged[len(damaged) // 2] ^= 255
    store.put(name, bytes(damaged))

    done = statelog.fall_back(job.checkpoint_location)
    assert [one.name for one in done.damages] == [name.removeprefix("statelog/")]
    assert (done.taken_back, done.next_batch) == ([2], 2)
    shutil.rmtree(job.root / "local")
    job.add(make_orders(1, seed=43))
    job.run(job.ledger(session, 3))
    job.require_exact()


def rename_then_forget(session: SparkSession, job: StoreJob) -> None:
    """Give the state of a stopped query another uid, with which it goes on, and then give it up."""
    job.add(make_orders(2, seed=44))
    job.run(replace(job, uid="totals").ledger(session, 2))
    assert statelog.rename(job.checkpoint_location, "totals", "ledger").batch == 1
    job.add(make_orders(2, seed=45))
    job.run(replace(job, uid="ledger").ledger(session, 2))
    job.require_exact()

    assert statelog.forget(job.checkpoint_location, "ledger").batch == 3
    more = make_orders(2, seed=46)
    job.add(more)
    job.run(replace(job, uid="ledger").ledger(session, 3))
    answers, found = ledger_model(more), job.results()
    assert [found[4], found[5]] == [answers[0], answers[1]], "it began without state"


def supersede_a_driver(session: SparkSession, job: StoreJob, arguments: Mapping[str, Any]) -> None:
    """A driver stops within a batch while another one runs the query; when it continues, it commits nothing."""
    job.add(make_orders(4, seed=47))
    stalled, go_on = job.root / "stalled", job.root / "go on"
    stall = {"at": Step.LAST_ACK, "batch": 1, "stalled": str(stalled), "go_on": str(go_on)}
    older = start_driver(
        "store_ledger", job.root, {"folder": job.folder, "parallelism": 2, "stall": stall, **arguments}
    )
    wait_until(lambda: stalled.exists() or older.process.poll() is not None, "the older driver's batch")
    job.run(job.ledger(session, 3))
    job.require_exact()
    answers = job.results()
    go_on.touch()
    assert older.wait() == 1, older.end
    assert isinstance(error_in_text(older.text), FencedError), older.end
    assert job.results() == answers
    job.add(make_orders(1, seed=48))
    job.run(job.ledger(session, 2))
    job.require_exact()


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
