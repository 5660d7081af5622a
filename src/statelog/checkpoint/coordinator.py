"""The coordinator of one operator in one start: it answers the tasks and writes each checkpoint's log entry.

It knows nothing of Spark: a callable gives it the times of a batch, and tasks reach it through a server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from statelog.checkpoint.admission import (
    OperatorConfig,
    incomplete_batch,
    require_own_partition,
    require_own_segments,
    stale_run,
    stale_task,
)
from statelog.checkpoint.batch import AcceptedAck, Batch, BatchTime
from statelog.checkpoint.checkpoint_metrics import checkpoint_metrics
from statelog.checkpoint.commit import compose, generations_of, rewrite_snapshots
from statelog.checkpoint.garbage import Inventory
from statelog.checkpoint.history import History
from statelog.checkpoint.kept_metrics import KeptMetrics
from statelog.checkpoint.materialization import MaterializationPolicy
from statelog.checkpoint.operator_start import OperatorStart
from statelog.checkpoint.progress import RestoringSubtasks
from statelog.checkpoint.protocol import (
    Ack,
    Acked,
    Begin,
    Begun,
    Fetch,
    Fetched,
    JobOutcome,
    Kept,
    ReadProgress,
    Reply,
    TaskId,
    TaskRequest,
    Witness,
)
from statelog.checkpoint.query_operators import OperatorChanges
from statelog.checkpoint.redistribution import SnapshotView, require_equal_copies, warn_of_large_snapshot
from statelog.checkpoint.settings import Inherited, inherit
from statelog.checkpoint.slow import SlowCheckpoints
from statelog.checkpoint.views import Views
from statelog.clock import Clock
from statelog.errors import FencedError, ProtocolError, StatelogError, StorageError
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.log.entry import INITIAL_BATCH, Checkpoint, Claim
from statelog.log.numbered import NumberedLog
from statelog.log.references import SegmentRef, StoredRun
from statelog.log_fields import get_logger
from statelog.metrics import Measurements, RestoreMetrics, Step
from statelog.options import Options
from statelog.storage import Store

_log = get_logger(__name__)


class Coordinator:
    """Decides which state each subtask starts from, and what each checkpoint consists of.

    The order of calls is :meth:`open`, then :meth:`begin`, :meth:`fetch` and :meth:`ack` from any thread, then
    :meth:`close`.

    `root` is the operator's folder in the store, `location` the store's, for tasks and messages. `new_token` makes 16
    unique bytes. `batch_time` gives Spark's times of a batch, and raises FencedError if it knows no such batch. `slots`
    is the number of subtasks that run at a time. With `deletes_in_background` a thread deletes files that are no longer
    needed, beside the work. `changes` tells whether operators were added or removed.
    """

    def __init__(
        self,
        config: OperatorConfig,
        *,
        store: Store,
        location: str,
        root: str,
        log: NumberedLog,
        options: Options,
        clock: Clock,
        new_token: Callable[[], bytes],
        batch_time: Callable[[int], BatchTime],
        measurements: Measurements,
        deletes_in_background: bool,
        slots: int,
        merge_policy: MergePolicy = MERGE_POLICY,
        changes: OperatorChanges | None = None,
    ) -> None:
        options = options.for_store(can_append=store.can_append)
        self._config = config
        self._store = store
        self._location = location
        self._root = root
        self._log = log
        self._options = options
        self._clock = clock
        self._new_token = new_token
        self._batch_time = batch_time
        self._lock = threading.Lock()
        self._measurements = measurements
        self._inventory = Inventory(
            store, root, self._name, options, clock, deletes_in_background=deletes_in_background
        )
        self._policy = MaterializationPolicy(config, self._inventory, options, clock, slots, self._name, merge_policy)
        self._retained_from = INITIAL_BATCH
        self._generations: dict[str, int] = {}
        self._inherited = Inherited()
        self._initial: Sequence[str] = ()
        self._start = OperatorStart(config, self._name, batch_time, changes)
        self._epoch = 0
        self.kept_batch: int | None = None
        """The batch of an earlier start whose checkpoint stays although Spark repeats it; None if there is none."""
        self._batch: Batch | None = None
        self._views = Views([], [], [], [])
        self._stopped: StatelogError | None = None
        self._is_closed = False
        self._held_batches: list[int] = []
        self._large: set[int] = set()
        """Subtasks of an unkeyed operator that have been warned of a large snapshot."""
        self._slow = SlowCheckpoints(self._name)
        self.restoring = RestoringSubtasks(config, options.observer, self._name, clock)
        self.metrics = KeptMetrics(options.observer)

    @property
    def history(self) -> History:
        """The checkpoints that this start still knows."""
        return self._inventory.history

    @property
    def _name(self) -> str:
        return f"operator '{self._config.uid}' at {self._location}/{self._root}"

    def begins_at(self, first_batch: int) -> bool:
        """Whether the operator begins its state with this batch, if :meth:`open` comes next."""
        return first_batch == 0 or self._start.begins(self._log.read(), first_batch)

    def open(
        self,
        first_batch: int,
        given: Mapping[int, Sequence[StoredRun]] | None = None,
        *,
        keeps: Callable[[History], bool] = lambda _: False,
    ) -> None:
        """Claim the location for this start, and find the state before its first batch.

        `given` is materialized state from before the operator's first batch, by subtask. `keeps` decides, once no other
        start can write any more, whether the stored checkpoint of the first batch stays; otherwise that batch is
        computed, again or for the first time. Raises the errors of :meth:`OperatorStart.admit`, and StorageError if the
        log cannot be read.
        """
        started_s = self._clock.monotonic_s()
        # A start that may not use the location must not fence off the one that owns it: look before claiming.
        self._start.admit(self._log.read(), first_batch)
        entries = self._log.claim(self._make_claim)
        if keeps(History(entries)):
            _log.info("%s: batch %d is repeated, and its stored output is handed out again", self._name, first_batch)
            self.kept_batch = first_batch
            first_batch += 1
        begins = self._start.admit(entries, first_batch)
        if begins:
            initial = self._start.initial_entry(entries, first_batch, given or {}, self._log, self._new_token())
            entries = [*entries, *[self._log.append(entry, []) for entry in initial]]
        self._inventory.open(entries, self._epoch, self._config.run_id, self._clock)
        self._inventory.points.open(self.history, first_batch)
        self._retained_from = first_batch - 1 if begins else self._inventory.retained_from()
        self._policy.schedule.restore(self.history, first_batch - 1)
        before = self.history.at(first_batch - 1)
        self._generations = generations_of(self._config, before)
        self._inherited = inherit(self._config.settings, self._config.states, before, self._name)
        log_s = self._clock.monotonic_s() - started_s
        run = self._config
        metrics = RestoreMetrics(run.query_id, run.uid, first_batch, run.parallelism, len(entries), log_s, begins)
        self._options.observer.restore(metrics)

    def offer_initial_state(self, objects: Sequence[str]) -> None:
        """Give the subtasks of the operator's first batch the rows of an initial state; call it before they begin.

        `objects` has one name for each subtask, empty for a subtask without rows.
        """
        self._initial = objects

    def _make_claim(self, epoch: int) -> Claim:
        self._epoch = epoch
        run = self._config
        now_ms = int(self._clock.now_s() * 1000)
        return Claim(epoch, run.query_id, run.run_id, run.uid, self._new_token(), now_ms)

    def durable_checkpoint(self, batch: int) -> Checkpoint:
        """The checkpoint of the batch that runs now; raises StateMissingError if it is not durable."""
        with self._lock:
            self._require_running()
            return self._durable(batch)

    def handle(self, request: TaskRequest, payload: bytes) -> Reply:
        """Answer a request of a task; the errors are those of the method that does it."""
        match request:
            case Begin():
                return Kept() if self._is_kept(request.task.batch) else self.begin(request)
            case Fetch():
                return self.fetch(request)
            case ReadProgress():
                self.restoring.note(request)
                return Acked()
            case Ack():
                return self.ack(request, payload)

    def _is_kept(self, batch: int) -> bool:
        with self._lock:
            self._require_running()
            return self._batch is None and batch == self.kept_batch

    def begin(self, request: Begin) -> Begun:
        """Tell a subtask that begins a batch, for the first time or again, which state it starts from.

        Raises FencedError if a newer start owns the location or the batch is over, StateMissingError if the checkpoint
        before the batch does not exist, ConfigurationError if the task's partition is not one that the operator made or
        its rows are of another batch.
        """
        with self._lock:
            self._require_running()
            task = request.task
            batch = self._enter(task)
            require_own_partition(request, batch, self._config, self._name)
            batch.begun[task.attempt] = task.subtask
            before = self.history.at(batch.number - 1)
            genesis = self._views.genesis_digests[task.subtask]
            return Begun(
                epoch=self._epoch,
                genesis=genesis,
                head=self._views.heads[task.subtask],
                inline_bytes=self._options.inline_bytes(self._config.parallelism),
                upload_prefix=self._inventory.changes_folder(task.subtask),
                store=self._location,
                batch_time_ms=batch.time.time_ms,
                watermark_ms=batch.time.watermark_ms,
                late_watermark_ms=batch.time.late_watermark_ms,
                timers_after_ms=self._views.timers_after_ms[task.subtask],
                generations=self._generations,
                certain_generations={} if before is None else before.generations,
                closed_ms=self._inherited.closed_ms,
                expires_by=self._inherited.expires_by,
                initial=self._initial[task.subtask] if self._initial else "",
                snapshot_view=None if self._config.has_keys else self._views.snapshots[task.subtask],
                maintenance=self._policy.request(task, genesis) if self._config.has_keys else None,
                witness=Witness(self._log.file_name, self._log.head),
            )

    def _enter(self, task: TaskId) -> Batch:
        """The batch that a task belongs to; the first task of a batch starts it."""
        current = self._batch
        if current is not None and task.batch == current.number:
            return current
        if current is not None and task.batch < current.number:
            raise stale_task(task, current, self._name)
        if current is not None and (task.batch > current.number + 1 or current.durable is None):
            raise incomplete_batch(task.batch - 1, current, self._config.parallelism, self._name)
        if current is not None:
            # A second entry of the last batch, with another attempt's result, may or may not be in the log: only a
            # later entry of this start settles it.
            self._commit(current, self._clock.monotonic_s())
        batch = Batch(
            task.batch,
            self._batch_time(task.batch).with_watermark_of(self._config.watermark, self.history.at(task.batch - 1)),
        )
        if current is None:
            self._views = Views.of_first_batch(self._config, self.history, task.batch)
        else:
            self._views = self._views.after(current)
            self._remove_initial_state()
        self._batch = batch
        self._inventory.gate.begin(self._epoch, batch.number)
        if current is not None:
            self._inventory.remove_lost(current, self._policy.certain(current.lost))
        return batch

    def watermark_advances(self, batch: int) -> bool:
        """Whether the operator's own watermark after a batch is larger than in it."""
        with self._lock:
            checkpoint = self.history.at(batch)
            if self._config.watermark is None or checkpoint is None:
                return False
            after_ms = self._config.watermark.advance(checkpoint.watermark_ms, checkpoint.max_event_ms)
            return after_ms > checkpoint.watermark_ms

    def fetch(self, request: Fetch) -> Fetched:
        """Tell a subtask how to get to the state before its batch."""
        with self._lock:
            self._require_running()
            task = request.task
            self._require_begun(task)
            missing = self.history.missing_segments(
                self._views.genesis_digests[task.subtask],
                task.subtask,
                self._config.parallelism,
                task.batch - 1,
                set(request.known),
            )
            return Fetched(missing)

    def ack(self, ack: Ack, payload: bytes) -> Acked:
        """Accept a subtask's result. For the last subtask of a batch, return once the checkpoint is durable.

        Raises FencedError if a newer start owns the location or the batch is over, CorruptionError if the payload does
        not match the ack, ProtocolError if the ack names objects that are not the subtask's. Raises StorageError if the
        entry could not be written: the task may call again; or if the subtask's materializations have failed too often:
        the coordinator has stopped.
        """
        received_s = self._clock.monotonic_s()
        accepted = AcceptedAck.of(ack, payload, self._name)
        accepted.received_s = received_s
        with self._lock:
            self._require_running()
            batch = self._require_begun(ack.task)
            require_own_segments(ack, self._inventory.changes_folder(ack.task.subtask), self._name)
            if self._config.has_operator_state:
                warn_of_large_snapshot(ack.last, self._large, self._name)
            self._measurements.add(ack.measured)
            accepted.unchanged_segment = self._unchanged_snapshot(ack)
            outcome = self._accept(batch, accepted)
            if len(batch.acks) == self._config.parallelism:
                self._commit(batch, received_s)
            return Acked(outcome, [] if batch.metrics is None else list(batch.metrics.numbers().values()))

    def require_committed(self, batch: int) -> None:
        """Raise StateMissingError if a batch that Spark has committed has no checkpoint.

        That happens if not all of its subtasks ran to their end.
        """
        with self._lock:
            if self._batch is None or batch >= self._batch.number:
                self._durable(batch)

    def _durable(self, batch: int) -> Checkpoint:
        current = self._batch
        if current is None:
            found = self.history.at(batch) if batch == self.kept_batch else None
        else:
            found = current.durable if batch == current.number else None
        if found is None:
            raise incomplete_batch(batch, current, self._config.parallelism, self._name)
        return found

    def _accept(self, batch: Batch, accepted: AcceptedAck) -> JobOutcome:
        """Let an ack count, and the materialization that came with it; levels that do not count go."""
        ack = accepted.ack
        fits = self._policy.fits(ack, self._views.genesis_digests[ack.task.subtask])
        if not ack.has_changeset:
            return JobOutcome.ACCEPTED if batch.accept(accepted, self._name) else JobOutcome.VOID
        levels, payload, accepted.levels, accepted.levels_payload = accepted.levels, accepted.levels_payload, [], b""
        former = batch.acks.get(ack.task.subtask)
        is_counted = batch.accept(accepted, self._name)
        if former is not None:
            # The state of an earlier batch is the same, whichever attempt materialized it.
            accepted.levels, accepted.levels_payload = former.levels, former.levels_payload
        try:
            return self._policy.settle(batch, ack, levels, payload, fits=fits, is_counted=is_counted)
        except StorageError as error:
            self._stopped = error
            raise

    def _unchanged_snapshot(self, ack: Ack) -> SegmentRef | None:
        """The stored snapshot that the subtask started from, if its ack says that the snapshot is unchanged."""
        if not ack.is_unchanged:
            return None
        view = SnapshotView() if self._config.has_keys else self._views.snapshots[ack.task.subtask]
        if view.slices is not None or view.snapshots[0].checksum != ack.last.checksum:
            raise ProtocolError(
                f"{self._name}: subtask {ack.task.subtask} refers to a snapshot that it did not start from.",
                hint="Do driver and workers run the same version of statelog?",
            )
        return view.snapshots[0]

    def _commit(self, batch: Batch, received_s: float) -> None:
        acks = [batch.acks[subtask] for subtask in range(self._config.parallelism)]
        if all(accepted.is_stored for accepted in acks):
            return
        require_equal_copies([accepted.ack.broadcast_checksums for accepted in acks], self._name)
        self._options.observer.step(Step.LAST_ACK, batch.number, -1)
        rewrite_snapshots(acks, self._store, self._inventory, self._name)
        kept = [self._oldest_retained(batch), *self._held_batches, *self._inventory.points.pending]
        oldest = max(self._retained_from, min(kept))
        changes_from = self._inventory.changes_from(oldest)
        log_start = self.history.log_start(oldest, batch.number, changes_from)
        base_map = self._inventory.base_map_to_repeat(batch.number)
        entry, payload = compose(
            self._config,
            batch,
            self.history.at(batch.number - 1),
            epoch=self._epoch,
            token=self._new_token(),
            generations=self._generations,
            log_start=self._log.number if log_start is None else log_start,
            retained_from=oldest,
            base_map=base_map,
            settings=self._inherited.settings,
        )
        files_before = self._log.files_made
        batch.is_written = True
        self._inventory.gate.doubt(entry)
        try:
            batch.durable = self._log.append(entry, payload)
        except FencedError as error:
            self._stopped = error
            raise
        for accepted, stored in zip(acks, batch.durable.by_subtask(), strict=True):
            accepted.stored, accepted.is_stored = stored, True
            accepted.payload = accepted.rewritten_bytes = accepted.levels_payload = b""
        for base in batch.durable.bases:
            acks[base.subtask].levels = base.levels
        self._retained_from = oldest
        self._inventory.add(batch.durable, base_map, sum(map(len, payload)))
        if self._config.has_keys:
            self._policy.committed(batch.durable, acks)
        durable_s = self._clock.monotonic_s()
        self._options.observer.step(Step.DURABLE, batch.number, -1)
        batch.metrics = checkpoint_metrics(
            batch.durable,
            acks,
            self._policy,
            self._inventory,
            last_ack_s=received_s,
            durable_s=durable_s,
            log_files=self._log.files_made - files_before,
            measured=self._measurements.take(),
        )
        self.metrics.checkpoint(batch.metrics)
        self._slow.note(batch.metrics, [accepted.ack for accepted in acks])
        self._inventory.release(batch.durable, oldest, self._log, changes_from)

    def _oldest_retained(self, batch: Batch) -> int:
        """The oldest batch that a rewind can reach once the checkpoint of a batch is durable."""
        return batch.number - self._options.retained_checkpoints + 1

    @contextmanager
    def holding(self, batch: int) -> Iterator[History | None]:
        """During the block, retain a checkpoint that Spark has committed.

        Yields the history up to now, or None if the checkpoint is already gone.
        """
        with self._lock:
            current = self._batch
            is_there = current is not None and batch >= self._oldest_retained(current) and self.history.has_batch(batch)
            history = self.history.copy() if is_there else None
            if is_there:
                self._held_batches.append(batch)
        try:
            yield history
        finally:
            with self._lock:
                if is_there:
                    self._held_batches.remove(batch)

    def _require_running(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _require_begun(self, task: TaskId) -> Batch:
        batch = self._batch
        if batch is not None and task.batch < batch.number:
            raise stale_task(task, batch, self._name)
        if batch is None or batch.number != task.batch or batch.begun.get(task.attempt) != task.subtask:
            raise stale_run(
                f"{self._name}: attempt {task.attempt} of subtask {task.subtask} has not begun batch {task.batch}."
            )
        return batch

    def _remove_initial_state(self) -> None:
        """Delete the initial state's objects: batch 0 is over, or the start that repeats it stores the rows again."""
        self._inventory.deleter.delete([name for name in self._initial if name])
        self._initial = ()

    def close(self) -> None:
        """Stop serving tasks, release the log, and delete the objects that no entry references."""
        with self._lock:
            if self._is_closed:
                return  # the files there may belong to another start by now
            self._is_closed = True
            if self._stopped is None:
                self._stopped = stale_run(f"{self._name}: the run {self._config.run_id} is over.")
            self._remove_initial_state()
            self._inventory.close()
            self._log.close()
