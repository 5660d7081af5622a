"""Counts which stored files the checkpoints still need, and finds files with too much garbage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from statelog.log.entry import Checkpoint
from statelog.log.numbered import base_name
from statelog.log.references import SegmentRef, StoredRun


@dataclass
class _Segment:
    length: int
    references: int = 0


@dataclass
class _File:
    """A file: its size as far as known, and its needed segments by offset."""

    size_bytes: int = 0
    needed_bytes: int = 0
    segments: dict[int, _Segment] = field(default_factory=dict)


class Retention:
    """Counts the references of checkpoints to files.

    Changesets of keyed state inside the entry that references them are not counted: they stay as long as the entry, and
    later checkpoints build on it.

    `max_space_amplification` limits the size of all files divided by their needed bytes (`size_bytes / needed_bytes`).
    Above the limit the most wasteful files are emptied: their needed bytes are stored again elsewhere.
    """

    def __init__(self, max_space_amplification: float, log_folder: str) -> None:
        self._max_amplification = max_space_amplification
        self._log_folder = f"{log_folder}/"
        self._files: dict[str, _File] = {}
        self._unneeded: set[str] = set()
        self._wasteful: frozenset[str] = frozenset()
        self.size_bytes = 0
        self.needed_bytes = 0

    def add(self, checkpoint: Checkpoint) -> None:
        """Count the references of a checkpoint."""
        self.add_runs(self._counted(checkpoint))

    def add_runs(self, runs: Iterable[StoredRun | SegmentRef]) -> None:
        """Count stored runs or segments, each as often as it occurs."""
        for segment in runs:
            file = self._files.setdefault(segment.name, _File())
            growth = max(segment.offset + segment.length - file.size_bytes, 0)
            file.size_bytes += growth
            self.size_bytes += growth
            held = file.segments.get(segment.offset)
            if held is None:
                held = file.segments[segment.offset] = _Segment(segment.length)
                file.needed_bytes += held.length
                self.needed_bytes += held.length
                self._unneeded.discard(segment.name)
            held.references += 1

    def remove(self, checkpoint: Checkpoint) -> None:
        """Drop the references of a checkpoint that was added."""
        self.remove_runs(self._counted(checkpoint))

    def remove_runs(self, runs: Iterable[StoredRun | SegmentRef]) -> None:
        """Drop references that were counted."""
        for segment in runs:
            file = self._files[segment.name]
            held = file.segments[segment.offset]
            held.references -= 1
            if not held.references:
                del file.segments[segment.offset]
                file.needed_bytes -= held.length
                self.needed_bytes -= held.length
            if not file.segments:
                self._unneeded.add(segment.name)

    def release(self) -> list[str]:
        """The files outside the log that have become unneeded since the last call, sorted."""
        released = sorted(self._unneeded)
        self._unneeded.clear()
        for name in released:
            self.size_bytes -= self._files.pop(name).size_bytes
        return [name for name in released if not name.startswith(self._log_folder)]

    def needs(self, name: str) -> bool:
        """Whether any part of a file is needed."""
        return name in self._files

    def choose_wasteful(self, log_from: str) -> None:
        """Choose the files to empty: the most wasteful ones, until the others together are small enough.

        Log files from `log_from` on are never emptied.
        """
        self._wasteful = frozenset()
        limit = self.needed_bytes * self._max_amplification
        excess = self.size_bytes - limit
        if excess <= 0:
            return
        closed = [
            (file.size_bytes - file.needed_bytes, name)
            for name, file in self._files.items()
            if not (name.startswith(self._log_folder) and name >= log_from)
        ]
        chosen: list[str] = []
        for wasted, name in sorted(closed, reverse=True):
            size = self._files[name].size_bytes
            if excess <= 0 or size <= (size - wasted) * self._max_amplification:
                break
            chosen.append(name)
            excess -= wasted
        self._wasteful = frozenset(chosen)

    @property
    def has_wasteful(self) -> bool:
        """Whether there are files to empty."""
        return bool(self._wasteful)

    def is_wasteful(self, name: str) -> bool:
        """Whether a file is to be emptied: its needed bytes are moved to another file, or stored again."""
        return name in self._wasteful

    def _counted(self, checkpoint: Checkpoint) -> Iterator[SegmentRef]:
        own = f"{self._log_folder}{base_name(checkpoint.number)}"
        for segment in checkpoint.segments:
            # A revision of an entry references segments in the entry before it.
            if checkpoint.is_whole or segment.name != own:
                yield segment
