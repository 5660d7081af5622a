"""Sticky placement: from batch to batch, a subtask runs on the executor that has its local files.

Spark prefers to run a task on the executor that has cached the partition it reads. So each operator has a placement
table: one row per subtask, partitioned like the operator's rows, and cached. The operator joins its rows to this table,
which changes none of them. If an executor is lost, Spark computes and caches the lost partitions of the table wherever
it runs their subtasks next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from statelog.log_fields import get_logger
from statelog.options import Options
from statelog.spark.driver import executor_internals, internals
from statelog.spark.driver.avoided_executors import AvoidedExecutors

_log = get_logger(__name__)

CHECKPOINT_MANAGER: Final = "spark.sql.streaming.checkpointFileManagerClass"
_REDUCE_LOCALITY: Final = "spark.shuffle.reduceLocality.enabled"
_SETTINGS: Final = {
    # Otherwise Spark prefers hosts with much of a task's shuffled input to the executor with its cached partition.
    _REDUCE_LOCALITY: "false",
    "spark.speculation": "false",
}
_LOCAL_CHECKPOINTS: Final = {
    # Spark's default calls a process for each look at a file in a directory, which may be a link.
    CHECKPOINT_MANAGER: f"{internals.CHECKPOINT_FILES}.FileSystemBasedCheckpointFileManager",
    # Otherwise this is a class of Hive that replaces no file, and the manager takes that for success.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
}
_WAITS: Final = ("spark.locality.wait.process", "spark.locality.wait")

_PLACE_COLUMN: Final = "__statelog_place"
_REBALANCE_INTERVAL_S: Final = 2
_REBALANCE_ATTEMPTS: Final = 5
_BOUNDARY_POLL_S: Final = 0.01


def spark_conf(*, local_checkpoints: bool = False) -> dict[str, str]:
    """Return Spark settings for stateful operators.

    Parameters
    ----------
    local_checkpoints : bool, default False
        Also return the settings with which Spark writes its own files of a checkpointLocation in less time. Use them
        only if the checkpointLocations of all the application's queries are directories: see docs/tuning.md.

    Returns
    -------
    dict of str to str
        Settings for ``SparkSession.builder.config(map=...)``. Set them before the session is created: Spark reads them
        when it makes the SparkContext. Those that are always returned are needed if there are several executors.

    Examples
    --------
    >>> SparkSession.builder.config(map=statelog.spark_conf()).getOrCreate()  # doctest: +SKIP
    """
    return _SETTINGS | (_LOCAL_CHECKPOINTS if local_checkpoints else {})


def make_placement(
    session: SparkSession, uid: str, instance: str, parallelism: int, options: Options
) -> Placement | None:
    """The placement of a streaming operator; None leaves it to Spark. Logs which of Spark's settings prevents it."""
    conf = dict(session.sparkContext.getConf().getAll())
    if options.placement == "off" or (options.placement == "auto" and not may_have_several_executors(conf)):
        return None
    cause = what_moves_subtasks(conf)
    if cause:
        _log.warning(
            "operator '%s': its subtasks will not stay on their executors, because %s. Call"
            " SparkSession.builder.config(map=statelog.spark_conf()) before the session is created, or set"
            " Options(placement='off').",
            uid,
            cause,
        )
        if options.placement == "auto":
            return None  # Placement would only cost time.
    return Placement(session, f"statelog {uid} {instance} placed", parallelism)


def may_have_several_executors(conf: Mapping[str, str]) -> bool:
    """Whether an application with these Spark settings has, or may get, more than one executor."""
    if conf.get("spark.master", "").split("[")[0] == "local":
        return False
    if conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        return conf.get("spark.dynamicAllocation.maxExecutors") != "1"
    return conf.get("spark.executor.instances") != "1"


def what_moves_subtasks(conf: Mapping[str, str]) -> str:
    """The Spark setting that would make subtasks move, as a clause for a message; empty if there is none."""
    if conf.get(_REDUCE_LOCALITY, "true").lower() != "false":
        return f"{_REDUCE_LOCALITY} is not false"
    wait = next((name for name in _WAITS if name in conf), None)
    if wait is not None and conf[wait].rstrip("ms ") == "0":
        return f"{wait} is 0"
    return ""


