"""The batch in progress: its attempts, and which of their acks counts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Self

from statelog.checkpoint.protocol import Ack
from statelog.errors import ConfigurationError, CorruptionError, ErrorKind
from statelog.log.entry import Checkpoint
from statelog.log.references import Level, SegmentRef
from statelog.log_fields import get_logger
from statelog.metrics import CheckpointMetrics
from statelog.operators.watermark import WatermarkPolicy
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
        """Spark's times with the watermark of an operator: its own, or if it has none Spark's."""
        if own is None:
            # If the operator used to have its own watermark, Spark's may be behind it: stay until Spark's catches up.
            least_ms = NO_TIME_MS if before is None else before.watermark_ms
            return replace(
                self,
                watermark_ms=max(self.watermark_ms, least_ms),
                late_watermark_ms=max(self.late_watermark_ms, least_ms),
            )
        if before is None:
            return replace(self, watermark_ms=NO_TIME_MS, late_watermark_ms=NO_TIME_MS)
        watermark_ms = own.advance(before.watermark_ms, before.max_event_ms)
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
    """The bytes of that snapshot, if the new entry stores them again."""
    stored: list[SegmentRef] = field(default_factory=list)
    """Segments of the changeset, once an entry references them."""
    levels: list[Level] = field(default_factory=list)
    """State that the subtask has materialized."""
    levels_payload: bytes = b""
    """The levels' runs without a name, until they are stored."""
    is_stored: bool = False
    """Whether an entry references the result."""
    received_s: float = 0.0
    """When it came, by the driver's monotonic clock."""

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
                f"{name}: the changeset of subtask {ack.task.subtask} was damaged on its way.",
                hint="Start the query again.",
            )
        return cls(ack, payload[:size], levels=ack.levels, levels_payload=payload[size:])


@dataclass
class Batch:
    """A batch that Spark can still repeat, because no later one has begun."""

    number: int
    time: BatchTime
    begun: dict[int, int] = field(default_factory=dict)
    """Subtask of each attempt that has begun, by attempt id."""
    acks: dict[int, AcceptedAck] = field(default_factory=dict)
    """The ack that counts, by subtask."""
    durable: Checkpoint | None = None
    """The log entry, once there is one."""
    is_written: bool = False
    """Whether the log may hold an entry, even if its write reported a failure."""
    metrics: CheckpointMetrics | None = None
    """Of the newest entry."""

    def missing(self, parallelism: int) -> list[int]:
        """Subtasks that have not acked."""
        return [subtask for subtask in range(parallelism) if subtask not in self.acks]

    @property
    def lost(self) -> set[int]:
        """Subtasks with an attempt that has begun but whose result does not count."""
        counted = {one.ack.task.attempt for one in self.acks.values()}
        return {subtask for attempt, subtask in self.begun.items() if attempt not in counted}

    def accept(self, accepted: AcceptedAck, name: str) -> bool:
        """Let an ack count and return True, unless a later attempt's ack or one with the same result already does.

        Raises ConfigurationError if the subtask had rows in an earlier attempt and has none now.
        """
        ack = accepted.ack
        former = self.acks.get(ack.task.subtask)
        if former is None:
            self.acks[ack.task.subtask] = accepted
            return True
        if former.ack.checksums == ack.checksums or ack.task.attempt < former.ack.task.attempt:
            return False
        if former.ack.last.input_rows > 0 and ack.last.input_rows == 0:
            raise ConfigurationError(
                f"{name}: subtask {ack.task.subtask} had {former.ack.last.input_rows} rows in batch {self.number},"
                " and none when the batch was run again.",
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
        self.acks[ack.task.subtask] = accepted
        return True
