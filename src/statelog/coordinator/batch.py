"""The batch in progress: its attempts, which of their acks counts, and what a durable entry covers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Self

from statelog.errors import ConfigurationError, CorruptionError, ErrorKind
from statelog.log.entry import Checkpoint, QueryCheckpoint
from statelog.log.references import Level, SegmentRef
from statelog.log_fields import get_logger
from statelog.metrics import CheckpointMetrics
from statelog.operators.event_time import WatermarkPolicy
from statelog.rpc.messages import Ack, JobOutcome
from statelog.runs import digests
from statelog.runs.times import NO_TIME_MS

_log = get_logger(__name__)


@dataclass(frozen=True)
class BatchTime:
    """Processing time and watermarks of a batch, in milliseconds since the Unix epoch."""

    time_ms: int
    watermark_ms: int
    """Timers up to this watermark fire in the batch."""
    late_watermark_ms: int = 0
    """Watermark of the previous batch: rows up to it are late."""

    def with_watermark_of(self, own: WatermarkPolicy | None, before: Checkpoint | None) -> BatchTime:
        """Spark's times with the watermark of an operator: its own or, if it has none, Spark's."""
        if own is None:
            # If the operator used to have its own watermark, Spark's may be behind: keep it until Spark's catches up.
            least_ms = NO_TIME_MS if before is None else before.watermark_ms
            return replace(
                self,
                watermark_ms=max(self.watermark_ms, least_ms),
                late_watermark_ms=max(self.late_watermark_ms, least_ms),
            )
        if before is None:
            return replace(self, watermark_ms=NO_TIME_MS, late_watermark_ms=NO_TIME_MS)
        watermark_ms = own.advance(
            before.watermark_ms, before.max_event_ms, before.silent_ms, self.time_ms - before.batch_time_ms
        )
        return replace(self, watermark_ms=watermark_ms, late_watermark_ms=before.watermark_ms)


@dataclass
class AcceptedAck:
    """An ack that counts, with its bytes until they are stored."""

    ack: Ack
    payload: bytes
    """The changeset, unless it is an object."""
    unchanged_segment: SegmentRef | None = None
    """Snapshot of an earlier checkpoint that the ack refers to."""
    rewritten_bytes: bytes = b""
    """The bytes of the referenced snapshot, if the new entry stores them again."""
    stored: list[SegmentRef] = field(default_factory=list)
    """Segments of the changeset, once an entry references them."""
    levels: list[Level] = field(default_factory=list)
    """State that the subtask has materialized."""
    levels_payload: bytes = b""
    """The runs of the levels that have no name yet, until they are stored."""
    is_stored: bool = False
    """Whether an entry references the result."""
    received_s: float = 0.0
    """When the ack arrived, by the driver's monotonic clock."""
    outcome: JobOutcome = JobOutcome.NONE
    """What the attempt was told about its materialization."""

    @classmethod
    def of(cls, ack: Ack, payload: bytes, name: str) -> Self:
        """Split an ack's payload into changeset and runs; CorruptionError if they do not match their checksums."""
        last = ack.last
        size = last.length if ack.has_changeset and not last.name and not ack.is_unchanged else 0
        sent = [(size, last.checksum)] if size else []
        sent += [(run.length, run.checksum) for level in ack.levels for run in level.runs if not run.name]
        start = 0
        for length, checksum in sent:
            if digests.checksum(payload[start : start + length]) != checksum:
                break
            start += length
        if start != len(payload) or start != sum(length for length, _ in sent):
            raise CorruptionError(
                f"{name}: the changeset of subtask {ack.task.subtask} was damaged in transit.",
                hint="Start the query again.",
            )
        return cls(ack, payload[:size], levels=ack.levels, levels_payload=payload[size:])


