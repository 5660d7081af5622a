"""Uses of Spark's private parts: sessions, plans, queries and their files; verified with Spark 4.3.

Those of executors are in `executor_internals`, that of Kafka's client in `kafka_client`; there are no others.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from typing import Any, ClassVar, Final
from uuid import UUID
from weakref import WeakSet

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext, SparkFiles
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from statelog.coordinator.admission import stale_run
from statelog.coordinator.batch import BatchTime
from statelog.errors import ConfigurationError, ErrorKind, StatelogError
from statelog.spark.checkpoint.logs import SOURCE_NAMES
from statelog.storage.location import scheme_of

_MAPS_OF_ROWS: Final = frozenset({"MapInArrow", "MapInPandas"})
_STREAMS: Final = frozenset({"StreamingRelation", "StreamingRelationV2", "StreamingExecutionRelation"})
_STATEFUL: Final = (
    "Aggregate",
    "Deduplicate",
    "Distinct",
    "FlatMapGroups",
    "GlobalLimit",
    "Join",
    "TransformWithState",
)
"""Beginnings of the names of the nodes that keep state in a stream."""
_ASYNCHRONOUS: Final = "AsyncProgressTrackingMicroBatchExecution"
_SINKS_IN_PYTHON: Final = frozenset({"ForeachBatchSink", "PythonTable"})


def is_classic(session: SparkSession) -> bool:
    """Whether a session runs in the driver's own JVM, not behind Spark Connect."""
    return hasattr(session, "_jsparkSession")


def worker_python(context: SparkContext) -> str:
    """The interpreter of the Python workers."""
    private: Any = context
    return str(private.pythonExec)


def shipped_files(context: SparkContext) -> list[str]:
    """The paths of the files that the application ships and workers may import, in the driver's folder of files."""
    private: Any = context
    return [os.path.join(SparkFiles.getRootDirectory(), name) for name in private._python_includes]


def kill_jvm() -> None:
    """Kill the JVM of this process, if there is one: for a session whose start or end hangs."""
    gateway: Any = SparkContext._gateway
    if gateway is not None and getattr(gateway, "proc", None) is not None:
        gateway.proc.kill()


def find_query(session: SparkSession, query_id: str, run_id: str) -> StreamingQuery:
    """The running query that a task belongs to; raises FencedError if this start of it is over."""
    query: Any = session.streams.get(query_id)
    if query is not None and query._jsq is not None and not _is_run_id(run_id):
        raise ConfigurationError(
            f"A task of query {query_id} ran in the job group '{run_id}', not in the one that Spark gave the query.",
            kind=ErrorKind.NO_BATCH_ID,
            hint="Do not call setJobGroup in foreachBatch. addJobTag marks jobs without taking them from the query.",
        )
    if query is None or query._jsq is None or str(query.runId) != run_id:
        raise stale_run(f"Run {run_id} of query {query_id} is over.")
    return query  # type: ignore[no-any-return]  # looked at as Any for its private parts


