"""Tasks in a Python worker of Spark: their description, what the worker keeps, and their metrics in Spark's progress.

Metrics travel in a row that only an observation sees. The rows of a streaming operator have one more column, the
report, which is null. The task whose ack completes the checkpoint gets its numbers with the reply, and returns one more
row that has them as its report. The plan observes the report (``observedMetrics`` of Spark's progress), and then
removes that row and the column.
"""

from __future__ import annotations

import gc
import os
import pickle
import secrets
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType

from statelog.clock import SystemClock
from statelog.convert.types import arrow_type
from statelog.errors import ConfigurationError, ErrorKind, ProcessorError
from statelog.local.owners import claim, executor_process
from statelog.local.use import subtask_directory
from statelog.log.open import open_retrying_store
from statelog.log_fields import LogFields, set_log_fields
from statelog.metrics import CheckpointMetrics, Measurements, meanings
from statelog.options import Options
from statelog.rpc.calls import RpcClient
from statelog.rpc.channel import RpcPolicy
from statelog.rpc.messages import Acked, Begun, Reply, Request, TaskId
from statelog.shown import redact_messages
from statelog.storage import Store
from statelog.storage.open import REGISTERED, require_shared
from statelog.storage.s3a import S3aSettings, adopt_s3a, adopted_s3a
from statelog.tasks.attempt import Attempt, Task, WorkerMemory

HASH_COLUMN: Final = "__statelog_hash"
SUBTASK_COLUMN: Final = "__statelog_subtask"
TIME_COLUMN: Final = "__statelog_time_ms"

_TOKEN_BYTES: Final = 4
_OPEN_FILES: Final = Path("/proc/self/fd")


# ---- The description of an operator ----


@dataclass(frozen=True)
class DriverAddress:
    """The driver's endpoint, as its tasks reach it."""

    host: str
    port: int
    secret: bytes
    certificate: bytes = b""
    """The certificate of its TLS, in DER; empty if calls are not encrypted."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec(ABC):
    """The description of an operator that Spark sends to each of its tasks; picklable."""

    uid: str
    instance: str
    parallelism: int
    columns: list[str]
    output_schema: StructType
    processor: bytes
    """The pickled processor."""
    options: Options
    driver: DriverAddress | None = None
    """None in batch queries."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Process one partition of one batch, for ``mapInArrow``.

        In a stream, the last output rows follow the coordinator's reply to the ack of this subtask, and the rows have
        the report column.
        """
        redact_messages(redacts=self.options.redact_keys)
        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        held = [batch for batch in batches if batch.num_rows]
        if self.driver is None:
            return self.run_batch(held, partition)
        read = self.read(held, partition)
        attempt = worker_process().attempt(self, context, read.subtask)
        set_log_fields(LogFields(self.uid, attempt.task.batch, read.subtask))
        return with_report(self.task(attempt).run(read), self.output_schema)

    @abstractmethod
    def read(self, batches: list[pa.RecordBatch], partition: int) -> Any:
        """The input of the task, from the rows of a partition.

        The rows determine the subtask; without rows, it is the partition's number. Raises ConfigurationError if the
        rows belong to several subtasks.
        """

    @abstractmethod
    def task(self, attempt: Attempt) -> Task:
        """The task of an attempt."""

    @abstractmethod
    def run_batch(self, batches: list[pa.RecordBatch], partition: int) -> Iterator[pa.RecordBatch]:
        """Process a partition of a batch query: state starts empty and is discarded afterwards."""

    def require_one_subtask(self, subtasks: npt.NDArray[np.integer[Any]], partition: int) -> int:
        """The subtask of a partition's rows; raises ConfigurationError if the rows belong to several."""
        first = int(subtasks[0])
        if (subtasks != first).any():
            raise ConfigurationError(
                f"operator '{self.uid}': partition {partition} holds rows of several subtasks.",
                kind=ErrorKind.PARTITIONS_RENUMBERED,
                hint="Check whether another optimizer rule changes spark.sql.shuffle.partitions or the plan. Please"
                " report it.",
            )
        return first


class TaskWork(Protocol):
    """Work on one partition of one batch; picklable."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Take the partition's rows, for ``mapInArrow``."""


