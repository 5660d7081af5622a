"""Which checkpoints exist: the log's entries read as a stack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from statelog.changelog import chain
from statelog.changelog.segment import MissingSegments, SegmentRef
from statelog.checkpoint.entry import Checkpoint, Entry
from statelog.state.key_groups import KEY_GROUPS

__all__ = ["History", "overlapping"]


class History:
    """The checkpoints that can be restored, by batch.

    A later entry for a batch replaces the earlier one and everything after it: a newer run repeated the
    batch, or a later attempt of the same run had another result. An entry for batch 0 starts anew. Entries that hold
    the whole state need none before them.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._checkpoints: list[Checkpoint] = []
        for entry in entries:
            if isinstance(entry, Checkpoint):
                self.add(entry)

    def add(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """Add a later entry; return those that it replaces."""
        replaced: list[Checkpoint] = []
        while self._checkpoints and self._checkpoints[-1].batch >= checkpoint.batch:
            replaced.append(self._checkpoints.pop())
        self._checkpoints.append(checkpoint)
        return replaced

    @property
    def latest(self) -> Checkpoint | None:
        """The newest checkpoint."""
        return self._checkpoints[-1] if self._checkpoints else None

    @property
    def first_missing(self) -> int | None:
        """The oldest batch whose checkpoint is lost although a later one exists; None if all are there."""
        if not self._checkpoints:
            return None
        first = self._checkpoints[0]
        for expected, checkpoint in enumerate(self._checkpoints, first.batch if first.is_whole else 0):
            if checkpoint.batch != expected:
                return expected
        return None

    def has_batch(self, batch: int) -> bool:
        """Whether the checkpoint of a batch exists and so do all before it."""
        return self.first_missing is None and self.at(batch) is not None

    def at(self, batch: int) -> Checkpoint | None:
        """The checkpoint of a batch; None if there is none."""
        newest_first = reversed(self._checkpoints)
        return next((checkpoint for checkpoint in newest_first if checkpoint.batch == batch), None)

    def up_to(self, batch: int) -> Iterator[Checkpoint]:
        """Checkpoints up to and including a batch, oldest first."""
        return (checkpoint for checkpoint in self._checkpoints if checkpoint.batch <= batch)

    def retain(self, oldest: int) -> list[Checkpoint]:
        """Give up checkpoints before a batch, unless later ones build on them; return them."""
        count = 0
        while count < len(self._checkpoints) and self._checkpoints[count].batch < oldest:
            if not self._checkpoints[count].is_whole:
                break
            count += 1
        given_up, self._checkpoints = self._checkpoints[:count], self._checkpoints[count:]
        return given_up

    def log_start(self, oldest: int, batch: int) -> int | None:
        """The first log file with an entry that is needed once the checkpoint of a batch exists; None if it is its own.

        Parameters
        ----------
        oldest : int
            The oldest batch that can be gone back to.
        batch : int
            The batch; its entry is still to be written.
        """
        for one in self._checkpoints:
            if one.batch < batch and (one.batch >= oldest or not one.is_whole):
                return one.number
        return None

    @property
    def checkpoints(self) -> Iterator[Checkpoint]:
        """All checkpoints that can be restored, oldest first."""
        return iter(self._checkpoints)

    def object_names(self) -> set[str]:
        """Every object that holds a segment."""
        return {segment.name for checkpoint in self._checkpoints for segment in checkpoint.segments}

    def digest(self, origin: bytes, subtask: int, parallelism: int, batch: int) -> bytes:
        """Chain digest of a subtask, of any parallelism, after a batch.

        Parameters
        ----------
        origin : bytes
            Digest of the subtask's empty state.
        subtask, parallelism : int
            The subtask.
        batch : int
            The batch; -1 for the empty state.
        """
        digest = origin
        for checkpoint in self.up_to(batch):
            digest = _extended(digest, checkpoint, subtask, parallelism)
        return digest

    def missing_segments(
        self, origin: bytes, subtask: int, parallelism: int, batch: int, known: set[bytes]
    ) -> MissingSegments:
        """What a subtask lacks of the state after a batch.

        Parameters
        ----------
        origin, subtask, parallelism, batch
            As for :meth:`digest`.
        known : set of bytes
            Digests whose state the subtask has.
        """
        digest = since = origin
        first_batch = 0
        segments: list[SegmentRef] = []
        for checkpoint in self.up_to(batch):
            segments.extend(overlapping(checkpoint, subtask, parallelism))
            digest = _extended(digest, checkpoint, subtask, parallelism)
            if digest in known:
                since, first_batch, segments = digest, checkpoint.batch + 1, []
        return MissingSegments(since, first_batch, segments)


def overlapping(checkpoint: Checkpoint, subtask: int, parallelism: int) -> list[SegmentRef]:
    """Segments of a checkpoint that may hold keys of a subtask of another parallelism."""
    first_group = -(-subtask * KEY_GROUPS // parallelism)
    last_group = -(-(subtask + 1) * KEY_GROUPS // parallelism) - 1
    first = first_group * checkpoint.parallelism // KEY_GROUPS
    last = last_group * checkpoint.parallelism // KEY_GROUPS
    return checkpoint.segments_of(first, last)


def _extended(digest: bytes, checkpoint: Checkpoint, subtask: int, parallelism: int) -> bytes:
    segments = overlapping(checkpoint, subtask, parallelism)
    return chain.extend(digest, checkpoint.batch, [segment.checksum for segment in segments])
