"""What happens inside the job, as JSON lines in a file; and the places where it can be told to pause."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

import statelog
from statelog import Step

__all__ = ["BatchListener", "Event", "EventReader", "Telemetry", "request_pause"]

Event = dict[str, Any]

_PAUSE_LIMIT_S: Final = 60.0


@dataclass(frozen=True)
class Telemetry(statelog.Observer):
    """Writes down restores and checkpoints, and pauses at a step when :func:`request_pause` asked for it.

    Parameters
    ----------
    path : str
        The file.
    """

    path: str

    def restore(self, metrics: statelog.RestoreMetrics) -> None:
        _write(self.path, "restore", asdict(metrics))

    def checkpoint(self, metrics: statelog.CheckpointMetrics) -> None:
        _write(self.path, "checkpoint", asdict(metrics))

    def step(self, step: Step, batch: int, subtask: int) -> None:
        if step is Step.RESTORED:
            _write(self.path, "restored", {"batch": batch, "subtask": subtask})
        if _claim_pause(self.path, step, batch):
            _write(self.path, "paused", {"step": step, "batch": batch, "pid": os.getpid()})
            time.sleep(_PAUSE_LIMIT_S)


class BatchListener(StreamingQueryListener):
    """Writes down how long Spark's batches take, and how many rows they have.

    Parameters
    ----------
    path : str
        The file.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        if progress.numInputRows:
            seconds = progress.durationMs["triggerExecution"] / 1000
            fields = {"batch": progress.batchId, "batch_s": seconds, "rows": progress.numInputRows}
            _write(self._path, "batch", fields)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        pass


class EventReader:
    """Reads the events from where it stopped the last time.

    Parameters
    ----------
    path : Path
        The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[Event]:
        """The events that are new and complete."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)


def request_pause(path: Path, step: Step, batch: int) -> None:
    """Make whoever passes `step` in `batch`, or the first one later, pause there for a minute, to be killed."""
    request = _request(str(path), step)
    request.with_suffix(".new").write_text(str(batch))
    request.with_suffix(".new").rename(request)


def _claim_pause(path: str, step: Step, batch: int) -> bool:
    request = _request(path, step)
    try:
        if batch < int(request.read_text()):
            return False
        request.unlink()  # several tasks get here; the one that removes the file pauses
    except FileNotFoundError:
        return False
    return True


def _request(path: str, step: Step) -> Path:
    return Path(f"{path}.pause-at-{step}")


def _write(path: str, kind: str, fields: Event) -> None:
    line = json.dumps({"event": kind, "at_s": time.time(), **fields}) + "\n"
    # Driver and workers write to one file: each line is a single append.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
