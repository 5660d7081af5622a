"""Warns of a slow checkpoint, and says where its time went."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from statelog.checkpoint.protocol import Ack
from statelog.log_fields import get_logger
from statelog.metrics import CheckpointMetrics

_log = get_logger(__name__)

SLOW_S: Final = 10.0
"""A checkpoint is slow if it takes this long in its slowest subtask and on the driver together."""


class SlowCheckpoints:
    """Warns of the first of several slow checkpoints in a row; the others are logged at the level INFO."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._was_slow = False

    def note(self, metrics: CheckpointMetrics, acks: Sequence[Ack]) -> None:
        """Note a durable checkpoint; `acks` are those that count."""
        is_slow = metrics.restore_s + metrics.subtask_s + metrics.commit_s >= SLOW_S
        if is_slow:
            restoring = max(acks, key=lambda ack: ack.restore_s)
            writing = max(acks, key=lambda ack: ack.subtask_s)
            _log.log(
                logging.INFO if self._was_slow else logging.WARNING,
                "%s: checkpoint %d was slow: up to %.1f s to restore state (subtask %d, %.1f MB in all subtasks), up to"
                " %.1f s to encode and store changes (subtask %d, %.1f MB), %.1f s to commit; of %d writes %d were"
                " retried",
                self._name,
                metrics.batch,
                metrics.restore_s,
                restoring.task.subtask,
                metrics.restored_bytes / 1e6,
                metrics.subtask_s,
                writing.task.subtask,
                metrics.changed_bytes / 1e6,
                metrics.commit_s,
                metrics.measured.counts.get("upload_requests", 0),
                metrics.measured.counts.get("upload_retries", 0),
            )
        self._was_slow = is_slow
