"""Appends the checkpoints of a start to the query's log, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from statelog.clock import Clock
from statelog.coordinator.active_operator import ActiveOperator
from statelog.coordinator.batch import AcceptedAck, Batch
from statelog.coordinator.commit import compose_entry, rewrite_snapshots
from statelog.coordinator.garbage import Inventory
from statelog.errors import CorruptionError, FencedError
from statelog.log.entry import INITIAL_BATCH, QueryCheckpoint, Section
from statelog.log.numbered import NumberedLog
from statelog.metrics import Measurements, Recorded, Step
from statelog.options import Options
from statelog.storage import Store


class CheckpointWriter:
    """Makes what the tasks have acked durable.

    Each append covers all acks that were accepted before it began, so an ack waits for an append, but never for another
    task's ack. `lock` is the coordinator's short lock, which is not held during an append; `require_running` raises
    the error with which the coordinator has stopped, and `stop` stops it. An operator that alone holds back the log by
    more than `least_log_bytes` is asked to materialize its state. `stored_commit` is as in the coordinator.
    """

    def __init__(
        self,
        operators: Mapping[str, ActiveOperator],
        inventory: Inventory,
        log: NumberedLog,
        store: Store,
        options: Options,
        *,
        clock: Clock,
        new_token: Callable[[], bytes],
        measurements: Measurements,
        least_log_bytes: int,
        stored_commit: Callable[[], int] | None,
        lock: threading.Lock,
        require_running: Callable[[], None],
        stop: Callable[[FencedError], None],
    ) -> None:
        self._operators = operators
        self._inventory = inventory
        self._log = log
        self._store = store
        self._options = options
        self._clock = clock
        self._new_token = new_token
        self._measurements = measurements
        self._least_log_bytes = least_log_bytes
        self._stored_commit = stored_commit
        self._restart_from: int | None = None
        """The newest batch whose commit Spark has stored, when last asked."""
        self._lock = lock
        self._require_running = require_running
        self._stop = stop
        self._epoch = 0
        self._retained_from = INITIAL_BATCH
        self.appending = threading.Lock()
        """Held by the thread that appends; taken before the short lock."""
        self.held_batches: list[int] = []
        """Batches whose checkpoints are being copied, so that they stay; the short lock protects them."""

    def begin(self, epoch: int, retained_from: int) -> None:
        """Begin to write in an epoch; `retained_from` is the oldest batch that can be restored."""
        self._epoch, self._retained_from = epoch, retained_from

    def oldest_retained(self, batch: Batch) -> int:
        """The oldest batch that a rewind or a restart can reach once the checkpoint of a batch is durable."""
        wanted = batch.number - self._options.retained_checkpoints + 1
        return wanted if self._restart_from is None else min(wanted, self._restart_from)

    def make_durable(self, batch: Batch, last: ActiveOperator, received_s: float) -> None:
        """Return once everything that was accepted for a complete batch is durable.

        `last` is the operator whose ack has completed or changed the batch; the ack arrived at `received_s`. Raises
        FencedError if a newer start owns the log, and StorageError if the entry could not be written.
        """
        with self.appending:
            with self._lock:
                self._require_running()
                if batch.is_settled:
                    return
                accepted = batch.accepted
                acks: dict[str, list[AcceptedAck]] = {}
                for uid, own in batch.operators.items():
                    counted = self._operators[uid].counted(own)
                    assert counted is not None, "the batch is complete"
                    acks[uid], own.is_written = counted, True
            self._append(batch, acks, accepted, last, received_s)

    def require_ownership(self) -> None:
        """Raise FencedError, which names the new owner, if a newer start has claimed the log."""
        with self.appending:
            with self._lock:
                self._require_running()
            self._require_own_log()

    def _require_own_log(self) -> None:
        try:
            self._log.require_ownership()
        except FencedError as error:
            self._stop(error)
            raise

    def _append(
        self, batch: Batch, acks: dict[str, list[AcceptedAck]], accepted: int, last: ActiveOperator, received_s: float
    ) -> None:
        inventory = self._inventory
        if self._stored_commit is not None:
            self._restart_from = self._stored_commit()
        self._report(Step.LAST_ACK, batch)
        for uid, counted in acks.items():
            try:
                rewrite_snapshots(counted, self._store, inventory, self._operators[uid].name)
            except CorruptionError:
                self._require_own_log()  # a newer start deletes what this one still reads
                raise
        kept = [self.oldest_retained(batch), *self.held_batches, *inventory.points.pending]
        oldest = max(self._retained_from, min(kept))
        changes_from = inventory.changes_from(oldest)
        log_start = inventory.query.log_start(oldest, batch.number, changes_from)
        repeated = {
            operator.identity: base_map
            for operator in self._operators.values()
            if (base_map := inventory.base_map_to_repeat(operator.identity, batch.number)) is not None
        }
        sections: list[Section] = []
        payload: list[bytes] = []
        offset = 0
        for uid, operator in self._operators.items():
            base_map = repeated.get(operator.identity)
            ranges = None if base_map is None else base_map.ranges
            section, data = operator.section(batch.operators[uid], acks[uid], ranges, offset)
            sections.append(section)
            payload += data
            offset += sum(map(len, data))
        entry = compose_entry(
            batch,
            last.config,
            inventory.query,
            sections,
            epoch=self._epoch,
            token=self._new_token(),
            log_start=self._log.number if log_start is None else log_start,
            retained_from=oldest,
            parent=inventory.parent.to_name(),
            stored_commit=self._restart_from,
        )
        files_before = self._log.files_made
        inventory.gate.doubt(entry)
        try:
            durable = self._log.append(entry, payload)
        except FencedError as error:
            self._stop(error)
            raise
        with self._lock:
            batch.durable, batch.covered = durable, accepted
            self._retained_from = oldest
            inventory.add(durable, repeated, offset)
            for section in durable.sections:
                self._operators[section.uid].committed(batch.operators[section.uid], acks[section.uid])
        durable_s = self._clock.monotonic_s()
        try:
            self._report(Step.DURABLE, batch)
            self._measure(batch, durable, acks, last, received_s, durable_s, self._log.files_made - files_before)
        finally:  # an observer may raise, but the entry is durable
            removable = self._log.removable(durable.log_start)  # may ask the store, so not with the short lock
            with self._lock:
                inventory.release(durable, oldest, self._log, removable, changes_from)
                inventory.find_log_holder(oldest, self._most_log_bytes)

    def _measure(
        self,
        batch: Batch,
        durable: QueryCheckpoint,
        acks: Mapping[str, list[AcceptedAck]],
        last: ActiveOperator,
        received_s: float,
        durable_s: float,
        log_files: int,
    ) -> None:
        """Report the operators' metrics; the operator that has completed the entry gets the entry's numbers."""
        for section in durable.sections:
            operator, own = self._operators[section.uid], batch.operators[section.uid]
            metrics, is_last = own.metrics, operator is last
            if metrics is None or is_last:
                metrics = operator.measure(
                    own,
                    section,
                    acks[section.uid],
                    revision=durable.revision,
                    last_ack_s=received_s if is_last else durable_s,
                    end_s=durable_s,
                    log_files=log_files if is_last else 0,
                    measured=self._measurements.take() if is_last else Recorded(),
                )
            elif durable.revision:
                continue  # the revision is another operator's
            operator.publish(own, metrics, acks[section.uid])

    def _most_log_bytes(self, identity: str) -> float:
        """How much of the log an operator may hold back before it has to materialize its state."""
        operators = self._operators.values()
        base_bytes = sum(operator.policy.schedule.base_bytes for operator in operators)
        factor = next(one.config.options.tuning.max_log_to_base for one in operators if one.identity == identity)
        return max(factor * base_bytes, self._least_log_bytes)

    def _report(self, step: Step, batch: Batch) -> None:
        """Report a step of the driver, once to each observer."""
        observers = {id(one.config.options.observer): one.config.options.observer for one in self._operators.values()}
        for observer in observers.values():
            observer.step(step, batch.number, -1)
