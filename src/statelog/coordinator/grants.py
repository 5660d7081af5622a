"""Grants: the coordinator's permission for a subtask's job to materialize state, and which objects it may reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from statelog.local.materializer import Grant
from statelog.log.references import Level


class Grants:
    """The open grants of a start, at most one per subtask.

    A grant ends once: when a durable checkpoint includes its job's outcome, or when the job has failed or is void.
    While it is open, the store keeps the base that the job begins with and all objects below the grant's folder. Once
    it has ended, nothing can reference an object below that folder any more, except those that checkpoints already
    reference.
    """

    def __init__(self, folder_of: Callable[[int], str]) -> None:
        self._folder_of = folder_of
        self._open: dict[int, Grant] = {}
        self._pending: set[int] = set()
        """Subtasks whose job's outcome waits for a durable checkpoint."""
        # Replaced as a whole, so that the deleting thread sees either the old or the new state.
        self._folders: frozenset[str] = frozenset()
        self._ended: list[str] = []

    def open(self, subtask: int, job: str, base: bytes, levels: Sequence[Level]) -> Grant:
        """Grant a subtask that has no grant a job that begins with some levels; `base` is the digest of their state."""
        assert subtask not in self._open
        grant = Grant(job, base, list(levels), f"{self._folder_of(subtask)}/{job}")
        self._open[subtask] = grant
        self._folders |= {grant.folder}
        return grant

    def of(self, subtask: int) -> Grant | None:
        """A subtask's open grant, unless its outcome already waits for a checkpoint."""
        return None if subtask in self._pending else self._open.get(subtask)

    def has(self, subtask: int) -> bool:
        """Whether a subtask has a grant that has not ended."""
        return subtask in self._open

    def take(self, subtask: int) -> None:
        """Note that the job's outcome counts once a checkpoint with it is durable."""
        self._pending.add(subtask)

    def end(self, subtask: int, *, has_leftovers: bool = True) -> bool:
        """End a subtask's grant; return whether it had one.

        `has_leftovers` says whether there may be objects of the job that no checkpoint references.
        """
        grant = self._open.pop(subtask, None)
        if grant is None:
            return False
        self._pending.discard(subtask)
        self._folders -= {grant.folder}
        if has_leftovers:
            self._ended.append(grant.folder)
        return True

    def end_pending(self, subtask: int) -> bool:
        """End a subtask's grant if its outcome was waiting for a checkpoint, now durable; return whether it was."""
        return subtask in self._pending and self.end(subtask)

    def end_all(self) -> None:
        """Forget all grants: the start is over."""
        self._open.clear()
        self._pending.clear()
        self._folders = frozenset()

    def is_open(self, name: str) -> bool:
        """Whether an open grant lets a job reference an object."""
        return name.rpartition("/")[0] in self._folders

    def ended(self) -> list[str]:
        """The folders of the grants that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended


def is_within_grant(levels: Sequence[Level], grant: Grant) -> bool:
    """Whether a job's levels are what its grant allows: the first levels of the base, and one more.

    The last level is either new, with runs below the grant's folder or inside the ack, or it is one of the base's
    levels, which now stands for more batches because nothing has changed since.
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
