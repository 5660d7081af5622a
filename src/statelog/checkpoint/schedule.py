"""When which subtask materializes its state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from statelog.checkpoint.history import History
from statelog.options import Options

SLICE_S: Final = 0.25
"""A batch may become longer by this for upkeep."""

_SMALL_BYTES: Final = 1 << 20
_REPLAY_BYTES_PER_S: Final = 50e6
_REPLAY_CHECKPOINT_S: Final = 0.005


@dataclass
class _Subtask:
    """What is known of a subtask.

    Parameters
    ----------
    due_s : float
        When the next materialization is due, by a monotonic clock.
    base_bytes : int
        Size of its materialized state.
    log_bytes, checkpoints : int
        Size and number of the changesets since.
    log_bytes_before, checkpoints_before : int
        Those of them that the materialization in progress takes up.
    is_running : bool
        Whether a materialization is in progress.
    has_backlog : bool
        Whether it has large local merges to do.
    failures : int
        Failures in a row.
    """

    due_s: float
    base_bytes: int = 0
    log_bytes: int = 0
    checkpoints: int = 0
    log_bytes_before: int = 0
    checkpoints_before: int = 0
    is_running: bool = False
    has_backlog: bool = False
    failures: int = 0


class MaterializationSchedule:
    """Decides after which batches a subtask does a slice of upkeep.

    As many subtasks as run at a time do one after a batch, so the batch becomes longer by one slice.

    Parameters
    ----------
    options : Options
        Options.
    name : str
        The operator; with the subtask it decides by how much the first materialization is put off.
    parallelism : int
        Number of subtasks.
    slots : int
        How many subtasks run at a time.
    now_s : float
        The time by a monotonic clock.
    """

    def __init__(self, options: Options, name: str, parallelism: int, slots: int, now_s: float) -> None:
        self._options = options
        self._slots = max(1, slots)
        interval_s = options.materialization_interval_s
        self._subtasks = [_Subtask(now_s + interval_s * (1 + _spread(name, subtask))) for subtask in range(parallelism)]
        self._running = 0
        self._granted: dict[int, bool] = {}
        self._batch = -1

    def restore(self, history: History, batch: int) -> None:
        """Take over what a new run finds.

        Parameters
        ----------
        history : History
            The checkpoints.
        batch : int
            The batch before the first.
        """
        record = history.record(batch)
        if record is None or record.base_map is None:
            return
        parallelism = len(self._subtasks)
        ranges = record.base_map.ranges
        base_bytes = sum(base_range.base.length for base_range in ranges)
        count = record.batch - record.base_map.through
        log_bytes = sum(
            segment.length
            for checkpoint in history.between(batch - count + 1, batch)
            for segment in checkpoint.segments
        )
        for number, subtask in enumerate(self._subtasks):
            base = record.base_map.base_of(number, parallelism)
            subtask.base_bytes = base_bytes // parallelism if base is None else base.length
            subtask.log_bytes = log_bytes // parallelism
            subtask.checkpoints = count

    @property
    def base_bytes(self) -> int:
        """Size of the materialized state of all subtasks."""
        return sum([one.base_bytes for one in self._subtasks])

    @property
    def log_bytes(self) -> int:
        """Size of the changesets since."""
        return sum([one.log_bytes for one in self._subtasks])

    def grant(self, subtask: int, batch: int, now_s: float, *, is_forced: bool = False) -> bool | None:
        """Whether a subtask does upkeep after a batch.

        Parameters
        ----------
        subtask : int
            The subtask.
        batch : int
            The batch that it begins.
        now_s : float
            The time.
        is_forced : bool
            Whether it is to materialize in any case, in its turn.

        Returns
        -------
        bool or None
            Whether it is to materialize, or only to merge; None for no upkeep.
        """
        if batch != self._batch:
            self._batch, self._granted = batch, {}
        one = self._subtasks[subtask]
        if subtask in self._granted:
            is_over = self._granted[subtask] and not one.is_running  # an attempt before has finished it
            return None if is_over else self._granted[subtask]
        may_start = self._running < self._slots and self._is_due(one, now_s, is_forced)
        materializes = one.is_running or may_start
        if not (materializes or (one.has_backlog and len(self._granted) < self._slots)):
            return None
        if materializes and not one.is_running:
            one.is_running = True
            self._running += 1
            one.log_bytes_before, one.checkpoints_before = one.log_bytes, one.checkpoints
        self._granted[subtask] = materializes
        return materializes

    def _is_due(self, one: _Subtask, now_s: float, is_forced: bool) -> bool:
        options = self._options
        if not options.materialization or not one.checkpoints:
            return False
        replay_s = one.log_bytes / _REPLAY_BYTES_PER_S + one.checkpoints * _REPLAY_CHECKPOINT_S
        return (
            is_forced
            or now_s >= one.due_s
            or one.log_bytes > max(options.max_log_to_base * one.base_bytes, _SMALL_BYTES)
            or replay_s > options.replay_budget_s
        )

    def committed(self, sizes: Iterable[int], backlogs: Iterable[bool]) -> None:
        """A checkpoint is durable, with changesets of these sizes in bytes."""
        for one, size, has_backlog in zip(self._subtasks, sizes, backlogs, strict=True):
            one.log_bytes += size
            one.checkpoints += 1
            one.has_backlog = has_backlog

    def materialized(self, subtask: int, base_bytes: int, now_s: float) -> None:
        """A subtask's materialized state is durable."""
        one = self._subtasks[subtask]
        one.base_bytes = base_bytes
        one.log_bytes = max(0, one.log_bytes - one.log_bytes_before)
        one.checkpoints = max(0, one.checkpoints - one.checkpoints_before)
        self._stop(one)
        one.failures = 0
        one.due_s = now_s + self._options.materialization_interval_s

    def dropped(self, subtask: int, now_s: float) -> None:
        """A materialization came to nothing, and is to be begun again."""
        one = self._subtasks[subtask]
        self._stop(one)
        one.due_s = now_s

    def failed(self, subtask: int, now_s: float) -> bool:
        """A materialization failed and will be tried again; return whether it has been too often."""
        self.dropped(subtask, now_s)
        one = self._subtasks[subtask]
        one.failures += 1
        return one.failures > self._options.materialization_max_failures

    def _stop(self, one: _Subtask) -> None:
        self._running -= one.is_running
        one.is_running = False


def _spread(name: str, subtask: int) -> float:
    """A number from 0 to 1 that differs from subtask to subtask."""
    digest = hashlib.blake2b(f"{name}/{subtask}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) / (1 << 32)
