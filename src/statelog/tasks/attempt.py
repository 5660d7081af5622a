"""One attempt of a subtask at a batch: what keyed and unkeyed tasks share, and the deadline of a restore."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa

from statelog.clock import Clock
from statelog.errors import CorruptionError, ErrorKind, FencedError, ProtocolError, StatelogError, StorageError
from statelog.history.restore_plan import RestorePlan
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.local.use import LocalCache, disk_error, in_use, is_turn_to_remove, remove_forgotten, remove_unused
from statelog.metrics import Measurements, Step
from statelog.options import Options
from statelog.rpc.messages import (
    Acked,
    Begin,
    Begun,
    CheckOwner,
    DiskFailed,
    Kept,
    ReadProgress,
    Reply,
    Request,
    TaskId,
)
from statelog.stopwatch import Part, Stopwatch
from statelog.storage import Store
from statelog.tables.open import MemoryTables

_Reply = TypeVar("_Reply")


class WorkerMemory:
    """The state that a Python worker keeps in memory from task to task."""

    def __init__(self, policy: MergePolicy = MERGE_POLICY) -> None:
        self.tables = MemoryTables()
        self.local = LocalCache(released=self.tables.forget, policy=policy)


@dataclass(frozen=True)
class Attempt:
    """The environment of one attempt: Spark's arguments, the worker, and the host's files."""

    task: TaskId
    partition: int
    """Spark's partition id."""
    parallelism: int
    options: Options
    call: Callable[[Request, bytes], Reply]
    """Sends a request and its payload to the coordinator."""
    memory: WorkerMemory
    local_of: Callable[[str], Path]
    """Returns the subtask's local directory for an operator's identity."""
    open_store: Callable[[str], Store]
    """Opens the store of a location."""
    clock: Clock
    token: str
    """Unique among all attempts."""
    measurements: Measurements = field(default_factory=Measurements)
    stage: int = -1
    """Spark's stage id; -1 without Spark."""

    @cached_property
    def stopwatch(self) -> Stopwatch:
        """Counts the time of the attempt."""
        return Stopwatch(self.clock)

    @property
    def file_token(self) -> str:
        """Unique among the writers of local files; begins with the batch."""
        return f"{self.task.batch}-{self.token}"

    @contextmanager
    def local_in_use(self, local: Path) -> Iterator[None]:
        """Hold the local directory during the block, and then remove directories that no subtask has used for long."""
        task = self.task
        with self._fenced_first(), _named_disk(local), in_use(local, task.batch):
            yield
        if is_turn_to_remove(task.batch, task.subtask, self.parallelism):
            remove_unused(local, task.batch)
            remove_forgotten(local)

    @contextmanager
    def _fenced_first(self) -> Iterator[None]:
        """Report lost files as FencedError if a newer start owns the location: it deletes what this one still reads."""
        try:
            yield
        except (CorruptionError, StorageError) as error:
            if isinstance(error, CorruptionError) or error.kind in (ErrorKind.OBJECT_MISSING, ErrorKind.LOCAL_DISK):
                try:
                    self.call(CheckOwner(self.task), b"")
                except FencedError as fenced:
                    raise fenced from error
                except StatelogError as unknown:
                    raise type(error)(
                        f"{error.message} Whether a newer start of the query has deleted it could not be found out:"
                        f" {unknown.message}",
                        kind=error.kind,
                        hint=error.hint,
                    ) from error
            if error.kind is ErrorKind.LOCAL_DISK:
                with suppress(StatelogError):  # it only helps the next attempt
                    self.call(DiskFailed(self.task, self.stage), b"")
            raise

    def begin(self, input_rows: int, time_ms: int | None) -> Begun | None:
        """Ask the coordinator for the state before the batch; `time_ms` is the batch time in the rows.

        None if the batch's stored checkpoint stays: then there is nothing to do.
        """
        with self.stopwatch.counting(Part.WAIT):
            reply = self.call(Begin(self.task, self.partition, input_rows, time_ms, self.token), b"")
        return None if isinstance(reply, Kept) else require_reply(reply, Begun, "begin")

    def step(self, step: Step) -> None:
        """Tell the observer that the attempt has reached a step."""
        self.options.observer.step(step, self.task.batch, self.task.subtask)


@contextmanager
def _named_disk(local: Path) -> Iterator[None]:
    """Report an error of local files with its host; processors, stores and calls have their own error types."""
    try:
        yield
    except OSError as error:
        raise disk_error(local, error) from error


def require_reply(reply: Reply, kind: type[_Reply], what: str) -> _Reply:
    """The reply, if it is one to the request that `what` names; otherwise raises ProtocolError."""
    if not isinstance(reply, kind):
        raise ProtocolError(f"The coordinator answered {what} with {type(reply).__name__}.")
    return reply