@dataclass
class OperatorBatch:
    """A batch of one operator: the attempts of its subtasks and their results."""

    number: int
    time: BatchTime
    """The times of the batch, with the operator's own watermark if it has one."""
    parallelism: int
    begun: dict[int, int] = field(default_factory=dict)
    """Subtask of each attempt that has begun, by attempt id."""
    tokens: dict[int, str] = field(default_factory=dict)
    """Token of each of these attempts."""
    acks: dict[int, AcceptedAck] = field(default_factory=dict)
    """The ack that counts, by subtask."""
    newest: dict[int, int] = field(default_factory=dict)
    """The latest attempt that has acked, by subtask; its result equals the one that counts."""
    durable: Checkpoint | None = None
    """The operator's part of the newest entry, once there is one."""
    is_written: bool = False
    """Whether the log may hold an entry, even if its write reported a failure."""
    metrics: CheckpointMetrics | None = None
    """Of the acks that count, once all subtasks have acked."""

    @property
    def missing(self) -> list[int]:
        """Subtasks that have not acked."""
        return [subtask for subtask in range(self.parallelism) if subtask not in self.acks]

    @property
    def is_complete(self) -> bool:
        """Whether all subtasks have acked."""
        return len(self.acks) == self.parallelism

    @property
    def lost(self) -> set[int]:
        """Subtasks with an attempt that has begun but whose result does not count."""
        counted = {one.ack.task.attempt for one in self.acks.values()}
        return {subtask for attempt, subtask in self.begun.items() if attempt not in counted}

    def differs(self, ack: Ack) -> bool:
        """Whether an ack would replace an earlier attempt's ack with another result."""
        former = self.acks.get(ack.task.subtask)
        if former is None or former.ack.checksums == ack.checksums:
            return False
        return ack.task.attempt >= self.newest[ack.task.subtask]

    def accept(self, accepted: AcceptedAck, name: str) -> bool:
        """Let an ack count and return True, unless a later attempt's ack or one with the same result already does.

        Raises ConfigurationError if the subtask had rows in an earlier attempt and has none now.
        """
        ack, subtask = accepted.ack, accepted.ack.task.subtask
        former = self.acks.get(subtask)
        if former is None:
            self.acks[subtask], self.newest[subtask] = accepted, ack.task.attempt
            return True
        if not self.differs(ack):
            if former.ack.checksums == ack.checksums:
                # Spark keeps the output of the latest attempt, so the result of an attempt in between never counts.
                self.newest[subtask] = max(self.newest[subtask], ack.task.attempt)
            return False
        if former.ack.last.input_rows > 0 and ack.last.input_rows == 0:
            raise ConfigurationError(
                f"{name}: subtask {ack.task.subtask} had {former.ack.last.input_rows} rows in batch {self.number},"
                " but none when the batch was run again.",
                kind=ErrorKind.STALE_DATAFRAME,
                hint="A DataFrame of an earlier batch was kept and run again; use each batch's DataFrame only in"
                " its own foreachBatch call.",
            )
        _log.log(
            logging.DEBUG if ack.adds_floats else logging.WARNING,
            "%s: attempts %d and %d of subtask %d gave different results in batch %d: the processor or its input"
            " is not deterministic; the later attempt counts",
            name,
            former.ack.task.attempt,
            ack.task.attempt,
            ack.task.subtask,
            self.number,
        )
        self.acks[subtask], self.newest[subtask] = accepted, ack.task.attempt
        return True


class InlineBudget:
    """Divides the bytes that may travel with the acks of a batch among the subtasks of all operators.

    A subtask's limit is what is left, divided by the subtasks still to begin. The limit stays for the batch, because it
    decides where changes are cut into parts, and two attempts must cut alike to have equal results.
    """

    def __init__(self, total_bytes: int, subtasks: int) -> None:
        self._left = total_bytes
        self._to_begin = subtasks
        self._limits: dict[tuple[str, int], int] = {}
        self._reserved: dict[tuple[str, int], int] = {}

    def limit_of(self, uid: str, subtask: int) -> int:
        """The limit of a subtask that begins, in bytes."""
        key = uid, subtask
        if key not in self._limits:
            self._limits[key] = self._reserved[key] = max(self._left, 0) // max(self._to_begin, 1)
            self._left -= self._limits[key]
            self._to_begin -= 1
        return self._limits[key]

    def sent(self, uid: str, subtask: int, size_bytes: int) -> None:
        """Note how much a subtask has sent: the rest of its limit goes to subtasks that begin later."""
        self._left += self._reserved.get((uid, subtask), 0) - size_bytes
        self._reserved[uid, subtask] = size_bytes


@dataclass
class Batch:
    """A batch of the query that Spark can still repeat, because no later one has begun."""

    number: int
    time: BatchTime
    """Spark's times of the batch."""
    operators: dict[str, OperatorBatch]
    """The batches of the operators, by uid."""
    budget: InlineBudget
    durable: QueryCheckpoint | None = None
    """The log entry, once there is one."""
    accepted: int = 0
    """How many acks have been counted."""
    covered: int = 0
    """How many of them the durable entry covers."""

    @property
    def is_complete(self) -> bool:
        """Whether all subtasks of all operators have acked."""
        return all(one.is_complete for one in self.operators.values())

    @property
    def is_settled(self) -> bool:
        """Whether all that counts is durable."""
        return self.durable is not None and self.covered == self.accepted
