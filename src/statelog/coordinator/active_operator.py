"""One operator of a start: its subtasks' views and restores, the acks that count, and its section of a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from statelog.clock import Clock
from statelog.coordinator.admission import OperatorConfig, require_own_segments
from statelog.coordinator.batch import AcceptedAck, BatchTime, OperatorBatch
from statelog.coordinator.checkpoint_metrics import FutureWatermark, KeptMetrics, SlowCheckpoints, checkpoint_metrics
from statelog.coordinator.commit import compose_section, generations_of
from statelog.coordinator.garbage import Inventory
from statelog.coordinator.materialization import MaterializationPolicy
from statelog.coordinator.redistribution import require_equal_copies, warn_of_large_snapshot
from statelog.coordinator.views import Views
from statelog.errors import ErrorKind, ProcessorError, ProtocolError
from statelog.history.operator_history import History
from statelog.history.settings import inherit
from statelog.local.materializer import MaintenanceRequest
from statelog.local.policy import MergePolicy
from statelog.log.entry import Checkpoint, Section
from statelog.log.references import BaseRange, SegmentRef
from statelog.log_fields import get_logger
from statelog.metrics import CheckpointMetrics, Measurements, Observer, Recorded, RestoreMetrics, RestoreProgress
from statelog.rpc.messages import Ack, Fetch, Fetched, JobOutcome, ReadProgress, SnapshotView, TaskId, View
from statelog.runs.times import NO_TIME_MS


class ActiveOperator:
    """The coordinator's knowledge of one operator in one start; the coordinator's lock protects it.

    `begins_at` is the batch with which the operator's state begins in this start, None if it has state. `given` is then
    the base map that its state begins with, if any. `before` is its checkpoint before the start's first batch.
    """

    def __init__(
        self,
        config: OperatorConfig,
        identity: str,
        before: Checkpoint | None,
        *,
        name: str,
        first_batch: int,
        begins_at: int | None,
        given: Sequence[BaseRange] | None,
        inventory: Inventory,
        clock: Clock,
        slots: int,
        merge_policy: MergePolicy,
        inline_bytes: int,
    ) -> None:
        self.config = config
        self.identity = identity
        self.name = name
        self.begins_at = begins_at
        self._given = given
        self._inventory = inventory
        self._clock = clock
        self._number = first_batch
        self._before = before
        """The checkpoint before the batch in progress; None if the operator begins with that batch."""
        self._spark_watermark_ms = NO_TIME_MS
        options = config.options
        self._seed = _seed(config, identity, first_batch - 1, given)
        self.policy = MaterializationPolicy(
            config, identity, inventory, self._history, options, clock, slots, name, merge_policy,
            inline_bytes=inline_bytes,
        )  # fmt: skip
        self.policy.schedule.restore(self._history(), first_batch - 1)
        self._generations = generations_of(config, before)
        self._inherited = inherit(config.settings, config.states, before, name)
        self._views = Views.of_first_batch(config, identity, self._history(), first_batch)
        self._initial: Sequence[str] = ()
        self._large: set[int] = set()
        """Subtasks of an unkeyed operator that have been warned of a large snapshot."""
        self._slow = SlowCheckpoints(name)
        self._future = FutureWatermark(name)
        self.measurements = Measurements()
        self.restoring = RestoringSubtasks(config, options.observer, name, clock)
        self.metrics = KeptMetrics(options.observer)

    def _history(self) -> History:
        """The operator's checkpoints before the batch in progress; given state replaces the one before its first."""
        if self._number == self.begins_at:
            return self._seed
        return self._inventory.query.histories.get(self.identity, self._seed)

    def report_restore(self, first_batch: int, entries: int, log_s: float) -> None:
        """Report to the observer that the start has read the log: `entries` of them in `log_s` seconds."""
        run = self.config
        begins = self.begins_at is not None
        run.options.observer.restore(
            RestoreMetrics(run.query_id, run.uid, first_batch, run.parallelism, entries, log_s, begins)
        )

    # ---- Batches ----

    def enter(self, number: int, time: BatchTime, last: OperatorBatch | None) -> OperatorBatch:
        """Begin a batch at Spark's time; `last` is the previous batch if it belongs to this start and is durable."""
        if last is not None:
            self._views = self._views.after(last)
            self._remove_initial_rows()
        self._number, self._spark_watermark_ms = number, time.watermark_ms
        self._before = None if number == self.begins_at else self._history().at(number - 1)
        batch = OperatorBatch(
            number, time.with_watermark_of(self.config.watermark, self._before), self.config.parallelism
        )
        if last is not None:
            self._inventory.remove_lost(self.identity, last.number, last.lost, self.policy.certain(last.lost))
        return batch

    def watermark_advances(self, batch: int) -> bool:
        """Whether the operator's own watermark is larger after a batch than in it."""
        history = self._inventory.query.histories.get(self.identity)
        checkpoint = None if history is None else history.at(batch)
        if self.config.watermark is None or checkpoint is None:
            return False
        after_ms = self.config.watermark.advance(checkpoint.watermark_ms, checkpoint.max_event_ms, checkpoint.silent_ms)
        return after_ms > checkpoint.watermark_ms

    def offer_initial_rows(self, objects: Sequence[str]) -> None:
        """Give the subtasks of the operator's first batch initial rows, see :meth:`Coordinator.open`."""
        self._initial = objects

    def initial_of(self, subtask: int) -> str:
        """The object with a subtask's rows of the initial state; empty if there are none."""
        return self._initial[subtask] if self._initial else ""

    def _remove_initial_rows(self) -> None:
        """Delete the initial rows: the first batch is over, or the start that repeats it will store the rows again."""
        self._inventory.deleter.delete([name for name in self._initial if name])
        self._initial = ()

    def close(self) -> None:
        """End the operator's part of the start."""
        self._remove_initial_rows()

    # ---- Views ----

    def view(self, subtask: int) -> View:
        """The state that a subtask starts the batch from."""
        before = self._before
        return View(
            identity=self.identity,
            genesis=self._views.genesis_digests[subtask],
            head=self._views.heads[subtask],
            generations=self._generations,
            certain_generations={} if before is None else before.generations,
            closed_ms=self._inherited.closed_ms,
            expires_by=self._inherited.expires_by,
            snapshot_view=None if self.config.has_keys else self._views.snapshots[subtask],
        )

    def timers_after_ms(self, subtask: int) -> int:
        """The time up to which no timer of a subtask is left to fire."""
        return self._views.timers_after_ms[subtask]

    def arrivals_after_ms(self, subtask: int) -> int:
        """The time up to which no arrival of a subtask is left whose limit is over."""
        return self._views.arrivals_after_ms[subtask]

    def maintenance(self, task: TaskId, needed_from: int | None) -> MaintenanceRequest | None:
        """The work on keyed state that a task does after its batch; see :meth:`MaterializationPolicy.request`."""
        if not self.config.has_keys:
            return None
        return self.policy.request(task, self._views.genesis_digests[task.subtask], needed_from)

    def fetch(self, request: Fetch) -> Fetched:
        """Tell a subtask how to get to the state before its batch."""
        task = request.task
        missing = self._history().missing_segments(
            self._views.genesis_digests[task.subtask],
            task.subtask,
            self.config.parallelism,
            task.batch - 1,
            set(request.known),
        )
        return Fetched(missing)

    # ---- Acks ----

    def accept(self, batch: OperatorBatch, accepted: AcceptedAck, *, is_final: bool) -> tuple[JobOutcome, bool]:
        """Let an ack count; return the outcome of the materialization that came with it, and whether the ack counts.

        `is_final` refuses any result but the one that counts. Raises ProtocolError if the ack names objects that
        are not the subtask's, ProcessorError if copies of a broadcast state differ, and StorageError if the subtask's
        materializations have failed too often.
        """
        ack = accepted.ack
        subtask = ack.task.subtask
        known = batch.acks.get(subtask)
        if known is not None and known.ack == ack:
            return known.outcome, False  # the attempt has not received the reply
        require_own_segments(ack, self._inventory.changes_folder(self.identity, subtask), self.name)
        if is_final and batch.differs(ack):
            raise ProcessorError(
                f"{self.name}: attempt {ack.task.attempt} of subtask {subtask} gave a different result in batch"
                f" {batch.number}, whose stored output already has the first one.",
                kind=ErrorKind.RESULT_CHANGED,
                hint="Start the query again: it repeats the batch.",
            )
        if self.config.has_operator_state:
            warn_of_large_snapshot(ack.last, self._large, self.name)
        self.measurements.add(ack.measured)
        accepted.unchanged_segment = self._unchanged_snapshot(ack)
        fits = self.policy.fits(ack, self._views.genesis_digests[subtask])
        if not ack.has_changeset:
            is_counted = self._count(batch, accepted)
            accepted.outcome = JobOutcome.ACCEPTED if is_counted else JobOutcome.VOID
            return accepted.outcome, is_counted
        levels, payload, accepted.levels, accepted.levels_payload = accepted.levels, accepted.levels_payload, [], b""
        former = batch.acks.get(subtask)
        is_counted = self._count(batch, accepted)
        if former is not None:
            # The state of an earlier batch is the same, whichever attempt materialized it.
            accepted.levels, accepted.levels_payload = former.levels, former.levels_payload
        accepted.outcome = self.policy.settle(batch, ack, levels, payload, fits=fits, is_counted=is_counted)
        return accepted.outcome, is_counted

    def _count(self, batch: OperatorBatch, accepted: AcceptedAck) -> bool:
        is_counted = batch.accept(accepted, self.name)
        if is_counted:
            batch.metrics = None
        return is_counted

    def _unchanged_snapshot(self, ack: Ack) -> SegmentRef | None:
        """The stored snapshot that the subtask started from, if its ack says that the snapshot is unchanged."""
        if not ack.is_unchanged:
            return None
        view = SnapshotView() if self.config.has_keys else self._views.snapshots[ack.task.subtask]
        if view.slices is not None or view.snapshots[0].checksum != ack.last.checksum:
            raise ProtocolError(
                f"{self.name}: subtask {ack.task.subtask} refers to a snapshot that it did not start from.",
                hint="Make sure that driver and workers run the same version of statelog.",
            )
        return view.snapshots[0]

    def counted(self, batch: OperatorBatch) -> list[AcceptedAck] | None:
        """The acks that count, in order of the subtasks; None unless all subtasks have acked.

        Raises ProcessorError if the copies of a broadcast state differ.
        """
        if not batch.is_complete:
            return None
        acks = [batch.acks[subtask] for subtask in range(self.config.parallelism)]
        require_equal_copies([accepted.ack.broadcast_checksums for accepted in acks], self.name)
        return acks

    # ---- Checkpoints ----

    def section(
        self,
        batch: OperatorBatch,
        acks: Sequence[AcceptedAck],
        base_ranges: Sequence[BaseRange] | None = None,
        offset: int = 0,
    ) -> tuple[Section, list[bytes]]:
        """The operator's section of the batch's checkpoint, and its payload; see :func:`compose_section`."""
        begins = batch.number == self.begins_at
        return compose_section(
            self.config,
            self.identity,
            acks,
            self._before,
            watermark_ms=None if batch.time.watermark_ms == self._spark_watermark_ms else batch.time.watermark_ms,
            time_ms=batch.time.time_ms,
            generations=self._generations,
            base_ranges=self._given if begins else base_ranges,
            settings=self._inherited.settings,
            begins=begins,
            offset=offset,
        )

    def committed(self, batch: OperatorBatch, acks: Sequence[AcceptedAck]) -> None:
        """Note that the query's newest checkpoint consists of these acks and is durable."""
        durable = self._inventory.query.histories[self.identity].latest
        assert durable is not None, "it was added"
        batch.durable = durable
        for accepted, stored in zip(acks, durable.by_subtask(), strict=True):
            accepted.stored, accepted.is_stored = stored, True
            accepted.payload = accepted.rewritten_bytes = accepted.levels_payload = b""
        for base in durable.bases:
            acks[base.subtask].levels = base.levels
        if self.config.has_keys:
            self.policy.committed(durable, acks)

    def measure(
        self,
        batch: OperatorBatch,
        section: Section,
        acks: Sequence[AcceptedAck],
        *,
        revision: int,
        last_ack_s: float,
        end_s: float,
        log_files: int,
        measured: Recorded,
    ) -> CheckpointMetrics:
        """The operator's metrics in the batch's checkpoint; see :func:`checkpoint_metrics`."""
        self.measurements.add(measured)
        metrics = checkpoint_metrics(
            self.config,
            section,
            acks,
            self.policy,
            self._inventory.retention,
            batch=batch.number,
            watermark_ms=batch.time.watermark_ms,
            revision=revision,
            last_ack_s=last_ack_s,
            end_s=end_s,
            log_files=log_files,
            measured=self.measurements.take(),
        )
        batch.metrics = metrics
        return metrics

    def publish(self, batch: OperatorBatch, metrics: CheckpointMetrics, acks: Sequence[AcceptedAck]) -> None:
        """Tell the observer of the metrics of a durable checkpoint."""
        self.metrics.checkpoint(metrics)
        self._slow.note(metrics, [accepted.ack for accepted in acks])
        self._future.note(metrics, batch.time, [] if batch.durable is None else batch.durable.max_event_ms)


