"""A keyed operator's task: begin, restore, process, write the changeset, ack, maintain. No Spark here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from statelog.checkpoint.changeset import Changeset, ChangesetWriter, Uploads
from statelog.checkpoint.keyed_view import KeyedView
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
)
from statelog.clock import Clock
from statelog.errors import ProtocolError
from statelog.local.materializer import Materialized, Materializer
from statelog.local.restore import restore_runs
from statelog.local.restore_plan import RestorePlan
from statelog.local.runs import LocalRun, LocalRuns
from statelog.local.shared_reads import SHARED_FOLDER, SharedReads, remove_shared
from statelog.local.use import in_use, is_turn_to_remove, remove_other_parallelisms, remove_unused
from statelog.metrics import Measurements, Metric, Step
from statelog.operators.keyed.changes import BatchChanges
from statelog.operators.keyed.operator import KeyedOperator
from statelog.operators.keyed.subtask import KeyedRows, KeyedSubtask
from statelog.options import Options
from statelog.runs.key_groups import Hashes
from statelog.runs.reader import Run
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
class _OpenedTable:
    """A table at the state before the batch; without `is_own` another attempt has the operator's table open."""

    table: StateTable
    is_own: bool
    maintenance: Maintenance
    restoring: Restoring


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
        view = self._view(read)
        with in_use(self.local.directory, self.task.batch):
            with self._table(view) as opened:
                subtask = KeyedSubtask(view.operator, opened.table, view.context, self.clock)
                with self._writer(view, subtask.changes) as writer:
                    last_output = yield from self._process(subtask, writer, read, self._initial(view))
                    started_s = self.clock.monotonic_s()
                    changeset, materialized = self._changeset(view, writer, opened.maintenance, read.rows.num_rows)
            # After the ack is sent, an entry may reference the attempt's objects even if we never see the reply. So
            # they are deleted only before it.
            outcome = self._ack(subtask, changeset, materialized, opened, started_s)
            if last_output is not None:
                yield last_output
            self._maintain(opened, materialized, outcome)
        if is_turn_to_remove(self.task.batch, self.task.subtask, self.parallelism):
            remove_unused(self.local.directory, self.task.batch)

    def _view(self, read: BatchInput) -> KeyedView:
        reply = self.call(Begin(self.task, self.partition, read.rows.num_rows, read.time_ms), b"")
        if not isinstance(reply, Begun):
            raise ProtocolError(f"The coordinator answered begin with {type(reply).__name__}.")
        return KeyedView.of(reply, self.task, self.parallelism, self.operator)

    @contextmanager
    def _table(self, view: KeyedView) -> Iterator[_OpenedTable]:
        """Restore the local runs of the view, and open a table over them; it is closed at the end of the block."""
        task = self.task
        restoring = Restoring(
            self.clock,
            self.options.restore_deadline_s,
            lambda done, known: self.call(ReadProgress(task, done, known), b""),
            f"operator '{task.uid}', subtask {task.subtask}, batch {task.batch}",
        )
        runs = self._restore(view, restoring)
        chain = [local_run for local_run, _ in runs]
        maintenance = self._maintenance(view, chain)
        # Before the sweep: the table may need runs that others have replaced, to continue from its own position.
        own = self._own_table(view, runs, restoring)
        with closing(RunsTable([run for _, run in runs]) if own is None else own) as table:
            if own is not None:
                self.local.sweep(chain, certain=task.batch - 1, keeps_rocksdb=self.options.table == "rocksdb")
                remove_shared(self._shared_folder, certain=task.batch - 1)
            self._step(Step.RESTORED)
            restoring.end()
            yield _OpenedTable(table, own is not None, maintenance, restoring)

    def _own_table(self, view: KeyedView, runs: list[tuple[LocalRun, Run]], restoring: Restoring) -> StateTable | None:
        """The table at the state before the batch; None if another attempt has it open: then read the runs."""
        if self.options.table == "memory":
            return self.tables.at(self.local, runs, view.head)
        if self.options.table == "rocksdb":
            return open_rocksdb(self.local, runs, view.head, view.garbage, restoring)
        return RunsTable([run for _, run in runs])

    def _restore(self, view: KeyedView, restoring: Restoring) -> list[tuple[LocalRun, Run]]:
        return restore_runs(
            self.local,
            genesis=view.genesis,
            head=view.head,
            last_batch=self.task.batch - 1,
            within=view.within,
            garbage=view.garbage,
            fetch=partial(self._fetch, restoring),
            open_store=lambda: self.open_store(view.location),
            token=self._local_token,
            note_read=restoring.read,
            shared=SharedReads(self._shared_folder, self.task.run_id, self.task.batch, self.token),
        )

    def _fetch(self, restoring: Restoring, known: list[bytes]) -> RestorePlan:
        remove_other_parallelisms(self.local.directory)
        self.measurements.count(Metric.STATE_FETCHES)
        reply = self.call(Fetch(self.task, known), b"")
        if not isinstance(reply, Fetched):
            raise ProtocolError(f"The coordinator answered fetch with {type(reply).__name__}.")
        restoring.begin(reply.missing)
        return reply.missing

    def _initial(self, view: KeyedView) -> KeyedRows | None:
        return read_initial(self.open_store(view.location).read(view.initial)) if view.initial else None

    def _process(
        self, subtask: KeyedSubtask, writer: ChangesetWriter, read: BatchInput, initial: KeyedRows | None
    ) -> Generator[pa.RecordBatch, None, pa.RecordBatch | None]:
        """Yield the output but for its last batch, which is returned; offer the changes to the writer meanwhile."""
        last: pa.RecordBatch | None = None
        for output in subtask.process(KeyedRows(read.rows, read.hashes), initial):
            if self.options.changelog:
                writer.offer()
            if last is not None:
                yield last
            last = output
        return last

    def _writer(self, view: KeyedView, changes: BatchChanges) -> ChangesetWriter:
        uploads = Uploads(
            lambda: self.open_store(view.location),
            max_bytes=self.options.max_in_flight_bytes,
            threads=self.options.upload_threads,
            recorder=self.measurements,
        )
        return ChangesetWriter(
            changes,
            uploads,
            subtask=self.task.subtask,
            attempt=self.task.attempt,
            prefix=f"{view.upload_prefix}/{self.task.batch}-{self.token}",
            part_bytes=self.options.upload_part_bytes,
            inline_bytes=view.inline_bytes,
            compression=self.options.codec,
        )

    def _changeset(
        self, view: KeyedView, writer: ChangesetWriter, maintenance: Maintenance, input_rows: int
    ) -> tuple[Changeset, Materialized | None]:
        """The batch's changeset, and the materialized state that goes with it: of a job, or of the batch itself."""
        local = self.local, view.head, self.task.batch, self._local_token, input_rows
        if self.options.changelog:
            return writer.finish(*local), maintenance.materializer.result(view.grant)
        local_run, changeset = writer.finish_local(*local)
        return changeset, maintenance.store_now(local_run)

    def _ack(
        self,
        subtask: KeyedSubtask,
        changeset: Changeset,
        materialized: Materialized | None,
        opened: _OpenedTable,
        started_s: float,
    ) -> JobOutcome:
        self._step(Step.ACKING)
        ack = Ack(
            task=self.task,
            segments=changeset.segments,
            subtask_s=subtask.flush_s + self.clock.monotonic_s() - started_s,
            late_rows=subtask.late_rows,
            max_event_ms=subtask.max_event_ms,
            timers_to_ms=subtask.timers_to_ms,
            measured=self.measurements.take(),
            levels=materialized.levels if materialized else [],
            has_changeset=self.options.changelog,
            job=materialized.job if materialized else "",
            materialization_failure=materialized.failure if materialized else "",
            has_backlog=opened.maintenance.has_backlog,
            restore_s=opened.restoring.took_s,
            restored_bytes=opened.restoring.known_bytes,
        )
        reply = self.call(ack, changeset.payload + materialized.payload if materialized else changeset.payload)
        if not isinstance(reply, Acked):
            raise ProtocolError(f"The coordinator answered an ack with {type(reply).__name__}.")
        self._step(Step.ACKED)
        return reply.job

    def _maintain(self, opened: _OpenedTable, materialized: Materialized | None, outcome: JobOutcome) -> None:
        if materialized is not None:
            if outcome is not JobOutcome.OPEN:
                opened.maintenance.materializer.end(materialized.job)
        elif opened.is_own:
            # Not while another attempt has the table open: that table will need these runs one by one.
            opened.maintenance.work()

    def _maintenance(self, view: KeyedView, chain: list[LocalRun]) -> Maintenance:
        materializer = Materializer(
            local=self.local,
            within=view.within,
            genesis=view.genesis,
            run_id=self.task.run_id,
            compression=self.options.codec,
            garbage=view.garbage,
            open_store=lambda: self.open_store(view.location),
            monotonic_s=self.clock.monotonic_s,
            token=self.token,
        )
        # All batches before this one are certain now, so their runs may be merged.
        return Maintenance(
            local=self.local,
            chain=chain,
            materializer=materializer,
            request=view.maintenance,
            genesis=view.genesis,
            fan_in=self.options.merge_fan_in,
            garbage=view.garbage,
            token=self._local_token,
            step=self._step,
        )

    @property
    def _local_token(self) -> str:
        """Unique among the writers of local files; begins with the batch."""
        return f"{self.task.batch}-{self.token}"

    @property
    def _shared_folder(self) -> Path:
        return self.local.directory.parent / SHARED_FOLDER

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
