"""Metrics and progress: recorded where things happen, sent with the ack, told to the observer."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

_KEPT: Final = 1000


class Metric(StrEnum):
    """The metrics. Those with a unit or ``per`` in their name are distributions, the others are counters."""

    STATE_FETCHES = "state_fetches"
    """Tasks that fetched state, because their executor had none or not all of it."""
    UPLOAD_REQUESTS = "upload_requests"
    """Objects to be written."""
    UPLOAD_FAILURES = "upload_failures"
    """Objects that could not be written by any attempt."""
    UPLOAD_RETRIES = "upload_retries"
    """Attempts started because the previous one had failed."""
    UPLOAD_HEDGES = "upload_hedges"
    """Attempts started because the previous one took long."""
    SLOW_DOWNS = "slow_downs"
    """Answers in which the store asked for fewer requests."""
    READ_RETRIES = "read_retries"
    """Repeated requests other than writes."""
    ATTEMPTS_PER_UPLOAD = "attempts_per_upload"
    """Number of the attempt that succeeded, from 1."""
    TOTAL_ATTEMPTS_PER_UPLOAD = "total_attempts_per_upload"
    """Number of attempts started, including those that came too late to count."""
    UPLOAD_LATENCY_S = "upload_latency_s"
    """Time from the first attempt to the success."""
    UPLOAD_SIZE_BYTES = "upload_size_bytes"
    """Size of the object."""
    UPLOAD_QUEUE_BYTES = "upload_queue_bytes"
    """Bytes of a subtask that were waiting or being written when an upload was added."""


@dataclass(frozen=True)
class Recorded:
    """The measurements of a period.

    Parameters
    ----------
    counts : dict of str to int
        Counters, by metric.
    samples : dict of str to list of float
        The latest samples of each distribution, at most 1,000.
    """

    counts: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)


class Measurements:
    """Collects measurements, from any thread, until they are taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._samples: dict[str, deque[float]] = {}

    def count(self, metric: Metric, number: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[str(metric)] += number

    def observe(self, metric: Metric, value: float) -> None:
        """Add a sample to a distribution."""
        with self._lock:
            self._samples.setdefault(str(metric), deque(maxlen=_KEPT)).append(value)

    def add(self, recorded: Recorded) -> None:
        """Add measurements that were taken elsewhere."""
        with self._lock:
            self._counts.update(recorded.counts)
            for metric, values in recorded.samples.items():
                self._samples.setdefault(metric, deque(maxlen=_KEPT)).extend(values)

    def take(self) -> Recorded:
        """Return the measurements since the last call."""
        with self._lock:
            taken = Recorded(dict(self._counts), {metric: list(held) for metric, held in self._samples.items()})
            self._counts, self._samples = Counter(), {}
            return taken


class Step(StrEnum):
    """The steps of a batch, in order."""

    RESTORED = "restored"
    """Task: the runs of the previous checkpoint are on this host."""
    ACKING = "acking"
    """Task: the changeset is ready; the ack is about to be sent."""
    LAST_ACK = "last-ack"
    """Driver: all subtasks have acked; the log entry is about to be written."""
    DURABLE = "durable"
    """Driver: the log entry is durable; the last task does not know that yet."""
    ACKED = "acked"
    """Task: the coordinator has answered."""
    MERGING = "merging"
    """Task: local runs are about to be merged, and then replaced by the result."""
    MATERIALIZING = "materializing"
    """Task: a slice of a materialization, or of a large merge, is about to begin."""


@dataclass(frozen=True)
class CheckpointMetrics:
    """The measurements of one checkpoint.

    Parameters
    ----------
    query_id, uid : str
        The query and the operator.
    batch : int
        Spark's batch id.
    revision : int
        How often a later attempt with another result replaced an earlier one.
    parallelism : int
        Number of subtasks.
    input_rows, late_rows, changes : int
        Rows read, late rows among them (dropped, or returned in a `lateColumn`), and changes logged; sums over all
        subtasks.
    watermark_ms : int
        The watermark of the batch, milliseconds since the Unix epoch.
    changed_bytes : int
        Stored size of the changesets.
    objects : int
        Objects written for the checkpoint, including the log entry unless it was appended to a file.
    commit_s : float
        Time from the last ack until the log entry is durable.
    subtask_s : float
        The longest time that a subtask spent on the checkpoint before its ack: encoding its changes, writing the local
        run, and an upload.
    base_bytes, log_bytes : int
        Size of the materialized keyed state, and of the changesets since, which a restart would read too.
    materialized, materialized_bytes : int
        Subtasks whose materialized state counts from this checkpoint on, and the bytes that they newly stored for it.
    materialization_failures : int
        Subtasks that reported a failed materialization with this checkpoint.
    stored_bytes, needed_bytes : int
        Size of the files that hold operator state, large changesets and materialized runs, and of their part that is
        still needed.
    restore_s : float
        The longest time of a subtask from the answer to its begin until its state could be read.
    restored_bytes : int
        Stored size of the runs from which subtasks fetched state that their local copies lacked.
    measured : Recorded
        Measurements of driver and tasks since the previous checkpoint; see :class:`statelog.Metric`.
    """

    query_id: str
    uid: str
    batch: int
    revision: int
    parallelism: int
    input_rows: int
    late_rows: int
    watermark_ms: int
    changes: int
    changed_bytes: int
    objects: int
    commit_s: float
    subtask_s: float
    base_bytes: int = 0
    log_bytes: int = 0
    materialized: int = 0
    materialized_bytes: int = 0
    materialization_failures: int = 0
    stored_bytes: int = 0
    needed_bytes: int = 0
    restore_s: float = 0.0
    restored_bytes: int = 0
    measured: Recorded = field(default_factory=Recorded)


@dataclass(frozen=True)
class RestoreMetrics:
    """The measurements of a start of an operator: reading its log.

    Parameters
    ----------
    query_id, uid : str
        The query and the operator.
    batch : int
        The first batch of the start.
    parallelism : int
        Number of subtasks.
    log_entries : int
        Entries read from the log.
    log_s : float
        Time to claim and read the log.
    begins : bool
        Whether the operator begins here, without state of earlier batches: the query is new, the operator was added to
        it, or its state was given up.
    """

    query_id: str
    uid: str
    batch: int
    parallelism: int
    log_entries: int
    log_s: float
    begins: bool


@dataclass(frozen=True)
class RestoreProgress:
    """The progress of a restart that takes longer than a second.

    Parameters
    ----------
    query_id, uid : str
        The query and the operator.
    batch : int
        The batch that needs the state.
    subtasks : int
        Subtasks that have reported.
    read_bytes, known_bytes : int
        Bytes, as stored, that these subtasks have read and that they must read in total. Runs that are then added to a
        RocksDB table count once more.
    """

    query_id: str
    uid: str
    batch: int
    subtasks: int
    read_bytes: int
    known_bytes: int


class Observer:
    """Base class of observers; every method does nothing.

    An observer is an option (:class:`statelog.Options`) and is sent to the tasks, so it must be picklable. On the
    driver several threads call the object itself; a task calls a copy. An exception fails the task or the checkpoint.
    """

    def step(self, step: Step, batch: int, subtask: int) -> None:
        """Called when a process passes a step of a batch; `subtask` is -1 on the driver."""

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        """Called on the driver when a checkpoint is durable."""

    def restore(self, metrics: RestoreMetrics) -> None:
        """Called on the driver when a start has claimed its location and found its state in the log."""

    def restoring(self, progress: RestoreProgress) -> None:
        """Called on the driver, by several threads, while subtasks read their state for more than a second."""
