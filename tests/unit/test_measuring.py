"""What is told of a checkpoint: sums over its subtasks, and the longest of their times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from statelog.checkpoint.batch import AcceptedAck
from statelog.checkpoint.commit import checkpoint_metrics
from statelog.checkpoint.protocol import TaskId
from statelog.log.entry import Checkpoint
from statelog.log.references import Base, Level, SegmentRef, StoredRun
from statelog.metrics import CheckpointMetrics, Recorded
from tests.acks import make_ack


def ack(subtask: int, **more: Any) -> AcceptedAck:
    task = TaskId("query", "run", "op", "instance", 5, subtask, subtask)
    return AcceptedAck(make_ack(task, b"sum", **more), b"")


def level(length: int) -> Level:
    return Level(0, 0, b"", b"", 0, 9, [StoredRun("", 0, length, b"", 1, 0, 9)])


def test_the_metrics_of_a_checkpoint_are_those_of_all_its_subtasks() -> None:
    bases = [Base(0, 3, [level(1000), level(10), level(20)]), Base(2, 3, [level(7)])]
    entry = Checkpoint(1, 5, 2, "query", "run", "op", 3, [], b"keys", [], 9000, 8000, b"", bases=bases)
    parts = [SegmentRef(1, 1, b"", 0, 100, 5, 0, "op/changes/0"), SegmentRef(1, 1, b"", 0, 200, 6, 0, "op/changes/1")]
    taken = [
        ack(0, length=30, rows=3, input_rows=50, late_rows=1, subtask_s=0.5, restore_s=2.0, restored_bytes=40),
        ack(1, length=1, rows=2, input_rows=8, late_rows=4, subtask_s=0.25, name="op/changes/2", parts=parts),
        ack(2, materialization_failure="no room", restore_s=1.0, restored_bytes=2),
    ]
    policy: Any = SimpleNamespace(schedule=SimpleNamespace(base_bytes=11, log_bytes=12))
    inventory: Any = SimpleNamespace(retention=SimpleNamespace(size_bytes=13, needed_bytes=14))
    measured = Recorded({"upload_requests": 3}, {})
    found = checkpoint_metrics(entry, taken, policy, inventory, 0.75, 2, measured)
    assert found == CheckpointMetrics(
        query_id="query",
        uid="op",
        batch=5,
        revision=2,
        parallelism=3,
        input_rows=58,
        late_rows=5,
        watermark_ms=8000,
        changes=3 + 2 + 11,
        changed_bytes=30 + 1 + 300,
        objects=3 + 2,
        commit_s=0.75,
        subtask_s=0.5,
        base_bytes=11,
        log_bytes=12,
        materialized=2,
        materialized_bytes=20 + 7,
        materialization_failures=1,
        stored_bytes=13,
        needed_bytes=14,
        restore_s=2.0,
        restored_bytes=42,
        measured=measured,
    )
