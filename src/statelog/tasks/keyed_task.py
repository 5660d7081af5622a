"""A keyed operator's task: begin, restore, process, write the changeset, ack, maintain. No Spark here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from statelog.errors import CorruptionError, ErrorKind
from statelog.history.restore_plan import RestorePlan
from statelog.local.materializer import Materialized, Materializer
from statelog.local.restore import SHARED_FOLDER, SharedReads, remove_shared, restore_runs
from statelog.local.runs import LocalRun, LocalRuns
from statelog.local.use import remove_other_parallelisms
from statelog.metrics import Metric, Step
from statelog.operators.keyed.caller import hot_key_groups
from statelog.operators.keyed.operator import BatchContext, KeyedOperator, KeyedRows
from statelog.operators.keyed.subtask import KeyedSubtask
from statelog.rpc.messages import Ack, Acked, Begun, Fetch, Fetched, JobOutcome, TaskTimes
from statelog.runs.arrow_messages import MalformedMessage, stream_batches
from statelog.runs.key_groups import HashRange, hash_range
from statelog.runs.merge import Garbage, choose_merge
from statelog.runs.reader import Run
from statelog.runs.schema import TimeDomain, stored_name
from statelog.runs.times import Moment
from statelog.stopwatch import Part
from statelog.storage import Store
from statelog.tables.open import open_rocksdb
from statelog.tables.runs import RunsTable
from statelog.tables.table import StateTable
from statelog.tasks.attempt import Attempt, Restoring, require_reply
from statelog.tasks.changeset import Changeset, ChangesetWriter


@dataclass(frozen=True)
class BatchInput:
    """All input rows of a subtask in one batch."""

    rows: KeyedRows
    subtask: int
    time_ms: int | None
    """The batch time that the rows carry; None without rows."""


@dataclass(frozen=True)
class _Start:
    """The starting point of the subtask: the coordinator's answer, and the local files."""

    begun: Begun
    folder: Path
    """The subtask's local directory."""
    local: LocalRuns
    within: HashRange
    """The subtask's key hashes."""
    operator: KeyedOperator
    """The operator with its states as they are stored: under their stored names, with their stored expiry."""
    garbage: Garbage
    """The rows that are permanently garbage."""
    open_store: Callable[[], Store]

    @property
    def shared_folder(self) -> Path:
        """The folder in which the subtasks of all operators on this host share what they read from the store."""
        return self.folder.parents[2] / SHARED_FOLDER


@dataclass(frozen=True)
class Maintenance:
    """Merges a subtask's local runs and materializes its state, after a batch or as a part of it."""

    attempt: Attempt
    begun: Begun
    local: LocalRuns
    chain: Sequence[LocalRun]
    """The local runs of the state before the batch, oldest first; that state is certain."""
    materializer: Materializer
    garbage: Garbage
    """Rows that merges may drop."""

    @property
    def has_backlog(self) -> bool:
        """Whether local runs that are too large to merge at once are being merged, or are waiting to be."""
        return self.materializer.is_merging or not self._is_done_at_once(self._to_merge())

    def work(self) -> None:
        """Merge local runs that are due, and do a slice of the coordinator's request."""
        chain, merges = list(self.chain), self._to_merge()
        if merges and self._is_done_at_once(merges):
            self.attempt.step(Step.MERGING)
            genesis, token = self.begun.view.genesis, self.attempt.file_token
            chain[-len(merges) :] = [self.local.merge(merges, genesis, token, garbage=self.garbage)]
            merges = []
        if self.begun.permit.maintenance is not None:
            self.attempt.step(Step.MATERIALIZING)
            self.materializer.work(self.begun.permit.maintenance, chain, merges)

    def store_now(self, local_run: LocalRun) -> Materialized | None:
        """Materialize the state after the batch, whose changes are in `local_run`; None without new changes."""
        request = self.begun.permit.maintenance
        assert request is not None
        if not request.is_due and not self.local.open(local_run).rows:
            return None
        return self.materializer.store_now(request, [*self.chain, local_run])

    def _to_merge(self) -> list[LocalRun]:
        """The newest runs that are due for a merge, except the inputs of a job."""
        busy = self.materializer.inputs()
        places = [place for place, local_run in enumerate(self.chain) if local_run.file_name in busy]
        free = list(self.chain[places[-1] + 1 if places else 0 :])
        rows = [self.local.open(local_run).rows for local_run in free]
        newest = choose_merge(rows, self.attempt.options.tuning.merge_fan_in, self.local.policy.smallest_tier_rows)
        return free[len(free) - newest :]

    def _is_done_at_once(self, local_runs: Sequence[LocalRun]) -> bool:
        runs, policy = [self.local.open(local_run) for local_run in local_runs], self.local.policy
        return (
            sum(run.rows for run in runs) <= policy.at_once_rows
            and sum(run.size_bytes for run in runs) <= policy.at_once_bytes
        )


