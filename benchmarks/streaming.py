"""Streaming queries that are measured: the session, the input, a run of some batches, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.counting import CheckpointRecorder

__all__ = [
    "QueryRun",
    "begun_s",
    "make_session",
    "payload",
    "pseudo_random",
    "rate_source",
    "run_batches",
]

_POLL_S: Final = 0.25
_DIGEST_BYTES: Final = 32
_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def make_session(
    name: str, parallelism: int, batches: int, directory: str, more: Mapping[str, str] | None = None
) -> SparkSession:
    """A session whose own state store is RocksDB with its changelog, and that remembers the progress of all batches.

    Parameters
    ----------
    name : str
        The benchmark.
    parallelism : int
        Number of cores and of state partitions.
    batches : int
        How many batches will run.
    directory : str
        For scratch files.
    more : dict of str, optional
        More settings of Spark.
    """
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.local.dir": f"{directory}/scratch",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": f"{directory}/warehouse",
        "spark.sql.shuffle.partitions": str(parallelism),
        "spark.sql.streaming.numRecentProgressUpdates": str(batches + 100),
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        **(more or {}),
    }
    builder = SparkSession.builder.master(f"local[{parallelism}]").appName(f"statelog benchmark: {name}")
    for setting, value in settings.items():
        builder = builder.config(setting, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def rate_source(session: SparkSession, rows_per_batch: int, parallelism: int, start_ms: int = 0) -> DataFrame:
    """Rows with successive numbers in `value`; their `timestamp` is `start_ms` and a second more with every batch."""
    source = session.readStream.format("rate-micro-batch").option("rowsPerBatch", rows_per_batch)
    source = source.option("startTimestamp", start_ms).option("advanceMillisPerBatch", 1000)
    return source.option("numPartitions", parallelism).load()


def pseudo_random(below: int, *columns: Column) -> Column:
    """A number from 0 on that depends on some columns and looks random."""
    return F.pmod(F.xxhash64(*columns), F.lit(below))


def payload(column: str, value_bytes: int) -> Column:
    """So many bytes that depend on a column, do not compress, and are called ``payload``."""
    parts = range(-(-value_bytes // _DIGEST_BYTES))
    digests = [F.sha2(F.concat_ws("/", F.col(column).cast("string"), F.lit(part)), 256) for part in parts]
    return F.substring(F.unhex(F.concat(*digests)), 1, value_bytes).alias("payload")


def begun_s(progress: dict[str, Any]) -> float:
    """When a batch began, seconds since the Unix epoch."""
    begun = np.datetime64(progress["timestamp"].removesuffix("Z"), "ms")
    return float(begun.astype(np.int64)) / 1000


@dataclasses.dataclass(frozen=True)
class QueryRun:
    """The first batches of a query.

    Parameters
    ----------
    progress : list of dict
        Spark's progress by batch.
    files : dict
        Number and size of the state's files.
    """

    progress: list[dict[str, Any]]
    files: dict[str, int]

    def require(self, side: str, expected: Iterable[dict[str, int]]) -> None:
        """Compare what the query observed with what it should have.

        Parameters
        ----------
        side : str
            What ran, for the message.
        expected : iterable of dict
            The right values of the `checks`, by batch.

        Raises
        ------
        RuntimeError
            If a batch's output is not what it should be.
        """
        for number, (entry, wanted) in enumerate(zip(self.progress, expected, strict=True)):
            # A sum of no rows is null.
            found = {name: value or 0 for name, value in entry["observedMetrics"]["check"].items()}
            if entry["batchId"] != number or found != wanted:
                raise RuntimeError(
                    f"{side}: batch {entry['batchId']} returned {found}; batch {number} should return {wanted}"
                )

    def to_json(self, recorder: CheckpointRecorder) -> dict[str, Any]:
        """Durations and checkpoints by batch, and the files of the state."""
        return {
            "batches": [{"batch": entry["batchId"], **entry["durationMs"]} for entry in self.progress],
            "checkpoints": [
                dataclasses.asdict(metrics) for metrics in recorder.checkpoints if metrics.batch < len(self.progress)
            ],
            **self.files,
        }


def run_batches(
    output: DataFrame, checks: Sequence[Column], output_mode: str, directory: str, state_folder: str, batches: int
) -> QueryRun:
    """Run a query for some batches into the sink ``noop``.

    Parameters
    ----------
    output : DataFrame
        A streaming DataFrame.
    checks : sequence of Column
        Aggregates of a batch's output, which Spark computes on the way to the sink.
    output_mode : str
        Spark's output mode.
    directory : str
        An existing directory for the checkpoint.
    state_folder : str
        Where the state is, below the checkpoint.
    batches : int
        How many batches to run.

    Raises
    ------
    RuntimeError
        If the query fails.
    """
    location = Path(directory) / "checkpoint"
    query = (
        output.observe("check", *checks)
        .writeStream.format("noop")
        .outputMode(output_mode)
        .option("checkpointLocation", str(location))
        .start()
    )
    files = _Files(location / state_folder)
    while query.isActive and (query.lastProgress is None or query.lastProgress["batchId"] < batches - 1):
        files.look()
        time.sleep(_POLL_S)
    query.stop()
    if error := query.exception():
        raise RuntimeError(f"the query failed: {error}")
    files.look()
    progress = [entry for each in query.recentProgress if (entry := json.loads(each.json))["batchId"] < batches]
    return QueryRun(progress, files.to_json())


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
