"""The metrics of a checkpoint."""

from __future__ import annotations

from statelog.checkpoint.batch import AcceptedAck
from statelog.checkpoint.inventory import Inventory
from statelog.checkpoint.materialization import MaterializationPolicy
from statelog.log.entry import Checkpoint
from statelog.metrics import Recorded
from statelog.observer import CheckpointMetrics


def checkpoint_metrics(
    entry: Checkpoint,
    acks: list[AcceptedAck],
    policy: MaterializationPolicy,
    inventory: Inventory,
    commit_s: float,
    log_files: int,
    measured: Recorded,
) -> CheckpointMetrics:
    """Build the metrics of a durable checkpoint.

    `commit_s` is the time from the last ack until the entry was durable, `log_files` the number of log files made for
    it, `measured` the store requests since the previous checkpoint.
    """
    uploads = sum(len(accepted.ack.names) for accepted in acks)
    return CheckpointMetrics(
        query_id=entry.query_id,
        uid=entry.uid,
        batch=entry.batch,
        revision=entry.revision,
        parallelism=entry.parallelism,
        input_rows=sum(accepted.ack.last.input_rows for accepted in acks),
        late_rows=sum(accepted.ack.late_rows for accepted in acks),
        watermark_ms=entry.watermark_ms,
        changes=sum(accepted.ack.total_rows for accepted in acks),
        changed_bytes=sum(accepted.ack.total_bytes for accepted in acks),
        objects=uploads + log_files,
        commit_s=commit_s,
        subtask_s=max(accepted.ack.subtask_s for accepted in acks),
        base_bytes=policy.base_bytes,
        log_bytes=policy.log_bytes,
        materialized=len(entry.bases),
        materialized_bytes=sum(base.levels[-1].length for base in entry.bases),
        materialization_failures=sum(bool(accepted.ack.materialization_failure) for accepted in acks),
        stored_bytes=inventory.stored_bytes,
        needed_bytes=inventory.needed_bytes,
        restore_s=max(accepted.ack.restore_s for accepted in acks),
        restored_bytes=sum(accepted.ack.restored_bytes for accepted in acks),
        measured=measured,
    )
