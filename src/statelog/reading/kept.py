"""Finds the checkpoints of an operator that can be read, and what keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from statelog.checkpoint.pins import Pin
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


def kept_checkpoints(
    query: StoredQuery, identity: str, pins: Iterable[tuple[ObjectInfo, Pin]] = ()
) -> list[KeptCheckpoint]:
    """The checkpoints of an operator that its query or some pins keep, by whichever line they lie on.

    Raises CorruptionError or StorageError if the entries that a pin names cannot be read.
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
            source = query.pinned(identity, pin)
            kept[pin.token] = KeptCheckpoint(source, source.needs())
        kept[pin.token].pins.append((info, pin))
    return list(kept.values())
