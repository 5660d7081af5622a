"""One side of ``state``, in a process of its own: runs a query and checks every batch's output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.counting import CheckpointRecorder
from benchmarks.state import SPARK, STATELOG
from benchmarks.state_expected import EXPECTED, ITEMS, InputBatch
from benchmarks.state_kinds import KINDS, Kind
from benchmarks.state_rows import OUTPUT, WINDOW_MS
from benchmarks.streaming import make_session, pseudo_random, rate_source, run_batches

__all__ = ["run"]

_STATE_FOLDERS: Final = {STATELOG: "statelog", SPARK: "state"}
_START_MS: Final = 1_700_000_000_000
_BATCH_MS: Final = 1000
_SPREAD_MS: Final = 2000
"""How far the event times of a batch lie apart, and the delay of the watermark: so no row is late."""


def run(
    side: str, kind: str, mode: str, rows_per_batch: int, keys: int, batches: int, parallelism: int, directory: str
) -> dict[str, Any]:
    """Run a side for some batches, and for one more in which lists are read.

    Parameters
    ----------
    side : str
        `STATELOG` or `SPARK`.
    kind : str
        One of `benchmarks.state_kinds.KINDS`.
    mode : {"row", "pandas"}
        What the processor takes.
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
    what = KINDS[kind]
    checked = batches + ("checks" in what.columns)
    session = make_session("state", parallelism, checked, directory)
    recorder = CheckpointRecorder()
    source = rate_source(session, rows_per_batch, parallelism, _START_MS)
    columns = _columns(F.col("value"), F.unix_millis("timestamp"), keys, F.col("value") >= rows_per_batch * batches)
    rows = source.select([columns[name].alias(name) for name in ("key", *what.columns)])
    if "time" in what.columns:
        rows = rows.withWatermark("time", f"{_SPREAD_MS} milliseconds")
    output = _operator(side, kind, mode, rows, parallelism, recorder)
    checks = [F.count(F.lit(1)).alias("keys"), F.sum("n").alias("total")]
    checks.append(F.sum(F.col("key") * F.col("n")).alias("weighted"))
    done = run_batches(output, checks, "update", directory, _STATE_FOLDERS[side], checked)
    done.require(f"{kind}, {mode}, {side}", EXPECTED[kind](_input(session, rows_per_batch, keys, batches, checked)))
    session.stop()
    result = done.to_json(recorder)
    for name in ("batches", "checkpoints"):
        result[name] = [each for each in result[name] if each["batch"] < batches]
    return result


def _columns(number: Column, batch_ms: Column, keys: int, checks: Column) -> dict[str, Column]:
    """The input columns, from the number of a row and the time of its batch."""
    time_ms = batch_ms - pseudo_random(_SPREAD_MS, number, F.lit(2))
    return {
        "key": pseudo_random(keys, number),
        "item": pseudo_random(ITEMS, number, F.lit(1)),
        "time": F.timestamp_millis(time_ms),
        "time_ms": time_ms,
        "checks": checks,
    }


def _operator(
    side: str, kind: str, mode: str, rows: DataFrame, parallelism: int, recorder: CheckpointRecorder
) -> DataFrame:
    what = KINDS[kind]
    own: dict[str, Any] = {"parallelism": parallelism, "options": statelog.Options(observer=recorder)}
    if side == STATELOG and kind == "window":
        windows = statelog.key_by(rows, "key").window(statelog.TumblingWindows(WINDOW_MS))
        return windows.agg(statelog.Count().alias("n"), **own)
    keyed: Any = statelog.key_by(rows, "key") if side == STATELOG else rows.groupBy("key")
    if side == SPARK:
        own = {}
    output: DataFrame
    if mode == "row":
        output = keyed.transformWithState(what.takes_rows(), OUTPUT, "update", what.time_mode, **own)
    else:
        output = keyed.transformWithStateInPandas(_require(what), OUTPUT, "update", what.time_mode, **own)
    return output


def _require(what: Kind) -> Any:
    if what.takes_frames is None:
        raise ValueError("this kind has no processor that takes frames")
    return what.takes_frames()


def _input(session: SparkSession, rows_per_batch: int, keys: int, batches: int, checked: int) -> Iterator[InputBatch]:
    """The same input, batch by batch."""
    for batch in range(checked):
        numbers = session.range(batch * rows_per_batch, (batch + 1) * rows_per_batch)
        batch_ms = F.lit(_START_MS + batch * _BATCH_MS)
        columns = _columns(F.col("id"), batch_ms, keys, F.lit(batch >= batches))
        held = numbers.select(*(columns[name].alias(name) for name in ("key", "item", "time_ms"))).toArrow()
        key, item, time_ms = (column.to_numpy() for column in held.columns)
        yield InputBatch(key, item, time_ms, _SPREAD_MS, batch >= batches)
