"""One side of ``files``, in a process of its own: a windowed word count, and the files that it leaves behind."""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import statelog
from benchmarks.counting import CheckpointRecorder
from benchmarks.streaming import make_session, pseudo_random, rate_source, run_batches

__all__ = ["SPARK", "run"]

SPARK: Final = "Spark"
_WINDOW_S: Final = 10
_DELAY: Final = "0 seconds"


def run(side: str, rows_per_batch: int, words: int, batches: int, parallelism: int, directory: str) -> dict[str, Any]:
    """Count words in windows of ten batches.

    Parameters
    ----------
    side : str
        `SPARK`, or how statelog merges files.
    rows_per_batch, words, batches, parallelism : int
        Size of the input, and number of subtasks and state partitions.
    directory : str
        An empty directory for the checkpoint and Spark's scratch files.

    Raises
    ------
    RuntimeError
        If the query fails, or a window does not have all of its rows.
    """
    session = make_session("files", parallelism, batches, directory)
    recorder = CheckpointRecorder()
    rows = rate_source(session, rows_per_batch, parallelism).select(
        "timestamp", pseudo_random(words, F.col("value")).alias("word")
    )
    counts = _counts(side, rows.withWatermark("timestamp", _DELAY), parallelism, recorder)
    folder = "state" if side == SPARK else "statelog"
    done = run_batches(counts, [F.sum("n").alias("rows")], "append", directory, folder, batches)
    returned = [entry["observedMetrics"]["check"]["rows"] or 0 for entry in done.progress]
    windows = sum(returned) // (_WINDOW_S * rows_per_batch)
    if set(returned) - {0, _WINDOW_S * rows_per_batch} or windows < batches // _WINDOW_S - 2:
        raise RuntimeError(f"{side}: the windows returned have {returned} rows, of {_WINDOW_S * rows_per_batch} each")
    session.stop()
    return {**done.to_json(recorder), "windows": windows}


def _counts(side: str, rows: DataFrame, parallelism: int, recorder: CheckpointRecorder) -> DataFrame:
    if side == SPARK:
        window = F.window("timestamp", f"{_WINDOW_S} seconds")
        return rows.groupBy(window, "word").agg(F.count(F.lit(1)).alias("n"))
    windows = statelog.key_by(rows, "word").window(statelog.TumblingWindows(_WINDOW_S * 1000))
    options = statelog.Options(file_merging=side, observer=recorder)
    return windows.agg(statelog.Count().alias("n"), parallelism=parallelism, options=options)
