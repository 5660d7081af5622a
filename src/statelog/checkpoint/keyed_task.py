"""A keyed operator's task: begin, restore, process, write the changeset, ack, maintain. No Spark here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from statelog.checkpoint.maintenance import Maintenance
from statelog.checkpoint.progress import Restoring
from statelog.checkpoint.protocol import (
    Ack,
    Acked,
    Begin,
    Begun,
    Fetch,
    Fetched,
    JobOutcome,
    ReadProgress,
    Reply,
    Request,
    TaskId,
    UploadedPart,
)
from statelog.checkpoint.uploads import Uploads
from statelog.checkpoint.writer import Changeset, ChangesetWriter
from statelog.clock import Clock
from statelog.errors import ProtocolError
from statelog.local.directory import remove_other_parallelisms
from statelog.local.materializer import Materialized, Materializer
from statelog.local.restore import restore_runs
from statelog.local.restore_plan import RestorePlan
from statelog.local.runs import LocalRun, LocalRuns
from statelog.local.shared_reads import SHARED_FOLDER, SharedReads, remove_shared
from statelog.local.use import in_use, is_turn_to_remove, remove_unused
from statelog.metrics import Measurements, Metric
from statelog.observer import Step
from statelog.operators.keyed.operator import KeyedOperator
from statelog.operators.keyed.subtask import BatchContext, KeyedRows, KeyedSubtask
from statelog.options import Options
from statelog.runs.key_groups import Hashes, hash_range
from statelog.runs.merge import Garbage
from statelog.runs.reader import Run
from statelog.runs.schema import TimeDomain, stored_name
from statelog.runs.times import Moment
from statelog.storage import Store
from statelog.tables.open import MemoryTables, open_rocksdb
from statelog.tables.runs import RunsTable
from statelog.tables.table import StateTable


@dataclass(frozen=True)
class BatchInput:
    """All input rows of a subtask in one batch."""

    rows: pa.RecordBatch | pa.Table
    """n rows in order of arrival; without columns if there are no rows."""
    hashes: Hashes
    """Key hashes of the rows, shape (n,)."""
    subtask: int
    time_ms: int | None
    """The batch time that the rows carry; None without rows."""


@dataclass(frozen=True)
class KeyedTask:
    """One attempt of one subtask in one batch."""

    task: TaskId
    partition: int
    """Spark's partition id."""
    parallelism: int
    operator: KeyedOperator
    options: Options
    call: Callable[[Request, bytes], Reply]
    """Sends a request and its payload to the coordinator."""
    local: LocalRuns
    tables: MemoryTables
    open_store: Callable[[str], Store]
    """Opens the store of a location."""
    clock: Clock
    token: str
    """Unique among all attempts."""
    measurements: Measurements = field(default_factory=Measurements)

    def run(self, read: BatchInput) -> Iterator[pa.RecordBatch]:
        """Process the batch and yield the output.

        The last output batch follows the coordinator's reply to the ack. After a StatelogError nothing of the attempt
        counts.
        """
        begun = self._begin(read)
        with in_use(self.local.directory, self.task.batch):
            yield from self._run(read, begun)
        if is_turn_to_remove(self.task.batch, self.task.subtask, self.parallelism):
            remove_unused(self.local.directory, self.task.batch)

    def _run(self, read: BatchInput, begun: Begun) -> Iterator[pa.RecordBatch]:
        task = self.task
        restoring = Restoring(
            self.clock,
            self.options.restore_deadline_s,
            lambda done, known: self.call(ReadProgress(task, done, known), b""),
            f"operator '{task.uid}', subtask {task.subtask}, batch {task.batch}",
        )
        runs = self._restore(begun, restoring)
        chain = [local_run for local_run, _ in runs]
        maintenance = self._maintenance(begun, chain)
        # Before the sweep: the table may need runs that others have replaced, to continue from its own position.
        found = self._table(begun, runs, restoring)
        with closing(RunsTable([run for _, run in runs]) if found is None else found) as table:
            if found is not None:
                self.local.sweep(chain, certain=task.batch - 1, keeps_rocksdb=self.options.table == "rocksdb")
                remove_shared(self._shared_folder, certain=task.batch - 1)
            self._step(Step.RESTORED)
            restoring.end()
            subtask = KeyedSubtask(self._operator(begun), table, self._context(begun), self.clock)
            uploads = Uploads(
                lambda: self.open_store(begun.store),
                max_bytes=self.options.max_in_flight_bytes,
                threads=self.options.upload_threads,
                recorder=self.measurements,
            )
            writer = ChangesetWriter(
                subtask.changes,
                uploads,
                prefix=f"{begun.upload_prefix}/{task.batch}-{self.token}",
                part_bytes=self.options.upload_part_bytes,
                inline_bytes=begun.inline_bytes,
                compression=self.options.codec,
            )
            held: pa.RecordBatch | None = None
            try:
                for output in subtask.process(KeyedRows(read.rows, read.hashes), self._initial(begun)):
                    if self.options.changelog:
                        writer.offer()
                    if held is not None:
                        yield held
                    held = output
                started_s = self.clock.monotonic_s()
                if self.options.changelog:
                    changeset = writer.finish(self.local, begun.head, task.batch, self._local_token)
                    materialized = maintenance.materializer.result(
                        begun.maintenance.grant if begun.maintenance else None
                    )
                else:
                    local_run, changeset = writer.finish_local(self.local, begun.head, task.batch, self._local_token)
                    materialized = maintenance.store_now(local_run)
            except (Exception, GeneratorExit):
                # After the ack is sent, an entry may reference these objects even if we never see the reply. So delete
                # them only before it.
                uploads.abandon()
                raise
        outcome = self._ack(
            subtask, changeset, materialized, read.rows.num_rows, started_s, maintenance.has_backlog, restoring
        )
        if held is not None:
            yield held
        if materialized is not None:
            if outcome is not JobOutcome.OPEN:
                maintenance.materializer.end(materialized.job)
        elif found is not None:
            # Not while another attempt has the table open: that table will need these runs one by one.
            maintenance.work()

    def _context(self, begun: Begun) -> BatchContext:
        return BatchContext(
            epoch=begun.epoch,
            batch=self.task.batch,
            moment=Moment(begun.batch_time_ms, begun.watermark_ms, begun.late_watermark_ms),
            timers_after_ms=begun.timers_after_ms,
            closed_ms=begun.closed_ms,
        )

    def _operator(self, begun: Begun) -> KeyedOperator:
        """The operator with its states as they are stored: under their stored names, with their stored expiry."""
        generations, expires_by = begun.generations, begun.expires_by
        if not generations and not expires_by:
            return self.operator
        states = [
            replace(
                binding,
                descriptor=replace(
                    binding.descriptor,
                    name=stored_name(name, generations.get(name, 0)),
                    expires_by=TimeDomain(expires_by[name]) if name in expires_by else binding.descriptor.expires_by,
                ),
            )
            for binding in self.operator.states
            for name in (binding.name,)
        ]
        return replace(self.operator, states=states)

    def _initial(self, begun: Begun) -> KeyedRows | None:
        if not begun.initial:
            return None
        return read_initial(self.open_store(begun.store).read(begun.initial))

    def _garbage(self, begun: Begun) -> Garbage:
        # Another start may repeat the batch, with another watermark or without the deletions. So only rows that are
        # garbage as of the previous checkpoint are garbage for good.
        return Garbage(Moment(begun.batch_time_ms, begun.late_watermark_ms), begun.certain_generations)

    def _begin(self, read: BatchInput) -> Begun:
        reply = self.call(Begin(self.task, self.partition, read.rows.num_rows, read.time_ms), b"")
        if not isinstance(reply, Begun):
            raise ProtocolError(f"The coordinator answered begin with {type(reply).__name__}.")
        return reply

    def _restore(self, begun: Begun, restoring: Restoring) -> list[tuple[LocalRun, Run]]:
        return restore_runs(
            self.local,
            genesis=begun.genesis,
            head=begun.head,
            last_batch=self.task.batch - 1,
            within=hash_range(self.task.subtask, self.parallelism),
            garbage=self._garbage(begun),
            fetch=partial(self._fetch, restoring),
            open_store=lambda: self.open_store(begun.store),
            token=self._local_token,
            note_read=restoring.read,
            shared=SharedReads(self._shared_folder, self.task.run_id, self.task.batch, self.token),
        )

    @property
    def _local_token(self) -> str:
        """Unique among the writers of local files; begins with the batch."""
        return f"{self.task.batch}-{self.token}"

    @property
    def _shared_folder(self) -> Path:
        return self.local.directory.parent / SHARED_FOLDER

    def _fetch(self, restoring: Restoring, known: list[bytes]) -> RestorePlan:
        remove_other_parallelisms(self.local.directory)
        self.measurements.count(Metric.STATE_FETCHES)
        reply = self.call(Fetch(self.task, known), b"")
        if not isinstance(reply, Fetched):
            raise ProtocolError(f"The coordinator answered fetch with {type(reply).__name__}.")
        restoring.begin(reply.missing)
        return reply.missing

    def _table(self, begun: Begun, runs: list[tuple[LocalRun, Run]], restoring: Restoring) -> StateTable | None:
        """The table at the state before the batch; None if another attempt has it open: then read the runs."""
        if self.options.table == "memory":
            return self.tables.at(self.local, runs, begun.head)
        if self.options.table == "rocksdb":
            return open_rocksdb(self.local, runs, begun.head, self._garbage(begun), restoring)
        return RunsTable([run for _, run in runs])

    def _ack(
        self,
        subtask: KeyedSubtask,
        changeset: Changeset,
        materialized: Materialized | None,
        input_rows: int,
        started_s: float,
        has_backlog: bool,
        restoring: Restoring,
    ) -> JobOutcome:
        *parts, last = changeset.parts
        self._step(Step.ACKING)
        ack = Ack(
            task=self.task,
            checksum=last.checksum,
            length=last.length,
            rows=last.rows,
            input_rows=input_rows,
            name=last.name,
            subtask_s=subtask.flush_s + self.clock.monotonic_s() - started_s,
            late_rows=subtask.late_rows,
            max_event_ms=subtask.max_event_ms,
            timers_to_ms=subtask.timers_to_ms,
            parts=[UploadedPart(part.name, part.checksum, part.length, part.rows) for part in parts],
            measured=self.measurements.take(),
            levels=materialized.levels if materialized else [],
            has_changeset=self.options.changelog,
            job=materialized.job if materialized else "",
            materialization_failure=materialized.failure if materialized else "",
            has_backlog=has_backlog,
            restore_s=restoring.took_s,
            restored_bytes=restoring.known_bytes,
        )
        reply = self.call(ack, changeset.payload + materialized.payload if materialized else changeset.payload)
        if not isinstance(reply, Acked):
            raise ProtocolError(f"The coordinator answered an ack with {type(reply).__name__}.")
        self._step(Step.ACKED)
        return reply.job

    def _maintenance(self, begun: Begun, chain: list[LocalRun]) -> Maintenance:
        garbage = self._garbage(begun)
        materializer = Materializer(
            self.local,
            within=hash_range(self.task.subtask, self.parallelism),
            genesis=begun.genesis,
            run_id=self.task.run_id,
            compression=self.options.codec,
            garbage=garbage,
            open_store=lambda: self.open_store(begun.store),
            monotonic_s=self.clock.monotonic_s,
            token=self.token,
        )
        # All batches before this one are certain now, so their runs may be merged.
        return Maintenance(
            local=self.local,
            chain=chain,
            materializer=materializer,
            request=begun.maintenance,
            genesis=begun.genesis,
            fan_in=self.options.merge_fan_in,
            garbage=garbage,
            token=self._local_token,
            step=self._step,
        )

    def _step(self, step: Step) -> None:
        self.options.observer.step(step, self.task.batch, self.task.subtask)


def read_initial(data: bytes) -> KeyedRows | None:
    """The rows of an initial state, in the batches that they were stored in; None if there are none."""
    with pa.ipc.open_stream(data) as reader:
        rows = reader.read_all()
    if not rows.num_rows:
        return None
    *columns, hash_column = range(rows.num_columns)
    return KeyedRows(rows.select(columns), rows.column(hash_column).to_numpy().view(np.uint64))
