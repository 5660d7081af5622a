"""Everything that uses what is private in Spark; verified with Spark 4.3."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statelog.checkpoint.batch import BatchTime
from statelog.errors import ConfigurationError, ErrorKind, FencedError


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


def active_query(session: SparkSession, query_id: str) -> StreamingQuery | None:
    """A session's running query of an id; None if there is none, or the session has been stopped."""
    context: Any = session.sparkContext
    return None if context._jsc is None else session.streams.get(query_id)


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


def last_committed(query: StreamingQuery) -> int | None:
    """The newest batch of a run, if Spark has committed it; None if not, or if the run had no batch."""
    execution = _execution(query)
    last, latest = execution.lastExecution(), execution.commitLog().getLatest()
    if last is None or latest.isEmpty() or int(latest.get()._1()) < int(last.currentBatchId()):
        return None
    return int(last.currentBatchId())


def committed_offsets(query: StreamingQuery) -> str:
    """The sources' offsets after the last batch, as JSON within other text."""
    return str(_execution(query).committedOffsets())


def own(query: StreamingQuery, name: str, default: str) -> str:
    """A configuration of a query's own session, a copy of the one that it was started in."""
    return str(_execution(query).sparkSessionForStream().conf().get(name, default))


def set_own(query: StreamingQuery, name: str, value: str) -> None:
    """Set a configuration of a query's own session."""
    _execution(query).sparkSessionForStream().conf().set(name, value)


def observations(query: StreamingQuery) -> set[str]:
    """The names of the observations in a query's analyzed plan."""
    nodes = _plan_nodes(_execution(query).analyzedPlan())
    return {str(node.name()) for node in nodes if _class_name(node) == "CollectMetrics"}


def reads_source(df: DataFrame, name: str) -> bool:
    """Whether a DataFrame reads a streaming source of a name."""
    frame: Any = df
    nodes = _plan_nodes(frame._jdf.queryExecution().analyzed())
    return any(_class_name(node) == "StreamingRelationV2" and str(node.sourceName()) == name for node in nodes)


def python_sources(query: StreamingQuery) -> list[str]:
    """The names of the streaming sources written in Python that a query reads; one for each time."""
    nodes = _plan_nodes(_execution(query).analyzedPlan())
    streams = (node for node in nodes if _class_name(node) == "StreamingRelationV2")
    return [str(node.sourceName()) for node in streams if _class_name(node.table()) == "PythonTable"]


def has_watermark(df: DataFrame) -> bool:
    """Whether a DataFrame comes from rows with a watermark, be their column still there or not."""
    frame: Any = df
    nodes = _plan_nodes(frame._jdf.queryExecution().analyzed())
    return any(_class_name(node).endswith("EventTimeWatermark") for node in nodes)


def selected_column(df: DataFrame, column: str | Column) -> tuple[int | None, str]:
    """Which column of a DataFrame a selection of it is, None if it is computed, and the name of what is selected.

    Spark resolves names by its settings and columns by their ids, so that neither is compared here as text.
    """
    chosen = _output(df.select(column)).head()
    jvm: Any = df.sparkSession._jvm
    attributes = getattr(jvm.org.apache.spark.sql.catalyst.expressions, "package$AttributeSeq")(_output(df))
    place = int(attributes.indexOf(chosen.exprId()))
    return (None if place < 0 else place), str(chosen.name())


def _output(df: DataFrame) -> Any:
    frame: Any = df
    return frame._jdf.queryExecution().analyzed().output()


def _plan_nodes(plan: Any) -> Iterator[Any]:
    """All nodes of a plan. Its text is no substitute: Spark cuts it off at a length that is configured."""
    waiting = [plan]
    while waiting:
        node = waiting.pop()
        yield node
        children = node.children()
        waiting += [children.apply(index) for index in range(children.size())]


