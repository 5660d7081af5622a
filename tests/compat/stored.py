"""Queries of the harness as folders: one file per stored object, and the query's id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from statelog.coordinator.batch import BatchTime
from statelog.testing import Harness
from statelog.testing.harness import HarnessSnapshot

_QUERY_ID = "query-id"


def write_query(directory: Path, harness: Harness) -> None:
    """Write what a query has stored."""
    stored = harness.snapshot().query
    for name, data in stored.objects.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    (directory / _QUERY_ID).write_text(stored.query_id)


def read_query(directory: Path, blank: Harness, times_ms: list[int]) -> HarnessSnapshot:
    """The snapshot of a stored query after batches of these times; `blank` is one like it that has not run."""
    with blank:
        snapshot = blank.snapshot()
    objects = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    query_id = objects.pop(_QUERY_ID).decode()
    times = {batch: BatchTime(time_ms, 0) for batch, time_ms in enumerate(times_ms)}
    query = replace(snapshot.query, query_id=query_id, next_batch=len(times), times=times, objects=objects)
    return replace(snapshot, query=query)
