"""The state from which the subtasks of an operator start a batch; for its first batch, the state may be given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import OperatorBatch
from statelog.coordinator.redistribution import restored_views
from statelog.history.operator_history import History
from statelog.log.references import Base, BaseRange, Level, StoredRun
from statelog.rpc.messages import SnapshotView
from statelog.runs import digests
from statelog.runs.key_groups import hash_range
from statelog.runs.times import NO_TIME_MS


def given_base(
    identity: str, parallelism: int, batch: int, runs: Mapping[int, Sequence[StoredRun]], first: int | None = None
) -> list[BaseRange]:
    """The base map of an operator whose state after `batch` was given; `runs` holds it by subtask, disjoint.

    `first` is the first batch whose changes it stands for, `batch` by default.
    """
    ranges: list[BaseRange] = []
    for subtask in range(parallelism):
        own, within = list(runs.get(subtask, ())), hash_range(subtask, parallelism)
        before = digests.genesis(identity, subtask, parallelism)
        after = digests.extend(before, batch, [run.checksum for run in own])
        level = Level(batch if first is None else first, batch, before, after, within.first, within.last, own)
        ranges.append(BaseRange(within.first, within.last, Base(subtask, parallelism, [level])))
    return ranges


@dataclass(frozen=True)
class Views:
    """The state before a batch; each list has one element per subtask."""

    genesis_digests: list[bytes]
    """Digests of the empty states."""
    heads: list[bytes]
    """Digests of the states before the batch."""
    timers_after_ms: list[int]
    """The time up to which all timers have fired in this start."""
    arrivals_after_ms: list[int]
    """The time up to which the limits of all arrivals are over in this start."""
    snapshots: list[SnapshotView]
    """State of an unkeyed operator; empty if the operator is keyed."""

    @classmethod
    def of_first_batch(cls, config: OperatorConfig, identity: str, history: History, batch: int) -> Self:
        """The views of a start's first batch: the stored state, redistributed over the start's subtasks."""
        subtasks = range(config.parallelism)
        genesis_digests = [digests.genesis(identity, subtask, config.parallelism) for subtask in subtasks]
        fired = [NO_TIME_MS] * config.parallelism
        if config.has_keys:
            heads = [
                history.digest(genesis, subtask, config.parallelism, batch - 1)
                for subtask, genesis in enumerate(genesis_digests)
            ]
            return cls(genesis_digests, heads, fired, fired, [])
        snapshots, before = [SnapshotView()] * config.parallelism, history.at(batch - 1)
        if before is not None:
            snapshots = restored_views(before, {state.name for state in config.states}, config.parallelism)
        return cls(genesis_digests, genesis_digests, fired, fired, snapshots)

    def after(self, batch: OperatorBatch) -> Views:
        """The views of the next batch; `batch` must be durable."""
        assert batch.durable is not None
        if self.snapshots:
            return replace(self, snapshots=[SnapshotView(parts, None) for parts in batch.durable.by_subtask()])
        heads = [
            digests.extend(head, batch.number, [part.checksum for part in parts])
            for head, parts in zip(self.heads, batch.durable.by_subtask(), strict=True)
        ]
        for base in batch.durable.bases:
            if base.through == batch.number:
                heads[base.subtask] = base.digest
        acks = [batch.acks[subtask].ack for subtask in range(len(heads))]
        return replace(
            self,
            heads=heads,
            timers_after_ms=[ack.timers_to_ms for ack in acks],
            arrivals_after_ms=[ack.arrivals_to_ms for ack in acks],
        )
