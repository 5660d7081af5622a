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
    batch, or a later attempt of the same run had another result. An entry for batch 0 starts anew.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._checkpoints: list[Checkpoint] = []
        for entry in entries:
            if isinstance(entry, Checkpoint):
                self.add(entry)

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a later entry."""
        while self._checkpoints and self._checkpoints[-1].batch >= checkpoint.batch:
            self._checkpoints.pop()
        self._checkpoints.append(checkpoint)

    @property
    def latest(self) -> Checkpoint | None:
        """The newest checkpoint."""
        return self._checkpoints[-1] if self._checkpoints else None

    @property
    def first_missing(self) -> int | None:
        """The oldest batch whose checkpoint is lost although a later one exists; None if all are there."""
        for expected, checkpoint in enumerate(self._checkpoints):
            if checkpoint.batch != expected:
                return expected
        return None

    def has_batch(self, batch: int) -> bool:
        """Whether the checkpoint of a batch exists and so do all before it."""
        return self.first_missing is None and 0 <= batch < len(self._checkpoints)

    def at(self, batch: int) -> Checkpoint | None:
        """The checkpoint of a batch; None if there is none."""
        newest_first = reversed(self._checkpoints)
        return next((checkpoint for checkpoint in newest_first if checkpoint.batch == batch), None)

    def up_to(self, batch: int) -> Iterator[Checkpoint]:
        """Checkpoints up to and including a batch, oldest first."""
        return (checkpoint for checkpoint in self._checkpoints if checkpoint.batch <= batch)

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
    return checkpoint.segments[first : last + 1]


def _extended(digest: bytes, checkpoint: Checkpoint, subtask: int, parallelism: int) -> bytes:
    segments = overlapping(checkpoint, subtask, parallelism)
    return chain.extend(digest, checkpoint.batch, [segment.checksum for segment in segments])
