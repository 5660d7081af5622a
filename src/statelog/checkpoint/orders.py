"""What the coordinator wants of its subtasks for the upkeep of keyed state, and how it went."""

from __future__ import annotations

import logging
from typing import Final

from statelog.changelog.materializer import Order
from statelog.checkpoint.admission import OperatorRun
from statelog.checkpoint.batch import TakenAck
from statelog.checkpoint.entry import Checkpoint
from statelog.checkpoint.inventory import Inventory
from statelog.checkpoint.protocol import TaskId
from statelog.checkpoint.schedule import SLICE_S, Schedule
from statelog.clock import Clock
from statelog.errors import ErrorKind, StorageError
from statelog.options import Options

__all__ = ["Orders"]

_log: Final = logging.getLogger(__name__)


class Orders:
    """Gives orders, and takes note of what comes of them.

    Parameters
    ----------
    run : OperatorRun
        The run.
    inventory : Inventory
        What is materialized.
    options : Options
        Options.
    clock : Clock
        Time.
    slots : int
        How many subtasks run at a time.
    name : str
        The operator, for messages.
    """

    def __init__(
        self, run: OperatorRun, inventory: Inventory, options: Options, clock: Clock, slots: int, name: str
    ) -> None:
        self._run = run
        self._inventory = inventory
        self._options = options
        self._clock = clock
        self._name = name
        self._schedule = Schedule(options, f"{run.query_id}/{run.uid}", run.parallelism, slots, clock.monotonic_s())

    def restore(self, batch: int) -> None:
        """Take over what a new run finds; `batch` is the one before its first."""
        self._schedule.restore(self._inventory.history, batch)

    @property
    def base_bytes(self) -> int:
        """Size of the materialized state."""
        return self._schedule.base_bytes

    @property
    def log_bytes(self) -> int:
        """Size of the changesets since."""
        return self._schedule.log_bytes

    def order(self, task: TaskId, origin: bytes) -> Order | None:
        """What a subtask is to do; None for nothing.

        Parameters
        ----------
        task : TaskId
            The task that begins.
        origin : bytes
            Chain digest of the subtask's empty state.
        """
        is_part_of_batch = not self._options.changelog
        is_forced = False
        if self._inventory.has_wasteful:
            stored = self._inventory.history.levels(origin, task.subtask, self._run.parallelism, task.batch - 1)
            is_forced = len(self._inventory.lasting(stored)) < len(stored)
        now_s = self._clock.monotonic_s()
        materializes = self._schedule.grant(task.subtask, task.batch, now_s, is_forced=is_forced)
        if materializes is None and not is_part_of_batch:
            return None
        known = []
        if materializes or is_part_of_batch:
            stored = self._inventory.history.levels(origin, task.subtask, self._run.parallelism, task.batch - 1)
            known = self._inventory.lasting(stored)
        return Order(
            slice_s=SLICE_S,
            materializes=bool(materializes),
            known=known,
            prefix=self._inventory.runs_folder(task.subtask),
            inline_bytes=self._options.inline_bytes(self._run.parallelism),
        )

    def note(self, taken: TakenAck) -> None:
        """Take note of how a subtask's materialization went, before its ack counts.

        Raises
        ------
        StorageError
            If it has failed too often.
        """
        ack = taken.ack
        if ack.levels and ack.has_changeset and ack.levels[-1].last <= self._materialized_through(ack.task.subtask):
            taken.levels, taken.levels_payload = [], b""  # a late one, of an attempt that was given up
        if not ack.materialization_failure:
            return
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

    def _materialized_through(self, subtask: int) -> int:
        latest = self._inventory.history.latest_record
        base = latest.cover.base_of(subtask, self._run.parallelism) if latest and latest.cover else None
        return -1 if base is None else base.through

    def committed(self, checkpoint: Checkpoint, taken: list[TakenAck]) -> None:
        """A checkpoint of these acks is durable."""
        self._schedule.committed([one.ack.total_bytes for one in taken], [one.ack.has_backlog for one in taken])
        now_s = self._clock.monotonic_s()
        for base in checkpoint.bases:
            self._schedule.materialized(base.subtask, base.length, now_s)
