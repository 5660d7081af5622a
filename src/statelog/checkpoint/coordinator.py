"""The coordinator of one operator in one run: begin, acks, and the log entry that makes a checkpoint.

It knows nothing of Spark: the batch's time comes from a callable, tasks call it through a server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from statelog.checkpoint.admission import OperatorConfig, require_admission
from statelog.checkpoint.batch import AcceptedAck, Batch, BatchTime
from statelog.checkpoint.commit import compose, generations_of
from statelog.checkpoint.history import History
from statelog.checkpoint.initial import initial_checkpoint, initial_entry
from statelog.checkpoint.inventory import Inventory
from statelog.checkpoint.materialization import MaterializationPolicy
from statelog.checkpoint.measuring import checkpoint_metrics
from statelog.checkpoint.progress import RestoringSubtasks
from statelog.checkpoint.protocol import (
    Ack,
    Acked,
    Begin,
    Begun,
    Fetch,
    Fetched,
    JobOutcome,
    ReadProgress,
    TaskId,
    Witness,
)
from statelog.checkpoint.redistribution import LARGE_SNAPSHOT_BYTES, SnapshotView, require_equal_copies
from statelog.checkpoint.refusals import incomplete_batch, require_own_names, require_own_partition, stale_task
from statelog.checkpoint.settings import TakenOver, take_over
from statelog.checkpoint.views import Views
from statelog.clock import Clock
from statelog.errors import (
    ErrorKind,
    FencedError,
    ProtocolError,
    StatelogError,
    StorageError,
)
from statelog.local.restore import read_segment
from statelog.log.entry import INITIAL_BATCH, Checkpoint, Claim
from statelog.log.log import Log
from statelog.log.references import SegmentRef, StoredRun
from statelog.metrics import Measurements
from statelog.observer import RestoreMetrics, Step
from statelog.options import Options
from statelog.runs.times import NO_TIME_MS
from statelog.storage import Store

_log = logging.getLogger(__name__)


class Coordinator:
    """Decides what each subtask starts from, and what each checkpoint consists of.

    The order of calls is :meth:`open`, then :meth:`begin`, :meth:`fetch` and :meth:`ack` from any thread, then
    :meth:`close`.

    Parameters
    ----------
    config : OperatorConfig
        The run.
    store : Store
        Where the operator's files are.
    location : str
        The store's location, for the tasks and for messages.
    root : str
        The operator's folder in the store.
    log : Log
        The operator's log.
    options : Options
        Options.
    clock : Clock
        Time.
    new_token : callable
        Makes 16 unique bytes.
    batch_time : callable
        Tells Spark's time of a batch; raises FencedError if it knows no such batch.
    measurements : Measurements
        What is measured of the store.
    deletes_in_background : bool
        Whether what is not needed any more is deleted by a thread, beside the work.
    slots : int
        How many subtasks run at a time.
    """

    def __init__(
        self,
        config: OperatorConfig,
        *,
        store: Store,
        location: str,
        root: str,
        log: Log,
        options: Options,
        clock: Clock,
        new_token: Callable[[], bytes],
        batch_time: Callable[[int], BatchTime],
        measurements: Measurements,
        deletes_in_background: bool,
        slots: int,
    ) -> None:
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
        self._inventory = Inventory(store, root, self._name, options, deletes_in_background=deletes_in_background)
        self._policy = MaterializationPolicy(config, self._inventory, options, clock, slots, self._name)
        self._retained_from = INITIAL_BATCH
        self._generations: dict[str, int] = {}
        self._taken_over = TakenOver()
        self._initial: Sequence[str] = ()
        self._epoch = 0
        self._batch: Batch | None = None
        self._views = Views([], [], [], [])
        self._stopped: StatelogError | None = None
        self._is_closed = False
        self._held: list[int] = []
        self._restoring = RestoringSubtasks(config, options.observer, self._name)

    @property
    def _history(self) -> History:
        return self._inventory.history

    @property
    def _name(self) -> str:
        return f"operator '{self._config.uid}' at {self._location}/{self._root}"

    def open(self, first_batch: int, given: Mapping[int, Sequence[StoredRun]] | None = None) -> None:
        """Claim the location for this run, and find the state before its first batch.

        Parameters
        ----------
        first_batch : int
            The first batch that Spark runs.
        given : mapping of int to sequence of StoredRun, optional
            For each subtask state that is there before batch 0.

        Raises
        ------
        ConfigurationError
            If the location belongs to another query or operator, or to another copy of the query, or its keys or states
            are of other types.
        StateMissingError
            If the checkpoint before `first_batch` does not exist.
        CorruptionError, StorageError
            If the log is damaged or cannot be read.
        """
        started_s = self._clock.monotonic_s()
        # A run that may not use the location must not fence off the one that owns it: look before claiming.
        time_before_ms = self._known_time_ms(first_batch - 1)
        require_admission(self._config, History(self._log.read()), first_batch, time_before_ms, self._name)
        entries = self._log.claim(self._make_claim)
        require_admission(self._config, History(entries), first_batch, time_before_ms, self._name)
        if first_batch == 0 and (given or History(entries).at(INITIAL_BATCH)):
            entries = [*entries, self._found(given or {})]
        self._inventory.open(entries, self._epoch, self._config.run_id, self._clock)
        self._retained_from = INITIAL_BATCH if first_batch == 0 else self._inventory.retained_from()
        self._policy.restore(first_batch - 1)
        before = self._history.at(first_batch - 1)
        self._generations = generations_of(self._config, before)
        self._taken_over = take_over(self._config.settings, self._config.states, before, self._name)
        log_s = self._clock.monotonic_s() - started_s
        run = self._config
        self._options.observer.restore(
            RestoreMetrics(run.query_id, run.uid, first_batch, run.parallelism, len(entries), log_s)
        )

    def _known_time_ms(self, batch: int) -> int | None:
        """Spark's time of a batch before this run; None if there was none, or Spark has forgotten it."""
        try:
            return None if batch < 0 else self._batch_time(batch).time_ms
        except FencedError:
            return None

    def _found(self, given: Mapping[int, Sequence[StoredRun]]) -> Checkpoint:
        """Make durable what is there before the first batch."""
        entry = initial_entry(self._config, self._epoch, self._new_token(), self._log.number)
        return self._log.append(initial_checkpoint(entry, given), [])

    def offer_initial_state(self, objects: Sequence[str]) -> None:
        """Give the subtasks of batch 0 the rows of an initial state; call it before they begin.

        Parameters
        ----------
        objects : sequence of str
            For each subtask the object that holds its rows; empty if it has none.
        """
        self._initial = objects

    def _make_claim(self, epoch: int) -> Claim:
        self._epoch = epoch
        run = self._config
        now_ms = int(self._clock.now_s() * 1000)
        return Claim(epoch, run.query_id, run.run_id, run.uid, self._new_token(), now_ms)

    def begin(self, request: Begin) -> Begun:
        """A subtask begins a batch, for the first time or again.

        Raises
        ------
        FencedError
            If a newer run owns the location, or the batch is over.
        StateMissingError
            If the checkpoint before the batch does not exist.
        ConfigurationError
            If the task's partition is not the one that the operator made, or its rows are of another batch.
        """
        with self._lock:
            self._require_running()
            task = request.task
            batch = self._enter(task)
            require_own_partition(request, batch, self._config, self._name)
            batch.begun[task.attempt] = task.subtask
            before = self._history.at(batch.number - 1)
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
                closed_ms=self._taken_over.closed_ms,
                expires_by=self._taken_over.expires_by,
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
            raise incomplete_batch(task.batch - 1, current, self._config, self._name)
        if current is not None:
            # Another result of the last batch may be in the log or not: only the run's own later entry settles it.
            self._commit(current, self._clock.monotonic_s())
        batch = Batch(task.batch, self._time_of(task.batch))
        if current is None:
            self._views = Views.of_first_batch(self._config, self._history, task.batch)
        else:
            self._views = self._views.after(current)
            self._remove_initial_state()
        self._batch = batch
        self._inventory.begin(batch.number)
        if current is not None:
            self._inventory.remove_lost(current, self._policy.certain(current.lost))
        return batch

    def _time_of(self, batch: int) -> BatchTime:
        """Spark's times of a batch, or with the operator's own watermark."""
        time = self._batch_time(batch)
        before = self._history.at(batch - 1)
        if self._config.watermark is None:
            # Spark's may be behind if the operator had one of its own: it waits until Spark's has come there.
            least_ms = NO_TIME_MS if before is None else before.watermark_ms
            return replace(
                time,
                watermark_ms=max(time.watermark_ms, least_ms),
                late_watermark_ms=max(time.late_watermark_ms, least_ms),
            )
        if before is None:
            return replace(time, watermark_ms=NO_TIME_MS, late_watermark_ms=NO_TIME_MS)
        watermark_ms = self._config.watermark.advance(before.watermark_ms, before.max_event_ms)
        return replace(time, watermark_ms=watermark_ms, late_watermark_ms=before.watermark_ms)

    def watermark_advances(self, batch: int) -> bool:
        """Whether the operator's own watermark is larger after a batch than it was in it."""
        with self._lock:
            checkpoint = self._history.at(batch)
            if self._config.watermark is None or checkpoint is None:
                return False
            after_ms = self._config.watermark.advance(checkpoint.watermark_ms, checkpoint.max_event_ms)
            return after_ms > checkpoint.watermark_ms

    def fetch(self, request: Fetch) -> Fetched:
        """Tell a subtask which segments it lacks of the state before its batch."""
        with self._lock:
            self._require_running()
            task = request.task
            self._require_begun(task)
            missing = self._history.missing_segments(
                self._views.genesis_digests[task.subtask],
                task.subtask,
                self._config.parallelism,
                task.batch - 1,
                set(request.known),
            )
            return Fetched(missing)

    def progress(self, progress: ReadProgress) -> None:
        """A subtask has read some of what it lacked."""
        self._restoring.note(progress)

    def ack(self, ack: Ack, payload: bytes) -> Acked:
        """Take a subtask's result; return for the last one when the checkpoint is durable.

        Parameters
        ----------
        ack : Ack
            The result.
        payload : bytes
            The changeset, unless `ack` names an object.

        Returns
        -------
        Acked
            What became of a materialization that came with it.

        Raises
        ------
        FencedError
            If a newer run owns the location, or the batch is over.
        CorruptionError
            If the payload is not what the ack says.
        ProtocolError
            If it names objects that the subtask may not name.
        StorageError
            If the entry could not be written; the task may call again.
        """
        received_s = self._clock.monotonic_s()
        taken = AcceptedAck.of(ack, payload, self._name)
        with self._lock:
            self._require_running()
            batch = self._require_begun(ack.task)
            require_own_names(ack, self._inventory.changes_folder(ack.task.subtask), self._name)
            if ack.length > LARGE_SNAPSHOT_BYTES and not self._config.has_keys:
                self._warn_of_size(ack)
            self._measurements.add(ack.measured)
            taken.unchanged_segment = self._kept(ack)
            outcome = self._take(batch, taken)
            if len(batch.acks) == self._config.parallelism:
                self._commit(batch, received_s)
            return Acked(outcome)

    def require_committed(self, batch: int) -> None:
        """Make sure that a batch that Spark has committed has a checkpoint.

        Raises
        ------
        StateMissingError
            If it has none, because its subtasks did not all run to their end.
        """
        with self._lock:
            current = self._batch
            if current is None or batch > current.number or (batch == current.number and current.durable is None):
                raise incomplete_batch(batch, current, self._config, self._name)

    def _take(self, batch: Batch, taken: AcceptedAck) -> JobOutcome:
        try:
            return self._policy.take(batch, taken, self._views.genesis_digests[taken.ack.task.subtask])
        except StorageError as error:
            self._stopped = error
            raise

    def _kept(self, ack: Ack) -> SegmentRef | None:
        """The stored snapshot that the subtask started from, if its ack says that it is still the same."""
        if not ack.is_unchanged:
            return None
        view = SnapshotView() if self._config.has_keys else self._views.snapshots[ack.task.subtask]
        if view.slices is not None or view.snapshots[0].checksum != ack.checksum:
            raise ProtocolError(
                f"{self._name}: subtask {ack.task.subtask} refers to a snapshot that it did not start from.",
                hint="Do driver and workers run the same version of statelog?",
            )
        return view.snapshots[0]

    def _warn_of_size(self, ack: Ack) -> None:
        _log.warning(
            "%s: the operator state of subtask %d has %.1f MB, and is stored as a whole in every batch that changes it;"
            " keep large states by key",
            self._name,
            ack.task.subtask,
            ack.length / 1e6,
        )

    def _commit(self, batch: Batch, received_s: float) -> None:
        taken = [batch.acks[subtask] for subtask in range(self._config.parallelism)]
        if all(one.is_stored for one in taken):
            return
        require_equal_copies([one.ack.copies for one in taken], self._name)
        self._options.observer.step(Step.LAST_ACK, batch.number, -1)
        self._move_from_wasteful_files(taken)
        oldest = max(self._retained_from, min([self._oldest_retained(batch), *self._held]))
        log_start = self._history.log_start(oldest, batch.number)
        base_map = self._inventory.base_map_to_repeat(batch.number)
        entry, payload = compose(
            self._config,
            batch,
            self._history.at(batch.number - 1),
            epoch=self._epoch,
            token=self._new_token(),
            generations=self._generations,
            log_start=self._log.number if log_start is None else log_start,
            retained_from=oldest,
            base_map=base_map,
            settings=self._taken_over.settings,
        )
        files_before = self._log.files_made
        batch.is_written = True
        self._inventory.gate.doubt(entry)
        try:
            batch.durable = self._log.append(entry, payload)
        except FencedError as error:
            self._stopped = error
            raise
        for one, stored in zip(taken, batch.durable.by_subtask(), strict=True):
            one.stored, one.payload, one.rewritten_bytes, one.levels_payload, one.is_stored = (
                stored,
                b"",
                b"",
                b"",
                True,
            )
        for base in batch.durable.bases:
            taken[base.subtask].levels = base.levels
        self._retained_from = oldest
        self._inventory.add(batch.durable, base_map, sum(map(len, payload)))
        if self._config.has_keys:
            self._policy.committed(batch.durable, taken)
        commit_s = self._clock.monotonic_s() - received_s
        self._options.observer.step(Step.DURABLE, batch.number, -1)
        log_files = self._log.files_made - files_before
        measured = self._measurements.take()
        self._options.observer.checkpoint(
            checkpoint_metrics(batch.durable, taken, self._policy, self._inventory, commit_s, log_files, measured)
        )
        self._inventory.release(batch.durable, oldest, self._log)

    def _oldest_retained(self, batch: Batch) -> int:
        """The oldest batch that can be gone back to once the checkpoint of a batch is durable."""
        return batch.number - self._options.retained_checkpoints + 1

    @contextmanager
    def holding(self, batch: int) -> Iterator[History | None]:
        """Keep a checkpoint that Spark has committed; give the checkpoints, or None if it is not retained any more."""
        with self._lock:
            current = self._batch
            is_there = (
                current is not None and batch >= self._oldest_retained(current) and self._history.has_batch(batch)
            )
            history = self._history.copy() if is_there else None
            if is_there:
                self._held.append(batch)
        try:
            yield history
        finally:
            with self._lock:
                if is_there:
                    self._held.remove(batch)

    def _move_from_wasteful_files(self, taken: list[AcceptedAck]) -> None:
        for one in taken:
            if one.unchanged_segment is not None and self._inventory.is_wasteful(one.unchanged_segment.name):
                try:
                    one.rewritten_bytes = read_segment(self._store, one.unchanged_segment)
                except StorageError as error:
                    # It can stay where it is; the next checkpoint tries again.
                    _log.warning("%s: a snapshot could not be moved yet: %s", self._name, error)

    def _require_running(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _require_begun(self, task: TaskId) -> Batch:
        batch = self._batch
        if batch is not None and task.batch < batch.number:
            raise stale_task(task, batch, self._name)
        if batch is None or batch.number != task.batch or batch.begun.get(task.attempt) != task.subtask:
            raise FencedError(
                f"{self._name}: attempt {task.attempt} of subtask {task.subtask} has not begun batch {task.batch}.",
                kind=ErrorKind.STALE_RUN,
                hint="The task is a leftover of an earlier run.",
            )
        return batch

    def _remove_initial_state(self) -> None:
        """The first batch is over, or will be repeated by a run that stores the rows again."""
        self._inventory.deleter.delete([name for name in self._initial if name])
        self._initial = ()

    def close(self) -> None:
        """Stop serving tasks and release the log. What no entry references is removed."""
        with self._lock:
            if self._is_closed:
                return  # what is there now may be another run's
            self._is_closed = True
            if self._stopped is None:
                self._stopped = FencedError(
                    f"{self._name}: the run {self._config.run_id} is over.",
                    kind=ErrorKind.STALE_RUN,
                    hint="The task is a leftover of an earlier run.",
                )
            self._remove_initial_state()
            self._inventory.close()
            self._log.close()
