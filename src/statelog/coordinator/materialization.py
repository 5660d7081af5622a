"""Decides when each subtask materializes its state, asks it for maintenance, and judges the outcome."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from statelog.clock import Clock
from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import AcceptedAck, OperatorBatch
from statelog.coordinator.garbage import Inventory
from statelog.coordinator.grants import is_within_grant
from statelog.errors import ErrorKind, ProtocolError, StorageError
from statelog.history.operator_history import History
from statelog.local.materializer import MaintenanceRequest
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.log.entry import INITIAL_BATCH, Checkpoint
from statelog.log.references import Level
from statelog.log_fields import get_logger
from statelog.options import Options
from statelog.rpc.messages import Ack, JobOutcome, TaskId


@dataclass
class _Subtask:
    """Sizes and progress of one subtask."""

    due_s: float
    """When the next materialization is due, by a monotonic clock."""
    rests_until_s: float = -math.inf
    """Until then, the size of the log does not make the next one due."""
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
    started_s: float | None = None
    """When the last materialization started; None if none has."""
    has_backlog: bool = False
    """Whether large local merges are waiting."""
    failures: int = 0
    """Failures in a row."""


class MaterializationSchedule:
    """Decides after which batches a subtask does a slice of maintenance.

    After a batch at most `slots` subtasks do one, as many as run at a time; so the batch becomes longer by one slice.
    `name` and the subtask's number decide how far a subtask's first materialization is delayed, so that not all are due
    at once. Times are those of a monotonic clock.
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
        self.started: set[int] = set()
        """The subtasks whose materialization has started in the batch."""

    def restore(self, history: History, batch: int) -> None:
        """Continue with the history of earlier starts; `batch` is the one before this start's first."""
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
            self._batch, self._granted, self.started = batch, {}, set()
        one = self._subtasks[subtask]
        if subtask in self._granted:
            is_over = self._granted[subtask] and not one.is_running  # an earlier attempt has finished it
            return None if is_over else self._granted[subtask]
        may_start = self._running < self._slots and (
            self._may(one) if is_forced else self._is_due(one, now_s) and self._has_turn(one, now_s)
        )
        materializes = one.is_running or may_start
        if not (materializes or (one.has_backlog and len(self._granted) < self._slots)):
            return None
        if materializes and not one.is_running:
            one.is_running, one.started_s = True, now_s
            self._running += 1
            self.started.add(subtask)
            one.log_bytes_before, one.checkpoints_before = one.log_bytes, one.checkpoints
        self._granted[subtask] = materializes
        return materializes

    def _has_turn(self, one: _Subtask, now_s: float) -> bool:
        """Whether there is room for all due subtasks with more changesets, so that none waits forever."""
        before = [
            other
            for other in self._subtasks
            if other.checkpoints > one.checkpoints and not other.is_running and self._is_due(other, now_s)
        ]
        return len(before) < self._slots - self._running

    def _is_due(self, one: _Subtask, now_s: float) -> bool:
        options, policy = self._options, self._policy
        if not self._may(one):
            return False
        replay_s = one.log_bytes / policy.replay_bytes_per_s + one.checkpoints * policy.replay_checkpoint_s
        return (
            now_s >= one.due_s
            or (
                now_s >= one.rests_until_s
                and one.log_bytes > max(options.tuning.max_log_to_base * one.base_bytes, policy.small_log_bytes)
            )
            or replay_s > options.replay_budget_s
        )

    def _may(self, one: _Subtask) -> bool:
        return self._options.tuning.materialization and one.checkpoints > 0

    def duration_s(self, subtask: int, now_s: float) -> float:
        """The time since a subtask's last materialization started; 0 if none has."""
        started_s = self._subtasks[subtask].started_s
        return 0.0 if started_s is None else now_s - started_s

    def committed(self, sizes: Iterable[int], backlogs: Iterable[bool]) -> None:
        """Note that a checkpoint is durable; `sizes` are those of its changesets in bytes."""
        for one, size, has_backlog in zip(self._subtasks, sizes, backlogs, strict=True):
            one.log_bytes += size
            one.checkpoints += 1
            one.has_backlog = has_backlog

    def materialized(self, subtask: int, base_bytes: int, stored_bytes: int, now_s: float) -> None:
        """Note that a subtask's materialized state is durable; `stored_bytes` of it are new."""
        one = self._subtasks[subtask]
        one.base_bytes = base_bytes
        one.log_bytes = max(0, one.log_bytes - one.log_bytes_before)
        one.checkpoints = max(0, one.checkpoints - one.checkpoints_before)
        self._stop(one)
        one.failures = 0
        one.due_s = now_s + self._options.materialization_interval_s
        one.rests_until_s = now_s + self._policy.rest_after(stored_bytes)

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
        return one.failures > self._options.tuning.materialization_max_failures

    def _stop(self, one: _Subtask) -> None:
        self._running -= one.is_running
        one.is_running = False