def _is_run_id(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _execution(query: StreamingQuery) -> Any:
    return query._jsq.streamingQuery()


def checkpoint_location(query: StreamingQuery) -> str:
    """The checkpoint location of a running query, with its scheme."""
    return str(_execution(query).resolvedCheckpointRoot())


def first_batch(query: StreamingQuery) -> int:
    """The batch with which a query that is about to start begins: the one after the last that Spark has committed."""
    latest = _execution(query).commitLog().getLatest()
    return 0 if latest.isEmpty() else int(latest.get()._1()) + 1


def is_planned(query: StreamingQuery, batch: int) -> bool:
    """Whether Spark has noted the input of a batch, which may have run."""
    return not _execution(query).offsetLog().get(batch).isEmpty()


def batch_time(query: StreamingQuery, batch: int) -> BatchTime:
    """The times that Spark recorded for a batch before it began; raises FencedError if Spark knows no such batch."""
    found = _execution(query).offsetLog().offsetSeqMetadataForBatchId(batch)
    if found.isEmpty():
        raise stale_run(f"Query {query.id} has no batch {batch}.")
    metadata = found.get()
    before = _execution(query).offsetLog().offsetSeqMetadataForBatchId(batch - 1)
    return BatchTime(
        time_ms=int(metadata.batchTimestampMs()),
        watermark_ms=int(metadata.batchWatermarkMs()),
        late_watermark_ms=int(before.get().batchWatermarkMs()) if not before.isEmpty() else 0,
    )


def fail(session: SparkSession, query: StreamingQuery, error: StatelogError) -> None:
    """Make a query that has not begun a batch yet fail with an error."""
    jvm: Any = session._jvm
    text = f"{type(error).__module__}.{type(error).__qualname__}: {error}\n"  # a line that error_of finds
    _execution(query).errorNotifier().markError(jvm.java.lang.IllegalStateException(text))


def cancel_jobs(session: SparkSession, run_id: str, error: StatelogError) -> None:
    """Let the running jobs of a start of a query fail with an error, unless the session has been stopped."""
    context: Any = session.sparkContext
    if context._jsc is not None:
        with suppress(Py4JError):  # it is stopping, and its jobs end anyway
            context._jsc.sc().cancelJobGroup(run_id, "".join(traceback.format_exception(error)))


def active_queries(session: SparkSession) -> list[StreamingQuery]:
    """A session's running queries; none if the session has been stopped."""
    context: Any = session.sparkContext
    return [] if context._jsc is None else list(session.streams.active)


def active_query(session: SparkSession, query_id: str) -> StreamingQuery | None:
    """A session's running query with this id; None if there is none, or the session has been stopped."""
    context: Any = session.sparkContext
    return None if context._jsc is None else session.streams.get(query_id)


def next_batch(query: StreamingQuery) -> int:
    """The batch that runs now; between two batches, the next one."""
    return int(_execution(query).getLatestExecutionContext().batchId())


def current_watermark_ms(query: StreamingQuery) -> int:
    """Spark's watermark after the last batch."""
    return int(_execution(query).watermarkTracker().currentWatermark())


def has_no_data_batches(query: StreamingQuery) -> bool:
    """Whether a query runs batches without data when its watermark advances."""
    conf = _execution(query).sparkSessionForStream().sessionState().conf()
    return bool(conf.streamingNoDataMicroBatchesEnabled())


def last_committed(query: StreamingQuery) -> int | None:
    """The last batch of this start if Spark has committed it; None if it has not, or if the start had no batch."""
    execution = _execution(query)
    last, latest = execution.lastExecution(), execution.commitLog().getLatest()
    if last is None or latest.isEmpty() or int(latest.get()._1()) < int(last.currentBatchId()):
        return None
    return int(last.currentBatchId())


def has_sources(query: StreamingQuery) -> bool:
    """Whether a query has made its sources, and so started their Python processes, or has ended."""
    return not query.isActive or not _execution(query).sources().isEmpty()


def committed_offsets(query: StreamingQuery) -> str:
    """A text that contains, as JSON, the sources' offsets after the last batch."""
    return str(_execution(query).committedOffsets())


def own(query: StreamingQuery, name: str, default: str) -> str:
    """A setting of a query's own session, which is a copy of the session that the query was started in."""
    return str(_execution(query).sparkSessionForStream().conf().get(name, default))


def set_own(query: StreamingQuery, name: str, value: str) -> None:
    """Change a setting of a query's own session."""
    _execution(query).sparkSessionForStream().conf().set(name, value)


def observations(query: StreamingQuery) -> set[str]:
    """The names of the observations in a query's analyzed plan."""
    return _observations(_execution(query).analyzedPlan())


def observations_of(df: DataFrame) -> set[str]:
    """The names of the observations in a DataFrame's plan."""
    return _observations(_analyzed(df))


def _observations(plan: Any) -> set[str]:
    return {str(node.name()) for node in _plan_nodes(plan) if _class_name(node) == "CollectMetrics"}


def reads_source(df: DataFrame, name: str) -> bool:
    """Whether a DataFrame reads a streaming source with this name."""
    nodes = _plan_nodes(_analyzed(df))
    return any(_class_name(node) == "StreamingRelationV2" and str(node.sourceName()) == name for node in nodes)


def has_source_names(session: SparkSession) -> bool:
    """Whether the sources of a session's queries must have names, by which Spark then finds them in its logs."""
    return hasattr(session.readStream, "name") and str(session.conf.get(SOURCE_NAMES, "false")).lower() == "true"


def stateful_nodes(df: DataFrame) -> list[str]:
    """The kinds of Spark's own stateful operators in a streaming DataFrame's plan."""
    nodes = (node for node in _plan_nodes(_analyzed(df)) if node.isStreaming() and not _joins_with_batch(node))
    return [kind for node in nodes if (kind := _class_name(node)).startswith(_STATEFUL)]


def _joins_with_batch(node: Any) -> bool:
    return _class_name(node) == "Join" and not all(side.isStreaming() for side in _items(node.children()))


def streaming_sources(query: StreamingQuery) -> list[str]:
    """The names of a query's streaming sources, in the order of their numbers; empty for older kinds of sources."""
    relations: list[Any] = []
    for node in _plan_nodes(_execution(query).analyzedPlan()):
        if _class_name(node) in _STREAMS and not any(node.equals(other) for other in relations):
            relations.append(node)
    return [str(node.sourceName()) if _class_name(node) == "StreamingRelationV2" else "" for node in relations]


def schemas_sent_to_python(session: SparkSession, query: StreamingQuery) -> list[StructType] | None:
    """The types of the rows that a query's operators send to Python as a whole.

    None if there are other Python functions in the query, for whose arguments no schema is at hand.
    """
    jvm: Any = session._jvm
    is_function = jvm.org.apache.spark.sql.catalyst.trees.TreePattern.PYTHON_UDF()
    schemas: list[StructType] = []
    for node in _plan_nodes(_execution(query).analyzedPlan()):
        if _class_name(node) in _MAPS_OF_ROWS:
            schemas.append(StructType.fromJson(json.loads(str(node.children().apply(0).schema().json()))))
        elif any(
            found.containsPattern(is_function) or "Python" in _class_name(found) for found in _items(node.expressions())
        ):
            return None
    return schemas


def writes_to_python(query: StreamingQuery) -> bool:
    """Whether a query's output goes to Python code that is not part of its plan: ``foreachBatch``, a sink in Python."""
    return _class_name(_execution(query).sink()) in _SINKS_IN_PYTHON


def file_sink(query: StreamingQuery) -> tuple[str, int] | None:
    """The folder of a query's file sink, and the newest batch of the sink's log; None without such a sink or log.

    The sink leaves out all batches up to that one.
    """
    sink = _execution(query).sink()
    if _class_name(sink) != "FileStreamSink":
        return None
    newest = _field(sink, "fileLog").getLatestBatchId()
    return None if newest.isEmpty() else (str(_field(sink, "path")), int(newest.get()))


def _field(instance: Any, name: str) -> Any:
    field = instance.getClass().getDeclaredField(name)
    field.setAccessible(True)
    return field.get(instance)


def has_watermark(df: DataFrame) -> bool:
    """Whether a DataFrame comes from rows with a watermark, even if it no longer has their column."""
    nodes = _plan_nodes(_analyzed(df))
    return any(_class_name(node).endswith("EventTimeWatermark") for node in nodes)


def selected_column(df: DataFrame, column: str | Column) -> tuple[int | None, str]:
    """The position and the name of the column that `column` selects; the position is None if the column is computed.

    Spark resolves names by its settings and columns by their ids, so neither is compared here as text.
    """
    chosen = _analyzed(df.select(column)).output().head()
    jvm: Any = df.sparkSession._jvm
    expressions = jvm.org.apache.spark.sql.catalyst.expressions
    attributes = getattr(expressions, "package$AttributeSeq")(_analyzed(df).output())
    place = int(attributes.indexOf(chosen.exprId()))
    return (None if place < 0 else place), str(chosen.name())


def _analyzed(df: DataFrame) -> Any:
    frame: Any = df
    return frame._jdf.queryExecution().analyzed()


def _plan_nodes(plan: Any) -> Iterator[Any]:
    """All nodes of a plan, parents first and from left to right.

    The text of a plan is not a substitute: Spark cuts it off at a configured length.
    """
    waiting = [plan]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(_items(node.children()))


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]


