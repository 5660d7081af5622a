"""One side of ``count``, in a process of its own: runs a counting query and checks every batch's output."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import statelog
from benchmarks.count import CEILING, SPARK, STATELOG
from benchmarks.counting import CheckpointRecorder, CountRows, count_batches

__all__ = ["run"]

_STATE_FOLDERS: Final = {STATELOG: "statelog", SPARK: "state", CEILING: "none"}
_OUTPUT: Final = "key long, n long"
_POLL_S: Final = 0.25
_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


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
    session = _session(parallelism, batches, directory)
    recorder = CheckpointRecorder()
    output = _operator(side, _input(session, rows_per_batch, keys, parallelism), parallelism, recorder)
    location = Path(directory) / "checkpoint"
    query = (
        output.observe("check", *_check_columns(side))
        .writeStream.format("noop")
        .outputMode("append" if side == CEILING else "update")
        .option("checkpointLocation", str(location))
        .start()
    )
    files = _Files(location / _STATE_FOLDERS[side])
    while query.isActive and (query.lastProgress is None or query.lastProgress["batchId"] < batches - 1):
        files.look()
        time.sleep(_POLL_S)
    query.stop()
    if error := query.exception():
        raise RuntimeError(f"the query of {side} failed: {error}")
    files.look()
    progress = [entry for each in query.recentProgress if (entry := json.loads(each.json))["batchId"] < batches]
    _verify(session, side, progress, rows_per_batch, keys)
    session.stop()
    return {
        "batches": [{"batch": entry["batchId"], **entry["durationMs"]} for entry in progress],
        "checkpoints": [dataclasses.asdict(metrics) for metrics in recorder.checkpoints if metrics.batch < batches],
        **files.to_json(),
    }


def _session(parallelism: int, batches: int, directory: str) -> SparkSession:
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.local.dir": f"{directory}/scratch",
        "spark.sql.warehouse.dir": f"{directory}/warehouse",
        "spark.sql.shuffle.partitions": str(parallelism),
        "spark.sql.streaming.numRecentProgressUpdates": str(batches + 100),
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }
    builder = SparkSession.builder.master(f"local[{parallelism}]").appName("statelog benchmark: count")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _key(keys: int, value: str) -> Column:
    return F.pmod(F.xxhash64(F.col(value)), F.lit(keys)).alias("key")


def _input(session: SparkSession, rows_per_batch: int, keys: int, parallelism: int) -> DataFrame:
    source = session.readStream.format("rate-micro-batch").option("rowsPerBatch", rows_per_batch)
    return source.option("numPartitions", parallelism).load().select(_key(keys, "value"))


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
    """Aggregates of a batch's output, which Spark computes on the way to the sink."""
    total = F.sum("n").alias("total")
    if side == CEILING:
        return [total]
    return [F.count(F.lit(1)).alias("keys"), total, F.sum(F.col("key") * F.col("n")).alias("weighted")]


def _verify(session: SparkSession, side: str, progress: list[dict[str, Any]], rows_per_batch: int, keys: int) -> None:
    """Compare each batch's output with counts that are computed without any state.

    A batch's output holds, for each of its keys, the number of rows so far: of all batches, so that a count
    lost or doubled anywhere shows in the next batch that has the key.
    """
    expected = _expected(session, len(progress), rows_per_batch, keys)
    for number, (entry, right) in enumerate(zip(progress, expected, strict=True)):
        found = entry["observedMetrics"]["check"]
        wanted = {"total": rows_per_batch} if side == CEILING else right
        if entry["batchId"] != number or found != wanted:
            raise RuntimeError(
                f"{side}: batch {entry['batchId']} returned {found}; batch {number} should return {wanted}"
            )


def _expected(session: SparkSession, batches: int, rows_per_batch: int, keys: int) -> Iterator[dict[str, int]]:
    counts = np.zeros(keys, np.int64)
    for batch in range(batches):
        values = session.range(batch * rows_per_batch, (batch + 1) * rows_per_batch)
        column = values.select(_key(keys, "id")).toArrow().column("key").to_numpy()
        changed, rows = np.unique(column, return_counts=True)
        counts[changed] += rows
        new = counts[changed]
        yield {"keys": len(changed), "total": int(new.sum()), "weighted": int((changed * new).sum())}


class _Files:
    """Files below a folder, looked at from time to time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, int] = {}
        self._live: dict[str, int] = {}

    def look(self) -> None:
        """Take down which files there are."""
        self._live = dict(_sizes(str(self._folder)))
        for path, size in self._live.items():
            self._seen[path] = max(size, self._seen.get(path, 0))

    def to_json(self) -> dict[str, int]:
        """Files at the last look, and those of any look."""
        return {
            "files_live": len(self._live),
            "bytes_live": sum(self._live.values()),
            "files_seen": len(self._seen),
            "bytes_seen": sum(self._seen.values()),
        }


def _sizes(folder: str) -> Iterator[tuple[str, int]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    yield from _sizes(entry.path)
                elif not entry.name.endswith(".tmp"):
                    yield entry.path, entry.stat().st_size
    except FileNotFoundError:
        return  # removed since it was listed