def _spread(name: str, subtask: int) -> float:
    """A number from 0 to 1 that differs between subtasks."""
    digest = hashlib.blake2b(f"{name}/{subtask}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) / (1 << 32)


_log: Final = get_logger(__name__)


class MaterializationPolicy:
    """Decides which subtask maintains its state after a batch, and whether its materialization counts.

    `history` gives the operator's checkpoints before the batch in progress, `slots` is the number of subtasks that run
    at a time. New runs of up to `inline_bytes` travel with the acks.
    """

    def __init__(
        self,
        config: OperatorConfig,
        identity: str,
        inventory: Inventory,
        history: Callable[[], History],
        options: Options,
        clock: Clock,
        slots: int,
        name: str,
        policy: MergePolicy = MERGE_POLICY,
        *,
        inline_bytes: int,
    ) -> None:
        self._policy = policy
        self._config = config
        self._grants = inventory.grants_of(identity)
        self._history = history
        self._inline_bytes = inline_bytes
        self._inventory = inventory
        self._options = options
        self._clock = clock
        self._name = name
        self.schedule = MaterializationSchedule(
            options, policy, f"{config.query_id}/{config.uid}", config.parallelism, slots, clock.monotonic_s()
        )

    def request(self, task: TaskId, genesis: bytes, needed_from: int | None = None) -> MaintenanceRequest | None:
        """The maintenance request for a task that begins; None if there is nothing to do.

        A materialization is due if the subtask's state lacks batches before `needed_from`.
        """
        subtask = task.subtask
        is_part_of_batch = not self._options.tuning.changelog
        is_forced = False
        if self._inventory.retention.wasteful or needed_from is not None:
            base = self._base(genesis, task)
            is_behind = needed_from is not None and (base[-1].last if base else INITIAL_BATCH) + 1 < needed_from
            is_forced = is_behind or len(self._inventory.retention.lasting(base)) < len(base)
        is_due = self.schedule.grant(subtask, task.batch, self._clock.monotonic_s(), is_forced=is_forced)
        if is_due is None and not is_part_of_batch:
            return None
        if (is_due or is_part_of_batch) and not self._grants.has(subtask):
            base = self._base(genesis, task)
            digest = base[-1].after if base else genesis
            self._grants.open(subtask, f"{task.batch}-{task.attempt}", digest, base)
        grant = self._grants.of(subtask)
        if grant is not None:
            grant = replace(grant, known=self._inventory.retention.lasting(grant.known))
        return MaintenanceRequest(self._policy.slice_s, self._inline_bytes, grant, bool(is_due))

    def _base(self, genesis: bytes, task: TaskId) -> list[Level]:
        """The materialized state of a subtask before its batch.

        If the batch is repeated under a new grant, this state is the same: a job that the batch's checkpoint includes
        was granted in this batch too, and each subtask gets one grant in a batch.
        """
        return self._history().levels(genesis, task.subtask, self._config.parallelism, task.batch - 1)

    def fits(self, ack: Ack, genesis: bytes) -> bool:
        """Whether the subtask's grant allows the levels of an ack, and they lead to its state.

        Raises ProtocolError if the batch's own changes are in levels that the ack may not reference.
        """
        fits = self._fits(ack, genesis)
        if ack.levels and not ack.has_changeset and not fits:
            raise ProtocolError(
                f"{self._name}: subtask {ack.task.subtask} names stored state in batch {ack.task.batch} that it is not"
                " allowed to name.",
                hint="Make sure that driver and workers run the same version of statelog.",
            )
        return fits

    def _fits(self, ack: Ack, genesis: bytes) -> bool:
        subtask, grant = ack.task.subtask, self._grants.of(ack.task.subtask)
        if grant is None or ack.job != grant.job or not ack.levels or not is_within_grant(ack.levels, grant):
            return False
        if not ack.has_changeset:
            return ack.levels[-1].last == ack.task.batch
        last = ack.levels[-1]
        history = self._history()
        return (
            last.last < ack.task.batch
            and history.digest(genesis, subtask, self._config.parallelism, last.last) == last.after
        )

    def settle(
        self, batch: OperatorBatch, ack: Ack, levels: list[Level], payload: bytes, *, fits: bool, is_counted: bool
    ) -> JobOutcome:
        """Decide whether the levels that came with an ack count; if so, attach them to the ack that counts.

        `payload` has their runs without a name; `is_counted` says whether the ack itself counts. Raises StorageError
        if the subtask's materializations have failed too often.
        """
        self._note_failure(ack)
        if not levels:
            return JobOutcome.VOID if ack.job else JobOutcome.NONE
        if not fits:
            self._drop(ack)
            return JobOutcome.VOID
        if not is_counted and batch.is_written:
            return JobOutcome.OPEN
        counted = batch.acks[ack.task.subtask]
        counted.levels, counted.levels_payload = levels, payload
        self._grants.take(ack.task.subtask)
        return JobOutcome.ACCEPTED

    def _drop(self, ack: Ack) -> None:
        """Continue the batch without a job that does not fit its grant, or no longer has one."""
        _log.info(
            "%s: a materialization of subtask %d arrived too late and was discarded", self._name, ack.task.subtask
        )
        grant = self._grants.of(ack.task.subtask)
        if grant is not None and grant.job == ack.job:
            self._grants.end(ack.task.subtask)
            self.schedule.dropped(ack.task.subtask, self._clock.monotonic_s())

    def _note_failure(self, ack: Ack) -> None:
        """Let a failed materialization be tried again, unless it has failed too often."""
        grant = self._grants.of(ack.task.subtask)
        if not ack.materialization_failure or grant is None or grant.job != ack.job:
            return
        self._grants.end(ack.task.subtask)
        _log.warning(
            "%s: the materialization of subtask %d failed and will be tried again: %s",
            self._name,
            ack.task.subtask,
            ack.materialization_failure,
        )
        if self.schedule.failed(ack.task.subtask, self._clock.monotonic_s()):
            raise StorageError(
                f"{self._name}: the materialization of subtask {ack.task.subtask} failed more than"
                f" {self._options.tuning.materialization_max_failures} times in a row: {ack.materialization_failure}",
                kind=ErrorKind.MATERIALIZATION,
                hint="Fix the cause and start the query again; no state is lost. Until then,"
                " Options(tuning=Tuning(materialization=False)) runs it without materialization, but the log grows.",
            )

    def committed(self, checkpoint: Checkpoint, acks: Sequence[AcceptedAck]) -> None:
        """Note that a checkpoint that consists of these acks is durable."""
        if not checkpoint.revision:
            self.schedule.committed(
                [accepted.ack.total_bytes for accepted in acks], [accepted.ack.has_backlog for accepted in acks]
            )
        now_s = self._clock.monotonic_s()
        for base in checkpoint.bases:
            if not self._options.tuning.changelog or self._grants.end_pending(base.subtask):
                self.schedule.materialized(base.subtask, base.length, base.levels[-1].length, now_s)

    def certain(self, lost: Collection[int]) -> list[str]:
        """Note that a batch is certain; return the folders of grants that have ended.

        `lost` are the subtasks with an attempt that does not count.
        """
        if not self._options.tuning.changelog:
            # Without a changelog, each batch materializes its state in a job of its own.
            for subtask in range(self._config.parallelism):
                self._grants.end(subtask, has_leftovers=subtask in lost)
        return self._grants.ended()