class Task(Protocol):
    """The work of an attempt: a KeyedTask or an UnkeyedTask."""

    def run(self, read: Any) -> Generator[pa.RecordBatch, None, Acked]:
        """Process the batch, yield the output, and return the coordinator's reply to the ack."""


# ---- Progress and deadline of a restore ----


_INTERVAL_S: Final = 1.0


class Restoring:
    """Measures the restore of an attempt, and fails it after the deadline of its options.

    A restore shorter than a second is not reported to the coordinator. `took_s` is set by :meth:`end`; `known_bytes` is
    the size of the state that had to be fetched.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._clock = attempt.clock
        self._name = attempt.task.name
        self._started_s = self._clock.monotonic_s()
        self._reported_s = self._started_s
        self._has_reported = False
        self._missing: list[tuple[str, int]] = []
        self._read = 0
        self._read_bytes = 0
        self._table_bytes = 0
        self._added_bytes = 0
        self.took_s = 0.0
        self.known_bytes = 0

    def begin(self, missing: RestorePlan) -> None:
        """Note which levels and segments have to be fetched."""
        stored = [(run.name, run.length) for level in missing.levels for run in level.runs]
        segments = {(one.segment.name, one.segment.offset): one.segment.length for one in missing.segments}
        self._missing = stored + [(name, length) for (name, _), length in segments.items()]
        self._read = self._read_bytes = 0
        self.known_bytes += missing.length

    def read(self) -> None:
        """Note that the next one has arrived; StorageError if the deadline is over and others are missing."""
        self._read_bytes += self._missing[self._read][1] if self._read < len(self._missing) else 0
        self._read += 1
        now_s = self._clock.monotonic_s()
        if self._is_over(now_s):
            self._require_all(now_s)
        self._tell_now_and_then(now_s)

    def begin_table(self, size_bytes: int) -> None:
        """Note that all have arrived, and runs of this size now go into a table. A second call replaces the first."""
        self._read_bytes, self._table_bytes = self.known_bytes, size_bytes

    def added(self, size_bytes: int) -> None:
        """Note how many bytes of the runs are in the table; StorageError if the deadline is over and more follow."""
        self._added_bytes = size_bytes
        now_s = self._clock.monotonic_s()
        if size_bytes < self._table_bytes and self._is_over(now_s):
            raise StorageError(
                f"{self._name}: after {now_s - self._started_s:.1f} s its state is not restored: its runs are here, but"
                f" {self._added_bytes / 1e6:.1f} of their {self._table_bytes / 1e6:.1f} MB are in its table.",
                kind=ErrorKind.RESTORE_DEADLINE,
                hint="Check whether the local disk is slow. Options(restore_deadline_s=...) says how long it may take;"
                " Options(table='runs') needs no table besides the runs.",
            )
        self._tell_now_and_then(now_s)

    def _is_over(self, now_s: float) -> bool:
        deadline_s = self._attempt.options.restore_deadline_s
        return deadline_s is not None and now_s - self._started_s > deadline_s

    def _require_all(self, now_s: float) -> None:
        """Fail if anything is missing after the deadline."""
        left = self._missing[self._read :]
        if left:
            missing_mb = sum(length for _, length in left) / 1e6
            raise StorageError(
                f"{self._name}: after {now_s - self._started_s:.1f} s its state is not restored: of"
                f" {self.known_bytes / 1e6:.1f} MB in {len(self._missing)} pieces, {missing_mb:.1f} MB in {len(left)}"
                f" pieces are missing, the next one in {left[0][0]}.",
                kind=ErrorKind.RESTORE_DEADLINE,
                hint="Check whether the storage is slow. Options(restore_deadline_s=...) says how long it may take, and"
                " Options(replay_budget_s=..., materialization_interval_s=...) how much there is to read.",
            )

    def end(self) -> None:
        """Note that the state can be read."""
        now_s = self._clock.monotonic_s()
        self.took_s = now_s - self._started_s
        if self._has_reported:
            self._read_bytes, self._added_bytes = self.known_bytes, self._table_bytes
            self._tell(now_s)

    def _tell_now_and_then(self, now_s: float) -> None:
        if now_s - self._reported_s >= _INTERVAL_S:
            self._tell(now_s)

    def _tell(self, now_s: float) -> None:
        self._reported_s, self._has_reported = now_s, True
        done_bytes = min(self._read_bytes, self.known_bytes) + self._added_bytes
        progress = ReadProgress(self._attempt.task, done_bytes, self.known_bytes + self._table_bytes)
        self._attempt.call(progress, b"")
