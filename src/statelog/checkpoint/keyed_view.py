"""The state that a keyed batch starts from, as its task uses it: made once of the coordinator's reply to begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from statelog.checkpoint.protocol import Begun, TaskId
from statelog.local.materializer import Grant, MaintenanceRequest
from statelog.operators.keyed.operator import KeyedOperator
from statelog.operators.keyed.subtask import BatchContext
from statelog.runs.key_groups import HashRange, hash_range
from statelog.runs.merge import Garbage
from statelog.runs.schema import TimeDomain, stored_name
from statelog.runs.times import Moment


@dataclass(frozen=True)
class KeyedView:
    """The state of a subtask before a batch, and the limits of the attempt that works on it."""

    genesis: bytes
    """Digest of the empty state."""
    head: bytes
    """Digest of the state before the batch."""
    within: HashRange
    """The subtask's key hashes."""
    operator: KeyedOperator
    """With its states as they are stored: under their stored names, with their stored expiry."""
    context: BatchContext
    garbage: Garbage
    """The rows that are garbage for good."""
    initial: str
    """The object with the rows of the initial state; empty if there are none."""
    location: str
    upload_prefix: str
    """Begins the names of the subtask's objects."""
    inline_bytes: int
    """Changesets up to this size are sent with the ack."""
    maintenance: MaintenanceRequest | None

    @classmethod
    def of(cls, begun: Begun, task: TaskId, parallelism: int, operator: KeyedOperator) -> Self:
        """The view that the coordinator has replied to a task."""
        return cls(
            genesis=begun.genesis,
            head=begun.head,
            within=hash_range(task.subtask, parallelism),
            operator=as_stored(operator, begun.generations, begun.expires_by),
            context=BatchContext(
                epoch=begun.epoch,
                batch=task.batch,
                moment=Moment(begun.batch_time_ms, begun.watermark_ms, begun.late_watermark_ms),
                timers_after_ms=begun.timers_after_ms,
                closed_ms=begun.closed_ms,
            ),
            # Another start may repeat the batch, with another watermark or without the deletions. So only rows that are
            # garbage as of the previous checkpoint are garbage for good.
            garbage=Garbage(Moment(begun.batch_time_ms, begun.late_watermark_ms), begun.certain_generations),
            initial=begun.initial,
            location=begun.store,
            upload_prefix=begun.upload_prefix,
            inline_bytes=begun.inline_bytes,
            maintenance=begun.maintenance,
        )

    @property
    def grant(self) -> Grant | None:
        """The grant of a materialization, if the coordinator has requested one."""
        return self.maintenance.grant if self.maintenance else None


def as_stored(operator: KeyedOperator, generations: Mapping[str, int], expires_by: Mapping[str, str]) -> KeyedOperator:
    """The operator with its states as they are stored; the mappings are those of :class:`Begun`."""
    if not generations and not expires_by:
        return operator
    states = [
        replace(
            binding,
            descriptor=replace(
                binding.descriptor,
                name=stored_name(name, generations.get(name, 0)),
                expires_by=TimeDomain(expires_by[name]) if name in expires_by else binding.descriptor.expires_by,
            ),
        )
        for binding in operator.states
        for name in (binding.name,)
    ]
    return replace(operator, states=states)
