"""One side of ``count``, in a process of its own: runs a counting query and checks every batch's output."""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

import statelog
from benchmarks.count import CEILING, SPARK, STATELOG
from benchmarks.count_expected import count_checks, expected_counts
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
    rows = rate_source(session, rows_per_batch, parallelism).select(pseudo_random(keys, F.col("value")).alias("key"))
    output = _operator(side, rows, parallelism, recorder)
    mode = "append" if side == CEILING else "update"
    done = run_batches(output, _check_columns(side), mode, directory, _STATE_FOLDERS[side], batches)
    if side == CEILING:
        done.require(side, [{"total": rows_per_batch}] * batches)
    else:
        ranges = [(batch * rows_per_batch, (batch + 1) * rows_per_batch) for batch in range(batches)]
        done.require(side, expected_counts(session, ranges, keys))
    session.stop()
    return done.to_json(recorder)


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
    return [F.sum("n").alias("total")] if side == CEILING else count_checks()
