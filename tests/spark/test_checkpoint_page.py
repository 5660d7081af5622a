"""The checkpoint page of a running query: it has the durations that the driver has measured."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
from pyspark.sql import DataFrame, SparkSession

import statelog
from statelog import CheckpointMetrics, Options, Recorded
from statelog.pages.live import watch
from tests.spark.support import Job, await_end, make_orders

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
        measured = watch(query).metrics()
    finally:
        seen.set()
    await_end(query)
    assert measured == {"main": tuple(replace(one, measured=Recorded()) for one in notes.metrics)}
    assert [one.batch for one in notes.metrics] == [0, 1]
    assert "Duration of a checkpoint" in text
    assert "Duration of a checkpoint" in shown.html
    assert "main: checkpoint 1 of" in repr(shown)
    assert "Duration of a checkpoint" not in statelog.show(job.checkpoint).html
