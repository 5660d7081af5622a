"""Everything that uses what is private in Spark; verified with Spark 4.3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statelog.checkpoint.batch import BatchTime
from statelog.errors import ConfigurationError, ErrorKind, FencedError

__all__ = [
    "active_queries",
    "batch_time",
    "cached_partitions",
    "checkpoint_location",
    "committed_offsets",
    "current_watermark_ms",
    "drop_cached_partition",
    "executors",
    "find_query",
    "has_no_data_batches",
    "has_observation",
    "is_first_start",
    "next_batch",
    "plan_text",
    "reads_source",
    "require_synchronous_progress",
    "slots",
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


def has_observation(query: StreamingQuery, observation: str) -> bool:
    """Whether a query's plan has an observation."""
    # With the comma behind it the name is whole.
    return f"{observation}," in plan_text(query)


def is_first_start(query: StreamingQuery) -> bool:
    """Whether a query that is about to start has not committed any batch."""
    return bool(_execution(query).commitLog().getLatest().isEmpty())


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


# ---- Executors and what they cache ----


def _context(session: SparkSession) -> Any:
    context: Any = session.sparkContext
    return context._jsc.sc()


def executors(session: SparkSession) -> list[str]:
    """Ids of the executors that are there; none if the driver is the only one."""
    found = _context(session).getExecutorIds()
    return sorted(str(found.apply(index)) for index in range(found.size()))


def slots(session: SparkSession) -> int:
    """How many tasks the executors can run at a time."""
    context = _context(session)
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def cached_partitions(frame: DataFrame, count: int) -> list[str | None]:
    """The executor that holds each of the first `count` partitions of a DataFrame in its cache, or None."""
    master = _block_master(frame)
    held = (master.getLocations(block) for block in _blocks(frame, range(count)))
    found = [None if places.isEmpty() else str(places.head().executorId()) for places in held]
    return found or [None] * count


def drop_cached_partition(frame: DataFrame, partition: int) -> None:
    """Make executors forget a partition of a cached DataFrame, so that it is computed again where it is needed next."""
    for block in _blocks(frame, [partition]):
        _block_master(frame).removeBlock(block)


def _block_master(frame: DataFrame) -> Any:
    # SparkEnv has it too, but its methods cannot be looked at without a library that Spark's package lacks.
    jvm: Any = frame.sparkSession._jvm
    field = jvm.java.lang.Class.forName("org.apache.spark.scheduler.DAGScheduler").getDeclaredField(
        "blockManagerMaster"
    )
    field.setAccessible(True)
    return field.get(_context(frame.sparkSession).dagScheduler())


def _blocks(frame: DataFrame, partitions: Iterable[int]) -> list[Any]:
    """Names of a cached DataFrame's partitions; none if it is not cached any more."""
    cached: Any = frame
    found = cached._jdf.sparkSession().sharedState().cacheManager().lookupCachedData(cached._jdf)
    if found.isEmpty():
        return []
    rdd_id = found.get().cachedRepresentation().cacheBuilder().cachedColumnBuffers().id()
    jvm: Any = frame.sparkSession._jvm
    return [jvm.org.apache.spark.storage.RDDBlockId(rdd_id, partition) for partition in partitions]
