"""Log entries as tests write them down, from the checkpoints of the operators in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from statelog.history.query_history import QueryHistory
from statelog.log.entry import Checkpoint, Claim, Entry, QueryCheckpoint
from statelog.log.references import SegmentRef


def checkpoint_of(batch: int, segments: Iterable[SegmentRef] = (), **values: Any) -> Checkpoint:
    """A checkpoint of the keyed operator "op" with one subtask; `values` are other fields of :class:`Checkpoint`."""
    usual: dict[str, Any] = {
        "identity": "op-1",
        "uid": "op",
        "parallelism": 1,
        "key_schema": b"keys",
        "states": [],
        "epoch": 1,
        "query_id": "query",
        "run_id": "run",
    }
    return Checkpoint(batch=batch, segments=list(segments), **usual | values)


def entry_of(*checkpoints: Checkpoint, **values: Any) -> QueryCheckpoint:
    """The entry with a section for each checkpoint, which have all else in common; its id is its token.

    It follows another one unless all operators begin with it.
    """
    first = checkpoints[0]
    entry = QueryCheckpoint(
        epoch=first.epoch,
        batch=first.batch,
        revision=first.revision,
        id=first.token,
        follows=b"" if all(one.begins for one in checkpoints) else b"the one before",
        query_id=first.query_id,
        run_id=first.run_id,
        token=first.token,
        batch_time_ms=first.batch_time_ms,
        watermark_ms=0,
        sections=[checkpoint.section for checkpoint in checkpoints],
        log_start=first.log_start,
        retained_from=first.retained_from,
        number=first.number,
        offset=first.offset,
    )
    return replace(entry, **values)


def query_of(checkpoints: Iterable[Checkpoint]) -> QueryHistory:
    """The history of a query whose entries have one section each."""
    return QueryHistory(entry_of(checkpoint) for checkpoint in checkpoints)


def segments_in(entry: QueryCheckpoint) -> list[SegmentRef]:
    """The segments of all sections."""
    return [segment for section in entry.sections for segment in section.segments]


def unplaced(entries: Iterable[Entry]) -> list[Entry]:
    """Entries with claims as their writers made them, before a file of the log had them."""
    return [replace(entry, number=0) if isinstance(entry, Claim) else entry for entry in entries]