def _class_name(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def add_listener(session: SparkSession, listener: Any) -> None:
    """Have a Python object that implements Spark's Java interface told what queries do."""
    context: Any = session.sparkContext
    ensure_callback_server_started(context._gateway)  # type: ignore[no-untyped-call]  # PySpark states no types
    streaming = context._jvm.org.apache.spark.sql.streaming
    manager: Any = session.streams
    manager._jsqm.addListener(streaming.PythonStreamingQueryListenerWrapper(listener))


@contextmanager
def active(session: SparkSession) -> Iterator[None]:
    """Make a session the one that Spark's JVM takes where it is told none."""
    own: Any = session
    sessions = own._jvm.org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(own._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


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
    """The executor that has each of the first `count` partitions of a cached DataFrame; None if not exactly one has."""
    master = _block_master(frame)
    held = (master.getLocations(block) for block in _blocks(frame, range(count)))
    return [str(places.head().executorId()) if places.size() == 1 else None for places in held]


def drop_cached_partitions(frame: DataFrame, partitions: Iterable[int]) -> None:
    """Make executors forget partitions of a cached DataFrame, and wait a second at most until they have."""
    master, held = _block_master(frame), _blocks(frame, partitions)
    for block in held:
        master.removeBlock(block)
    for _ in range(100):
        held = [block for block in held if not master.getLocations(block).isEmpty()]
        if not held:
            return
        time.sleep(0.01)


def cache_partitions(frame: DataFrame, executors: Sequence[str]) -> None:
    """Have the partitions of a cached DataFrame computed, each by an executor, unless they are there already.

    Parameters
    ----------
    frame : DataFrame
        The DataFrame, with one row in every partition.
    executors : sequence of str
        The executor of each partition.
    """
    # A zip of two RDDs prefers the places of the first.
    jvm: Any = frame.sparkSession._jvm
    _tasks_on(frame, executors).zip(_cached_rdd(frame), jvm.scala.reflect.ClassTag.Any()).count()


def run_tasks_on(frame: DataFrame, executors: Sequence[str]) -> None:
    """Run a task that does nothing on each of some executors, of which a new one takes long for its first."""
    _tasks_on(frame, executors).count()


def _tasks_on(frame: DataFrame, executors: Sequence[str]) -> Any:
    """An RDD with a partition, of one row, for each of some executors, which prefers it."""
    jvm: Any = frame.sparkSession._jvm
    hosts = _hosts(frame)
    wished = [
        jvm.scala.Tuple2(
            partition, _scala(jvm, [f"executor_{hosts[executor]}_{executor}"] if executor in hosts else [])
        )
        for partition, executor in enumerate(executors)
    ]
    return _context(frame.sparkSession).makeRDD(_scala(jvm, wished), jvm.scala.reflect.ClassTag.Any())


def _scala(jvm: Any, values: Sequence[Any]) -> Any:
    listed = jvm.java.util.ArrayList()
    for value in values:
        listed.add(value)
    return jvm.org.apache.spark.api.python.PythonUtils.toSeq(listed)


def _hosts(frame: DataFrame) -> dict[str, str]:
    """The host of each executor."""
    found, hosts = _block_master(frame).getMemoryStatus().keysIterator(), {}
    while found.hasNext():
        manager = found.next()
        hosts[str(manager.executorId())] = str(manager.host())
    return hosts


def _cached_rdd(frame: DataFrame) -> Any:
    cached: Any = frame
    found = cached._jdf.sparkSession().sharedState().cacheManager().lookupCachedData(cached._jdf)
    return found.get().cachedRepresentation().cacheBuilder().cachedColumnBuffers()


def _blocks(frame: DataFrame, partitions: Iterable[int]) -> list[Any]:
    jvm: Any = frame.sparkSession._jvm
    make, rdd_id = jvm.org.apache.spark.storage.RDDBlockId, _cached_rdd(frame).id()
    return [make(rdd_id, partition) for partition in partitions]


def _block_master(frame: DataFrame) -> Any:
    # SparkEnv has it too, but its methods cannot be looked at without a library that Spark's package lacks.
    jvm: Any = frame.sparkSession._jvm
    scheduler = jvm.java.lang.Class.forName("org.apache.spark.scheduler.DAGScheduler")
    field = scheduler.getDeclaredField("blockManagerMaster")
    field.setAccessible(True)
    return field.get(_context(frame.sparkSession).dagScheduler())
