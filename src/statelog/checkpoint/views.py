"""The state that the subtasks start a batch from; for batch 0 it may be an initial checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import msgspec

from statelog.checkpoint.admission import OperatorConfig
from statelog.checkpoint.batch import Batch
from statelog.checkpoint.history import History
from statelog.checkpoint.redistribution import SnapshotView, restored_views
from statelog.log.entry import INITIAL_BATCH, Checkpoint
from statelog.log.references import Base, BaseRange, Level, StoredRun
from statelog.runs import digests
from statelog.runs.key_groups import hash_range
from statelog.runs.times import NO_TIME_MS


def initial_checkpoint(entry: Checkpoint, runs: Mapping[int, Sequence[StoredRun]]) -> Checkpoint:
    """Add materialized keyed state to an entry without segments; `runs` holds it by subtask, disjoint."""
    ranges: list[BaseRange] = []
    first = min(entry.batch, 0)
    for subtask in range(entry.parallelism):
        own, within = list(runs.get(subtask, ())), hash_range(subtask, entry.parallelism)
        before = digests.genesis(entry.query_id, entry.uid, subtask, entry.parallelism)
        after = digests.extend(before, entry.batch, [run.checksum for run in own])
        level = Level(first, entry.batch, before, after, within.first, within.last, own)
        ranges.append(BaseRange(within.first, within.last, Base(subtask, entry.parallelism, [level])))
    return msgspec.structs.replace(entry, base_ranges=ranges)


def initial_entry(
    config: OperatorConfig, batch: int, batch_time_ms: int, *, epoch: int, token: bytes, log_start: int
) -> Checkpoint:
    """The checkpoint before an operator's first batch, still without state.

    `batch` is the query's batch before that one, at Spark's time `batch_time_ms`. `token` is 16 unique bytes,
    `log_start` the number of the log's newest file.
    """
    return Checkpoint(
        epoch=epoch,
        batch=batch,
        revision=0,
        query_id=config.query_id,
        run_id=config.run_id,
        uid=config.uid,
        parallelism=config.parallelism,
        segments=[],
        key_schema=config.key_schema,
        states=config.states,
        batch_time_ms=batch_time_ms,
        watermark_ms=NO_TIME_MS,
        token=token,
        log_start=log_start,
        retained_from=batch,
        settings=dict(config.settings),
        # Whoever reads checkpoint -1 knows it without a mark, also an older version.
        is_initial=batch != INITIAL_BATCH,
    )


@dataclass(frozen=True)
class Views:
    """The state before a batch; each list has one element per subtask."""

    genesis_digests: list[bytes]
    """Digests of the empty states."""
    heads: list[bytes]
    """Digests of the states before the batch."""
    timers_after_ms: list[int]
    """Up to this time all timers have fired in this start."""
    snapshots: list[SnapshotView]
    """State of an unkeyed operator; empty if the operator is keyed."""

    @classmethod
    def of_first_batch(cls, config: OperatorConfig, history: History, batch: int) -> Self:
        """The views of a start's first batch: the stored state, redistributed over the start's subtasks."""
        subtasks = range(config.parallelism)
        genesis_digests = [
            digests.genesis(config.query_id, config.uid, subtask, config.parallelism) for subtask in subtasks
        ]
        fired = [NO_TIME_MS] * config.parallelism
        if config.has_keys:
            heads = [
                history.digest(genesis, subtask, config.parallelism, batch - 1)
                for subtask, genesis in enumerate(genesis_digests)
            ]
            return cls(genesis_digests, heads, fired, [])
        snapshots, before = [SnapshotView()] * config.parallelism, history.at(batch - 1)
        if before is not None and not before.is_initial:
            snapshots = restored_views(before, {state.name for state in config.states}, config.parallelism)
        return cls(genesis_digests, genesis_digests, fired, snapshots)

    def after(self, batch: Batch) -> Views:
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
        fired = [batch.acks[subtask].ack.timers_to_ms for subtask in range(len(heads))]
        return replace(self, heads=heads, timers_after_ms=fired)
