"""Spark's file sink leaves out batches that its log has; a start of which rows would be missing is refused."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import statelog
from statelog import ConfigurationError
from tests.spark.support import Job, Order, Salted, make_orders

pytestmark = pytest.mark.spark


class Run:
    """A query with Spark's file sink, whose rows tell the start that wrote them."""

    def __init__(self, spark: SparkSession, root: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.job = Job(root)
        self.folder = root / "written"
        self._spark = spark
        self._caplog = caplog

    def start(self, salt: int, checkpoint: Path | None = None) -> list[str]:
        """Run over all input; returns the warnings."""
        (self.job.root / "salt").write_text(str(salt))
        rows = statelog.key_by(self.job.read(self._spark), "user", parallelism=2).transformWithState(
            Salted(str(self.job.root / "salt")), "user string, total long", "append", "None"
        )
        writer = rows.writeStream.format("json").option("path", str(self.folder))
        writer = writer.option("checkpointLocation", str(checkpoint or self.job.checkpoint))
        self._caplog.clear()
        with self._caplog.at_level(logging.WARNING, "statelog"):
            writer.trigger(availableNow=True).start().awaitTermination()
        return [record.getMessage() for record in self._caplog.records if "file sink" in record.getMessage()]

    def take_back(self, first: int) -> None:
        """Remove the files of a batch and later ones from the sink's log: ``8``, ``.8.crc``, ``9.compact``."""
        for path in (self.folder / "_spark_metadata").iterdir():
            if int(path.name.lstrip(".").partition(".")[0]) >= first:
                path.unlink()

    def written(self) -> list[list[Any]]:
        """All rows in the sink's folder."""
        rows = self._spark.read.schema("user string, total long").json(str(self.folder)).collect()
        return sorted(map(list, rows))


def totals(batches: list[list[Order]], salts: list[int]) -> list[list[Any]]:
    """The rows of all batches, each computed with its salt."""
    held: Counter[str] = Counter()
    rows: list[list[Any]] = []
    for orders, salt in zip(batches, salts, strict=True):
        for order in orders:
            held[order["user"]] += salt
        rows += [[user, held[user]] for user in {order["user"] for order in orders}]
    return sorted(rows)


def test_after_a_rewind_by_one_batch_it_must_be_taken_back(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(spark, tmp_path, caplog)
    run.job.add(make_orders(3, seed=91))
    assert run.start(1) == []
    assert statelog.rewind(run.job.checkpoint, to=1).next_batch == 2

    with pytest.raises(StreamingQueryException, match="begins with batch 2.*has batches up to 2"):
        run.start(10)
    run.take_back(2)
    run.job.add(make_orders(1, seed=92))
    assert run.start(100) == []
    assert run.written() == totals(run.job.batches_of_spark(), [1, 1, 100, 100])


def test_after_a_rewind_by_several_batches_they_must_be_taken_back(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Across the batches in which Spark compacts the sink's log."""
    run = Run(spark, tmp_path, caplog)
    run.job.add(make_orders(12, seed=91, rows=5))
    assert run.start(1) == []
    assert statelog.rewind(run.job.checkpoint, to=7).next_batch == 8

    run.job.add(make_orders(1, seed=92))
    with pytest.raises(StreamingQueryException) as failure:
        run.start(10)
    error = statelog.error_of(failure.value)
    assert isinstance(error, ConfigurationError)
    assert f"begins with batch 8, but Spark's file sink in file:{run.folder} has batches up to 11" in error.message
    assert "Remove the files of batch 8 and of later batches" in error.hint

    run.take_back(8)
    assert run.start(100) == []
    run.job.add(make_orders(12, seed=93, rows=5))
    assert run.start(1000) == []
    batches = run.job.batches_of_spark()
    assert run.written() == totals(batches, [1] * 8 + [100] * (len(batches) - 20) + [1000] * 12)


def test_a_folder_of_another_query_is_refused(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it has just the first batch, which a query that has died after it would have as well."""
    run = Run(spark, tmp_path, caplog)
    run.job.add(make_orders(1, seed=93))
    assert run.start(1) == []
    for batches in (1, 2):
        with pytest.raises(StreamingQueryException, match=f"has batches up to {batches - 1}, from another query"):
            run.start(1, tmp_path / f"another checkpoint {batches}")
        run.job.add(make_orders(1, seed=94))
        assert run.start(1) == []


def test_a_batch_that_spark_repeats_after_a_crash_is_no_reason_for_a_warning(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(spark, tmp_path, caplog)
    run.job.add(make_orders(2, seed=94))
    assert run.start(1) == []
    (run.job.checkpoint / "commits" / "1").unlink()  # as if the driver had died between the sink's commit and Spark's
    (run.job.checkpoint / "commits" / ".1.crc").unlink()
    run.job.add(make_orders(1, seed=95))
    assert run.start(10) == []
    assert run.written() == totals(run.job.batches_of_spark(), [1, 1, 10])
