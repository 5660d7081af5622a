"""The way of rows to the partitions of their subtasks."""

from __future__ import annotations

import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from statelog.spark.plan.placement import labels, to_subtasks

pytestmark = [pytest.mark.spark, pytest.mark.smoke]


@pytest.mark.parametrize("parallelism", [1, 2, 3, 16])
def test_rows_come_to_the_partition_of_their_subtask(spark: SparkSession, parallelism: int) -> None:
    rows = spark.range(0, 3 * parallelism).select((F.col("id") % parallelism).cast("int").alias("subtask"))
    found = to_subtasks(rows, parallelism, F.col("subtask")).select("subtask", F.spark_partition_id()).collect()
    assert sorted(map(tuple, found)) == [(subtask, subtask) for subtask in range(parallelism) for _ in range(3)]


def test_labels_go_by_sparks_hash(spark: SparkSession) -> None:
    for parallelism in (7, 1000):
        chosen = labels(parallelism)
        rows = spark.createDataFrame([(label,) for label in chosen], "label int")
        places = rows.select(F.expr(f"pmod(hash(label), {parallelism})")).collect()
        assert [place for (place,) in places] == list(range(parallelism))
        assert len(np.unique(chosen)) == parallelism
