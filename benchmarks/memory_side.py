"""The processes of ``memory``: one that builds a state larger than its memory, and one that checks what it returned."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any, Final

import statelog
from benchmarks.counting import CheckpointRecorder
from benchmarks.payloads import PAYLOAD_OUTPUT, check_payloads, payload_rows, start_checked
from benchmarks.recovering import KeepPayload
from benchmarks.streaming import make_session, rate_source

__all__ = ["check", "run"]

_POLL_S: Final = 0.25


def run(
    keys: int, value_bytes: int, rows_per_batch: int, batches: int, parallelism: int, table: str, directory: str
) -> dict[str, Any]:
    """Give each key its first row, batch by batch, and go on with rows of random keys.

    Parameters
    ----------
    keys, value_bytes : int
        Size of the state.
    rows_per_batch : int
        Rows of every batch.
    batches : int
        How many batches to run, all included.
    parallelism : int
        Number of subtasks and cores.
    table : str
        The option of that name.
    directory : str
        A directory for the checkpoint, local copies and Spark's scratch files.

    Returns
    -------
    dict
        `progress`, Spark's progress by batch, and `checkpoints`, the metrics of the checkpoints.

    Raises
    ------
    RuntimeError
        If the query fails.
    """
    session = make_session("memory", parallelism, batches, directory)
    recorder = CheckpointRecorder()
    options = statelog.Options(table=table, local_directory=f"{directory}/local", observer=recorder)
    rows = payload_rows(rate_source(session, rows_per_batch, parallelism), keys, value_bytes)
    output = statelog.key_by(rows, "key").transformWithState(
        KeepPayload(), PAYLOAD_OUTPUT, "update", "None", parallelism=parallelism, options=options
    )
    query = start_checked(output, directory)
    while query.isActive and (query.lastProgress is None or query.lastProgress["batchId"] < batches - 1):
        time.sleep(_POLL_S)
    query.stop()
    if error := query.exception():
        raise RuntimeError(f"the query failed: {error}")
    progress = [entry for each in query.recentProgress if (entry := json.loads(each.json))["batchId"] < batches]
    session.stop()
    return {"progress": progress, "checkpoints": [dataclasses.asdict(metrics) for metrics in recorder.checkpoints]}


def check(progress: list[dict[str, Any]], keys: int, value_bytes: int, parallelism: int, directory: str) -> None:
    """Compare every batch's output with numbers made without any state; raises RuntimeError if they differ."""
    session = make_session("memory", parallelism, 1, directory)
    check_payloads(session, "statelog", progress, keys, value_bytes)
    session.stop()
