"""Warns of a slow checkpoint, and of rows that are late because of a watermark in the future."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from statelog.checkpoint.batch import BatchTime
from statelog.checkpoint.protocol import Ack
from statelog.log_fields import get_logger
from statelog.metrics import CheckpointMetrics
from statelog.texts import time_text

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


class FutureWatermark:
    """Warns once of late rows while the watermark is ahead of processing time; further batches are at the level INFO.

    One row with a wrong time moves the watermark there, and the rows with right times are late until the clock has
    caught up.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_warned = False
        self._late_rows = 0

    def note(self, metrics: CheckpointMetrics, time: BatchTime, max_event_ms: Sequence[int | None]) -> None:
        """Note a durable checkpoint; `max_event_ms` is the largest event time of each input of an own watermark."""
        if time.late_watermark_ms <= time.time_ms:
            self._is_warned, self._late_rows = False, 0
            return
        if not metrics.late_rows:
            return
        self._late_rows += metrics.late_rows
        largest_ms = max((at_ms for at_ms in max_event_ms if at_ms is not None), default=None)
        _log.log(
            logging.INFO if self._is_warned else logging.WARNING,
            "%s: late rows: %d in batch %d, %d since the watermark has been ahead of the clock: it is %s, and the"
            " batch's processing time is %s. Rows with a later event time have moved it%s. Rows are late until the"
            " clock reaches it; Watermark(max_ahead=...) keeps rows from moving it so far",
            self._name,
            metrics.late_rows,
            metrics.batch,
            self._late_rows,
            time_text(time.late_watermark_ms),
            time_text(time.time_ms),
            "" if largest_ms is None else f", the latest {time_text(largest_ms)}",
        )
        self._is_warned = True