@dataclass(frozen=True)
class KeyedTask:
    """The work of one attempt."""

    attempt: Attempt
    operator: KeyedOperator

    def run(self, read: BatchInput) -> Generator[pa.RecordBatch, None, Acked]:
        """Process the batch, yield the output, and return the coordinator's reply to the ack.

        The last output batch follows the reply. After a StatelogError, nothing of the attempt counts.
        """
        begun = self.attempt.begin(len(read.rows.hashes), read.time_ms)
        if begun is None:
            return Acked()
        attempt, start = self.attempt, self._start(begun)
        with attempt.local_in_use(start.folder):
            restoring = Restoring(self.attempt)
            runs = self._restore(start, restoring)
            maintenance = self._maintenance(start, [local_run for local_run, _ in runs])
            with self._table(start, runs, restoring) as (table, is_own):
                subtask = KeyedSubtask(start.operator, table, self._context(start.begun), attempt.stopwatch)
                with ChangesetWriter(subtask.changes, attempt, start.begun) as writer:
                    initial = _initial(start)
                    with attempt.stopwatch.counting(Part.PROCESSOR):
                        last_output = yield from self._process(subtask, writer, read, initial)
                    with attempt.stopwatch.counting(Part.ENCODE):
                        changeset, materialized = self._changeset(writer, maintenance, len(read.rows.hashes))
            # After the ack is sent, an entry may reference the attempt's objects even if we never see the reply. So
            # they are deleted only before it.
            done = materialized or Materialized([], "")
            assert writer.local_run is not None
            sizes = _state_sizes([*(run for _, run in runs), start.local.open(writer.local_run)])
            hot_groups = hot_key_groups(read.rows.hashes)
            reply = self._ack(subtask, changeset, done, maintenance, restoring, sizes, hot_groups)
            if last_output is not None:
                yield last_output
            if materialized is None and is_own:
                # Not while another attempt has the table open: that table will need these runs one by one.
                maintenance.work()
            elif materialized is not None and reply.job is not JobOutcome.OPEN:
                maintenance.materializer.end(materialized.job)
        return reply

    def _start(self, begun: Begun) -> _Start:
        attempt = self.attempt
        folder = attempt.local_of(begun.view.identity)
        return _Start(
            begun,
            folder,
            attempt.memory.local.at(folder, attempt.task.batch),
            within=hash_range(attempt.task.subtask, attempt.parallelism),
            operator=as_stored(self.operator, begun.view.generations, begun.view.expires_by),
            # Another start may repeat the batch, with another watermark or without the deletions. So only rows that are
            # garbage as of the previous checkpoint stay garbage.
            garbage=Garbage(
                Moment(begun.permit.batch_time_ms, begun.permit.late_watermark_ms), begun.view.certain_generations
            ),
            open_store=lambda: attempt.open_store(begun.permit.store),
        )

    def _context(self, begun: Begun) -> BatchContext:
        return BatchContext(
            epoch=begun.permit.epoch,
            batch=self.attempt.task.batch,
            moment=Moment(begun.permit.batch_time_ms, begun.permit.watermark_ms, begun.permit.late_watermark_ms),
            timers_after_ms=begun.permit.timers_after_ms,
            arrivals_after_ms=begun.permit.arrivals_after_ms,
            closed_ms=begun.view.closed_ms,
        )

    @contextmanager
    def _table(
        self, start: _Start, runs: list[tuple[LocalRun, Run]], restoring: Restoring
    ) -> Iterator[tuple[StateTable, bool]]:
        """Open a table at the state before the batch; it is closed at the end of the block.

        Also yields whether it is the operator's own table; otherwise another attempt has that open.
        """
        # Before the sweep: to continue from its own position, the table may need runs that others have replaced.
        own = self._own_table(start, runs, restoring)
        with closing(RunsTable([run for _, run in runs]) if own is None else own) as table:
            if own is not None:
                certain, keeps_rocksdb = self.attempt.task.batch - 1, self.attempt.options.table == "rocksdb"
                start.local.sweep([local_run for local_run, _ in runs], certain=certain, keeps_rocksdb=keeps_rocksdb)
                remove_shared(start.shared_folder, certain=certain)
            self.attempt.step(Step.RESTORED)
            restoring.end()
            yield table, own is not None

    def _own_table(self, start: _Start, runs: list[tuple[LocalRun, Run]], restoring: Restoring) -> StateTable | None:
        """The table at the state before the batch; None if another attempt has it open: then read the runs."""
        kind, head = self.attempt.options.table, start.begun.view.head
        if kind == "memory":
            return self.attempt.memory.tables.at(start.local, runs, head, start.garbage)
        if kind == "rocksdb":
            return open_rocksdb(start.local, runs, head, start.garbage, restoring)
        return RunsTable([run for _, run in runs])

    def _restore(self, start: _Start, restoring: Restoring) -> list[tuple[LocalRun, Run]]:
        task = self.attempt.task
        return restore_runs(
            start.local,
            genesis=start.begun.view.genesis,
            head=start.begun.view.head,
            last_batch=task.batch - 1,
            within=start.within,
            garbage=start.garbage,
            fetch=partial(self._fetch, start, restoring),
            open_store=start.open_store,
            token=self.attempt.file_token,
            note_read=restoring.read,
            shared=SharedReads(start.shared_folder, task.run_id, task.batch, self.attempt.token),
        )

    def _fetch(self, start: _Start, restoring: Restoring, known: list[bytes]) -> RestorePlan:
        remove_other_parallelisms(start.folder)
        self.attempt.measurements.count(Metric.STATE_FETCHES)
        reply = self.attempt.call(Fetch(self.attempt.task, known), b"")
        missing = require_reply(reply, Fetched, "fetch").missing
        restoring.begin(missing)
        return missing

    def _process(
        self, subtask: KeyedSubtask, writer: ChangesetWriter, read: BatchInput, initial: KeyedRows | None
    ) -> Generator[pa.RecordBatch, None, pa.RecordBatch | None]:
        """Yield the output except its last batch, which is returned; offer the changes to the writer meanwhile."""
        last: pa.RecordBatch | None = None
        stopwatch = self.attempt.stopwatch
        for output in subtask.process(read.rows, initial):
            if self.attempt.options.tuning.changelog:
                with stopwatch.counting(Part.ENCODE):
                    writer.offer()
            if last is not None:
                with stopwatch.counting(Part.WAIT):
                    yield last
            last = output
        return last

    def _changeset(
        self, writer: ChangesetWriter, maintenance: Maintenance, input_rows: int
    ) -> tuple[Changeset, Materialized | None]:
        """The batch's changeset, and the materialized state that goes with it: from a job, or from the batch itself."""
        if self.attempt.options.tuning.changelog:
            request = maintenance.begun.permit.maintenance
            return writer.finish(maintenance.local, input_rows), maintenance.materializer.result(
                request.grant if request else None
            )
        local_run, changeset = writer.finish_local(maintenance.local, input_rows)
        return changeset, maintenance.store_now(local_run)

    def _ack(
        self,
        subtask: KeyedSubtask,
        changeset: Changeset,
        materialized: Materialized,
        maintenance: Maintenance,
        restoring: Restoring,
        state_sizes: dict[str, tuple[int, int]],
        hot_groups: list[tuple[int, int]],
    ) -> Acked:
        attempt = self.attempt
        attempt.step(Step.ACKING)
        ack = Ack(
            task=attempt.task,
            segments=changeset.segments,
            late_rows=subtask.late_rows,
            max_event_ms=subtask.max_event_ms,
            timers_to_ms=subtask.timers_to_ms,
            arrivals_to_ms=subtask.arrivals_to_ms,
            measured=attempt.measurements.take(),
            levels=materialized.levels,
            has_changeset=attempt.options.tuning.changelog,
            job=materialized.job,
            materialization_failure=materialized.failure,
            has_backlog=maintenance.has_backlog,
            restore_s=restoring.took_s,
            restored_bytes=restoring.known_bytes,
            times=TaskTimes.of(attempt.stopwatch),
            state_sizes=state_sizes,
            hot_keys=_told(subtask.hot_keys.found, redacts=attempt.options.redact_keys),
            hot_key_groups=hot_groups,
            adds_floats=self.operator.adds_floats,
        )
        reply = require_reply(attempt.call(ack, changeset.payload + materialized.payload), Acked, "an ack")
        attempt.step(Step.ACKED)
        return reply

    def _maintenance(self, start: _Start, chain: list[LocalRun]) -> Maintenance:
        attempt, begun = self.attempt, start.begun
        materializer = Materializer(
            local=start.local,
            within=start.within,
            genesis=begun.view.genesis,
            run_id=attempt.task.run_id,
            compression=attempt.options.codec,
            garbage=start.garbage,
            max_space_amplification=attempt.options.max_space_amplification,
            open_store=start.open_store,
            monotonic_s=attempt.clock.monotonic_s,
            token=attempt.token,
            note_stored=partial(attempt.measurements.count, Metric.MATERIALIZATION_UPLOADS),
        )
        # All batches before this one are certain now, so their runs may be merged.
        return Maintenance(attempt, begun, start.local, chain, materializer, start.garbage)


