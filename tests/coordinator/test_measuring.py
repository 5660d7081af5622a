"""What is told of a checkpoint: sums over its subtasks, and the longest of their times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import AcceptedAck
from statelog.coordinator.checkpoint_metrics import checkpoint_metrics
from statelog.log.entry import Checkpoint
from statelog.log.references import Base, Level, SegmentRef, StoredRun
from statelog.metrics import CheckpointMetrics, HotKey, HotKeyGroup, Recorded, StateMetrics, SubtaskMetrics
from statelog.rpc.messages import TaskId, TaskTimes
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateSchema, encode_schema
from tests.acks import make_ack
from tests.entries import checkpoint_of

KEY = pa.schema([("id", pa.int64())])


def ack(subtask: int, **more: Any) -> AcceptedAck:
    task = TaskId("query", "run", "op", "instance", 5, subtask, subtask)
    return AcceptedAck(make_ack(task, b"sum", **more), b"", received_s=100.0 + subtask)


def metrics_of(entry: Checkpoint, taken: list[AcceptedAck], measured: Recorded) -> CheckpointMetrics:
    policy: Any = SimpleNamespace(
        schedule=SimpleNamespace(
            base_bytes=11, log_bytes=12, started={1}, duration_s=lambda subtask, now_s: now_s - 100.25 + subtask
        )
    )
    retention: Any = SimpleNamespace(size_bytes=13, needed_bytes=14)
    return checkpoint_metrics(
        OperatorConfig("query", "run", "op", entry.parallelism, entry.key_schema, entry.states),
        entry.section,
        taken,
        policy,
        retention,
        batch=entry.batch,
        watermark_ms=8000,
        revision=entry.revision,
        last_ack_s=102.0,
        end_s=102.75,
        log_files=2,
        measured=measured,
    )


def level(length: int) -> Level:
    return Level(0, 0, b"", b"", 0, 9, [StoredRun("", 0, length, b"", 1, 0, 9)])


def _entry(states: list[StateSchema] | None = None) -> Checkpoint:
    return checkpoint_of(
        5, parallelism=2, key_schema=encode_schema(KEY), states=states or [], batch_time_ms=9000, watermark_ms=8000
    )


def test_the_metrics_of_a_checkpoint_are_those_of_all_its_subtasks() -> None:
    bases = [Base(0, 3, [level(1000), level(10), level(20)]), Base(2, 3, [level(7)])]
    entry = checkpoint_of(5, revision=2, parallelism=3, batch_time_ms=9000, watermark_ms=8000, bases=bases)
    parts = [SegmentRef(1, 1, b"", 0, 100, 5, 0, "op/changes/0"), SegmentRef(1, 1, b"", 0, 200, 6, 0, "op/changes/1")]
    taken = [
        ack(0, length=30, rows=3, input_rows=50, late_rows=1, subtask_s=0.5, restore_s=2.0, restored_bytes=40),
        ack(1, length=1, rows=2, input_rows=8, late_rows=4, subtask_s=0.25, name="op/changes/2", parts=parts),
        ack(2, materialization_failure="no room", restore_s=1.0, restored_bytes=2),
    ]
    measured = Recorded({"upload_requests": 3}, {})
    found = metrics_of(entry, taken, measured)
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
        logged_changesets=1,
        materializations_started=1,
        materialized=2,
        materialized_bytes=20 + 7,
        materialization_s=4.5,
        materialization_failures=1,
        stored_bytes=13,
        needed_bytes=14,
        restore_s=2.0,
        restored_bytes=42,
        encode_s=0.5,
        wait_s=2.75,
        measured=measured,
        subtasks=[
            SubtaskMetrics(0, 50, 3, 30, restore_s=2.0, encode_s=0.5, wait_s=2.75),
            SubtaskMetrics(1, 8, 13, 301, encode_s=0.25, wait_s=1.75),
            SubtaskMetrics(2, 0, 0, 0, restore_s=1.0, wait_s=0.75),
        ],
        hot_keys=[],
        hot_key_groups=[],
    )


def test_a_subtask_waits_after_its_ack_until_the_checkpoint_is_durable() -> None:
    taken = [ack(0), ack(1)]
    times = TaskTimes(read_s=1.0, processor_s=2.0, encode_s=3.0, upload_s=4.0, wait_s=5.0)
    taken[0].ack = replace(taken[0].ack, times=times)
    found = metrics_of(_entry(), taken, Recorded())
    first, second = found.subtasks
    assert (first.read_s, first.processor_s, first.encode_s, first.upload_s, first.wait_s) == (1, 2, 3, 4, 7.75)
    assert second.wait_s == 1.75
    assert (found.read_s, found.wait_s, found.subtask_s) == (1.0, 7.75, 7.0)


def test_the_size_of_a_state_leaves_out_deleted_ones() -> None:
    taken = [ack(0), ack(1)]
    taken[0].ack = replace(taken[0].ack, state_sizes={"count": (5, 50), "$1$count": (3, 30), "gone": (9, 90)})
    taken[1].ack = replace(taken[1].ack, state_sizes={"$1$count": (4, 40)})
    entry = replace(_entry(states=[StateSchema("count", "value", b"", b""), StateSchema("other", "value", b"", b"")]))
    entry = replace(entry, generations={"count": 1})
    found = metrics_of(entry, taken, Recorded())
    assert found.states == {"count": StateMetrics(7, 70), "other": StateMetrics(0, 0)}
    assert (found.state_rows, found.state_bytes) == (7, 70)


@pytest.mark.parametrize(
    ("kind", "value", "encoded"),
    [
        (pa.date32(), pa.scalar(4_000_000, pa.date32()), None),
        (pa.timestamp("us", "UTC"), pa.scalar((1 << 62) + 1, pa.timestamp("us", "UTC")), None),
        (pa.string(), None, b"\x01\x00\x00\x00\x01\xff"),
    ],
    ids=["date", "timestamp", "no UTF-8"],
)
def test_a_hot_key_that_python_cannot_hold_fails_no_checkpoint(
    kind: pa.DataType, value: pa.Scalar | None, encoded: bytes | None
) -> None:
    schema = pa.schema([("id", kind)])
    key = encoded or KeyCodec(schema).encode_columns([pa.array([value], kind)])[0].as_py()
    taken = [ack(0), ack(1)]
    taken[0].ack = replace(taken[0].ack, hot_keys=[(9, 1, key)])
    found = metrics_of(replace(_entry(), key_schema=encode_schema(schema)), taken, Recorded())
    assert found.hot_keys == [HotKey(9, 1, None)]
    assert found.hottest_key_rows == 9


def test_the_hottest_keys_are_those_of_all_subtasks() -> None:
    codec = KeyCodec(KEY)
    taken = [ack(0), ack(1)]
    first = [(9, 1, codec.encode((1,))), (3, 2, b"")]
    second = [(rows, 30_000, codec.encode((rows,))) for rows in range(20, 10, -1)]
    taken[0].ack = replace(taken[0].ack, hot_keys=first, hot_key_groups=[(9, 1), (3, 2)])
    taken[1].ack = replace(taken[1].ack, hot_keys=second, hot_key_groups=[(155, 30_000)])
    found = metrics_of(_entry(), taken, Recorded())
    assert found.hot_keys == [HotKey(rows, 30_000, (rows,)) for rows in range(20, 10, -1)]
    assert found.hottest_key_rows == 20
    assert found.hot_key_groups == [HotKeyGroup(155, 30_000), HotKeyGroup(9, 1), HotKeyGroup(3, 2)]
    taken[1].ack = replace(taken[1].ack, hot_keys=[])
    assert metrics_of(_entry(), taken, Recorded()).hot_keys == [HotKey(9, 1, (1,)), HotKey(3, 2, None)]
