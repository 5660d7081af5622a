"""Which files the checkpoints need that can be restored, and which wasteful ones are to be emptied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from statelog.log.entry import Checkpoint
from statelog.log.log import base_name
from statelog.log.references import SegmentRef, StoredRun


@dataclass
class _Segment:
    length: int
    references: int = 0


@dataclass
class _File:
    """A file: its size as far as it is known, and what is needed of it, by offset."""

    size_bytes: int = 0
    needed_bytes: int = 0
    segments: dict[int, _Segment] = field(default_factory=dict)


class Retention:
    """Counts the references of checkpoints to files, by name, whatever shares the files.

    Changesets of keyed state inside the entry that names them are not counted: they stay as long as the entry, which
    later checkpoints build on.

    Parameters
    ----------
    max_space_amplification : float
        The size of all files divided by what is needed of them, above which files are emptied.
    log_folder : str
        Where the log's files are.

    Attributes
    ----------
    size_bytes : int
        Size of all files of which something is needed.
    needed_bytes : int
        What is needed of them.
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
        """Count what a checkpoint names."""
        self.add_runs(self._counted(checkpoint))

    def add_runs(self, runs: Iterable[StoredRun | SegmentRef]) -> None:
        """Count stored runs, or segments, each as often as it is given."""
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
        """Give up a checkpoint that was added."""
        self.remove_runs(self._counted(checkpoint))

    def remove_runs(self, runs: Iterable[StoredRun | SegmentRef]) -> None:
        """Give up what was counted."""
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
        """The files outside of the log of which nothing is needed any more since the last call, sorted."""
        released = sorted(self._unneeded)
        self._unneeded.clear()
        for name in released:
            self.size_bytes -= self._files.pop(name).size_bytes
        return [name for name in released if not name.startswith(self._log_folder)]

    def needs(self, name: str) -> bool:
        """Whether something is needed of a file."""
        return name in self._files

    def choose_wasteful(self, log_from: str) -> None:
        """Find the files to empty: the most wasteful ones, until the others are not too large together.

        Parameters
        ----------
        log_from : str
            Files of the log from this one on are never emptied.
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
        """Whether what is needed of a file is to be moved to another one, or stored again."""
        return name in self._wasteful

    def _counted(self, checkpoint: Checkpoint) -> Iterator[SegmentRef]:
        own = f"{self._log_folder}{base_name(checkpoint.number)}"
        for segment in checkpoint.segments:
            # A revision names what the entry before it holds.
            if checkpoint.is_whole or segment.name != own:
                yield segment
