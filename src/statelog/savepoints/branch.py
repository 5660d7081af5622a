"""Begins the log of a branch: a new query's operator that goes on from the objects of another's, where they are."""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from statelog.checkpoint.history import History
from statelog.checkpoint.parent import Parent, write_parent
from statelog.errors import ConfigurationError, ErrorKind
from statelog.log.entry import Checkpoint, Claim
from statelog.log.open import open_location, open_log
from statelog.log.references import BaseRange, SegmentRef, StoredRun
from statelog.runs import digests
from statelog.savepoints.load import RestoreTarget
from statelog.storage.links import link
from statelog.storage.names import name_part


def branch_operator(history: History, parent: Parent, target: RestoreTarget, *, uid: str | None = None) -> None:
    """Begin the log of an operator with the entries that checkpoint `target.batch` of its parent's history needs.

    `uid` is the operator's; None for that of its parent. Raises ConfigurationError if the location holds state of the
    operator already.
    """
    record = history.record(target.batch)
    assert record is not None, f"checkpoint {target.batch} is not there"
    uid = uid or record.checkpoint.uid
    root = name_part(uid)
    store = open_location(target.location)
    log = open_log(store, root, target.options, target.clock)
    if any(isinstance(entry, Checkpoint) for entry in log.read()):
        raise ConfigurationError(
            f"{target.location}/{root} holds state already.",
            kind=ErrorKind.OTHER_OWNER,
            hint="Branch into an empty location, or remove the folder first.",
        )
    entries = [
        replace(
            checkpoint,
            query_id=target.query_id,
            run_id=target.run_id,
            uid=uid,
            revision=0,
            segments=[_linked(segment, parent.location) for segment in checkpoint.segments],
            bases=[],
            base_ranges=None,
            token=target.new_token(),
            retained_from=target.batch,
            operators=target.operators,
        )
        for checkpoint in history.between(record.needed_from, target.batch)
    ]
    if not record.checkpoint.is_whole:
        assert record.base_map is not None, f"checkpoint {target.batch} cannot be restored"
        # Before all of them, so that the base map counts as one that the log begins with.
        ranges = [_linked_range(one, parent.location, target.query_id, uid) for one in record.base_map.ranges]
        entries[0] = replace(entries[0], base_ranges=ranges)
    now_ms = int(target.clock.now_s() * 1000)
    # A list's elements are in the order of the epochs that appended them, so those of the branch are later ones.
    least = record.checkpoint.epoch + 1
    log.claim(lambda own: Claim(max(own, least), target.query_id, target.run_id, uid, target.new_token(), now_ms))
    try:
        write_parent(store, root, parent)
        start = log.number
        for entry in entries:
            log.append(replace(entry, epoch=log.epoch, log_start=start), [])
    finally:
        log.close()


_Part = TypeVar("_Part", SegmentRef, StoredRun)


def _linked(part: _Part, location: str) -> _Part:
    return replace(part, name=link(location, part.name))


def _linked_range(base_range: BaseRange, location: str, query_id: str, uid: str) -> BaseRange:
    base = base_range.base
    levels = [replace(level, runs=[_linked(run, location) for run in level.runs]) for level in base.levels]
    # The empty state, with which the first level begins, is another in each query.
    genesis = digests.genesis(query_id, uid, base.subtask, base.parallelism)
    levels[0] = replace(levels[0], before=genesis)
    return replace(base_range, base=replace(base, levels=levels))