def _seed(config: OperatorConfig, identity: str, batch: int, given: Sequence[BaseRange] | None) -> History:
    """The history of an operator before its first batch: of the state that it was given, if there is any."""
    if given is None:
        return History()
    return History(
        [
            Checkpoint(
                identity=identity,
                uid=config.uid,
                parallelism=config.parallelism,
                segments=[],
                key_schema=config.key_schema,
                states=config.states,
                base_ranges=list(given),
                begins=True,
                batch=batch,
                query_id=config.query_id,
                run_id=config.run_id,
                retained_from=batch,
            )
        ]
    )


_log: Final = get_logger(__name__)


@dataclass(frozen=True)
class SubtaskRestore:
    """The progress of one subtask; bytes as in :class:`RestoreProgress`."""

    subtask: int
    read_bytes: int
    known_bytes: int


@dataclass(frozen=True)
class Restore:
    """The latest restore of an operator whose subtasks have reported."""

    batch: int
    subtasks: tuple[SubtaskRestore, ...]
    took_s: float
    """Time from the first report until now, or until the last subtask has finished."""
    left_s: float | None
    """Time for the rest, at the speed between the first report and the latest; None while there is only one."""

    @property
    def read_bytes(self) -> int:
        """Bytes that the subtasks have read."""
        return sum(one.read_bytes for one in self.subtasks)

    @property
    def known_bytes(self) -> int:
        """Bytes that they must read in total."""
        return sum(one.known_bytes for one in self.subtasks)

    @property
    def left_bytes(self) -> int:
        """Bytes that they must still read."""
        return self.known_bytes - self.read_bytes