class Placement:
    """Keeps the subtasks of an operator on their executors.

    The placement table is cached while a query runs. Without the cache the operator returns the same rows, but its
    subtasks move. No other placement may have the same `name`.
    """

    def __init__(self, session: SparkSession, name: str, parallelism: int) -> None:
        self._name = name
        self._parallelism = parallelism
        self._table = _placement_table(session, name, parallelism)
        self._avoided: AvoidedExecutors | None = None
        self._executors: list[str] = []
        self._present = 0
        self._attempts = 0
        self._starts: set[str] = set()
        self._lock = threading.Lock()

    def by_subtask(self, rows: DataFrame, subtask: str) -> DataFrame:
        """Bring rows to the partitions of their subtasks, and the partitions to the executors of the placement table.

        `subtask` is an int column, from 0 to the parallelism, exclusive. The result has the same rows and columns;
        partition i has those of subtask i.
        """
        labeled = rows.withColumn(_PLACE_COLUMN, label_of(F.col(subtask), self._parallelism))
        shuffled = labeled.repartition(self._parallelism, F.col(_PLACE_COLUMN))
        # The observation keeps Spark from moving the join to the other side of the shuffle.
        shuffled = shuffled.observe(self._name, F.count(F.lit(1)).alias("rows"))
        return shuffled.join(self._table.hint("SHUFFLE_HASH"), _PLACE_COLUMN, "left_semi").drop(_PLACE_COLUMN)

    def places(self) -> list[str | None]:
        """The executor of each subtask while a query runs; None for a subtask that has none yet."""
        return executor_internals.cached_partitions(self._table, self._parallelism)

    def keep_during(self, query: StreamingQuery, avoided: AvoidedExecutors) -> None:
        """Place the subtasks for a query that is about to start, and keep them placed until it ends.

        They get no place on an avoided executor while there are others.
        """
        run_id = str(query.runId)
        self._avoided = avoided
        try:
            self._hold(run_id)
        except Exception as error:
            _log.warning("query %s: its subtasks are not placed yet and may move: %s", query.id, error)
        name = f"statelog-placement-{query.id}"
        threading.Thread(target=self._keep, args=(query, run_id), name=name, daemon=True).start()

    def _hold(self, run_id: str) -> None:
        with self._lock:
            is_first = not self._starts
            self._starts.add(run_id)
            if is_first:
                self._table.cache()
                self._executors, self._attempts = [], 0
                if self._targets():
                    self._rebalance()

    def _release(self, run_id: str) -> None:
        with self._lock:
            self._starts.discard(run_id)
            if not self._starts:
                self._table.unpersist()

    def _keep(self, query: StreamingQuery, run_id: str) -> None:
        try:
            while not query.awaitTermination(_REBALANCE_INTERVAL_S):
                self._rebalance_between_batches(query)
        except Exception:
            _log.debug("query %s has ended with an error, or with its session", query.id)
        with suppress(Exception):  # The cache ends with the session, too.
            self._release(run_id)

    def _rebalance_between_batches(self, query: StreamingQuery) -> None:
        try:
            targets = self._targets()
            if not targets:
                return
            # The tasks of a running batch would occupy the places that subtasks move to, so subtasks move between two
            # batches, and quickly, before the next batch begins. A new executor is slow in its first task, so that
            # one is empty and runs now.
            executor_internals.run_tasks_on(self._table, targets)
            if _comes_between_batches(query):
                with self._lock:
                    self._rebalance()
        except Exception:
            _log.debug("the subtasks could not be rebalanced", exc_info=True)

    def _targets(self) -> list[str]:
        """The executors to give subtasks to; none unless executors have come or gone.

        After such a change, up to ``_REBALANCE_ATTEMPTS`` calls in a row may return some.
        """
        session = self._table.sparkSession
        is_local = str(session.sparkContext.master).split("[")[0] == "local"
        executors = [] if is_local else self._usable(session)
        if executors != self._executors:
            self._executors, self._attempts = executors, _REBALANCE_ATTEMPTS
        if not executors or not self._attempts:
            return []
        moved = self._rebalanced(self.places())
        self._attempts = self._attempts - 1 if moved else 0
        return sorted(set(moved.values()))

    def _usable(self, session: SparkSession) -> list[str]:
        """The present executors that subtasks may be on."""
        present = executor_internals.executors(session)
        self._present = len(present)
        if self._avoided is None:
            return present
        return self._avoided.others(present, lambda: executor_internals.executor_hosts(session))

    def _rebalance(self) -> None:
        """Move subtasks to the usable executors."""
        places = self.places()
        moved = self._rebalanced(places)
        if not moved:
            return
        _log.info("%d of %d subtasks move to other executors: to %s, from %s", len(moved), len(places), moved, places)
        executor_internals.drop_cached_partitions(self._table, moved)
        wished = [moved.get(subtask, place or "") for subtask, place in enumerate(places)]
        executor_internals.cache_partitions(self._table, wished)

    def _rebalanced(self, places: list[str | None]) -> dict[int, str]:
        slots = executor_internals.slots(self._table.sparkSession) * len(self._executors) // max(self._present, 1)
        return rebalanced(places, self._executors, slots)


