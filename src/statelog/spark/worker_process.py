"""Shared by the tasks of all operators in a Python worker: task ids, the connection to the driver, local files."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from pyspark import TaskContext

from statelog.checkpoint.protocol import Begun, Reply, Request, TaskId
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind
from statelog.local.directory import subtask_directory
from statelog.local.runs import LocalRuns
from statelog.local.use import LocalCache
from statelog.log.open_store import open_retrying_store
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.spark.rpc import RpcClient, caller_of
from statelog.spark.rpc_channel import RpcPolicy
from statelog.storage import Store
from statelog.storage.probe import require_shared
from statelog.tables.open import MemoryTables


class TaskSpec(Protocol):
    """The part of a task's description that keyed and unkeyed operators share."""

    @property
    def uid(self) -> str: ...

    @property
    def instance(self) -> str: ...

    @property
    def parallelism(self) -> int: ...

    @property
    def options(self) -> Options: ...

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def secret(self) -> bytes: ...


class WorkerProcess:
    """The objects that a Python worker reuses from task to task. All of them can be lost at any time."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, int, bytes, float], RpcClient] = {}
        self._stores: dict[tuple[str, int, float, float], Store] = {}
        self._seen: set[tuple[str, str]] = set()
        self.tables = MemoryTables()
        self._local = LocalCache(released=self.tables.forget)
        self.measurements = Measurements()
        # Spark's worker collects garbage after every task; it need not visit the objects that are loaded by now.
        gc.freeze()

    def client(self, spec: TaskSpec, task: TaskId) -> RpcClient:
        """The connection to the driver; a new one after a fork or a failure. `task` names the caller in messages."""
        timeout_s = spec.options.driver_timeout_s
        key = (spec.host, spec.port, spec.secret, timeout_s)
        client = self._clients.get(key)
        if client is None or client.process_id != os.getpid() or client.is_broken:
            policy = RpcPolicy(call_timeout_s=timeout_s)
            client = RpcClient(spec.host, spec.port, spec.secret, policy, caller=caller_of(task))
            self._clients[key] = client
        return client

    def caller(self, spec: TaskSpec, task: TaskId) -> Callable[[Request, bytes], Reply]:
        """Make the function by which a task calls the coordinator.

        After the first answer of a start, it checks that this worker sees the driver's files at the location.
        """
        client = self.client(spec, task)

        def call(request: Request, payload: bytes) -> Reply:
            reply = client.call(request, payload)
            if isinstance(reply, Begun) and reply.witness and (task.run_id, reply.store) not in self._seen:
                store, host = self.open_store(reply.store, spec.options), socket.gethostname()
                require_shared(store, reply.witness.name, reply.witness.head, host=host, who=caller_of(task))
                self._seen.add((task.run_id, reply.store))
            return reply

        return call

    def open_store(self, location: str, options: Options) -> Store:
        """The store of a location, with its open connections and its knowledge of earlier requests."""
        key = (location, options.upload_attempts, options.upload_timeout_s, options.upload_retry_delay_s)
        if key not in self._stores:
            self._stores[key] = open_retrying_store(location, options, SystemClock(), self.measurements)
        return self._stores[key]

    def local_runs(self, directory: Path, batch: int) -> LocalRuns:
        """The local runs in the directory of a subtask; runs that are already mapped stay so."""
        return self._local.at(directory, batch)


@cache
def worker_process() -> WorkerProcess:
    """The shared objects of this Python worker."""
    return WorkerProcess()


def task_id(spec: TaskSpec, subtask: int, context: TaskContext) -> TaskId:
    """The id of this task, from Spark; raises ConfigurationError outside of a micro-batch."""
    batch = context.getLocalProperty("streaming.sql.batchId")
    query_id = context.getLocalProperty("sql.streaming.queryId")
    run_id = context.getLocalProperty("spark.jobGroup.id")
    if batch is None or query_id is None or run_id is None:
        raise ConfigurationError(
            f"operator '{spec.uid}' is part of a stream, but ran outside of a micro-batch.",
            kind=ErrorKind.NO_BATCH_ID,
            hint="Run its actions on the thread that Spark calls foreachBatch on, and while the batch lasts.",
        )
    return TaskId(query_id, run_id, spec.uid, spec.instance, int(batch), subtask, context.taskAttemptId())


def local_directory(spec: TaskSpec, task: TaskId) -> Path:
    """The directory of a subtask's local files on this host."""
    base = spec.options.local_directory
    if base is None:
        base = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    operator = f"{task.query_id}-{spec.uid.encode().hex()}"
    return subtask_directory(Path(base), operator, spec.parallelism, task.subtask)


def require_one_subtask(spec: TaskSpec, subtasks: npt.NDArray[np.integer[Any]], partition: int) -> int:
    """The subtask of a partition's rows; raises ConfigurationError if the rows belong to several."""
    first = int(subtasks[0])
    if (subtasks != first).any():
        raise ConfigurationError(
            f"operator '{spec.uid}': partition {partition} holds rows of several subtasks.",
            kind=ErrorKind.PARTITIONS_RENUMBERED,
            hint="Was spark.sql.shuffle.partitions or the plan changed by another optimizer rule? Please report it.",
        )
    return first
