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
    taken: list[AcceptedAck],
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
    uploads = sum(len(one.ack.names) for one in taken)
    return CheckpointMetrics(
        query_id=entry.query_id,
        uid=entry.uid,
        batch=entry.batch,
        revision=entry.revision,
        parallelism=entry.parallelism,
        input_rows=sum(one.ack.input_rows for one in taken),
        late_rows=sum(one.ack.late_rows for one in taken),
        watermark_ms=entry.watermark_ms,
        changes=sum(one.ack.total_rows for one in taken),
        changed_bytes=sum(one.ack.total_bytes for one in taken),
        objects=uploads + log_files,
        commit_s=commit_s,
        subtask_s=max(one.ack.subtask_s for one in taken),
        base_bytes=policy.base_bytes,
        log_bytes=policy.log_bytes,
        materialized=len(entry.bases),
        materialized_bytes=sum(base.levels[-1].length for base in entry.bases),
        materialization_failures=sum(bool(one.ack.materialization_failure) for one in taken),
        stored_bytes=inventory.stored_bytes,
        needed_bytes=inventory.needed_bytes,
        restore_s=max(one.ack.restore_s for one in taken),
        restored_bytes=sum(one.ack.restored_bytes for one in taken),
        measured=measured,
    )
