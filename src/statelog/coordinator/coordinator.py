"""The coordinator of a query in one start: it answers the tasks and writes each checkpoint's log entry.

It does not depend on Spark: a callable gives it the times of a batch, and tasks reach it through a transport.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec import structs

from statelog.clock import Clock
from statelog.coordinator.active_operator import ActiveOperator
from statelog.coordinator.admission import (
    OperatorConfig,
    admit,
    foreign_task,
    incomplete_batch,
    require_distinct,
    require_own_partition,
    stale_run,
    stale_task,
)
from statelog.coordinator.batch import AcceptedAck, Batch, BatchTime, InlineBudget
from statelog.coordinator.checkpoint_writer import CheckpointWriter
from statelog.coordinator.garbage import Inventory
from statelog.coordinator.views import given_base
from statelog.errors import FencedError, StatelogError, StorageError
from statelog.history.query_history import QueryHistory
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.log.entry import Checkpoint, Claim, Entry, QueryCheckpoint
from statelog.log.numbered import NumberedLog
from statelog.log.open import new_identity
from statelog.log.references import BaseRange, StoredRun
from statelog.log_fields import get_logger
from statelog.metrics import Measurements, Recorded
from statelog.options import Options
from statelog.rpc.messages import (
    Ack,
    Acked,
    Begin,
    Begun,
    CheckOwner,
    Fetch,
    Fetched,
    Kept,
    Permit,
    ReadProgress,
    Reply,
    TaskId,
    TaskRequest,
    Witness,
)
from statelog.storage import Store

_log = get_logger(__name__)


class Coordinator:
    """Decides which state each subtask starts from, and what each checkpoint consists of.

    The order of calls is :meth:`open`, then :meth:`handle` from any thread, then :meth:`close`.

    `roster` has the query's operators in this start, `location` is the store's, for tasks and messages. `options` are
    the query's; those of its operators are in the roster. `new_token` makes 16 unique bytes. `batch_time` gives Spark's
    times of a batch, and raises FencedError if it knows no such batch. `slots` is the number of subtasks that run at a
    time. `stored_commit` gives the newest batch whose commit Spark has stored, which may be several batches ago:
    the next start goes back to it. With `deletes_in_background` a thread deletes files that are no longer needed.

    An ack is accepted under a short lock; the :class:`CheckpointWriter` appends outside of it. Raises
    ConfigurationError if two operators have one uid.
    """

    def __init__(
        self,
        roster: Sequence[OperatorConfig],
        *,
        store: Store,
        location: str,
        log: NumberedLog,
        options: Options,
        clock: Clock,
        new_token: Callable[[], bytes],
        batch_time: Callable[[int], BatchTime],
        measurements: Measurements,
        deletes_in_background: bool,
        slots: int,
        stored_commit: Callable[[], int] | None = None,
        merge_policy: MergePolicy = MERGE_POLICY,
    ) -> None:
        require_distinct(roster)
        self._roster = sorted(roster, key=lambda config: config.uid)
        self._options = options.for_store(can_append=store.can_append)
        self._location = location
        self._log = log
        self._clock = clock
        self._new_token = new_token
        self._batch_time = batch_time
        self._measurements = measurements
        self._inventory = Inventory(store, location, options, clock, deletes_in_background=deletes_in_background)
        self._subtasks = sum(config.parallelism for config in roster)
        self._slots = slots
        self._merge_policy = merge_policy
        self._stores_output = any(config.stores_output for config in roster)
        self._operators: dict[str, ActiveOperator] = {}
        self._epoch = 0
        self.kept_batch: int | None = None
        """The batch of an earlier start whose checkpoint stays although Spark repeats it; None if there is none."""
        self._lock = threading.Lock()
        self._writer = CheckpointWriter(
            self._operators,
            self._inventory,
            log,
            store,
            self._options,
            clock=clock,
            new_token=new_token,
            measurements=measurements,
            least_log_bytes=merge_policy.small_log_bytes,
            stored_commit=stored_commit,
            lock=self._lock,
            require_running=self._require_running,
            stop=self._stop,
        )
        self._first_batch = 0
        self._batch: Batch | None = None
        self._stopped: StatelogError | None = None
        self._is_closed = False

    # ---- The start ----

    @property
    def history(self) -> QueryHistory:
        """The checkpoints that this start still knows."""
        return self._inventory.query

    def operator(self, uid: str) -> ActiveOperator:
        """The operator of the start with a uid; KeyError if there is none."""
        return self._operators[uid]

    def has_operator(self, uid: str) -> bool:
        """Whether the start has an operator with a uid."""
        return uid in self._operators

    def beginning(self, first_batch: int) -> set[str]:
        """The operators that begin their state with this batch if :meth:`open` comes next; raises as :func:`admit`."""
        known = self._admit(QueryHistory(self._log.read()), first_batch)
        return {config.uid for config in self._roster} - known.keys()

    def open(
        self,
        first_batch: int,
        given: Mapping[str, Mapping[int, Sequence[StoredRun]]] | None = None,
        *,
        initial_rows: Mapping[str, Sequence[str]] | None = None,
        identities: Mapping[str, str] | None = None,
        keeps: Callable[[QueryHistory], bool] | None = None,
    ) -> None:
        """Claim the location for this start, and find the state before its first batch.

        For operators that begin their state, `given` has materialized state by uid and subtask, and `initial_rows` the
        objects with rows of an initial state, by uid and then one for each subtask, empty for one without rows;
        `identities` has those that were made for them, by uid. A stored checkpoint of the first batch is taken back,
        because the batch is repeated, unless `keeps` decides that it stays. Raises the errors of :func:`admit`, and
        StorageError if the log cannot be read.
        """
        started_s = self._clock.monotonic_s()
        # A start that may not use the location must not fence the one that owns it: look before claiming.
        history = QueryHistory(self._log.read())
        self._admit(history, first_batch)
        before = history.at(first_batch - 1)
        follows = b"" if before is None else before.id
        entries = self._claim(follows if keeps is None else None)
        if keeps is not None:
            # Now no other start can write any more.
            if keeps(QueryHistory(entries)):
                _log.info("%s: batch %d is repeated, and its stored output is read again", self._location, first_batch)
                self.kept_batch = first_batch
                first_batch += 1
            else:
                entries = self._claim(follows)
        self._first_batch = first_batch
        history = QueryHistory(entries)
        known = self._admit(history, first_batch)
        names = [run.name for of in (given or {}).values() for runs in of.values() for run in runs]
        self._inventory.open(entries, self._epoch, self._roster[0].run_id, self._clock, names)
        self._inventory.points.open(self.history, first_batch)
        self._writer.begin(self._epoch, self.history.retained_from if known else first_batch - 1)
        for config in self._roster:
            uid = config.uid
            self._operators[uid] = self._active(
                config, first_batch, known.get(uid), (identities or {}).get(uid), (given or {}).get(uid, {})
            )
        self._inventory.work_for([operator.identity for operator in self._operators.values()])
        for uid, objects in (initial_rows or {}).items():
            if self._operators[uid].begins_at is not None:
                self._operators[uid].offer_initial_rows(objects)
        log_s = self._clock.monotonic_s() - started_s
        read = sum(entry.epoch < self._epoch for entry in entries)
        for operator in self._operators.values():
            operator.report_restore(first_batch, read, log_s)
        self._inventory.remove_orphans()

    def _admit(self, history: QueryHistory, first_batch: int) -> dict[str, str]:
        """Check that the start may use the log; see :func:`admit`."""
        try:
            time_ms = None if first_batch == 0 else self._batch_time(first_batch - 1).time_ms
        except FencedError:
            time_ms = None  # Spark no longer has it
        return admit(history, self._roster, first_batch, time_ms, self._location)

    def _active(
        self,
        config: OperatorConfig,
        first_batch: int,
        known: str | None,
        made: str | None,
        given: Mapping[int, Sequence[StoredRun]],
    ) -> ActiveOperator:
        """An operator that continues with the state of identity `known`; if that is None, it starts empty.

        It then starts over whenever that batch is repeated: as identity `made` if there is one, and with the
        materialized state `given` by subtask.
        """
        identity = known or made or new_identity(config.uid, self._new_token())
        before_batch = first_batch - 1
        base: list[BaseRange] | None = None
        if known is None and config.has_keys and given:
            base = given_base(identity, config.parallelism, before_batch, given)
        operator = ActiveOperator(
            config,
            identity,
            None if known is None else self.history.histories[known].at(before_batch),
            name=f"operator '{config.uid}' at {self._location}",
            first_batch=first_batch,
            begins_at=first_batch if known is None else None,
            given=base,
            inventory=self._inventory,
            clock=self._clock,
            slots=self._slots,
            merge_policy=self._merge_policy,
            inline_bytes=self._options.inline_bytes(self._subtasks),
        )
        if known is None and first_batch > 0:
            state = "with the tables of its initialState" if base else "empty"
            _log.info("%s: it is new in the query as of batch %d, and starts %s", operator.name, first_batch, state)
        return operator

    def _claim(self, follows: bytes | None) -> list[Entry]:
        """Claim the log; return its entries. `follows` is the checkpoint to which the query goes back, see Claim."""
        run, claims = self._roster[0], list[Claim]()

        def make(epoch: int) -> Claim:
            self._epoch, now_ms = epoch, int(self._clock.now_s() * 1000)
            claims.append(Claim(epoch, run.query_id, run.run_id, self._new_token(), now_ms, follows))
            return claims[-1]

        entries = self._log.claim(make)
        return [*entries, structs.replace(claims[-1], number=self._log.number)]

    # ---- Calls of tasks ----

    def handle(self, request: TaskRequest, payload: bytes) -> Reply:
        """Answer a request of a task; the errors are those of the method that does it."""
        match request:
            case Begin():
                return Kept() if self._is_kept(request.task.batch) else self.begin(request)
            case Fetch():
                return self.fetch(request)
            case ReadProgress():
                self._operator_of(request.task).restoring.note(request)
            case CheckOwner():
                self._operator_of(request.task)
                self.require_ownership()
            case Ack():
                return self.ack(request, payload)
        return Acked()

    def _operator_of(self, task: TaskId) -> ActiveOperator:
        operator = self._operators.get(task.uid)
        if operator is not None and operator.config.instance in ("", task.instance):
            return operator
        raise foreign_task(task, self._location)

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
        task = request.task
        operator = self._operator_of(task)
        while True:
            with self._lock:
                self._require_running()
                batch = self._enter(task)
                if batch.number == task.batch:
                    return self._begun(operator, batch, request)
            # The last batch may or may not have an entry in the log, or an accepted ack waits for one.
            self._writer.make_durable(batch, operator, self._clock.monotonic_s())

    def _begun(self, operator: ActiveOperator, batch: Batch, request: Begin) -> Begun:
        task, own = request.task, batch.operators[operator.config.uid]
        require_own_partition(request, own, operator.config, operator.name)
        own.begun[task.attempt], own.tokens[task.attempt] = task.subtask, request.token
        permit = Permit(
            epoch=self._epoch,
            inline_bytes=batch.budget.limit_of(task.uid, task.subtask),
            upload_prefix=self._inventory.changes_folder(operator.identity, task.subtask),
            store=self._location,
            batch_time_ms=own.time.time_ms,
            watermark_ms=own.time.watermark_ms,
            late_watermark_ms=own.time.late_watermark_ms,
            timers_after_ms=operator.timers_after_ms(task.subtask),
            arrivals_after_ms=operator.arrivals_after_ms(task.subtask),
            initial=operator.initial_of(task.subtask),
            maintenance=operator.maintenance(task, self._inventory.needed_by(operator.identity)),
            witness=Witness(self._log.file_name, self._log.head),
        )
        return Begun(operator.view(task.subtask), permit)

    def _enter(self, task: TaskId) -> Batch:
        """The batch that a task belongs to; the first task of a batch starts it.

        Returns the last batch if it has to become durable first.
        """
        current = self._batch
        if current is not None and task.batch == current.number:
            return current
        if current is not None and task.batch < current.number:
            raise stale_task(task, current, self._location)
        expected = self._first_batch if current is None else current.number + 1
        if task.batch > expected or not (current is None or current.is_complete):
            raise incomplete_batch(task.batch - 1, current, self._roster, self._location)
        if current is not None and not current.is_settled:
            return current
        time = self._batch_time(task.batch)
        self._inventory.gate.begin(self._epoch, task.batch)  # first: what the last batch has lost can go from now on
        self._batch = Batch(
            task.batch,
            time,
            {
                uid: operator.enter(task.batch, time, None if current is None else current.operators[uid])
                for uid, operator in self._operators.items()
            },
            InlineBudget(self._options.inline_bytes(1), self._subtasks),
        )
        return self._batch

    def fetch(self, request: Fetch) -> Fetched:
        """Tell a subtask how to get to the state before its batch."""
        operator = self._operator_of(request.task)
        with self._lock:
            self._require_running()
            self._require_begun(request.task)
            return operator.fetch(request)

    def ack(self, ack: Ack, payload: bytes) -> Acked:
        """Accept a subtask's result. If the query's batch is complete, return once all that counts is durable.

        Raises FencedError if a newer start owns the location or the batch is over, CorruptionError if the payload does
        not match the ack, ProtocolError if the ack names objects that are not the subtask's. Raises StorageError if the
        entry could not be written: the task may call again; or if the subtask's materializations have failed too often:
        the coordinator has stopped.
        """
        operator = self._operator_of(ack.task)
        received_s = self._clock.monotonic_s()
        accepted = AcceptedAck.of(ack, payload, operator.name)
        accepted.received_s = received_s
        with self._lock:
            self._require_running()
            batch = self._require_begun(ack.task)
            own = batch.operators[ack.task.uid]
            try:
                outcome, is_counted = operator.accept(own, accepted, is_final=self._is_final(batch, operator))
            except StorageError as error:
                self._stopped = error
                raise
            if is_counted:
                batch.accepted += 1
                batch.budget.sent(ack.task.uid, ack.task.subtask, len(payload))
            acks = operator.counted(own)
            is_complete = batch.is_complete
        if acks is None:
            return Acked(outcome)
        if is_complete:
            self._writer.make_durable(batch, operator, received_s)
        elif own.metrics is None:
            section, _ = operator.section(own, acks)
            now_s = self._clock.monotonic_s()
            operator.measure(
                own, section, acks, revision=0, last_ack_s=now_s, end_s=now_s, log_files=0, measured=Recorded()
            )
        metrics = own.metrics
        return Acked(outcome, [] if metrics is None else list(metrics.numbers().values()))

    def _is_final(self, batch: Batch, operator: ActiveOperator) -> bool:
        """Whether an operator's results must not be replaced: its rows have gone into stored output, or may have."""
        if not self._stores_output:
            return False
        uid = operator.config.uid
        return batch.durable is not None or any(
            uid in config.in_front and batch.operators[config.uid].begun for config in self._roster
        )

    def _require_running(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _stop(self, error: StatelogError) -> None:
        self._stopped = error

    def _require_begun(self, task: TaskId) -> Batch:
        batch = self._batch
        if batch is not None and task.batch < batch.number:
            raise stale_task(task, batch, self._location)
        is_begun = batch is not None and batch.number == task.batch
        if batch is None or not is_begun or batch.operators[task.uid].begun.get(task.attempt) != task.subtask:
            raise stale_run(
                f"operator '{task.uid}' at {self._location}: attempt {task.attempt} of subtask {task.subtask} has not"
                f" begun batch {task.batch}."
            )
        return batch

    # ---- Looks from outside ----

    def durable_checkpoint(self, uid: str, batch: int) -> Checkpoint:
        """An operator's checkpoint of the batch that runs now; raises StateMissingError if it is not durable."""
        with self._lock:
            self._require_running()
            entry = self._durable(batch)
            return next(Checkpoint.of(entry, section) for section in entry.sections if section.uid == uid)

    def require_ownership(self) -> None:
        """Raise FencedError, which names the new owner, if a newer start has claimed the log."""
        self._writer.require_ownership()

    def require_committed(self, batch: int) -> None:
        """Raise StateMissingError if a batch that Spark has committed has no checkpoint.

        That happens if not all subtasks ran to their end.
        """
        with self._lock:
            if self._batch is None or batch >= self._batch.number:
                self._durable(batch)

    def _durable(self, batch: int) -> QueryCheckpoint:
        current = self._batch
        if current is None:
            found = self.history.at(batch) if batch == self.kept_batch else None
        else:
            found = current.durable if batch == current.number else None
        if found is None:
            raise incomplete_batch(batch, current, self._roster, self._location)
        return found

    def watermark_advances(self, uid: str, batch: int) -> bool:
        """Whether an operator's own watermark is larger after a batch than in it."""
        with self._lock:
            return self._operators[uid].watermark_advances(batch)

    @contextmanager
    def holding(self, batch: int) -> Iterator[QueryHistory | None]:
        """During the block, retain a checkpoint that Spark has committed.

        Yields the history up to now, or None if the checkpoint is already gone.
        """
        with self._lock:
            current, oldest = self._batch, self._writer.oldest_retained
            is_there = current is not None and batch >= oldest(current) and self.history.has_batch(batch)
            history = self.history.copy() if is_there else None
            if is_there:
                self._writer.held_batches.append(batch)
        try:
            yield history
        finally:
            with self._lock:
                if is_there:
                    self._writer.held_batches.remove(batch)

    def close(self) -> None:
        """Stop serving tasks, release the log, and delete the objects that no entry references."""
        with self._writer.appending, self._lock:
            if self._is_closed:
                return  # the files in the location may belong to another start by now
            self._is_closed = True
            if self._stopped is None:
                self._stopped = stale_run(f"{self._location}: the run {self._roster[0].run_id} is over.")
            for operator in self._operators.values():
                operator.close()
            self._inventory.close()
            self._log.close()
