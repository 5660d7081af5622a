"""One side of ``latency``, in a process of its own: counts events, and tells when batches were committed."""

from __future__ import annotations

import json
import time
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import statelog
from benchmarks.count_expected import count_checks, expected_counts
from benchmarks.counting import CountRows
from benchmarks.streaming import QueryRun, begun_s, make_session, pseudo_random

__all__ = ["AGGREGATION", "SPARK", "STATELOG", "run"]

STATELOG: Final = "statelog"
SPARK: Final = "Spark transformWithState"
AGGREGATION: Final = "Spark aggregation in the JVM"

_OUTPUT: Final = "key long, n long"
_POLL_S: Final = 0.25
_BATCHES_PER_S: Final = 50
"""Far more than there can be."""


def run(
    side: str, host: str, port: int, events: int, keys: int, parallelism: int, timeout_s: float, directory: str
) -> dict[str, Any]:
    """Count events by key until all are committed, or it takes too long.

    Parameters
    ----------
    side : str
        `STATELOG`, `SPARK` or `AGGREGATION`.
    host, port : str, int
        Where the events come from.
    events : int
        How many will come.
    keys, parallelism : int
        Number of possible keys, and of subtasks, state partitions and cores.
    timeout_s : float
        How long to wait for all of them.
    directory : str
        An empty directory for the checkpoint and Spark's scratch files.

    Returns
    -------
    dict
        For each batch its first event, the one after its last, and when it was committed; and the time of the end.

    Raises
    ------
    RuntimeError
        If the query fails, or a batch's output is not what it should be.
    """
    session = make_session("latency", parallelism, int(timeout_s * _BATCHES_PER_S), directory)
    lines = session.readStream.format("socket").option("host", host).option("port", port).load()
    rows = lines.select(pseudo_random(keys, F.col("value").cast("long")).alias("key"))
    query = _start(_operator(side, rows, parallelism), directory)
    end_s = time.monotonic() + timeout_s
    while query.isActive and time.monotonic() < end_s and _read(query) < events:
        time.sleep(_POLL_S)
    stopped_s = time.time()
    query.stop()
    if error := query.exception():
        raise RuntimeError(f"the query failed: {error}")
    # Spark also tells that there was nothing to do, and observes nothing then.
    progress = [entry for each in query.recentProgress if (entry := json.loads(each.json))["observedMetrics"]]
    _check(session, side, progress, keys)
    session.stop()
    return {"batches": [_batch(entry) for entry in progress], "stopped_s": stopped_s}


def _operator(side: str, rows: DataFrame, parallelism: int) -> DataFrame:
    if side == STATELOG:
        return statelog.key_by(rows, "key").transformWithState(
            CountRows(), _OUTPUT, "update", "None", parallelism=parallelism
        )
    if side == SPARK:
        return rows.groupBy("key").transformWithState(CountRows(), _OUTPUT, "update", "None")
    if side == AGGREGATION:
        return rows.groupBy("key").agg(F.count(F.lit(1)).alias("n"))
    raise ValueError(f"there is no side {side!r}")


def _start(output: DataFrame, directory: str) -> StreamingQuery:
    writer = output.observe("check", *count_checks()).writeStream.format("noop").outputMode("update")
    return writer.option("checkpointLocation", f"{directory}/checkpoint").start()


def _read(query: StreamingQuery) -> int:
    """How many events are committed."""
    last = query.lastProgress
    return 0 if last is None else _events_to(json.loads(last.json), "endOffset")


def _events_to(entry: dict[str, Any], name: str) -> int:
    """How many events there are up to an offset: Spark's is the number of the last line, or nothing."""
    [source] = entry["sources"]
    return 0 if source[name] is None else int(source[name]) + 1


def _batch(entry: dict[str, Any]) -> dict[str, Any]:
    took_ms = entry["durationMs"]["triggerExecution"]
    return {
        "first": _events_to(entry, "startOffset"),
        "end": _events_to(entry, "endOffset"),
        # The last thing that a trigger does is to commit its batch.
        "committed_s": begun_s(entry) + took_ms / 1000,
        "duration_ms": took_ms,
    }


def _check(session: SparkSession, side: str, progress: list[dict[str, Any]], keys: int) -> None:
    ranges = [(_events_to(entry, "startOffset"), _events_to(entry, "endOffset")) for entry in progress]
    counted = [entry["numInputRows"] for entry in progress]
    if counted != [end - first for first, end in ranges]:
        raise RuntimeError(f"{side}: the batches read {counted} rows, of the lines {ranges}")
    QueryRun(progress, {}).require(side, expected_counts(session, ranges, keys))
