"""The materialization policy of an operator: it asks subtasks for maintenance and judges the outcomes."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from msgspec.structs import replace

from statelog.checkpoint.admission import OperatorConfig
from statelog.checkpoint.batch import AcceptedAck, Batch
from statelog.checkpoint.grants import is_within_grant
from statelog.checkpoint.inventory import Inventory
from statelog.checkpoint.protocol import Ack, JobOutcome, TaskId
from statelog.checkpoint.schedule import MaterializationSchedule
from statelog.clock import Clock
from statelog.errors import ErrorKind, ProtocolError, StorageError
from statelog.local.materializer import MaintenanceRequest
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.log.entry import Checkpoint
from statelog.log.references import Level
from statelog.options import Options

_log: Final = logging.getLogger(__name__)


class MaterializationPolicy:
    """Decides which subtask maintains its state after a batch, and whether its materialization counts.

    `slots` is the number of subtasks that run at a time.
    """

    def __init__(
        self,
        config: OperatorConfig,
        inventory: Inventory,
        options: Options,
        clock: Clock,
        slots: int,
        name: str,
        policy: MergePolicy = MERGE_POLICY,
    ) -> None:
        self._policy = policy
        self._config = config
        self._grants = inventory.grants
        self._inventory = inventory
        self._options = options
        self._clock = clock
        self._name = name
        self._schedule = MaterializationSchedule(
            options, policy, f"{config.query_id}/{config.uid}", config.parallelism, slots, clock.monotonic_s()
        )

    def restore(self, batch: int) -> None:
        """Take over the history of earlier starts; `batch` is the one before this start's first."""
        self._schedule.restore(self._inventory.history, batch)

    @property
    def base_bytes(self) -> int:
        """Size of the materialized state."""
        return self._schedule.base_bytes

    @property
    def log_bytes(self) -> int:
        """Size of the changesets since the materialized state."""
        return self._schedule.log_bytes

    def request(self, task: TaskId, genesis: bytes) -> MaintenanceRequest | None:
        """The maintenance request for a task that begins; None if there is nothing to do."""
        subtask = task.subtask
        is_part_of_batch = not self._options.changelog
        is_forced = False
        if self._inventory.has_wasteful:
            base = self._base(genesis, task)
            is_forced = len(self._inventory.lasting(base)) < len(base)
        is_due = self._schedule.grant(subtask, task.batch, self._clock.monotonic_s(), is_forced=is_forced)
        if is_due is None and not is_part_of_batch:
            return None
        if (is_due or is_part_of_batch) and not self._grants.has(subtask):
            base = self._base(genesis, task)
            digest = base[-1].after if base else genesis
            self._grants.open(subtask, f"{task.batch}-{task.attempt}", digest, base)
        grant = self._grants.of(subtask)
        if grant is not None:
            grant = replace(grant, known=self._inventory.lasting(grant.known))
        return MaintenanceRequest(
            self._policy.slice_s, self._options.inline_bytes(self._config.parallelism), grant, bool(is_due)
        )

    def _base(self, genesis: bytes, task: TaskId) -> list[Level]:
        """The materialized state of a subtask before its batch.

        If the batch is repeated under a new grant, this state is the same: a job that the batch's checkpoint includes
        was granted in this batch too, and each subtask gets one grant in a batch.
        """
        return self._inventory.history.levels(genesis, task.subtask, self._config.parallelism, task.batch - 1)

    def accept(self, batch: Batch, accepted: AcceptedAck, genesis: bytes) -> JobOutcome:
        """Let an ack count, and decide whether the materialization that came with it does.

        An ack whose levels do not count loses them. Raises the errors of :meth:`Batch.take`; ProtocolError if the
        batch's own changes are in levels that the ack may not reference; StorageError if the subtask's materializations
        have failed too often.
        """
        subtask = accepted.ack.task.subtask
        fits = self._fits(accepted.ack, genesis)
        if not accepted.ack.has_changeset:
            if accepted.levels and not fits:
                raise self._foreign_names(accepted.ack)
            return JobOutcome.ACCEPTED if batch.accept(accepted, self._name) else JobOutcome.VOID
        levels, payload, accepted.levels, accepted.levels_payload = accepted.levels, accepted.levels_payload, [], b""
        former = batch.acks.get(subtask)
        is_counted = batch.accept(accepted, self._name)
        if former is not None:
            # The state of an earlier batch is the same, whichever attempt materialized it.
            accepted.levels, accepted.levels_payload = former.levels, former.levels_payload
        self._note_failure(accepted.ack)
        if not levels:
            return JobOutcome.VOID if accepted.ack.job else JobOutcome.NONE
        if not fits:
            self._drop(accepted.ack)
            return JobOutcome.VOID
        if not is_counted and batch.is_written:
            return JobOutcome.OPEN
        counted = batch.acks[subtask]
        counted.levels, counted.levels_payload = levels, payload
        self._grants.take(subtask)
        return JobOutcome.ACCEPTED

    def _fits(self, ack: Ack, genesis: bytes) -> bool:
        """Whether the subtask's grant allows the levels of an ack, and they lead to its state."""
        subtask, grant = ack.task.subtask, self._grants.of(ack.task.subtask)
        if grant is None or ack.job != grant.job or not ack.levels or not is_within_grant(ack.levels, grant):
            return False
        if not ack.has_changeset:
            return ack.levels[-1].last == ack.task.batch
        last = ack.levels[-1]
        history = self._inventory.history
        return (
            last.last < ack.task.batch
            and history.digest(genesis, subtask, self._config.parallelism, last.last) == last.after
        )

    def _drop(self, ack: Ack) -> None:
        """Continue the batch without a job that does not fit its grant, or has none any more."""
        _log.info("%s: a materialization of subtask %d came too late and is void", self._name, ack.task.subtask)
        grant = self._grants.of(ack.task.subtask)
        if grant is not None and grant.job == ack.job:
            self._grants.end(ack.task.subtask)
            self._schedule.dropped(ack.task.subtask, self._clock.monotonic_s())

    def _foreign_names(self, ack: Ack) -> ProtocolError:
        return ProtocolError(
            f"{self._name}: subtask {ack.task.subtask} names stored state in batch {ack.task.batch} that it was not"
            " given leave to name.",
            hint="Do driver and workers run the same version of statelog?",
        )

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
        if self._schedule.failed(ack.task.subtask, self._clock.monotonic_s()):
            raise StorageError(
                f"{self._name}: the materialization of subtask {ack.task.subtask} failed more than"
                f" {self._options.materialization_max_failures} times in a row: {ack.materialization_failure}",
                kind=ErrorKind.MATERIALIZATION,
                hint="Mend the cause and start the query again; no state is lost. Until then Options("
                "materialization=False) runs it without, and the log grows.",
            )

    def committed(self, checkpoint: Checkpoint, acks: list[AcceptedAck]) -> None:
        """Note that a checkpoint of these acks is durable."""
        if not checkpoint.revision:
            self._schedule.committed(
                [accepted.ack.total_bytes for accepted in acks], [accepted.ack.has_backlog for accepted in acks]
            )
        now_s = self._clock.monotonic_s()
        for base in checkpoint.bases:
            if not self._options.changelog or self._grants.end_pending(base.subtask):
                self._schedule.materialized(base.subtask, base.length, now_s)

    def certain(self, lost: Collection[int]) -> list[str]:
        """Note that a batch is certain; return the folders of grants that have ended.

        `lost` are the subtasks with an attempt that does not count.
        """
        if not self._options.changelog:
            # Without a changelog, each batch materializes its state in a job of its own.
            for subtask in range(self._config.parallelism):
                self._grants.end(subtask, has_leftovers=subtask in lost)
        return self._grants.ended()
