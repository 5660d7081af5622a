"""What queries return that count rows by key, computed without any state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from benchmarks.streaming import pseudo_random

__all__ = ["count_checks", "expected_counts"]


def count_checks() -> list[Column]:
    """Aggregates of a batch's output, for :meth:`benchmarks.streaming.QueryRun.require`."""
    total = F.sum("n").alias("total")
    return [F.count(F.lit(1)).alias("keys"), total, F.sum(F.col("key") * F.col("n")).alias("weighted")]


def expected_counts(session: SparkSession, ranges: Iterable[tuple[int, int]], keys: int) -> Iterator[dict[str, int]]:
    """What :func:`count_checks` should find, by batch.

    A batch's output holds, for each of its keys, the number of rows so far: of all batches, so that a count
    lost or doubled anywhere shows in the next batch that has the key.

    Parameters
    ----------
    session : SparkSession
        Computes the keys.
    ranges : iterable of pair of int
        The batches: the first number of each and the one after its last. A row's key is :func:`pseudo_random` of
        its number.
    keys : int
        Number of possible keys.
    """
    counts = np.zeros(keys, np.int64)
    for first, end in ranges:
        values = session.range(first, end)
        column = values.select(pseudo_random(keys, F.col("id")).alias("key")).toArrow().column("key").to_numpy()
        changed, rows = np.unique(column, return_counts=True)
        counts[changed] += rows
        new = counts[changed]
        yield {"keys": len(changed), "total": int(new.sum()), "weighted": int((changed * new).sum())}
