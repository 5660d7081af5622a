"""What happens inside, told to whoever wants to know: metrics of checkpoints, and the steps of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from statelog.metrics import Recorded


class Step(StrEnum):
    """Points of a batch, in the order in which they are passed."""

    RESTORED = "restored"
    """Task: the runs of the checkpoint before are here."""
    ACKING = "acking"
    """Task: the changeset is ready; the ack is about to be sent."""
    LAST_ACK = "last-ack"
    """Driver: the acks of all subtasks are in; the log entry is about to be written."""
    DURABLE = "durable"
    """Driver: the log entry is durable; the last task does not know it yet."""
    ACKED = "acked"
    """Task: the coordinator has answered."""
    MERGING = "merging"
    """Task: local runs are about to be merged; the result replaces them afterwards."""
    MATERIALIZING = "materializing"
    """Task: a slice of a materialization, or of a large merge, is about to be done."""


@dataclass(frozen=True)
class CheckpointMetrics:
    """One checkpoint, measured.

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
        Rows read, how many of them were late (left out, or returned in a `lateColumn`), and changes logged, of all
        subtasks.
    watermark_ms : int
        The watermark of the batch, milliseconds since the Unix epoch.
    changed_bytes : int
        Bytes of the changesets as stored.
    objects : int
        Objects written for the checkpoint, the log entry included unless it was appended to a file.
    commit_s : float
        From the last ack received to the entry durable.
    subtask_s : float
        The longest time that a subtask spent on the checkpoint: encoding its changes, writing the local
        run, and an upload, up to the moment when it sends the ack.
    base_bytes, log_bytes : int
        Size of the materialized keyed state, and of the changesets since, which a restart would read as well.
    materialized, materialized_bytes : int
        Subtasks whose materialized state counts from this checkpoint on, and what they have newly stored of it.
    materialization_failures : int
        Subtasks that reported with this checkpoint that one has failed.
    stored_bytes, needed_bytes : int
        Size of the files that hold operator state, large changesets and materialized runs, and what is needed of them.
    restore_s : float
        The longest time that a subtask needed from the answer to its begin until its state could be read.
    restored_bytes : int
        Size, as stored, of the runs from which subtasks fetched what their local copies did not have.
    measured : Recorded
        What driver and tasks have measured since the checkpoint before; see :class:`statelog.Metric`.
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
    """How a run of an operator found its state.

    Parameters
    ----------
    query_id, uid : str
        The query and the operator.
    batch : int
        The first batch of the run.
    parallelism : int
        Number of subtasks.
    log_entries : int
        Entries read from the log.
    log_s : float
        Time to claim and read the log.
    """

    query_id: str
    uid: str
    batch: int
    parallelism: int
    log_entries: int
    log_s: float


@dataclass(frozen=True)
class RestoreProgress:
    """How far a restart has come, while it takes longer than a second.

    Parameters
    ----------
    query_id, uid : str
        The query and the operator.
    batch : int
        The batch that needs the state.
    subtasks : int
        Subtasks that have told.
    read_bytes, known_bytes : int
        How much they have read, and of how much, as stored. Runs that are then added to a RocksDB table count too.
    """

    query_id: str
    uid: str
    batch: int
    subtasks: int
    read_bytes: int
    known_bytes: int


class Observer:
    """Base class of observers; every method does nothing.

    An observer is given with :class:`statelog.Options` and sent to the tasks, so it must be picklable. On the
    driver the object itself is called, by several threads; on the tasks a copy of it. An exception fails the
    task or the checkpoint.
    """

    def step(self, step: Step, batch: int, subtask: int) -> None:
        """A point of a batch is passed; `subtask` is -1 on the driver."""

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        """A checkpoint is durable. Called on the driver."""

    def restore(self, metrics: RestoreMetrics) -> None:
        """A run has claimed its location and found its state. Called on the driver."""

    def restoring(self, progress: RestoreProgress) -> None:
        """Subtasks are reading their state, since more than a second. Called on the driver, by several threads."""
