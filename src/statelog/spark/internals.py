"""Everything that uses what is private in Spark; verified with Spark 4.3."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statelog.checkpoint.batch import BatchTime
from statelog.errors import ConfigurationError, ErrorKind, FencedError

__all__ = ["batch_time", "checkpoint_location", "find_query", "is_first_start", "require_synchronous_progress"]


def find_query(session: SparkSession, query_id: str, run_id: str) -> StreamingQuery:
    """The running query that a task belongs to.

    Raises
    ------
    FencedError
        If this run of the query is over.
    """
    query: Any = session.streams.get(query_id)
    if query is None or query._jsq is None or str(query.runId) != run_id:
        raise FencedError(
            f"Run {run_id} of query {query_id} is over.",
            kind=ErrorKind.STALE_RUN,
            hint="The task is a leftover of an earlier run.",
        )
    return query  # type: ignore[no-any-return]  # looked at as Any for its private parts


def _execution(query: StreamingQuery) -> Any:
    return query._jsq.streamingQuery()


def checkpoint_location(query: StreamingQuery) -> str:
    """The checkpoint location of a running query, with its scheme."""
    return str(_execution(query).resolvedCheckpointRoot())


def is_first_start(query: StreamingQuery, observation: str) -> bool:
    """Whether a query that is about to start has not committed any batch, and its plan has an observation."""
    execution = _execution(query)
    return observation in str(execution.analyzedPlan()) and execution.commitLog().getLatest().isEmpty()


def batch_time(query: StreamingQuery, batch: int) -> BatchTime:
    """Time and watermark that Spark wrote down for a batch before it started it."""
    found = _execution(query).offsetLog().offsetSeqMetadataForBatchId(batch)
    if found.isEmpty():
        raise FencedError(
            f"Query {query.id} has no batch {batch}.",
            kind=ErrorKind.STALE_RUN,
            hint="The task is a leftover of an earlier run.",
        )
    metadata = found.get()
    before = _execution(query).offsetLog().offsetSeqMetadataForBatchId(batch - 1)
    return BatchTime(
        time_ms=int(metadata.batchTimestampMs()),
        watermark_ms=int(metadata.batchWatermarkMs()),
        late_watermark_ms=int(before.get().batchWatermarkMs()) if not before.isEmpty() else 0,
    )


def require_synchronous_progress(query: StreamingQuery) -> None:
    """Refuse asynchronous progress tracking.

    Raises
    ------
    ConfigurationError
        If the query uses it: after a restart several batches may then be repeated as one, so a batch id
        does not name the same input any more.
    """
    kind = str(_execution(query).getClass().getSimpleName())
    if kind != "MicroBatchExecution":
        raise ConfigurationError(
            f"Query {query.id} runs as {kind}; a batch id must always name the same input.",
            kind=ErrorKind.UNSUPPORTED_SETTING,
            hint="Remove the option asyncProgressTrackingEnabled, and use a micro-batch trigger.",
        )
