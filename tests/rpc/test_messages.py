"""The messages between tasks and the coordinator: each arrives as what it was, and leaves out nothing that counts."""

from __future__ import annotations

import msgspec
import pytest

from statelog.history.restore_plan import RestorePlan
from statelog.log.references import SegmentRef
from statelog.metrics import Recorded
from statelog.rpc.messages import (
    Acked,
    Begin,
    Begun,
    CheckOwner,
    DiskFailed,
    Failure,
    Fetch,
    Fetched,
    JobOutcome,
    Kept,
    Permit,
    Ping,
    Pinged,
    ReadProgress,
    Reply,
    Request,
    TaskId,
    Tick,
    Ticked,
    View,
)
from tests.acks import make_ack

TASK = TaskId("query", "run", "op", "instance", 5, 0, 1)
BEGUN = Begun(View("op-1", b"genesis", b"head"), Permit(1, 0, "op-1/changes/1/0", "/location", 5, 0))
ACK = make_ack(TASK, b"last", 10, 3, 50, "", 0.5)
PARTS = [
    SegmentRef(0, 1, b"one", 0, 100, 5, 0, "op-1/changes/0"),
    SegmentRef(0, 1, b"two", 0, 200, 6, 0, "op-1/changes/1"),
]


@pytest.mark.parametrize(
    "request_",
    [
        Begin(TASK, 0, 1, 2, "token"),
        Fetch(TASK, [b"digest"]),
        ReadProgress(TASK, 1, 2),
        CheckOwner(TASK),
        DiskFailed(TASK, 4),
        ACK,
        Tick("clock", "reader", True),
        Ping("me"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_request_arrives_as_what_it_was(request_: Request) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request_), type=Request) == request_


@pytest.mark.parametrize(
    "reply",
    [
        BEGUN,
        Kept(),
        Fetched(RestorePlan(b"digest", 3, [])),
        Acked(JobOutcome.OPEN),
        Acked(JobOutcome.ACCEPTED, [1.0, None]),
        Ticked(True),
        Pinged(7.0),
        Failure("StorageError", "no room", "", "free some"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_reply_arrives_as_what_it_was(reply: Reply) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=Reply) == reply


def test_an_ack_is_of_all_its_parts() -> None:
    in_parts = make_ack(TASK, b"last", 10, 3, 50, parts=PARTS)
    assert in_parts.checksums == [b"one", b"two", b"last"]
    assert in_parts.names == ["op-1/changes/0", "op-1/changes/1"], "the bytes of the last one came with it"
    stored = make_ack(TASK, b"last", 10, 3, 50, "op-1/changes/2", parts=PARTS)
    assert stored.names == [*in_parts.names, "op-1/changes/2"]
    assert in_parts.last.checksum == b"last"
    assert (in_parts.total_bytes, in_parts.total_rows) == (310, 14)
    assert (ACK.checksums, ACK.names, ACK.total_bytes, ACK.total_rows) == ([b"last"], [], 10, 3)


def test_an_ack_without_more_is_of_a_changeset_with_nothing_to_be_noted() -> None:
    assert (ACK.has_changeset, ACK.is_unchanged, ACK.has_backlog) == (True, False, False)
    assert not ACK.adds_floats
    assert (ACK.late_rows, ACK.restored_bytes, ACK.materialization_failure, ACK.measured) == (0, 0, "", Recorded())
    assert BEGUN.permit.late_watermark_ms == 0, "and nothing of a batch without a watermark is late"
