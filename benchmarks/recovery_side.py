"""The processes of ``recovery``: one that builds a state and is killed, and one that goes on with it."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import statelog
from benchmarks.payloads import PAYLOAD_OUTPUT, check_payloads, payload_rows, rows_read, start_checked
from benchmarks.recovering import KeepPayload, RestoreRecorder
from benchmarks.streaming import begun_s, make_session, rate_source

__all__ = ["BUILT_FILE", "CHANGELOG_OFF", "CHANGELOG_ON", "DEDUPLICATION", "PROCESSOR", "build", "restart"]

CHANGELOG_ON: Final = "changelog on"
CHANGELOG_OFF: Final = "changelog off"
DEDUPLICATION: Final = "Spark deduplication"
PROCESSOR: Final = "Spark transformWithState"

BUILT_FILE: Final = "built"
"""Holds the first batch after the state is built."""

_POLL_S: Final = 0.05
# So that a snapshot is there when the process is killed soon; by default the interval is a minute.
_SPARK: Final = {"spark.sql.streaming.stateStore.maintenanceInterval": "1s"}


def build(
    side: str,
    keys: int,
    value_bytes: int,
    build_batches: int,
    rows_per_batch: int,
    parallelism: int,
    directory: str,
    local_directory: str,
) -> None:
    """Give each key its first row in a few large batches, then go on with small ones until the process is killed.

    Parameters
    ----------
    side : str
        `CHANGELOG_ON`, `CHANGELOG_OFF`, `DEDUPLICATION` or `PROCESSOR`.
    keys, value_bytes : int
        Size of the state.
    build_batches : int
        Number of large batches.
    rows_per_batch, parallelism : int
        Rows of a small batch, and number of subtasks, state partitions and cores.
    directory : str
        A directory for the checkpoint and Spark's scratch files.
    local_directory : str
        For local copies.
    """
    session = make_session("recovery", parallelism, 100, directory, _SPARK)
    sizes = (-(-keys // build_batches), rows_per_batch)
    for size in sizes:
        rows = payload_rows(rate_source(session, size, parallelism), keys, value_bytes)
        options = _options(side, RestoreRecorder(), local_directory)
        query = start_checked(_operator(side, rows, parallelism, options), directory)
        while query.isActive and (size == rows_per_batch or rows_read(query) < keys):
            time.sleep(_POLL_S)
            if size == rows_per_batch and query.lastProgress and not (Path(directory) / BUILT_FILE).exists():
                (Path(directory) / BUILT_FILE).write_text(str(query.lastProgress["batchId"]))
        _stop(query)


def restart(
    side: str,
    keys: int,
    value_bytes: int,
    rows_per_batch: int,
    batches: int,
    parallelism: int,
    directory: str,
    local_directory: str,
    started_s: float,
) -> dict[str, Any]:
    """Go on with a checkpoint for some batches.

    Parameters
    ----------
    side, keys, value_bytes, rows_per_batch, parallelism, directory, local_directory
        As for :func:`build`.
    batches : int
        How many batches to run, the first included.
    started_s : float
        When the process was started, seconds since the Unix epoch.

    Raises
    ------
    RuntimeError
        If the query fails, or a batch's output is not what it should be.
    """
    session = make_session("recovery", parallelism, 100, directory, _SPARK)
    if side in (DEDUPLICATION, PROCESSOR):
        _load_library(session)
    recorder = RestoreRecorder()
    rows = payload_rows(rate_source(session, rows_per_batch, parallelism), keys, value_bytes)
    output = _operator(side, rows, parallelism, _options(side, recorder, local_directory))
    query = start_checked(output, directory)
    while query.isActive and (query.lastProgress is None or len(query.recentProgress) < batches):
        time.sleep(_POLL_S)
    _stop(query)
    progress = [json.loads(each.json) for each in query.recentProgress][:batches]
    check_payloads(session, side, progress, keys, value_bytes, is_deduplicated=side == DEDUPLICATION)
    session.stop()
    return _measured(progress, recorder, started_s)


def _measured(progress: list[dict[str, Any]], recorder: RestoreRecorder, started_s: float) -> dict[str, Any]:
    first, *later = progress
    first_begun_s = begun_s(first)
    first_s = first["durationMs"]["triggerExecution"] / 1000
    measured = {
        "batch": first["batchId"],
        "rows": [each["numInputRows"] for each in progress],
        "total_s": first_begun_s + first_s - started_s,
        "start_up_s": first_begun_s - started_s,
        "first_batch_s": first_s,
        "later_batch_s": statistics.median(each["durationMs"]["triggerExecution"] for each in later) / 1000,
        "log_s": 0.0,
    }
    if recorder.restores:
        (opened, opened_s), *_ = recorder.restores
        checkpoint = recorder.checkpoints[0]
        measured["log_s"] = opened.log_s
        measured["log_entries"] = opened.log_entries
        if opened_s < first_begun_s:
            measured["start_up_s"] -= opened.log_s
        measured["restore_s"] = checkpoint.restore_s
        measured["restored_bytes"] = checkpoint.restored_bytes
        measured["later_restore_s"] = statistics.median(each.restore_s for each in recorder.checkpoints[1:])
    else:
        [operator] = first["stateOperators"]
        partitions = operator["numShufflePartitions"]
        metrics = operator["customMetrics"]
        measured["restore_s"] = metrics["rocksdbLoadLatencyMs"] / 1000 / partitions
        measured["replay_s"] = metrics["rocksdbReplayChangeLogLatencyMs"] / 1000 / partitions
        measured["changelogs"] = metrics["rocksdbNumReplayChangelogFiles"] / partitions
    measured["processing_s"] = measured["total_s"] - measured["start_up_s"] - measured["log_s"] - measured["restore_s"]
    return measured


def _load_library(session: SparkSession) -> None:
    """Load the native library that Spark would load with its first state; it is no part of a state."""
    jvm: Any = session.sparkContext._jvm
    jvm.org.rocksdb.RocksDB.loadLibrary()


def _options(side: str, recorder: RestoreRecorder, local_directory: str) -> statelog.Options:
    return statelog.Options(changelog=side == CHANGELOG_ON, local_directory=local_directory, observer=recorder)


def _operator(side: str, rows: DataFrame, parallelism: int, options: statelog.Options) -> DataFrame:
    if side == DEDUPLICATION:
        new = rows.dropDuplicates(["key", "payload"])
        return new.select("key", F.lit(1).alias("n"), F.length("payload").alias("found"))
    if side == PROCESSOR:
        return rows.groupBy("key").transformWithState(KeepPayload(), PAYLOAD_OUTPUT, "update", "None")
    return statelog.key_by(rows, "key").transformWithState(
        KeepPayload(), PAYLOAD_OUTPUT, "update", "None", parallelism=parallelism, options=options
    )


def _stop(query: StreamingQuery) -> None:
    query.stop()
    if error := query.exception():
        raise RuntimeError(f"the query failed: {error}")
