"""Uses of Spark's private parts: executors, their cached partitions and their tasks; verified with Spark 4.3."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from pyspark import RDD
from pyspark.serializers import CPickleSerializer
from pyspark.sql import DataFrame, SparkSession

_STAGE_ATTEMPTS: Final = 4
"""Spark's spark.stage.maxConsecutiveAttempts."""


def _context(session: SparkSession) -> Any:
    context: Any = session.sparkContext
    return context._jsc.sc()


def executors(session: SparkSession) -> list[str]:
    """Ids of the present executors, sorted; none if the driver itself runs the tasks."""
    found = _context(session).getExecutorIds()
    return sorted(str(found.apply(index)) for index in range(found.size()))


def executor_hosts(session: SparkSession) -> dict[str, str]:
    """The hosts of the present executors, and of the driver, by id."""
    managers, hosts = _block_master(session).getMemoryStatus().keysIterator(), {}
    while managers.hasNext():
        manager = managers.next()
        hosts[str(manager.executorId())] = str(manager.host())
    return hosts


def slots(session: SparkSession) -> int:
    """How many tasks the executors can run at a time."""
    context = _context(session)
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def cached_partitions(frame: DataFrame, count: int) -> list[str | None]:
    """The executor of each of the first `count` partitions of a cached DataFrame; None unless exactly one has it."""
    master = _block_master(frame.sparkSession)
    held = (master.getLocations(block) for block in _blocks(frame, range(count)))
    return [str(places.head().executorId()) if places.size() == 1 else None for places in held]


def drop_cached_partitions(frame: DataFrame, partitions: Iterable[int]) -> None:
    """Drop partitions of a cached DataFrame from the executors, and wait up to a second until they are gone."""
    master, held = _block_master(frame.sparkSession), _blocks(frame, partitions)
    for block in held:
        master.removeBlock(block)
    for _ in range(100):
        held = [block for block in held if not master.getLocations(block).isEmpty()]
        if not held:
            return
        time.sleep(0.01)


def cache_partitions(frame: DataFrame, executors: Sequence[str]) -> None:
    """Compute and cache partition i of a DataFrame on `executors[i]`, unless it is cached already.

    Every partition of `frame` must have exactly one row.
    """
    # A zip of two RDDs prefers the places of the first, and needs equally many rows in both.
    jvm: Any = frame.sparkSession._jvm
    _tasks_on(frame.sparkSession, executors).zip(_cached_rdd(frame), jvm.scala.reflect.ClassTag.Any()).count()


def run_tasks_on(frame: DataFrame, executors: Sequence[str]) -> None:
    """Run an empty task on each of these executors: the first task of a new executor takes long."""
    _tasks_on(frame.sparkSession, executors).count()


def numbers_on(session: SparkSession, executors: Sequence[str]) -> RDD[int]:
    """The numbers from 0 on, each in a partition that Spark prefers to run on the executor at that position.

    Without executors, the partition of 0 may run anywhere.
    """
    pickler = CPickleSerializer()
    rows = [bytearray(pickler.dumps(number)) for number in range(len(executors) or 1)]  # type: ignore[no-untyped-call]  # pyspark's copy has no types
    pickled = _rows_on(session, rows, executors or [""])
    return RDD(pickled.toJavaRDD(), session.sparkContext, pickler)


def executor_of(session: SparkSession, stage: int, task: int) -> tuple[str, str] | None:
    """The id and the host of the executor that has run a task, by Spark's ids; None if Spark does not know it yet."""
    store, most = _context(session).statusStore(), 10_000
    for attempt in range(_STAGE_ATTEMPTS):
        tasks = store.taskList(stage, attempt, most)
        for found in map(tasks.apply, range(tasks.size())):
            if int(found.taskId()) == task:
                return str(found.executorId()), str(found.host())
    return None


def _tasks_on(session: SparkSession, executors: Sequence[str]) -> Any:
    """An RDD with a partition of one row per executor, as in :func:`_rows_on`."""
    return _rows_on(session, range(len(executors)), executors)


def _rows_on(session: SparkSession, rows: Sequence[Any], executors: Sequence[str]) -> Any:
    """An RDD with a partition for each row; Spark prefers the executor at its position, or none if that is unknown."""
    jvm: Any = session._jvm
    hosts = executor_hosts(session)
    wished = [
        jvm.scala.Tuple2(row, _scala(jvm, [f"executor_{hosts[executor]}_{executor}"] if executor in hosts else []))
        for row, executor in zip(rows, executors, strict=True)
    ]
    return _context(session).makeRDD(_scala(jvm, wished), jvm.scala.reflect.ClassTag.Any())


def _scala(jvm: Any, values: Sequence[Any]) -> Any:
    listed = jvm.java.util.ArrayList()
    for value in values:
        listed.add(value)
    return jvm.org.apache.spark.api.python.PythonUtils.toSeq(listed)


def _cached_rdd(frame: DataFrame) -> Any:
    cached: Any = frame
    found = cached._jdf.sparkSession().sharedState().cacheManager().lookupCachedData(cached._jdf)
    return found.get().cachedRepresentation().cacheBuilder().cachedColumnBuffers()


def _blocks(frame: DataFrame, partitions: Iterable[int]) -> list[Any]:
    jvm: Any = frame.sparkSession._jvm
    make, rdd_id = jvm.org.apache.spark.storage.RDDBlockId, _cached_rdd(frame).id()
    return [make(rdd_id, partition) for partition in partitions]


def _block_master(session: SparkSession) -> Any:
    # SparkEnv has it too, but reflection on its methods needs a library that Spark's package lacks.
    jvm: Any = session._jvm
    scheduler = jvm.java.lang.Class.forName("org.apache.spark.scheduler.DAGScheduler")
    field = scheduler.getDeclaredField("blockManagerMaster")
    field.setAccessible(True)
    return field.get(_context(session).dagScheduler())
