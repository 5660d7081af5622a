"""Rows with a payload per key, and the check of what a query makes of them; for ``recovery`` and ``memory``."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.streaming import payload, pseudo_random

__all__ = ["PAYLOAD_OUTPUT", "check_payloads", "payload_rows", "rows_read", "start_checked"]

PAYLOAD_OUTPUT: Final = "key long, n long, found long"


def payload_rows(numbers: DataFrame, keys: int, value_bytes: int) -> DataFrame:
    """Rows of successive keys until each has one, then of random ones; a key always has the same payload.

    Parameters
    ----------
    numbers : DataFrame
        Successive numbers from 0 on in the column `value`.
    keys : int
        Number of keys.
    value_bytes : int
        Size of a payload.
    """
    return numbers.select(_key(F.col("value"), keys).alias("key")).select("key", payload("key", value_bytes))


def _key(number: Column, keys: int) -> Column:
    return F.when(number < keys, number).otherwise(pseudo_random(keys, number))


def start_checked(output: DataFrame, directory: str) -> StreamingQuery:
    """Start a query whose output is of `PAYLOAD_OUTPUT`, with the sums that :func:`check_payloads` compares."""
    checks = [F.count(F.lit(1)).alias("keys"), F.sum("n").alias("total"), F.sum("found").alias("found")]
    checks.append(F.sum(F.col("key") * F.col("n")).alias("weighted"))
    writer = output.observe("check", *checks).writeStream.format("noop").outputMode("update")
    return writer.option("checkpointLocation", f"{directory}/checkpoint").start()


def rows_read(query: StreamingQuery) -> int:
    """How many rows a query has read from the rate source since its first start."""
    last = query.lastProgress
    return 0 if last is None else _offset(json.loads(last.json)["sources"][0]["endOffset"])


def check_payloads(
    session: SparkSession,
    side: str,
    progress: list[dict[str, Any]],
    keys: int,
    value_bytes: int,
    *,
    is_deduplicated: bool = False,
) -> None:
    """Compare the output of some successive batches with numbers made without any state.

    Parameters
    ----------
    session : SparkSession
        A session.
    side : str
        What ran, for the message.
    progress : list of dict
        Spark's progress by batch.
    keys, value_bytes : int
        As for :func:`payload_rows`.
    is_deduplicated : bool
        Whether only new keys are in the output, and all keys had a row before.

    Raises
    ------
    RuntimeError
        If a batch's output is not what it should be.
    """
    counts = np.zeros(keys, np.int64)
    start = 0
    for entry in progress:
        [source] = entry["sources"]
        begin, end = _offset(source["startOffset"]), _offset(source["endOffset"])
        if start < begin:
            changed, rows = _changes(session, start, begin, keys)
            counts[changed] += rows
        changed, rows = _changes(session, begin, end, keys)
        known = int(np.count_nonzero(counts[changed]))
        counts[changed] += rows
        new, start = counts[changed], end
        wanted = {
            "keys": len(changed),
            "total": int(new.sum()),
            "found": value_bytes * known,
            "weighted": int((changed * new).sum()),
        }
        if is_deduplicated:
            wanted = dict.fromkeys(wanted, 0)
        found = {name: value or 0 for name, value in entry["observedMetrics"]["check"].items()}
        if found != wanted:
            raise RuntimeError(f"{side}: batch {entry['batchId']} returned {found} and should return {wanted}")


def _changes(session: SparkSession, first: int, last: int, keys: int) -> tuple[Any, Any]:
    """The keys of some successive rows, and how many rows each has."""
    column = session.range(first, last).select(_key(F.col("id"), keys).alias("key")).toArrow().column("key")
    return np.unique(column.to_numpy(), return_counts=True)


def _offset(offset: Any) -> int:
    number: int = 0 if offset is None else offset["offset"]
    return number
