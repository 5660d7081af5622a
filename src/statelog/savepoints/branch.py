"""Begins the log of a branch: a new query that goes on from the objects of another one, where they are."""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from statelog.checkpoint.history import Record
from statelog.checkpoint.query_history import QueryHistory
from statelog.log.entry import Parent, Section
from statelog.log.references import BaseRange, SegmentRef, StoredRun
from statelog.savepoints.load import RestoreTarget, new_log
from statelog.storage.links import link


def branch_query(query: QueryHistory, parent: Parent, target: RestoreTarget) -> None:
    """Begin a query's log with the entries that checkpoint `target.batch` of its parent's history needs.

    The operators keep their identities: their state goes on. Raises ConfigurationError if the location holds state
    already.
    """
    records = [record for one in query.histories_at(target.batch) if (record := one.record(target.batch)) is not None]
    first = min(record.needed_from for record in records)
    newest = query.at(target.batch)
    assert newest is not None, f"checkpoint {target.batch} is not there"
    # A list's elements are in the order of the epochs that appended them, so those of the branch are later ones.
    with new_log(target, newest.epoch + 1) as log:
        start, follows = log.number, b""
        for batch in range(first, target.batch + 1):
            entry = query.at(batch)
            assert entry is not None, f"checkpoint {batch}, which a later one builds on, is not there"
            sections = [
                _section(query, record, batch, parent.location) for record in records if record.needed_from <= batch
            ]
            own = target.entry(
                log, batch, entry.batch_time_ms, sections, follows=follows, parent=parent, log_start=start
            )
            log.append(own, [])
            follows = own.id


def _section(query: QueryHistory, record: Record, batch: int, location: str) -> Section:
    """The section of an operator in the branch's entry of a batch; `record` is that of the newest."""
    checkpoint = query.histories[record.checkpoint.identity].at(batch)
    assert checkpoint is not None, f"checkpoint {batch}, which a later one builds on, is not there"
    section = replace(
        checkpoint.section,
        segments=[_linked(segment, location) for segment in checkpoint.segments],
        bases=[],
        base_ranges=None,
    )
    if batch == record.needed_from and not checkpoint.is_whole:
        assert record.base_map is not None, "the checkpoint can be restored"
        # Before all changes, so that the base map counts as one that the log begins with.
        ranges = [_linked_range(one, location) for one in record.base_map.ranges]
        section = replace(section, base_ranges=ranges)
    return section


_Part = TypeVar("_Part", SegmentRef, StoredRun)


def _linked(part: _Part, location: str) -> _Part:
    return replace(part, name=link(location, part.name))


def _linked_range(base_range: BaseRange, location: str) -> BaseRange:
    levels = [replace(level, runs=[_linked(run, location) for run in level.runs]) for level in base_range.base.levels]
    return replace(base_range, base=replace(base_range.base, levels=levels))
