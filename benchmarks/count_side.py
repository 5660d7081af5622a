"""One side of ``count``, in a process of its own: runs a counting query and checks every batch's output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.count import CEILING, SPARK, STATELOG
from benchmarks.counting import CheckpointRecorder, CountRows, count_batches
from benchmarks.streaming import make_session, pseudo_random, rate_source, run_batches

__all__ = ["run"]

_STATE_FOLDERS: Final = {STATELOG: "statelog", SPARK: "state", CEILING: "none"}
_OUTPUT: Final = "key long, n long"


def run(side: str, rows_per_batch: int, keys: int, batches: int, parallelism: int, directory: str) -> dict[str, Any]:
    """Run a side for some batches.

    Parameters
    ----------
    side : str
        `STATELOG`, `SPARK` or `CEILING`.
    rows_per_batch, keys, batches, parallelism : int
        Size of the input, and number of subtasks, state partitions and cores.
    directory : str
        An empty directory for the checkpoint and Spark's scratch files.

    Returns
    -------
    dict
        Progress and checkpoints by batch, and the files of the state.

    Raises
    ------
    RuntimeError
        If the query fails, or a batch's output is not what it should be.
    """
    session = make_session("count", parallelism, batches, directory)
    recorder = CheckpointRecorder()
    rows = rate_source(session, rows_per_batch, parallelism).select(_key(keys, "value"))
    output = _operator(side, rows, parallelism, recorder)
    mode = "append" if side == CEILING else "update"
    done = run_batches(output, _check_columns(side), mode, directory, _STATE_FOLDERS[side], batches)
    if side == CEILING:
        done.require(side, [{"total": rows_per_batch}] * batches)
    else:
        done.require(side, _expected(session, batches, rows_per_batch, keys))
    session.stop()
    return done.to_json(recorder)


def _key(keys: int, value: str) -> Column:
    return pseudo_random(keys, F.col(value)).alias("key")


def _operator(side: str, rows: DataFrame, parallelism: int, recorder: CheckpointRecorder) -> DataFrame:
    if side == STATELOG:
        return statelog.key_by(rows, "key").transformWithState(
            CountRows(),
            _OUTPUT,
            "update",
            "None",
            parallelism=parallelism,
            options=statelog.Options(observer=recorder),
        )
    if side == SPARK:
        return rows.groupBy("key").transformWithState(CountRows(), _OUTPUT, "update", "None")
    if side == CEILING:
        return rows.repartition(parallelism, "key").mapInArrow(count_batches, "n long")
    raise ValueError(f"there is no side {side!r}")


def _check_columns(side: str) -> list[Column]:
    """Aggregates of a batch's output."""
    total = F.sum("n").alias("total")
    if side == CEILING:
        return [total]
    return [F.count(F.lit(1)).alias("keys"), total, F.sum(F.col("key") * F.col("n")).alias("weighted")]


def _expected(session: SparkSession, batches: int, rows_per_batch: int, keys: int) -> Iterator[dict[str, int]]:
    """The right values, computed without any state.

    A batch's output holds, for each of its keys, the number of rows so far: of all batches, so that a count
    lost or doubled anywhere shows in the next batch that has the key.
    """
    counts = np.zeros(keys, np.int64)
    for batch in range(batches):
        values = session.range(batch * rows_per_batch, (batch + 1) * rows_per_batch)
        column = values.select(_key(keys, "id")).toArrow().column("key").to_numpy()
        changed, rows = np.unique(column, return_counts=True)
        counts[changed] += rows
        new = counts[changed]
        yield {"keys": len(changed), "total": int(new.sum()), "weighted": int((changed * new).sum())}
