"""One side of ``window-space``, in a process of its own: sliding windows, and how large their checkpoints are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.counting import CheckpointRecorder
from benchmarks.streaming import make_session, payload, pseudo_random, rate_source, run_batches
from benchmarks.window_counting import CountWindowRows

__all__ = ["CHANGELOG_OFF", "CHANGELOG_ON", "expected_windows", "run"]

CHANGELOG_ON: Final = "changelog on"
CHANGELOG_OFF: Final = "changelog off"

_OUTPUT: Final = "key long, n long, bytes long"
_DELAY: Final = "0 seconds"
_BATCH_MS: Final = 1000
"""Time from batch to batch, as the source of rows has it."""


def run(
    side: str,
    rows_per_batch: int,
    keys: int,
    value_bytes: int,
    window_batches: int,
    slide_batches: int,
    batches: int,
    max_log_to_base: float,
    parallelism: int,
    directory: str,
) -> dict[str, Any]:
    """Give the rows of sliding windows to a processor, a second of event time per batch.

    Parameters
    ----------
    side : str
        `CHANGELOG_ON` or `CHANGELOG_OFF`.
    rows_per_batch, keys, value_bytes : int
        Size of the input.
    window_batches, slide_batches : int
        Length of a window and distance of their starts, in batches.
    batches, parallelism : int
        Number of batches, and of subtasks and cores.
    max_log_to_base : float
        As in :class:`statelog.Options`.
    directory : str
        An empty directory for the checkpoint and Spark's scratch files.

    Raises
    ------
    RuntimeError
        If the query fails, or a batch's output is not what it should be.
    """
    session = make_session("window-space", parallelism, batches, directory)
    recorder = CheckpointRecorder()
    source = rate_source(session, rows_per_batch, parallelism).withWatermark("timestamp", _DELAY)
    rows = source.select("timestamp", _key(keys, "value"), payload("value", value_bytes))
    windows = statelog.SlidingWindows(window_batches * _BATCH_MS, slide_batches * _BATCH_MS)
    options = statelog.Options(changelog=side == CHANGELOG_ON, max_log_to_base=max_log_to_base, observer=recorder)
    stream = statelog.key_by(rows, "key").window(windows)
    output = stream.process(CountWindowRows(), _OUTPUT, parallelism=parallelism, options=options)
    checks = [F.sum(name).alias(name) for name in ("n", "bytes")] + [F.sum(F.col("key") * F.col("n")).alias("weighted")]
    done = run_batches(output, checks, "append", directory, "statelog", batches)
    sums = [_sums(session, batch, rows_per_batch, keys) for batch in range(batches)]
    done.require(side, expected_windows(sums, rows_per_batch, value_bytes, window_batches, slide_batches))
    session.stop()
    return done.to_json(recorder)


def _key(keys: int, value: str) -> Column:
    return pseudo_random(keys, F.col(value)).alias("key")


def _sums(session: SparkSession, batch: int, rows_per_batch: int, keys: int) -> int:
    """The sum of the keys of a batch."""
    numbers = session.range(batch * rows_per_batch, (batch + 1) * rows_per_batch)
    column = numbers.select(_key(keys, "id")).toArrow().column("key").to_numpy()
    return int(column.astype(np.int64).sum())


def expected_windows(
    sums: list[int], rows_per_batch: int, value_bytes: int, window_batches: int, slide_batches: int
) -> Iterator[dict[str, int]]:
    """What the batches return: batch N is at second N, and its watermark, the time of the batch before, ends windows.

    Parameters
    ----------
    sums : list of int
        The sum of the keys of each batch.
    rows_per_batch, value_bytes, window_batches, slide_batches : int
        As for :func:`run`.
    """
    for batch in range(len(sums)):
        end = batch - 1
        is_end = (end - window_batches) % slide_batches == 0
        held = range(max(0, end - window_batches), max(0, end)) if is_end else range(0)
        n = rows_per_batch * len(held)
        yield {"n": n, "bytes": n * value_bytes, "weighted": sum(sums[number] for number in held)}
