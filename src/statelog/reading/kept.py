"""Finds the checkpoints of an operator that can be read, and what keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from statelog.errors import StatelogError
from statelog.history.pins import Pin
from statelog.log.references import SegmentRef, StoredRun
from statelog.reading.source import Source, StoredQuery
from statelog.storage import ObjectInfo


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint of an operator that can be read."""

    source: Source
    needed: Pin
    """What it needs, as a pin would name it."""
    pins: list[tuple[ObjectInfo, Pin]] = field(default_factory=list)
    """Those that keep it."""

    @property
    def is_retained(self) -> bool:
        """Whether it needs no pin."""
        return self.source.pin is None


def _raise(info: ObjectInfo, pin: Pin, error: StatelogError) -> None:
    raise error


def kept_checkpoints(
    query: StoredQuery,
    identity: str,
    pins: Iterable[tuple[ObjectInfo, Pin]] = (),
    unread: Callable[[ObjectInfo, Pin, StatelogError], None] = _raise,
) -> list[KeptCheckpoint]:
    """The checkpoints of an operator that its query or some pins keep, on whichever line they lie.

    `unread` is called if the entries that a pin names cannot be read; by default it raises the error.
    """
    kept: dict[bytes, KeptCheckpoint] = {}
    history = query.history.histories.get(identity)
    for checkpoint in () if history is None else history.checkpoints:
        source = query.retained(identity, checkpoint.batch)
        if source is not None:
            kept[checkpoint.token] = KeptCheckpoint(source, source.needs())
    for info, pin in pins:
        if pin.operator(identity) is None:
            continue
        if pin.token not in kept:
            try:
                source = query.pinned(identity, pin)
            except StatelogError as error:
                unread(info, pin, error)
                continue
            kept[pin.token] = KeptCheckpoint(source, source.needs())
        kept[pin.token].pins.append((info, pin))
    return list(kept.values())


def stored_parts(source: Source) -> Iterator[tuple[SegmentRef | StoredRun, bool]]:
    """All that a checkpoint consists of, and whether each part is a snapshot of an unkeyed operator."""
    record = source.history.record(source.checkpoint.batch)
    assert record is not None
    for checkpoint in source.history.between(record.needed_from, record.batch):
        for segment in checkpoint.segments:
            # A start reads the snapshots of all subtasks, and only changesets with rows.
            if segment.rows or checkpoint.is_whole:
                yield segment, checkpoint.is_whole
    for base_range in () if record.base_map is None else record.base_map.ranges:
        for run in base_range.runs:
            yield run, False
