"""The checkpoint page of a running query: the durations that the driver has measured, and a restore as it continues."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
from pyspark.sql import DataFrame, SparkSession

import statelog
from statelog import CheckpointMetrics, Options, RestoreProgress
from statelog.tools.pages.live import watch
from tests.spark.support import Job, await_end, make_orders
from tests.stores import KeptStore

pytest.importorskip("jinja2", reason="jinja2 is not installed")
pytest.importorskip("waitress", reason="waitress is not installed")

pytestmark = pytest.mark.spark


class Notes(statelog.Observer):
    def __init__(self) -> None:
        self.metrics: list[CheckpointMetrics] = []

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.metrics.append(metrics)


def test_the_page_of_a_running_query_has_its_durations(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(2))
    reached, seen, notes = threading.Event(), threading.Event(), Notes()

    def save(df: DataFrame, batch: int) -> None:
        job.save(df, batch)
        if batch == 1:
            reached.set()
            assert seen.wait(120)

    query = job.start(job.ledger(spark, 2, Options(observer=notes)), save)
    try:
        assert reached.wait(120)
        with statelog.ui(query) as page, urlopen(page.url) as answer:
            text = answer.read().decode()
        shown = statelog.show(query)
        [live] = watch(query)().operators
    finally:
        seen.set()
    await_end(query)
    assert live.uid == "main"
    assert [one.numbers() for one in live.metrics] == [one.numbers() for one in notes.metrics]
    assert live.newest == notes.metrics[-1]
    assert "Time in batch 1" in text
    assert "Hottest keys of batch 1" in text
    assert [one.batch for one in notes.metrics] == [0, 1]
    assert "Duration of a checkpoint" in text
    assert "Duration of a checkpoint" in shown.html
    assert "main: checkpoint 1 of" in repr(shown)
    assert "Duration of a checkpoint" not in statelog.show(job.checkpoint).html


class SlowStore(KeptStore):
    """Takes longer for a changeset than a restore may take without a report."""

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if "/changes/" in name:
            time.sleep(1.1)
        return super().read(name, offset=offset, length=length)


class Restores(statelog.Observer):
    """Stops a restore at its first report until the page was seen."""

    def __init__(self) -> None:
        self.reached, self.seen = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[type[statelog.Observer], tuple[()]]:
        return statelog.Observer, ()  # tasks need none

    def restoring(self, progress: RestoreProgress) -> None:
        self.reached.set()
        assert self.seen.wait(120)


def test_a_restore_is_shown_before_the_first_batch_is_over(spark: SparkSession, tmp_path: Path) -> None:
    statelog.register_store("slow", SlowStore)
    job = replace(Job(tmp_path), location=f"slow:{tmp_path}/state").add(make_orders(3))
    stored = Options(inline_budget_bytes=0, file_merging="off", local_directory=str(tmp_path / "one"))
    job.run(job.ledger(spark, 2, stored))
    job.add(make_orders(1, seed=2))
    restores = Restores()
    query = job.start(job.ledger(spark, 2, replace(stored, local_directory=str(tmp_path / "two"), observer=restores)))
    try:
        with statelog.ui(query) as page:
            assert restores.reached.wait(120)
            with urlopen(page.url) as answer:
                text = answer.read().decode()
        told = repr(statelog.show(query))
    finally:
        restores.seen.set()
    await_end(query)
    assert "Restoring the state for batch 3" in text
    [(known, read)] = re.findall(r'<progress max="(\d+)" value="(\d+)"', text)
    assert 0 < int(read) < int(known)
    assert "main: restores its state for batch 3" in told
    [live] = watch(query)().operators
    assert live.restoring is None
    assert live.last_restore is not None
    assert live.last_restore.batch == 3
    assert live.last_restore.restored_bytes == sum(
        file.stat().st_size for file in (tmp_path / "state").glob("*/changes/**/*.run") if file.stem < "3"
    )
    assert "last restore of this driver: batch 3" in statelog.show(query).html


def test_the_page_of_a_query_before_its_first_batch(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(1))
    query = job.start(job.ledger(spark, 2))
    try:
        [before] = watch(query)().operators
        text = repr(statelog.show(query))
    finally:
        await_end(query)
    assert before.parallelism == 2
    assert "main: " in text
    assert "main: checkpoint 0 of" in repr(statelog.show(query))


def test_a_query_without_operators_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(1))
    query = job.start(job.read(spark), lambda df, batch: None)
    try:
        with pytest.raises(statelog.ConfigurationError, match="neither a query"):
            statelog.ui(query)
    finally:
        await_end(query)
