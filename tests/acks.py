"""Acks as tests write them down: of one segment, or with parts in front of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from statelog.log.references import SegmentRef
from statelog.rpc.messages import Ack, TaskId, TaskTimes


def make_ack(
    task: TaskId,
    checksum: bytes,
    length: int = 0,
    rows: int = 0,
    input_rows: int = 0,
    name: str = "",
    subtask_s: float = 0.0,
    *,
    parts: Sequence[SegmentRef] = (),
    **more: Any,
) -> Ack:
    """The ack of a changeset whose last segment is described; `name` is empty if its bytes come with the ack."""
    last = SegmentRef(task.subtask, task.attempt, checksum, 0, length, rows, input_rows, name)
    return Ack(task, [*parts, last], times=TaskTimes(encode_s=subtask_s), **more)
