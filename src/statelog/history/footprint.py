"""What a checkpoint needs: its footprint."""

from __future__ import annotations

from collections.abc import Iterator

from statelog.history.operator_history import History
from statelog.log.references import SegmentRef, StoredRun


def stored_parts(history: History, batch: int) -> Iterator[SegmentRef | StoredRun]:
    """The changesets, snapshots and materialized runs that an operator's checkpoint is read from."""
    record = history.record(batch)
    assert record is not None, f"checkpoint {batch} is not there"
    for checkpoint in history.between(record.needed_from, batch):
        # A start reads the snapshots of all subtasks, and only changesets with rows.
        yield from (segment for segment in checkpoint.segments if segment.rows or checkpoint.is_whole)
    for base_range in () if record.base_map is None else record.base_map.ranges:
        yield from base_range.runs
