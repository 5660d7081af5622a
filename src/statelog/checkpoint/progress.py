"""Progress and deadline of a restore: measured by the tasks, summed up on the driver."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from statelog.checkpoint.admission import OperatorConfig
from statelog.checkpoint.attempt import Attempt
from statelog.checkpoint.protocol import ReadProgress
from statelog.clock import Clock
from statelog.errors import ErrorKind, StorageError
from statelog.local.restore_plan import RestorePlan
from statelog.log_fields import get_logger
from statelog.metrics import Observer, RestoreProgress

_log: Final = get_logger(__name__)

_INTERVAL_S: Final = 1.0


class Restoring:
    """The task's side: measures the restore of an attempt, and fails it after the deadline of its options.

    The coordinator is told nothing of a restore shorter than a second. `took_s` is set by :meth:`end`; `known_bytes` is
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
        """Note that the next of them is here; StorageError if the deadline is over and others are missing."""
        self._read_bytes += self._missing[self._read][1] if self._read < len(self._missing) else 0
        self._read += 1
        now_s = self._clock.monotonic_s()
        if self._is_over(now_s):
            self._require_all(now_s)
        self._tell_now_and_then(now_s)

    def begin_table(self, size_bytes: int) -> None:
        """All of them are here; now runs of so many bytes go into a table. A second call replaces the first."""
        self._read_bytes, self._table_bytes = self.known_bytes, size_bytes

    def added(self, size_bytes: int) -> None:
        """Note how many bytes of the runs are in the table; StorageError if the deadline is over and more follow."""
        self._added_bytes = size_bytes
        now_s = self._clock.monotonic_s()
        if size_bytes < self._table_bytes and self._is_over(now_s):
            raise StorageError(
                f"{self._name}: after {now_s - self._started_s:.1f} s its state is not restored: its runs are here, and"
                f" {self._added_bytes / 1e6:.1f} of their {self._table_bytes / 1e6:.1f} MB are in its table.",
                kind=ErrorKind.RESTORE_DEADLINE,
                hint="Is the local disk slow? Options(restore_deadline_s=...) says how long it may take;"
                " Options(table='runs') needs no table besides the runs.",
            )
        self._tell_now_and_then(now_s)

    def _is_over(self, now_s: float) -> bool:
        deadline_s = self._attempt.options.restore_deadline_s
        return deadline_s is not None and now_s - self._started_s > deadline_s

    def _require_all(self, now_s: float) -> None:
        """The deadline is over: fail if anything is missing."""
        left = self._missing[self._read :]
        if left:
            missing_mb = sum(length for _, length in left) / 1e6
            raise StorageError(
                f"{self._name}: after {now_s - self._started_s:.1f} s its state is not restored: of"
                f" {self.known_bytes / 1e6:.1f} MB in {len(self._missing)} pieces, {missing_mb:.1f} MB in {len(left)}"
                f" pieces are missing, the next one in {left[0][0]}.",
                kind=ErrorKind.RESTORE_DEADLINE,
                hint="Is the storage slow? Options(restore_deadline_s=...) says how long it may take, and"
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
    """Since the first report, until now or the last subtask's end."""
    left_s: float | None
    """For the rest, at the speed between the first report and the latest; None while there is only one."""

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
    """The driver's side: adds up the progress of an operator's subtasks, and tells the observer."""

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
        """Bytes that the first report had read."""

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
            "%s: %d subtasks are restoring their state: %.0f of %.0f MB are read",
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