class RestoringSubtasks:
    """Adds up the progress of an operator's subtasks, and reports it to the observer."""

    def __init__(self, config: OperatorConfig, observer: Observer, name: str, clock: Clock) -> None:
        self._config = config
        self._observer = observer
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._batch = -1
        self._told: dict[int, ReadProgress] = {}
        self._began_s = self._told_s = 0.0
        self._first_bytes = 0
        """Bytes that had been read by the first report."""

    def note(self, progress: ReadProgress) -> None:
        """Note the progress of one subtask."""
        with self._lock:
            self._told_s = self._clock.monotonic_s()
            if progress.task.batch != self._batch:
                self._batch, self._began_s, self._first_bytes = progress.task.batch, self._told_s, progress.read_bytes
                self._told.clear()
            self._told[progress.task.subtask] = progress
            told = list(self._told.values())
        done, known = sum(one.read_bytes for one in told), sum(one.known_bytes for one in told)
        _log.info(
            "%s: %d subtasks are restoring their state: %.0f of %.0f MB have been read",
            self._name, len(told), done / 1e6, known / 1e6,
        )  # fmt: skip
        self._observer.restoring(
            RestoreProgress(self._config.query_id, self._config.uid, progress.task.batch, len(told), done, known)
        )

    @property
    def latest(self) -> Restore | None:
        """The latest restore; None if no subtask of this start has reported one."""
        with self._lock:
            if not self._told:
                return None
            subtasks = [SubtaskRestore(number, one.read_bytes, one.known_bytes) for number, one in self._told.items()]
            done = sum(one.read_bytes for one in subtasks)
            left = sum(one.known_bytes for one in subtasks) - done
            end_s = self._clock.monotonic_s() if left else self._told_s
            speed = (done - self._first_bytes) / (self._told_s - self._began_s) if self._told_s > self._began_s else 0.0
            return Restore(
                batch=self._batch,
                subtasks=tuple(sorted(subtasks, key=lambda one: one.subtask)),
                took_s=end_s - self._began_s,
                left_s=left / speed if speed > 0 else None,
            )
