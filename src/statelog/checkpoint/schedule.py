"""Decides when each subtask materializes its state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from statelog.checkpoint.history import History
from statelog.local.policy import MergePolicy
from statelog.options import Options


@dataclass
class _Subtask:
    """Sizes and progress of one subtask."""

    due_s: float
    """When the next materialization is due, by a monotonic clock."""
    base_bytes: int = 0
    """Size of the materialized state."""
    log_bytes: int = 0
    """Size of the changesets since then."""
    checkpoints: int = 0
    """Number of the changesets since then."""
    log_bytes_before: int = 0
    """The part of `log_bytes` that the materialization in progress replaces."""
    checkpoints_before: int = 0
    """The same of `checkpoints`."""
    is_running: bool = False
    """Whether a materialization is in progress."""
    has_backlog: bool = False
    """Whether large local merges wait."""
    failures: int = 0
    """Failures in a row."""


class MaterializationSchedule:
    """Decides after which batches a subtask does a slice of maintenance.

    After a batch at most `slots` subtasks do one, as many as run at a time; so the batch becomes longer by one slice.
    `name` and the subtask decide how much later than the others its first materialization is. Times are those of a
    monotonic clock.
    """

    def __init__(
        self, options: Options, policy: MergePolicy, name: str, parallelism: int, slots: int, now_s: float
    ) -> None:
        self._options = options
        self._policy = policy
        self._slots = max(1, slots)
        interval_s = options.materialization_interval_s
        self._subtasks = [_Subtask(now_s + interval_s * (1 + _spread(name, subtask))) for subtask in range(parallelism)]
        self._running = 0
        self._granted: dict[int, bool] = {}
        self._batch = -1

    def restore(self, history: History, batch: int) -> None:
        """Take over the history of earlier starts; `batch` is the one before this start's first."""
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
        """Size of the changesets since the materialized state."""
        return sum([one.log_bytes for one in self._subtasks])

    def grant(self, subtask: int, batch: int, now_s: float, *, is_forced: bool = False) -> bool | None:
        """Whether a subtask materializes after a batch (True) or only merges (False); None for no maintenance.

        `is_forced` makes its materialization due at once.
        """
        if batch != self._batch:
            self._batch, self._granted = batch, {}
        one = self._subtasks[subtask]
        if subtask in self._granted:
            is_over = self._granted[subtask] and not one.is_running  # an earlier attempt has finished it
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
        options, policy = self._options, self._policy
        if not options.materialization or not one.checkpoints:
            return False
        replay_s = one.log_bytes / policy.replay_bytes_per_s + one.checkpoints * policy.replay_checkpoint_s
        return (
            is_forced
            or now_s >= one.due_s
            or one.log_bytes > max(options.max_log_to_base * one.base_bytes, policy.small_log_bytes)
            or replay_s > options.replay_budget_s
        )

    def committed(self, sizes: Iterable[int], backlogs: Iterable[bool]) -> None:
        """Note that a checkpoint is durable; `sizes` are those of its changesets in bytes."""
        for one, size, has_backlog in zip(self._subtasks, sizes, backlogs, strict=True):
            one.log_bytes += size
            one.checkpoints += 1
            one.has_backlog = has_backlog

    def materialized(self, subtask: int, base_bytes: int, now_s: float) -> None:
        """Note that a subtask's materialized state is durable."""
        one = self._subtasks[subtask]
        one.base_bytes = base_bytes
        one.log_bytes = max(0, one.log_bytes - one.log_bytes_before)
        one.checkpoints = max(0, one.checkpoints - one.checkpoints_before)
        self._stop(one)
        one.failures = 0
        one.due_s = now_s + self._options.materialization_interval_s

    def dropped(self, subtask: int, now_s: float) -> None:
        """Note that a materialization was in vain and has to begin again."""
        one = self._subtasks[subtask]
        self._stop(one)
        one.due_s = now_s

    def failed(self, subtask: int, now_s: float) -> bool:
        """Note that a materialization has failed and has to begin again; return whether it fails too often."""
        self.dropped(subtask, now_s)
        one = self._subtasks[subtask]
        one.failures += 1
        return one.failures > self._options.materialization_max_failures

    def _stop(self, one: _Subtask) -> None:
        self._running -= one.is_running
        one.is_running = False


def _spread(name: str, subtask: int) -> float:
    """A number from 0 to 1 that differs between subtasks."""
    digest = hashlib.blake2b(f"{name}/{subtask}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) / (1 << 32)