def as_stored(operator: KeyedOperator, generations: Mapping[str, int], expires_by: Mapping[str, str]) -> KeyedOperator:
    """The operator with its states as they are stored; the mappings are those of :class:`Begun`."""
    if not generations and not expires_by:
        return operator
    states = [
        replace(
            binding,
            descriptor=replace(
                binding.descriptor,
                name=stored_name(name, generations.get(name, 0)),
                expires_by=TimeDomain(expires_by[name]) if name in expires_by else binding.descriptor.expires_by,
            ),
        )
        for binding in operator.states
        for name in (binding.name,)
    ]
    return replace(operator, states=states)


def _initial(start: _Start) -> KeyedRows | None:
    name = start.begun.permit.initial
    return read_initial(start.open_store().read(name), name) if name else None


def read_initial(data: bytes, name: str) -> KeyedRows | None:
    """The rows of an initial state in object `name`, in the batches that they were stored in; None without any.

    Raises CorruptionError if they are not rows.
    """
    try:
        batches = [batch for batch in stream_batches(data) if batch.num_rows]
    except MalformedMessage as error:
        raise CorruptionError(
            f"{name}: the initial state is malformed: {error}.", kind=ErrorKind.FORMAT, hint="Start the query again."
        ) from None
    if not batches:
        return None
    rows = pa.Table.from_batches(batches)
    *columns, hash_column = range(rows.num_columns)
    return KeyedRows(rows.select(columns), rows.column(hash_column).to_numpy().view(np.uint64))


def _told(hot_keys: list[tuple[int, int, bytes]], *, redacts: bool) -> list[tuple[int, int, bytes]]:
    return [(rows, group, b"") for rows, group, _ in hot_keys] if redacts else hot_keys


def _state_sizes(runs: Iterable[Run]) -> dict[str, tuple[int, int]]:
    """Rows and bytes of each state in some runs, by stored name."""
    sizes: dict[str, tuple[int, int]] = {}
    for run in runs:
        for name, section in run.sections.items():
            rows, size_bytes = sizes.get(name, (0, 0))
            sizes[name] = rows + section.rows, size_bytes + section.size_bytes
    return sizes
