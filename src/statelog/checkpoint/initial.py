"""The initial checkpoint: materialized state that an operator has before its first batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from statelog.checkpoint.admission import OperatorConfig
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


def initial_entry(config: OperatorConfig, epoch: int, token: bytes, log_start: int) -> Checkpoint:
    """The checkpoint before the first batch, still without state.

    `token` is 16 unique bytes, `log_start` the number of the log's newest file.
    """
    return Checkpoint(
        epoch=epoch,
        batch=INITIAL_BATCH,
        revision=0,
        query_id=config.query_id,
        run_id=config.run_id,
        uid=config.uid,
        parallelism=config.parallelism,
        segments=[],
        key_schema=config.key_schema,
        states=config.states,
        batch_time_ms=0,
        watermark_ms=NO_TIME_MS,
        token=token,
        log_start=log_start,
        retained_from=INITIAL_BATCH,
        settings=dict(config.settings),
    )