def _class_name(node: Any) -> str:
    return str(node.getClass().getSimpleName())


@contextmanager
def active(session: SparkSession) -> Iterator[None]:
    """Make a session the active one, which Spark's JVM uses where no session is named."""
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


def is_progress_asynchronous(query: StreamingQuery) -> bool:
    """Whether Spark writes a query's offset and commit logs concurrently with its batches, and omits entries."""
    return _class_name(_execution(query)) == _ASYNCHRONOUS


def stored_commit(query: StreamingQuery) -> int:
    """The newest batch in the stored commit log of a query with asynchronous progress; -1 without any."""
    newest = _execution(query).commitLog().writtenToDurableStorage().peekLast()
    return -1 if newest is None else int(newest)


# ---- Starts of queries ----

_listening: WeakSet[SparkSession] = WeakSet()
_listening_lock = threading.Lock()


def when_queries_start_and_fail(
    session: SparkSession, started: Callable[[str, str], None], failed: Callable[[str, str], None]
) -> None:
    """Call functions for every query of a session: `started` with its id and run id, `failed` with its id and failure.

    Spark calls `started` before the query's first batch, and waits for it. Some time after the end, it calls `failed`
    with the text of the exception. Only the first functions of a session count.
    """
    with _listening_lock:
        if session not in _listening:
            context: Any = session.sparkContext
            ensure_callback_server_started(context._gateway)  # type: ignore[no-untyped-call]  # PySpark states no types
            streaming = context._jvm.org.apache.spark.sql.streaming
            manager: Any = session.streams
            manager._jsqm.addListener(streaming.PythonStreamingQueryListenerWrapper(_QueryListener(started, failed)))
            _listening.add(session)


