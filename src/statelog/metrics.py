"""Metrics and progress: recorded where things happen, sent with the ack, reported to the observer."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any, Final, NamedTuple, Self

_KEPT: Final = 1000
_MEANING: Final = "meaning"
_NO_TIME_MS: Final = -(1 << 63)


class Metric(StrEnum):
    """The metrics. Those with a unit or ``per`` in their name are distributions, the others are counters."""

    meaning: str
    """A sentence."""

    def __new__(cls, name: str, meaning: str) -> Self:
        """A member from its name and its meaning."""
        member = str.__new__(cls, name)
        member._value_, member.meaning = name, meaning
        return member

    STATE_FETCHES = "state_fetches", "Tasks that fetched state, because their executor had none or not all of it."
    MATERIALIZATION_UPLOADS = "materialization_uploads", "Objects with materialized state that were written."
    UPLOAD_REQUESTS = "upload_requests", "Objects with changes or materialized state that were to be written."
    UPLOAD_FAILURES = "upload_failures", "Objects that could not be written by any attempt."
    UPLOAD_RETRIES = "upload_retries", "Attempts started because the previous one had failed."
    UPLOAD_HEDGES = "upload_hedges", "Attempts started because the previous one took too long."
    SLOW_DOWNS = "slow_downs", "Answers in which the store asked for fewer requests."
    READ_RETRIES = "read_retries", "Repeated requests other than writes."
    ATTEMPTS_PER_UPLOAD = "attempts_per_upload", "Number of the attempt that succeeded, from 1."
    TOTAL_ATTEMPTS_PER_UPLOAD = (
        "total_attempts_per_upload",
        "Number of attempts started, including those that came too late to count.",
    )
    UPLOAD_LATENCY_S = "upload_latency_s", "Time from the first attempt to the success."
    UPLOAD_SIZE_BYTES = "upload_size_bytes", "Size of the object."
    UPLOAD_QUEUE_BYTES = (
        "upload_queue_bytes",
        "Bytes of a subtask that were waiting or being written when an upload was added.",
    )


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
        if not (recorded.counts or recorded.samples):
            return
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
class Meaning:
    """What a number of :class:`CheckpointMetrics` means: the source of the documentation and of all exported names.

    Parameters
    ----------
    text : str
        A sentence.
    unit : {"", "rows", "bytes", "seconds", "milliseconds"}
        Empty for a count of the things that the name says.
    adds_up : bool
        Whether the numbers of successive checkpoints add up; otherwise each replaces the one before.
    per : {"", "subtask", "state"}
        The part of the operator that has the number; empty for the whole operator.
    """

    text: str
    unit: str = ""
    adds_up: bool = False
    per: str = ""


def _number(text: str, unit: str = "", *, adds_up: bool = False, **default: Any) -> Any:
    return field(metadata={_MEANING: Meaning(text, unit, adds_up)}, **default)


class SubtaskMetrics(NamedTuple):
    """A subtask's part of a checkpoint. The times add up to about the time of its task.

    Parameters
    ----------
    subtask : int
        Its number, from 0.
    input_rows : int
        Rows read.
    changes : int
        Changes of state that were logged.
    changed_bytes : int
        Stored size of the changeset.
    restore_s : float
        Time in seconds from the driver's answer to the begin request until the state could be read.
    read_s : float
        Time for looking up state.
    processor_s : float
        Time in the processor, with the conversion of rows and values.
    encode_s : float
        Time for encoding changes and writing them to the local disk.
    upload_s : float
        Time of waiting until objects were written.
    wait_s : float
        Time of waiting for the driver, for Spark to take rows, and after the ack for the other subtasks and the log
        entry.
    """

    subtask: int
    input_rows: int
    changes: int
    changed_bytes: int
    restore_s: float = 0.0
    read_s: float = 0.0
    processor_s: float = 0.0
    encode_s: float = 0.0
    upload_s: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True)
class StateMetrics:
    """The size of one state in all subtasks.

    Parameters
    ----------
    rows : int
        Values, map entries, list elements or timers. In keyed state, rows that were replaced or deleted count until
        their runs are merged, so this is an upper bound.
    size_bytes : int
        Size of these rows in the local files of the subtasks.
    """

    rows: int
    size_bytes: int


@dataclass(frozen=True)
class HotKey:
    """A key with many input rows in a batch.

    Parameters
    ----------
    rows : int
        Its input rows in the batch.
    key_group : int
        Its key group.
    key : tuple or None
        The values of the grouping columns; None with ``Options(redact_keys=True)``, for a key of more than 1 kB, and
        for values that Python cannot represent, such as dates after the year 9999.
    """

    rows: int
    key_group: int
    key: tuple[Any, ...] | None


@dataclass(frozen=True)
class HotKeyGroup:
    """A key group with many input rows in a batch.

    Parameters
    ----------
    rows : int
        Its input rows in the batch.
    key_group : int
        Its number, from 0 to 32,767.
    """

    rows: int
    key_group: int


@dataclass(frozen=True)
class CheckpointMetrics:
    """The measurements of one checkpoint.

    :func:`meanings` has the meanings and units of the numbers; docs/metrics.md lists them.

    Parameters
    ----------
    query_id, uid : str
        The query and the operator.
    batch : int
        Spark's batch id.
    measured : Recorded
        Measurements of driver and tasks since the previous checkpoint; see :class:`statelog.Metric`.
    subtasks : sequence of SubtaskMetrics
        Each subtask's part, in the order of the subtasks.
    states : mapping of str to StateMetrics
        The size of each state, by name.
    hot_keys : sequence of HotKey
        The keys with the most input rows in the batch, in descending order; at most 10, and none with a single row.
    hot_key_groups : sequence of HotKeyGroup
        The key groups with the most input rows, likewise.
    """

    query_id: str
    uid: str
    batch: int
    revision: int = _number("How often a later attempt with another result replaced an earlier one.")
    parallelism: int = _number("Subtasks.")
    input_rows: int = _number("Rows read.", "rows", adds_up=True)
    late_rows: int = _number("Late rows read, dropped or returned in a `late_column`.", "rows", adds_up=True)
    watermark_ms: int = _number("The watermark of the batch, since the Unix epoch.", "milliseconds")
    changes: int = _number("Changes of state that were logged.", adds_up=True)
    changed_bytes: int = _number("Stored size of the changesets.", "bytes", adds_up=True)
    objects: int = _number(
        "Objects written for the checkpoint, including the log entry unless it was appended to a file.", adds_up=True
    )
    commit_s: float = _number("Time from the last ack until the log entry was durable.", "seconds", adds_up=True)
    subtask_s: float = _number(
        "Longest time of a subtask before its ack: encoding its changes, writing the local run, and an upload.",
        "seconds",
        adds_up=True,
    )
    base_bytes: int = _number("Size of the materialized keyed state.", "bytes", default=0)
    log_bytes: int = _number("Size of the later changesets, which a restart would also read.", "bytes", default=0)
    logged_changesets: int = _number(
        "Subtasks whose changes, or the last part of large ones, are in the log entry; others have their own objects.",
        adds_up=True,
        default=0,
    )
    materializations_started: int = _number("Subtasks that began to materialize their state.", adds_up=True, default=0)
    materialized: int = _number(
        "Subtasks whose materialized state counts from this checkpoint on.", adds_up=True, default=0
    )
    materialized_bytes: int = _number(
        "Size of what these subtasks newly stored for that state.", "bytes", adds_up=True, default=0
    )
    materialization_s: float = _number(
        "Longest time from the start of a materialization until its state counts.", "seconds", default=0.0
    )
    materialization_failures: int = _number(
        "Subtasks that reported a failed materialization with this checkpoint.", adds_up=True, default=0
    )
    stored_bytes: int = _number(
        "Size of the files that hold operator state, large changesets and materialized runs.", "bytes", default=0
    )
    needed_bytes: int = _number("The part of these files that is still needed.", "bytes", default=0)
    restore_s: float = _number(
        "Longest time that a subtask needed at the beginning of the batch until its state could be read.",
        "seconds",
        adds_up=True,
        default=0.0,
    )
    restored_bytes: int = _number(
        "Stored size of the runs from which subtasks fetched state that their local copies lacked.",
        "bytes",
        adds_up=True,
        default=0,
    )
    state_rows: int = _number("Rows of all states; an upper bound for keyed state.", "rows", default=0)
    state_bytes: int = _number("Size of these rows in the local files of the subtasks.", "bytes", default=0)
    hottest_key_rows: int = _number("Rows of the key that had the most in the batch.", "rows", default=0)
    read_s: float = _number("Longest time of a subtask for looking up state.", "seconds", adds_up=True, default=0.0)
    processor_s: float = _number("Longest time of a subtask in the processor.", "seconds", adds_up=True, default=0.0)
    encode_s: float = _number(
        "Longest time of a subtask for encoding its changes and writing them to the local disk.",
        "seconds",
        adds_up=True,
        default=0.0,
    )
    upload_s: float = _number(
        "Longest time in which a subtask waited for its uploads.", "seconds", adds_up=True, default=0.0
    )
    wait_s: float = _number(
        "Longest time in which a subtask waited for the driver, for Spark or for other subtasks.",
        "seconds",
        adds_up=True,
        default=0.0,
    )
    measured: Recorded = field(default_factory=Recorded)
    subtasks: Sequence[SubtaskMetrics] = ()
    states: Mapping[str, StateMetrics] = field(default_factory=dict)
    hot_keys: Sequence[HotKey] = ()
    hot_key_groups: Sequence[HotKeyGroup] = ()

    @property
    def space_amplification(self) -> float | None:
        """`stored_bytes` per byte of `needed_bytes`; None if nothing is needed."""
        return space_amplification(self.stored_bytes, self.needed_bytes)

    def numbers(self) -> dict[str, float | None]:
        """The numbers by name, in the order of :func:`meanings`; a watermark that has no value yet is None."""
        found = {name: getattr(self, name) for name in meanings()}
        if self.watermark_ms == _NO_TIME_MS:
            found["watermark_ms"] = None
        return found


def space_amplification(stored_bytes: int, needed_bytes: int) -> float | None:
    """The size of files per byte of them that retained checkpoints need; None if they need nothing."""
    return stored_bytes / needed_bytes if needed_bytes else None


def storage_overhead(stored_bytes: int, state_bytes: int) -> float | None:
    """The size of stored objects per byte of the state that a restart reads; None if there is no state."""
    return stored_bytes / state_bytes if state_bytes else None


@cache
def meanings() -> Mapping[str, Meaning]:
    """The meanings of the numbers of :class:`CheckpointMetrics`, by name."""
    described = ((one.name, one.metadata.get(_MEANING)) for one in fields(CheckpointMetrics))
    return {name: meaning for name, meaning in described if meaning is not None}


@dataclass(frozen=True)
class RestoreMetrics:
    """The measurements of an operator's start: claiming and reading its log.

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
