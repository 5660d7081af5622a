"""The warning of a slow checkpoint: when it comes, how often, and where it says that the time went."""

from __future__ import annotations

import logging

import pytest

from statelog import CheckpointMetrics, Recorded
from statelog.coordinator.checkpoint_metrics import SLOW_S, SlowCheckpoints
from statelog.rpc.messages import TaskId
from tests.acks import make_ack


def note(slow: SlowCheckpoints, batch: int, restore_s: float, subtask_s: float, commit_s: float) -> None:
    metrics = CheckpointMetrics(
        "query", "op", batch, 0, 2, 0, 0, 0, 0, 3_000_000, 0, commit_s, subtask_s,
        restore_s=restore_s, restored_bytes=7_000_000, measured=Recorded({"upload_requests": 5, "upload_retries": 2}),
    )  # fmt: skip
    acks = [
        make_ack(TaskId("query", "run", "op", "instance", batch, 0, 1), b"", subtask_s=subtask_s, restore_s=0.0),
        make_ack(TaskId("query", "run", "op", "instance", batch, 1, 2), b"", subtask_s=0.0, restore_s=restore_s),
    ]
    slow.note(metrics, acks)


def test_the_first_of_several_slow_checkpoints_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("statelog.coordinator.checkpoint_metrics")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger.name)
    slow = SlowCheckpoints("operator 'op'")
    note(slow, 1, 0.0, SLOW_S / 2, SLOW_S / 2 - 0.1)
    assert caplog.records == []
    note(slow, 2, 4.0, 5.0, 1.0)
    note(slow, 3, 0.0, 0.0, 10.0)
    note(slow, 4, 0.0, 0.0, 0.1)
    note(slow, 5, 11.0, 0.0, 0.0)
    told = [(record.levelname, record.getMessage().partition(" was slow: ")[0]) for record in caplog.records]
    name = "operator 'op': checkpoint"
    assert told == [("WARNING", f"{name} 2"), ("INFO", f"{name} 3"), ("WARNING", f"{name} 5")]
    assert caplog.records[0].getMessage().partition(" was slow: ")[2] == (
        "up to 4.0 s to restore state (subtask 1, 7.0 MB in all subtasks), up to 5.0 s to encode and store changes"
        " (subtask 0, 3.0 MB), 1.0 s to commit; of 5 writes 2 were retried"
    )
