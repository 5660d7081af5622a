"""The first checkpoint of a location that does not begin with nothing: materialized state, and nothing before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from statelog.changelog import chain
from statelog.changelog.base import Base, Level, StoredRun
from statelog.checkpoint.cover import Piece
from statelog.checkpoint.entry import Checkpoint
from statelog.state.key_groups import hash_range

__all__ = ["founding_checkpoint"]


def founding_checkpoint(entry: Checkpoint, runs: Mapping[int, Sequence[StoredRun]]) -> Checkpoint:
    """Let a checkpoint of keyed state begin a location.

    Parameters
    ----------
    entry : Checkpoint
        Whose it is, and all but the state; without segments.
    runs : mapping of int to sequence of StoredRun
        For each of the entry's subtasks that has state the runs that hold it.
    """
    pieces: list[Piece] = []
    first = min(entry.batch, 0)
    for subtask in range(entry.parallelism):
        own, within = list(runs.get(subtask, ())), hash_range(subtask, entry.parallelism)
        before = chain.genesis(entry.query_id, entry.uid, subtask, entry.parallelism)
        after = chain.extend(before, entry.batch, [run.checksum for run in own])
        level = Level(first, entry.batch, before, after, within.first, within.last, own)
        pieces.append(Piece(within.first, within.last, Base(subtask, entry.parallelism, [level])))
    return msgspec.structs.replace(entry, cover=pieces)
