"""Grants: what a materialization may name, and when its leave to do so ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from statelog.local.materializer import Grant
from statelog.log.references import Level


@dataclass
class _Open:
    """A grant that has not ended, and whether its job's outcome waits for a checkpoint."""

    grant: Grant
    is_taken: bool = False


class Grants:
    """The open grants of a run's subtasks: at most one for each.

    A grant ends once: its job's outcome is part of a durable checkpoint, or the job has failed or is void. While it is
    open the base that it begins with is in the store, and so is whatever lies below its folder. Afterwards nobody may
    name an object below that folder which no checkpoint names.

    Parameters
    ----------
    folder_of : callable
        The folder of a subtask's materialized runs.
    """

    def __init__(self, folder_of: Callable[[int], str]) -> None:
        self._folder_of = folder_of
        self._open: dict[int, _Open] = {}
        # Replaced as a whole, so that the thread that deletes sees one state or the other.
        self._folders: frozenset[str] = frozenset()
        self._ended: list[str] = []

    def open(self, subtask: int, job: str, base: bytes, levels: Sequence[Level]) -> Grant:
        """Grant a subtask that has none a job that begins with some levels."""
        assert subtask not in self._open
        grant = Grant(job, base, list(levels), f"{self._folder_of(subtask)}/{job}")
        self._open[subtask] = _Open(grant)
        self._folders |= {grant.folder}
        return grant

    def of(self, subtask: int) -> Grant | None:
        """The grant that a subtask's job may still be finished for."""
        found = self._open.get(subtask)
        return None if found is None or found.is_taken else found.grant

    def has(self, subtask: int) -> bool:
        """Whether a subtask has a grant that has not ended."""
        return subtask in self._open

    def take(self, subtask: int) -> None:
        """The job's outcome counts as soon as a checkpoint with it is durable."""
        self._open[subtask].is_taken = True

    def end(self, subtask: int, *, has_leftovers: bool = True) -> bool:
        """A subtask's grant is over; return whether it had one.

        Parameters
        ----------
        subtask : int
            The subtask.
        has_leftovers : bool
            Whether there may be objects of the job that no checkpoint names.
        """
        found = self._open.pop(subtask, None)
        if found is None:
            return False
        self._folders -= {found.grant.folder}
        if has_leftovers:
            self._ended.append(found.grant.folder)
        return True

    def end_taken(self, subtask: int) -> bool:
        """The outcome that was taken of a subtask is durable; return whether there was one."""
        found = self._open.get(subtask)
        return found is not None and found.is_taken and self.end(subtask)

    def end_all(self) -> None:
        """The run is over."""
        self._open.clear()
        self._folders = frozenset()

    def is_open(self, name: str) -> bool:
        """Whether an object is one that a job may still name."""
        return name.rpartition("/")[0] in self._folders

    def ended(self) -> list[str]:
        """The folders of the grants that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended


def names_only(levels: Sequence[Level], grant: Grant) -> bool:
    """Whether a job's levels consist of what its grant lets it name: the base's first levels, and one more.

    The last level is new, with runs below the grant's folder or inside the ack. Or it is one of the base's that stands
    for more batches, because nothing has changed since.
    """
    *kept, last = levels
    begins_at = grant.known[0].before if grant.known else grant.base
    if kept != grant.known[: len(kept)] or last.before != (kept[-1].after if kept else begins_at):
        return False
    if len(kept) < len(grant.known):
        longer = replace(grant.known[len(kept)], last=last.last, after=last.after)
        if longer == last:
            return True
    return all(not run.name or run.name.rpartition("/")[0] == grant.folder for run in last.runs)
