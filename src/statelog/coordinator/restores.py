"""The progress of a restore: its tasks report it, the driver adds it up."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from statelog.clock import Clock
from statelog.coordinator.admission import OperatorConfig
from statelog.log_fields import get_logger
from statelog.metrics import Observer, RestoreProgress
from statelog.rpc.messages import ReadProgress

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
    """Adds up the progress of an operator's subtasks, and tells the observer."""

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
