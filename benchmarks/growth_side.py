"""The process of ``growth``: queries with states of different sizes that get the same changes in turn."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import statelog
from benchmarks.counting import CheckpointRecorder, CountRows
from benchmarks.streaming import make_session
from statelog.local.runs import JOB_FOLDER

__all__ = ["run"]

_POLL_S: Final = 0.005
_BUILD_ROWS: Final = 1_000_000
_SETTLING_BATCHES: Final = 60
_JOBS: Final = f"local/statelog/*/*/*/{JOB_FOLDER}/job.msgpack"
_OUTPUT: Final = "key long, n long"
# Queries without new rows should leave the processor to the one that has some.
_SETTINGS: Final = {"spark.sql.streaming.pollingDelay": "100ms"}


def run(
    queries: dict[str, dict[str, Any]], rows_per_batch: int, rounds: int, warm_up: int, parallelism: int, directory: str
) -> dict[str, list[dict[str, Any]]]:
    """Build the states, let upkeep come to its end, and measure batches in turn.

    Parameters
    ----------
    queries : dict of str to dict
        By name, `keys`, the number of keys, `built_with`, the options until the state is built, and `options`, those
        afterwards; None to go on.
    rows_per_batch : int
        Rows, and changed keys, of a measured batch.
    rounds, warm_up : int
        Measured batches of each query, and how many before them are left out.
    parallelism : int
        Number of subtasks and cores.
    directory : str
        A directory for the checkpoints and Spark's scratch files.

    Returns
    -------
    dict of str to list of dict
        The batches by query: `batch_s`, `commit_s`, `subtask_s`, `restore_s`, `changes`, `has_job`, whether a
        materialization or a large merge was in progress before or after the batch, and `has_slice`, whether one went
        on in it.

    Raises
    ------
    RuntimeError
        If a query fails, or a batch's output is not what it should be.
    """
    session = make_session("growth", parallelism, 1000, directory, _SETTINGS)
    fed = {
        name: _Fed(session, Path(directory) / str(number), query["keys"], rows_per_batch, parallelism)
        for number, (name, query) in enumerate(queries.items())
    }
    for name, query in queries.items():
        fed[name].start(query["built_with"])
        fed[name].build()
    for one in fed.values():
        one.settle()
    for name, query in queries.items():
        if query["options"] is not None:
            fed[name].stop()
            fed[name].start(query["options"])
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in queries}
    for number in range(warm_up + rounds):
        names = list(queries)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            batch = fed[name].batch()
            if number >= warm_up:
                measured[name].append(batch)
    for one in fed.values():
        one.stop()
    session.stop()
    return measured


class _Fed:
    """A query that counts rows by key, and has a batch whenever it is given a file."""

    def __init__(
        self, session: SparkSession, directory: Path, keys: int, rows_per_batch: int, parallelism: int
    ) -> None:
        self._session = session
        self._directory = directory
        self._rows = min(rows_per_batch, keys)
        self._parallelism = parallelism
        self._counts = np.zeros(keys, np.int64)
        self._files = 0
        self._had_job = False
        self._query: StreamingQuery | None = None
        self._recorder = CheckpointRecorder()
        for folder in ("input", "unfinished"):
            (directory / folder).mkdir(parents=True)

    def start(self, options: dict[str, Any]) -> None:
        """Start it, for the first time or again."""
        self._recorder = CheckpointRecorder()
        source = self._session.readStream.schema("key long").option("maxFilesPerTrigger", 1)
        counts = statelog.key_by(source.parquet(str(self._directory / "input")), "key").transformWithState(
            CountRows(),
            _OUTPUT,
            "update",
            "None",
            parallelism=self._parallelism,
            options=statelog.Options(
                **options, local_directory=str(self._directory / "local"), observer=self._recorder
            ),
        )
        checks = [F.count(F.lit(1)).alias("keys"), F.sum("n").alias("total")]
        checks.append(F.sum(F.col("key") * F.col("n")).alias("weighted"))
        writer = counts.observe("check", *checks).writeStream.format("noop").outputMode("update")
        self._query = writer.option("checkpointLocation", str(self._directory / "checkpoint")).start()

    def stop(self) -> None:
        """Stop it."""
        assert self._query is not None
        self._query.stop()

    def build(self) -> None:
        """Give every key its first row."""
        for first in range(0, len(self._counts), _BUILD_ROWS):
            self._feed(np.arange(first, min(first + _BUILD_ROWS, len(self._counts))))

    def settle(self) -> None:
        """Run batches until no materialization or large merge goes on in them."""
        quiet = 0
        for _ in range(_SETTLING_BATCHES):
            quiet = 0 if self.batch()["has_slice"] else quiet + 1
            if quiet == 2:
                return

    def batch(self) -> dict[str, Any]:
        """Change as many keys as always, evenly spread and other ones every time."""
        stride = len(self._counts) // self._rows
        return self._feed(np.arange(self._rows) * stride + self._files % stride)

    def _feed(self, keys: npt.NDArray[np.int64]) -> dict[str, Any]:
        number, self._files = self._files, self._files + 1
        started_s = time.time()
        file = self._directory / "unfinished" / f"{number}.parquet"
        pq.write_table(pa.table({"key": keys}), file)
        file.rename(self._directory / "input" / file.name)
        progress = self._wait(number)
        self._counts[keys] += 1
        counts = self._counts[keys]
        wanted = {"keys": len(keys), "total": int(counts.sum()), "weighted": int((keys * counts).sum())}
        found = progress["observedMetrics"]["check"]
        if found != wanted:
            raise RuntimeError(f"batch {number} returned {found} and should return {wanted}")
        jobs = list(self._directory.glob(_JOBS))
        had_job, self._had_job = self._had_job, bool(jobs)
        checkpoint = self._recorder.checkpoints[-1]
        if checkpoint.batch != number:
            raise RuntimeError(f"the newest checkpoint is {checkpoint.batch} after batch {number}")
        return {
            "batch_s": progress["durationMs"]["triggerExecution"] / 1000,
            "commit_s": checkpoint.commit_s,
            "subtask_s": checkpoint.subtask_s,
            "restore_s": checkpoint.restore_s,
            "changes": checkpoint.changes,
            "has_job": had_job or self._had_job,
            "has_slice": any(job.stat().st_mtime >= started_s for job in jobs),
        }

    def _wait(self, number: int) -> dict[str, Any]:
        query = self._query
        assert query is not None
        while query.isActive:
            last = query.lastProgress
            if last is not None and last["batchId"] == number and last["numInputRows"]:
                entry: dict[str, Any] = json.loads(last.json)
                return entry
            time.sleep(_POLL_S)
        raise RuntimeError(f"the query failed: {query.exception()}")
