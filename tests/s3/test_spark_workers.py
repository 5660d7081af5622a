"""Stores in the driver and in Python workers, which Spark's daemon forks, and replaces when they die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from statelog.storage import Store, open_store
from tests.s3.server import RadosGateway

pytest_plugins = ("tests.s3.plugin",)
pytestmark = pytest.mark.spark


@pytest.fixture
def session(s3_server: RadosGateway, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """The tests' session, whose workers get the server's settings as ``spark.executorEnv.*`` gives them."""
    for name, value in s3_server.environment.items():
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
    return spark


def run_in_workers(session: SparkSession, store: Store, run: str, *, die: bool = False) -> set[int]:
    """In each of two tasks read what the driver wrote, and write the process's number below `run`; returns these."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch["id"].to_pylist():
                assert store.read("driver") == b"from the driver"
                store.put(f"{run}/{task}", b"%d" % os.getpid())
                if die and task == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield pa.RecordBatch.from_pydict({"pid": [os.getpid()]})

    rows = session.range(0, 2, 1, 2).mapInArrow(work, "pid long").collect()
    assert [info.name for info in store.list(f"{run}/")] == [f"{run}/0", f"{run}/1"]
    assert {int(store.read(f"{run}/{task}")) for task in range(2)} == {row.pid for row in rows}
    return {row.pid for row in rows}


def test_a_store_that_the_driver_has_used_works_in_workers(session: SparkSession, s3_location: str) -> None:
    store = open_store(s3_location)
    store.put("driver", b"from the driver")
    # Workers are used again, and so are their clients.
    assert os.getpid() not in run_in_workers(session, store, "first") | run_in_workers(session, store, "second")


def test_the_successor_of_a_killed_worker_works(session: SparkSession, s3_location: str) -> None:
    store = open_store(s3_location)
    store.put("driver", b"from the driver")
    with pytest.raises(Py4JJavaError, match="Python worker exited unexpectedly"):
        run_in_workers(session, store, "killed", die=True)
    assert int(store.read("killed/0")) not in run_in_workers(session, store, "successor")