def _comes_between_batches(query: StreamingQuery) -> bool:
    """Wait until a query is between two batches; False if it ends instead."""
    batch = internals.next_batch(query)
    while query.isActive:
        if not query.status["isTriggerActive"] or internals.next_batch(query) != batch:
            return True
        time.sleep(_BOUNDARY_POLL_S)
    return False


def _placement_table(session: SparkSession, name: str, parallelism: int) -> DataFrame:
    # If the plan of a cached table is not adaptive, Spark always knows how the table is partitioned. Adaptive planning
    # is a setting of the session, so the table gets a session of its own.
    own = session.newSession()
    own.conf.set("spark.sql.adaptive.enabled", "false")
    # Spark caches equal plans once; the name keeps the tables of operators with equally many subtasks apart.
    label = label_of(F.col("id").cast("int"), parallelism)
    rows = own.range(0, parallelism, 1, 1).select(label.alias(_PLACE_COLUMN), F.lit(name).alias("of"))
    return rows.repartition(parallelism, F.col(_PLACE_COLUMN))


def rebalanced(places: Sequence[str | None], executors: Sequence[str], slots: int) -> dict[int, str]:
    """The executors of the subtasks that must move, so that no executor is idle while another one has too many.

    `places` has the executor of each subtask. A subtask moves if it has none, or if its executor has more subtasks than
    its fair share and than it can run at a time. `slots` is how many tasks all executors together run at a time; they
    are assumed to be equally large.
    """
    held: dict[str, list[int]] = {executor: [] for executor in executors}
    homeless: list[int] = []
    for subtask, executor in enumerate(places):
        held.get(executor or "", homeless).append(subtask)
    share, remainder = divmod(len(places), len(executors))
    for rank, executor in enumerate(sorted(executors, key=lambda executor: -len(held[executor]))):
        allowed = max(share + (rank < remainder), slots // len(executors))
        homeless += held[executor][allowed:]
        del held[executor][allowed:]
    moved: dict[int, str] = {}
    for subtask in sorted(homeless):
        moved[subtask] = min(executors, key=lambda executor: len(held[executor]))
        held[moved[subtask]].append(subtask)
    return moved


# ---- The shuffle to the subtasks' partitions: Spark 4.0 has none by partition number ----


_SEED = 42
"""Of the hash that Spark's hash partitioning uses."""


def to_subtasks(rows: DataFrame, parallelism: int, subtask: Column) -> DataFrame:
    """Bring rows to the partition of their subtask; `subtask` is an int from 0 to the parallelism, exclusive."""
    return rows.repartition(parallelism, label_of(subtask, parallelism))


def label_of(subtask: Column, parallelism: int) -> Column:
    """An int by which hash partitioning brings a row to the partition of its subtask."""
    return F.get(F.expr(f"array({', '.join(map(str, labels(parallelism)))})"), subtask)


@lru_cache
def labels(parallelism: int) -> tuple[int, ...]:
    """For each of so many partitions, the smallest int from 0 on that Spark's hash partitioning brings there."""
    found: dict[int, int] = {}
    start = 0
    while len(found) < parallelism:
        partitions = _spark_hash(np.arange(start, start + 4 * parallelism, dtype=np.uint32)) % np.int32(parallelism)
        for partition, first in zip(*np.unique(partitions, return_index=True), strict=True):
            found.setdefault(int(partition), start + int(first))
        start += 4 * parallelism
    return tuple(found[partition] for partition in range(parallelism))


def _spark_hash(values: NDArray[np.uint32]) -> NDArray[np.int32]:
    """Spark's ``hash`` of ints: 32-bit Murmur3 of their four bytes."""
    mixed = _rotated(values * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    hashed = _rotated(np.uint32(_SEED) ^ mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    hashed ^= np.uint32(4)
    hashed = (hashed ^ (hashed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hashed = (hashed ^ (hashed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return (hashed ^ (hashed >> np.uint32(16))).view(np.int32)


def _rotated(values: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return (values << np.uint32(bits)) | (values >> np.uint32(32 - bits))