def task_function(spec: TaskWork) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function that Spark sends to the workers.

    Spark pickles it by value. It holds only bytes, so a worker that cannot import statelog can report just that.
    """
    pickled, stores = _dumps(spec), pickled_stores()

    def run(batches: Any) -> Any:
        import pickle
        import sys

        try:
            task = pickle.loads(pickled)
        except ImportError as error:
            raise ImportError(
                f"The Python workers run {sys.executable}, which cannot import statelog ({error})."
                " Install statelog there, or set PYSPARK_PYTHON (or spark.pyspark.python) to the interpreter"
                " of the environment that has it before the session is created. [worker-import]"
            ) from error
        from statelog.errors import note_cause
        from statelog.spark.worker.worker import adopt_stores, send_at_once

        try:
            send_at_once()
            adopt_stores(stores)
            yield from task.run(batches)
        except Exception as error:
            note_cause(error)
            raise

    return run


def pickled_processor(processor: object, uid: str) -> bytes:
    """Pickle a processor for the workers; raises ProcessorError if it cannot be pickled."""
    try:
        return _dumps(processor)
    except Exception as error:
        raise ProcessorError(
            f"operator '{uid}': the processor {type(processor).__name__} cannot be sent to the workers:"
            f" {type(error).__name__}: {error}.",
            kind=ErrorKind.PROCESSOR_NOT_PICKLABLE,
            hint="Open connections, locks and files in init() instead of in the constructor, and do not use the"
            " SparkSession in the processor.",
        ) from error


def _dumps(value: object) -> bytes:
    data: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]  # pyspark's copy has no types
    return data


# ---- The worker's process ----


def send_at_once() -> None:
    """Have TCP send data between Spark and this process without delay; Linux only, elsewhere nothing happens.

    From 4.2 on, Spark describes a task in one write, and sends small input in another. TCP holds back the second until
    the first is acknowledged (Nagle's algorithm), and Linux delays an acknowledgment by 40 ms unless there is something
    to send along with it. Spark does not expose the connection, so all of the process are set. Linux ends the mode
    when data travels in both directions, so each task sets it again.
    """
    if not hasattr(socket, "TCP_QUICKACK") or not _OPEN_FILES.is_dir():
        return
    # If there is one, every new socket object makes its connection non-blocking, which Spark's is not made for.
    default_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)
    try:
        for descriptor in os.listdir(_OPEN_FILES):
            try:
                connection = socket.socket(fileno=int(descriptor))
            except OSError:
                continue  # another kind of file
            with suppress(OSError):  # not TCP
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.detach()
    finally:
        socket.setdefaulttimeout(default_s)


class WorkerProcess:
    """The objects that a Python worker reuses from task to task. All of them can be lost at any time."""

    def __init__(self) -> None:
        self._clients: dict[tuple[DriverAddress, float], RpcClient] = {}
        self._stores: dict[tuple[str, int, float, float], Store] = {}
        self._seen: set[tuple[str, str]] = set()
        self._claimed: set[Path] = set()
        self._memory = WorkerMemory()
        self._measurements = Measurements()
        # Spark's worker collects garbage after every task; it need not visit the objects that are loaded by now.
        gc.freeze()

    def attempt(self, spec: TaskSpec, context: TaskContext, subtask: int) -> Attempt:
        """The context of the task that runs now; raises ConfigurationError outside of a micro-batch."""
        assert spec.driver is not None
        task = _task_id(spec, subtask, context)
        self._claim_scratch(spec.options)
        return Attempt(
            task=task,
            partition=context.partitionId(),
            parallelism=spec.parallelism,
            options=spec.options,
            call=self._caller(spec.driver, spec.options, task),
            memory=self._memory,
            local_of=partial(_local_directory, spec, task),
            open_store=lambda location: self.open_store(location, spec.options),
            clock=SystemClock(),
            token=f"{task.attempt}-{secrets.token_hex(_TOKEN_BYTES)}",
            measurements=self._measurements,
            stage=context.stageId(),
        )

    def _claim_scratch(self, options: Options) -> None:
        scratch = _scratch_directory()
        if scratch is not None and not options.local_directory and scratch not in self._claimed:
            self._claimed.add(scratch)
            claim(scratch, executor_process())

    def client(self, driver: DriverAddress, options: Options, task: TaskId) -> RpcClient:
        """The connection to the driver; a new one after a fork or a failure. `task` names the caller in messages."""
        key = (driver, options.driver_timeout_s)
        client = self._clients.get(key)
        if client is None or client.process_id != os.getpid() or client.is_broken:
            policy = RpcPolicy(call_timeout_s=options.driver_timeout_s)
            client = RpcClient(
                driver.host, driver.port, driver.secret, policy, certificate=driver.certificate, caller=task.name
            )
            self._clients[key] = client
        return client

    def _caller(self, driver: DriverAddress, options: Options, task: TaskId) -> Callable[[Request, bytes], Reply]:
        """Make the function by which a task calls the coordinator.

        After the first answer of a start, it checks that this worker sees the driver's files at the location.
        """
        client = self.client(driver, options, task)

        def call(request: Request, payload: bytes) -> Reply:
            reply = client.call(request, payload)
            if (
                isinstance(reply, Begun)
                and reply.permit.witness
                and (task.run_id, reply.permit.store) not in self._seen
            ):
                store, host = self.open_store(reply.permit.store, options), socket.gethostname()
                require_shared(store, reply.permit.witness.name, reply.permit.witness.head, host=host, who=task.name)
                self._seen.add((task.run_id, reply.permit.store))
            return reply

        return call

    def open_store(self, location: str, options: Options) -> Store:
        """The store of a location, with its open connections and its knowledge of earlier requests."""
        key = (
            location,
            options.tuning.upload_attempts,
            options.tuning.upload_timeout_s,
            options.tuning.upload_retry_delay_s,
        )
        if key not in self._stores:
            self._stores[key] = open_retrying_store(location, options, SystemClock(), self._measurements)
        return self._stores[key]


@cache
def worker_process() -> WorkerProcess:
    """The shared objects of this Python worker."""
    return WorkerProcess()


def _task_id(spec: TaskSpec, subtask: int, context: TaskContext) -> TaskId:
    """The id of this task, from Spark; raises ConfigurationError outside of a micro-batch."""
    batch = context.getLocalProperty("streaming.sql.batchId")
    query_id = context.getLocalProperty("sql.streaming.queryId")
    run_id = context.getLocalProperty("spark.jobGroup.id")
    if batch is None or query_id is None or run_id is None:
        raise ConfigurationError(
            f"operator '{spec.uid}' is part of a stream, but ran outside of a micro-batch.",
            kind=ErrorKind.NO_BATCH_ID,
            hint="Run its actions on the thread that Spark calls foreachBatch on, during the batch.",
        )
    return TaskId(query_id, run_id, spec.uid, spec.instance, int(batch), subtask, context.taskAttemptId())


def _local_directory(spec: TaskSpec, task: TaskId, identity: str) -> Path:
    """The directory of the local files of a subtask on this host; `identity` is its operator's."""
    return subtask_directory(local_base(spec.options), task.query_id, identity, spec.parallelism, task.subtask)


def local_base(options: Options) -> Path:
    """The directory below which a host's local files are, in a Python worker."""
    return Path(options.local_directory or _scratch_directory() or tempfile.gettempdir())


def _scratch_directory() -> Path | None:
    """The executor's own scratch directory, in a Python worker of Spark."""
    first = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return Path(first) if first else None


# ---- Stores that the driver's program has registered, and its settings for S3 ----


_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

_adopted: Final[dict[str, bytes]] = {}


@dataclass(frozen=True)
class DriverStores:
    """What the driver's program has said about stores; picklable."""

    factories: dict[str, bytes]
    """The registered factories by scheme, each pickled by itself, so that a worker can name one that it lacks."""
    s3a: S3aSettings | None
    """Hadoop's settings for S3, if they are used."""


def pickled_stores() -> bytes:
    """The driver's :class:`DriverStores`, pickled; raises ConfigurationError if a factory cannot be."""
    factories: dict[str, bytes] = {}
    for scheme, factory in dict(REGISTERED).items():
        try:
            factories[scheme] = _dumps(factory)
        except Exception as error:
            raise ConfigurationError(
                f"The factory of the scheme {scheme!r} cannot be sent to the workers: {type(error).__name__}: {error}.",
                hint="Register a function or class of a module, and open files and connections in the store's methods.",
            ) from error
    return pickle.dumps(DriverStores(factories, adopted_s3a()))


def adopt_stores(pickled: bytes) -> None:
    """Use the driver's stores in this Python worker; raises ConfigurationError if a factory cannot be loaded."""
    stores: DriverStores = pickle.loads(pickled)
    adopt_s3a(stores.s3a)
    for scheme, data in stores.factories.items():
        if _adopted.get(scheme) == data:
            continue
        try:
            factory = pickle.loads(data)
        except Exception as error:
            raise ConfigurationError(
                f"The factory of the scheme {scheme!r} cannot be loaded in the Python workers:"
                f" {type(error).__name__}: {error}.",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                hint="Install the module of the store for the workers' interpreter on every host.",
            ) from error
        REGISTERED[scheme] = factory
        _adopted[scheme] = data


def with_stores(work: Callable[[_Argument], _Result]) -> Callable[[_Argument], _Result]:
    """The function for a Spark job, which knows the driver's stores wherever it runs."""
    stores = pickled_stores()

    def run(argument: _Argument) -> _Result:
        adopt_stores(stores)
        return work(argument)

    return run


REPORT_COLUMN: Final = "__statelog_report"
OBSERVED: Final = "checkpoint"
"""The name of the numbers in an operator's entry of ``observedMetrics``."""

_REPORT: Final = pa.field(REPORT_COLUMN, pa.list_(pa.float64()))
_LARGEST_BYTES: Final = 16
"""No value of fixed size takes more, in Arrow."""
_LONG: Final = frozenset(name for name, kind in CheckpointMetrics.__annotations__.items() if kind == "int")
"""The numbers without a fraction."""


# ---- The plan ----


def observation_of(uid: str) -> str:
    """The name of an operator's entry in ``observedMetrics``."""
    return f"statelog.{uid}"


def reported_schema(output: StructType) -> StructType:
    """The output's columns with the report behind them."""
    return StructType([*output.fields, StructField(REPORT_COLUMN, ArrayType(DoubleType()))])


def observed(rows: DataFrame, uid: str) -> DataFrame:
    """Observe the report, and remove it.

    A batch may be computed several times, and then has several reports. The largest counts: it has the latest
    revision, and all reports of one revision have the same numbers.
    """
    # One aggregate, and one result: Spark generates code for each aggregate, in every task of every batch.
    largest = F.array(F.max(F.col(REPORT_COLUMN)))
    numbers = F.get(F.transform(largest, lambda report: F.struct(*_numbers(report))), F.lit(0))
    seen = rows.observe(observation_of(uid), numbers.alias(OBSERVED))
    return seen.filter(F.col(REPORT_COLUMN).isNull()).drop(REPORT_COLUMN)


def _numbers(report: Column) -> list[Column]:
    numbers = [(name, F.get(report, F.lit(place))) for place, name in enumerate(meanings())]
    return [(number.cast("long") if name in _LONG else number).alias(name) for name, number in numbers]


# ---- The tasks ----


def with_report(output: Generator[pa.RecordBatch, None, Acked], schema: StructType) -> Iterator[pa.RecordBatch]:
    """A task's output with the report column; if its ack has completed the checkpoint, one more row has the report."""
    columns: pa.Schema | None = None
    while True:
        try:
            rows = next(output)
        except StopIteration as end:
            acked: Acked = end.value
            break
        columns = rows.schema
        yield _with_column(rows, pa.nulls(rows.num_rows, _REPORT.type))
    if acked.numbers:
        yield _with_column(_hidden_row(columns, schema), pa.array([acked.numbers], _REPORT.type))


def _with_column(rows: pa.RecordBatch, report: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*rows.columns, report], schema=rows.schema.append(_REPORT))


def _hidden_row(columns: pa.Schema | None, schema: StructType) -> pa.RecordBatch:
    """A row of nulls. Spark does not look for nulls in columns that are declared without any, so these have zeros."""
    if columns is None:
        columns = pa.schema([(field.name, arrow_type(field.dataType, "output column")) for field in schema])
    nulls = [
        pa.nulls(1, column.type) if field.nullable else zero(column.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(nulls, schema=columns)


def zero(kind: pa.DataType) -> pa.Array:
    """One value of an Arrow type that is not null: 0, the empty string or list, a struct of such values."""
    if pa.types.is_null(kind):
        return pa.nulls(1)
    zeros = pa.py_buffer(bytes(_LARGEST_BYTES))
    children = [zero(kind.field(index).type) for index in range(kind.num_fields)]
    return pa.Array.from_buffers(kind, 1, [None] + [zeros] * (kind.num_buffers - 1), 0, children=children)
