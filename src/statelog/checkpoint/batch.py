"""The batch in progress: which attempts have begun, and whose results count."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Self

from statelog.checkpoint.protocol import Ack
from statelog.errors import ConfigurationError, CorruptionError, ErrorKind
from statelog.log.entry import Checkpoint
from statelog.log.references import Level, SegmentRef
from statelog.runs import digests

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchTime:
    """When a batch takes place, in milliseconds since the Unix epoch.

    Parameters
    ----------
    time_ms : int
        The processing time.
    watermark_ms : int
        The watermark: timers up to it fire in this batch.
    late_watermark_ms : int
        The watermark of the batch before: rows up to it are late.
    """

    time_ms: int
    watermark_ms: int
    late_watermark_ms: int = 0


@dataclass
class AcceptedAck:
    """An ack that counts, and the changeset's bytes until they are stored.

    Parameters
    ----------
    ack : Ack
        The ack.
    payload : bytes
        The changeset, unless the ack names an object.
    kept : SegmentRef or None
        The stored snapshot of an earlier checkpoint that the ack refers to.
    moved : bytes
        The bytes of `kept`, if they are to be moved to the new entry.
    stored : list of SegmentRef
        Where the result is, once an entry names it.
    levels : list of Level
        State that the subtask has materialized.
    levels_payload : bytes
        The bytes of its runs without a name, until they are stored.
    is_stored : bool
        Whether an entry names the result.
    """

    ack: Ack
    payload: bytes
    unchanged_segment: SegmentRef | None = None
    rewritten_bytes: bytes = b""
    stored: list[SegmentRef] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    levels_payload: bytes = b""
    is_stored: bool = False

    @classmethod
    def of(cls, ack: Ack, payload: bytes, name: str) -> Self:
        """An ack with the bytes that came with it, checked.

        Parameters
        ----------
        ack : Ack
            The ack.
        payload : bytes
            The changeset unless it is an object or there is none, and the materialized runs without a name.
        name : str
            The operator, for messages.

        Raises
        ------
        CorruptionError
            If the bytes are not what the ack says.
        """
        size = ack.length if ack.has_changeset and not ack.name and not ack.is_unchanged else 0
        sent = [(size, ack.checksum)] if size else []
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
    """A batch that can still be repeated, because no later one has begun.

    Parameters
    ----------
    number : int
        Spark's batch id.
    time : BatchTime
        Its time.
    begun : dict
        Subtask of each attempt that has begun.
    acks : dict
        The ack that counts, by subtask.
    durable : Checkpoint or None
        The log entry, once there is one.
    is_written : bool
        Whether an entry may be in the log, although nobody has seen it.
    """

    number: int
    time: BatchTime
    begun: dict[int, int] = field(default_factory=dict)
    acks: dict[int, AcceptedAck] = field(default_factory=dict)
    durable: Checkpoint | None = None
    is_written: bool = False

    def missing(self, parallelism: int) -> list[int]:
        """Subtasks that have not acked."""
        return [subtask for subtask in range(parallelism) if subtask not in self.acks]

    @property
    def lost(self) -> set[int]:
        """Subtasks of which an attempt has begun that does not count."""
        counted = {one.ack.task.attempt for one in self.acks.values()}
        return {subtask for attempt, subtask in self.begun.items() if attempt not in counted}

    def take(self, new: AcceptedAck, name: str) -> bool:
        """Let an ack count unless one of a later attempt does, or one with the same result.

        Parameters
        ----------
        new : AcceptedAck
            The ack.
        name : str
            The operator, for messages.

        Returns
        -------
        bool
            Whether it counts.

        Raises
        ------
        ConfigurationError
            If the subtask has lost all its rows since an earlier attempt.
        """
        ack = new.ack
        held = self.acks.get(ack.task.subtask)
        if held is None:
            self.acks[ack.task.subtask] = new
            return True
        if held.ack.checksums == ack.checksums or ack.task.attempt < held.ack.task.attempt:
            return False
        if held.ack.input_rows > 0 and ack.input_rows == 0:
            raise ConfigurationError(
                f"{name}: subtask {ack.task.subtask} had {held.ack.input_rows} rows in batch {self.number}, and none"
                " when the batch was run again.",
                kind=ErrorKind.STALE_DATAFRAME,
                hint="A DataFrame of an earlier batch was kept and run again; use each batch's DataFrame only in"
                " its own foreachBatch call.",
            )
        _log.warning(
            "%s: attempts %d and %d of subtask %d gave different results in batch %d: the processor or its input"
            " is not deterministic; the later attempt counts",
            name,
            held.ack.task.attempt,
            ack.task.attempt,
            ack.task.subtask,
            self.number,
        )
        self.acks[ack.task.subtask] = new
        return True
