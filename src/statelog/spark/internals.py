"""Everything that uses what is private in Spark; verified with Spark 4.3."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statelog.checkpoint.batch import BatchTime
from statelog.errors import ConfigurationError, ErrorKind, FencedError

__all__ = [
    "active_queries",
    "batch_time",
    "checkpoint_location",
    "committed_offsets",
    "current_watermark_ms",
    "find_query",
    "has_no_data_batches",
    "is_first_start",
    "next_batch",
    "plan_text",
    "reads_source",
    "require_synchronous_progress",
]


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
    # With the comma behind it the name is whole.
    return f"{observation}," in str(execution.analyzedPlan()) and execution.commitLog().getLatest().isEmpty()


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


def active_queries(session: SparkSession) -> list[StreamingQuery]:
    """A session's running queries; none if it has been stopped."""
    context: Any = session.sparkContext
    return [] if context._jsc is None else list(session.streams.active)


def next_batch(query: StreamingQuery) -> int:
    """The batch that is being run, or the next one between two batches."""
    return int(_execution(query).getLatestExecutionContext().batchId())


def current_watermark_ms(query: StreamingQuery) -> int:
    """Spark's watermark after the last batch."""
    return int(_execution(query).watermarkTracker().currentWatermark())


def has_no_data_batches(query: StreamingQuery) -> bool:
    """Whether a query runs batches without data when its watermark advances."""
    conf = _execution(query).sparkSessionForStream().sessionState().conf()
    return bool(conf.streamingNoDataMicroBatchesEnabled())


def committed_offsets(query: StreamingQuery) -> str:
    """The sources' offsets after the last batch, as JSON within other text."""
    return str(_execution(query).committedOffsets())


def plan_text(query: StreamingQuery) -> str:
    """A query's analyzed plan, with the names of its observations."""
    return str(_execution(query).analyzedPlan())


def reads_source(df: DataFrame, name: str) -> bool:
    """Whether a DataFrame reads a streaming source of a name."""
    frame: Any = df
    return name in str(frame._jdf.queryExecution().analyzed())


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
