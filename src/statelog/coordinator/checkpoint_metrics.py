"""Makes the metrics of an operator's checkpoints, keeps the latest, and warns of slow checkpoints."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import AcceptedAck, BatchTime
from statelog.coordinator.garbage import Retention
from statelog.coordinator.materialization import MaterializationPolicy
from statelog.errors import StatelogError
from statelog.log.entry import Section
from statelog.log_fields import get_logger
from statelog.metrics import CheckpointMetrics, HotKey, HotKeyGroup, Observer, Recorded, StateMetrics, SubtaskMetrics
from statelog.operators.keyed.caller import MOST
from statelog.rpc.messages import Ack
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import decode_schema, is_deleted, plain_name
from statelog.shown import time_text
from statelog.stopwatch import Part

_log: Final = get_logger(__name__)


def checkpoint_metrics(
    config: OperatorConfig,
    section: Section,
    acks: Sequence[AcceptedAck],
    policy: MaterializationPolicy,
    retention: Retention,
    *,
    batch: int,
    watermark_ms: int,
    revision: int,
    last_ack_s: float,
    end_s: float,
    log_files: int,
    measured: Recorded,
) -> CheckpointMetrics:
    """Build the metrics of an operator in a checkpoint.

    `last_ack_s` is the time of the operator's last ack, by the driver's own clock. `end_s` is that of the durable
    entry if this ack completed the query's batch, otherwise equal to it. `log_files` is the number of log files made
    for the entry, `measured` has the store requests since the previous checkpoint.
    """
    subtasks = [_subtask_metrics(accepted, end_s) for accepted in acks]
    states = _state_metrics(section, acks)
    hot_keys = _hot_keys(acks, section.key_schema)
    uploads = sum(len(accepted.ack.names) for accepted in acks)
    return CheckpointMetrics(
        query_id=config.query_id,
        uid=config.uid,
        batch=batch,
        revision=revision,
        parallelism=config.parallelism,
        input_rows=sum(subtask.input_rows for subtask in subtasks),
        late_rows=sum(accepted.ack.late_rows for accepted in acks),
        watermark_ms=watermark_ms,
        changes=sum(subtask.changes for subtask in subtasks),
        changed_bytes=sum(subtask.changed_bytes for subtask in subtasks),
        objects=uploads + log_files,
        commit_s=end_s - last_ack_s,
        subtask_s=max(accepted.ack.subtask_s for accepted in acks),
        base_bytes=policy.schedule.base_bytes,
        log_bytes=policy.schedule.log_bytes,
        logged_changesets=sum(_is_logged(accepted.ack) for accepted in acks),
        materializations_started=len(policy.schedule.started),
        materialized=len(section.bases),
        materialized_bytes=sum(base.levels[-1].length for base in section.bases),
        materialization_s=max((policy.schedule.duration_s(base.subtask, end_s) for base in section.bases), default=0.0),
        materialization_failures=sum(bool(accepted.ack.materialization_failure) for accepted in acks),
        stored_bytes=retention.size_bytes,
        needed_bytes=retention.needed_bytes,
        restore_s=max(subtask.restore_s for subtask in subtasks),
        restored_bytes=sum(accepted.ack.restored_bytes for accepted in acks),
        state_rows=sum(state.rows for state in states.values()),
        state_bytes=sum(state.size_bytes for state in states.values()),
        hottest_key_rows=hot_keys[0].rows if hot_keys else 0,
        **{part: max(getattr(subtask, part) for subtask in subtasks) for part in Part},
        measured=measured,
        subtasks=subtasks,
        states=states,
        hot_keys=hot_keys,
        hot_key_groups=[
            HotKeyGroup(rows, group)
            for rows, group in heapq.nlargest(MOST, (found for one in acks for found in one.ack.hot_key_groups))
        ],
    )


def _is_logged(ack: Ack) -> bool:
    """Whether a changeset, or the last part of a large one, is part of the log entry."""
    return bool(ack.has_changeset and ack.last.length and not ack.last.name and not ack.is_unchanged)


def _subtask_metrics(accepted: AcceptedAck, end_s: float) -> SubtaskMetrics:
    ack, times = accepted.ack, accepted.ack.times
    return SubtaskMetrics(
        subtask=ack.task.subtask,
        input_rows=ack.last.input_rows,
        changes=ack.total_rows,
        changed_bytes=ack.total_bytes,
        restore_s=ack.restore_s,
        read_s=times.read_s,
        processor_s=times.processor_s,
        encode_s=times.encode_s,
        upload_s=times.upload_s,
        wait_s=times.wait_s + end_s - accepted.received_s,
    )


def _state_metrics(section: Section, acks: Sequence[AcceptedAck]) -> dict[str, StateMetrics]:
    """The sizes of the states by name, without states that were deleted."""
    sizes = {state.name: [0, 0] for state in section.states}
    for accepted in acks:
        for stored, (rows, size_bytes) in accepted.ack.state_sizes.items():
            size = sizes.get(plain_name(stored))
            if size is not None and not is_deleted(stored, section.generations):
                size[0] += rows
                size[1] += size_bytes
    return {name: StateMetrics(*size) for name, size in sizes.items()}


def _hot_keys(acks: Sequence[AcceptedAck], key_schema: bytes) -> list[HotKey]:
    found = heapq.nlargest(MOST, (hot for accepted in acks for hot in accepted.ack.hot_keys))
    if not found:
        return []
    codec = _key_codec(key_schema)
    return [HotKey(rows, group, _decoded(codec, key)) for rows, group, key in found]


def _decoded(codec: KeyCodec, key: bytes) -> tuple[Any, ...] | None:
    """The values of a key; None if it was not reported or has no Python value, such as a date after the year 9999."""
    try:
        return codec.decode_all([key])[0] if key else None
    except (StatelogError, ValueError, ArithmeticError):
        return None  # the checkpoint is durable already, so nothing may fail here


@lru_cache(maxsize=64)
def _key_codec(key_schema: bytes) -> KeyCodec:
    return KeyCodec(decode_schema(key_schema))


# ---- The latest ----


_KEPT: Final = 1000


class KeptMetrics:
    """Reports each checkpoint to the observer, and keeps its metrics: all of the newest, the numbers of the others."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.newest: CheckpointMetrics | None = None
        """The metrics of the newest checkpoint; None before the first one of this start."""
        self._recent: deque[CheckpointMetrics] = deque(maxlen=_KEPT)
        self.last_restore: CheckpointMetrics | None = None
        """The newest checkpoint whose subtasks had to fetch state."""

    @property
    def recent(self) -> Sequence[CheckpointMetrics]:
        """The latest metrics, the oldest first."""
        return tuple(self._recent.copy())

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        """Note a durable checkpoint."""
        self.newest = metrics
        kept = replace(metrics, measured=Recorded(), subtasks=(), states={}, hot_keys=(), hot_key_groups=())
        self._recent.append(kept)
        if kept.restored_bytes:
            self.last_restore = kept
        self._observer.checkpoint(metrics)


# ---- Warnings ----


SLOW_S: Final = 10.0
"""A checkpoint is slow if it takes this long in its slowest subtask and on the driver together."""


class SlowCheckpoints:
    """Warns of the first of several slow checkpoints in a row; the others are logged at level INFO."""

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
    """Warns once of late rows while the watermark is ahead of processing time; further batches are at level INFO.

    One row with a wrong time moves the watermark to that time, and rows with correct times are late until the clock has
    caught up.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_warned = False
        self._late_rows = 0

    def note(self, metrics: CheckpointMetrics, time: BatchTime, max_event_ms: Sequence[int | None]) -> None:
        """Note a durable checkpoint; `max_event_ms` has the largest event time of each input of an own watermark."""
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
            " batch's processing time is %s. Rows with event times in the future have moved it%s. Rows are"
            " late until the clock reaches it; Watermark(max_ahead=...) keeps rows from moving it that far",
            self._name,
            metrics.late_rows,
            metrics.batch,
            self._late_rows,
            time_text(time.late_watermark_ms),
            time_text(time.time_ms),
            "" if largest_ms is None else f", the latest {time_text(largest_ms)}",
        )
        self._is_warned = True