class _QueryListener:
    """A listener for Spark's JVM; a listener of PySpark would first make a Python object of every progress event."""

    def __init__(self, started: Callable[[str, str], None], failed: Callable[[str, str], None]) -> None:
        self._started = started
        self._failed = failed

    def onQueryStarted(self, event: Any) -> None:
        self._started(event.id().toString(), event.runId().toString())

    def onQueryTerminated(self, event: Any) -> None:
        if event.exception().isDefined():
            self._failed(event.id().toString(), str(event.exception().get()))

    def _ignore(self, event: Any) -> None:
        pass

    onQueryProgress = onQueryIdle = _ignore

    class Java:
        implements: ClassVar = ["org.apache.spark.sql.streaming.PythonStreamingQueryListener"]


# ---- Files of a checkpointLocation ----


_IS_4_0: Final = pyspark.__version__.startswith("4.0.")
CHECKPOINT_FILES: Final = "org.apache.spark.sql.execution.streaming" + ("" if _IS_4_0 else ".checkpointing")
"""The package of Spark's file managers."""


def file_system_scheme(session: SparkSession, location: str) -> str:
    """The scheme of the file system that Spark uses for a location; empty if the session's Hadoop has none for it.

    A path without a scheme is one of the file system that Hadoop's configuration names.
    """
    jvm: Any = session._jvm
    file_system, configuration = jvm.org.apache.hadoop.fs.FileSystem, _hadoop_configuration(session)
    scheme = scheme_of(location) or str(file_system.getDefaultUri(configuration).getScheme())
    try:
        file_system.getFileSystemClass(scheme, configuration)
    except Py4JJavaError:
        return ""
    return scheme


def checkpoint_files(session: SparkSession, location: str) -> tuple[Any, Callable[[str], Any], str]:
    """The file manager that Spark uses for the files of a checkpointLocation.

    Returns also a function that makes the paths of names relative to the location, and the location with its scheme.
    """
    jvm: Any = session._jvm
    configuration, new_path = _hadoop_configuration(session), jvm.org.apache.hadoop.fs.Path
    path = new_path(location)
    root = path.getFileSystem(configuration).makeQualified(path)
    managers = reduce(getattr, f"{CHECKPOINT_FILES}.CheckpointFileManager".split("."), jvm)
    return managers.create(root, configuration), lambda name: new_path(root, name), str(root.toString())


def hadoop_settings(session: SparkSession, prefix: str) -> dict[str, str]:
    """The session's settings of Hadoop whose names begin with a prefix; some are secrets, and none is logged."""
    with _without_debug_log():
        found = _hadoop_configuration(session).getPropsWithPrefix(prefix)
        return {f"{prefix}{name}": str(value) for name, value in found.items()}


@contextmanager
def _without_debug_log() -> Iterator[None]:
    """Keep what this thread gets from the JVM out of Py4J's debug log, which has every answer."""
    thread = threading.get_ident()

    def is_of_another(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(f"py4j.{name}") for name in ("clientserver", "java_gateway")]
    for logger in loggers:
        logger.addFilter(is_of_another)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_of_another)


def hadoop_version(session: SparkSession) -> str:
    """The version of the session's Hadoop."""
    jvm: Any = session._jvm
    return str(jvm.org.apache.hadoop.util.VersionInfo.getVersion())


def _hadoop_configuration(session: SparkSession) -> Any:
    own: Any = session
    return own._jsparkSession.sessionState().newHadoopConf()
