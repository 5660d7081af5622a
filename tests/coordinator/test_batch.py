"""Which acks count in a batch, and which bytes belong to them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from msgspec.structs import replace

from statelog import ConfigurationError, CorruptionError, ErrorKind
from statelog.coordinator.batch import AcceptedAck, Batch, BatchTime, InlineBudget, OperatorBatch
from statelog.log.references import Level, SegmentRef, StoredRun
from statelog.rpc.messages import Ack, TaskId
from statelog.runs import digests
from tests.acks import make_ack
from tests.contract.log_contract import make_checkpoint


def ack(data: bytes = b"data", *, subtask: int = 0, attempt: int = 1, rows: int = 0, **more: Any) -> Ack:
    task = TaskId("query", "run", "op", "instance", 5, subtask, attempt)
    values: dict[str, Any] = {"name": "", **more}
    return make_ack(task, digests.checksum(data), len(data), 1, rows, values.pop("name"), 0.0, **values)


def level(*runs: tuple[str, bytes]) -> Level:
    stored = [StoredRun(name, 0, len(data), digests.checksum(data), 1, 0, 9) for name, data in runs]
    return Level(0, 0, b"before", b"after", 0, 9, stored)


# ---- The bytes that come with an ack ----


@pytest.mark.parametrize(
    ("sent", "levels", "changeset", "behind"),
    [
        (ack(), [], b"data", b""),
        (ack(), [level(("", b"one"), ("op-1/runs/1", b"stored")), level(("", b"two"))], b"data", b"onetwo"),
        (ack(name="op-1/changes/1"), [level(("", b"one"))], b"", b"one"),
        (ack(has_changeset=False), [level(("", b"one"))], b"", b"one"),
        (ack(is_unchanged=True), [], b"", b""),
        (ack(b""), [level(("", b"one"))], b"", b"one"),
    ],
    ids=["changeset", "and runs", "an object", "only runs", "unchanged", "empty"],
)
def test_the_changeset_comes_first_and_the_runs_without_a_name_behind_it(
    sent: Ack, levels: list[Level], changeset: bytes, behind: bytes
) -> None:
    sent = replace(sent, levels=levels)
    payload = changeset + behind
    taken = AcceptedAck.of(sent, payload, "operator 'op'")
    assert (taken.ack, taken.payload, taken.levels, taken.levels_payload) == (sent, changeset, levels, behind)
    assert (taken.unchanged_segment, taken.rewritten_bytes, taken.stored, taken.is_stored) == (None, b"", [], False)
    flipped = [payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :] for at in range(len(payload))]
    for damaged in (*flipped, payload + b"x", *(payload[:end] for end in range(len(payload)))):
        with pytest.raises(CorruptionError, match="operator 'op': the changeset of subtask 0 was damaged in transit"):
            AcceptedAck.of(sent, damaged, "operator 'op'")


# ---- Which attempt counts ----


def batch(parallelism: int = 3) -> OperatorBatch:
    return OperatorBatch(5, BatchTime(5000, 4000), parallelism)


def take(held: OperatorBatch, *acks: Ack) -> list[bool]:
    return [held.accept(AcceptedAck(one, b""), "operator 'op'") for one in acks]


def counted(held: OperatorBatch) -> dict[int, int]:
    return {subtask: one.ack.task.attempt for subtask, one in held.acks.items()}


def test_a_batch_begins_with_nothing() -> None:
    held = batch()
    assert (held.begun, held.acks, held.durable, held.is_written, held.metrics) == ({}, {}, None, False, None)
    assert held.missing == [0, 1, 2]
    assert held.time.late_watermark_ms == 0, "no row that has a time is late"


def test_the_latest_attempt_with_a_result_of_its_own_counts() -> None:
    held = batch(4)
    results = [ack(b"first", attempt=4), ack(b"other", attempt=3), ack(b"first", attempt=5), ack(b"second", attempt=6)]
    assert take(held, *results) == [True, False, False, True]
    assert counted(held) == {0: 6}
    assert take(held, ack(b"x", subtask=2, attempt=1)) == [True]
    assert counted(held) == {0: 6, 2: 1}
    assert held.missing == [1, 3]


def test_a_result_between_two_equal_ones_does_not_count() -> None:
    """Spark keeps the output of the latest attempt, whenever the others come."""
    held = batch()
    assert take(held, ack(b"first", attempt=4), ack(b"first", attempt=6), ack(b"other", attempt=5)) == [
        True,
        False,
        False,
    ]
    assert not held.differs(ack(b"other", attempt=5))
    assert take(held, ack(b"first", attempt=3), ack(b"other", attempt=6)) == [False, True]
    assert take(held, ack(b"first", attempt=5), ack(b"first", attempt=7)) == [False, True]


def test_a_batch_is_complete_with_the_acks_of_all_its_subtasks() -> None:
    held = batch(2)
    for subtask in (1, 1, 0):
        assert not held.is_complete
        take(held, ack(subtask=subtask))
    assert held.is_complete


@pytest.mark.parametrize("adds_floats", [False, True])
def test_other_last_digits_are_no_reason_to_warn(adds_floats: bool, caplog: pytest.LogCaptureFixture) -> None:
    held = batch()
    acks = [replace(ack(data, attempt=at), adds_floats=adds_floats) for at, data in enumerate((b"first", b"second"))]
    with caplog.at_level(logging.WARNING):
        assert take(held, *acks) == [True, True]
    assert ("is not deterministic" in caplog.text) is not adds_floats


def test_a_result_is_all_of_its_parts() -> None:
    held = batch()
    parts = [SegmentRef(0, 1, b"part", 0, 9, 1, 0, "op-1/changes/0")]
    assert take(held, ack(attempt=1), ack(attempt=2, parts=parts), ack(attempt=3, parts=parts)) == [True, True, False]


def test_an_attempt_that_sends_its_ack_again_with_another_result_counts() -> None:
    """Its output is the one that Spark keeps, whichever of the two that came of."""
    held = batch()
    assert take(held, ack(b"first"), ack(b"second")) == [True, True]
    assert held.acks[0].ack.last.checksum == digests.checksum(b"second")


@pytest.mark.parametrize(("before", "after", "is_refused"), [(1, 0, True), (0, 0, False), (5, 1, False), (0, 3, False)])
def test_rows_of_a_batch_do_not_vanish(before: int, after: int, is_refused: bool) -> None:
    held = batch()
    take(held, ack(b"first", attempt=1, rows=before))
    if not is_refused:
        assert take(held, ack(b"second", attempt=2, rows=after)) == [True]
        return
    with pytest.raises(ConfigurationError, match="subtask 0 had 1 rows in batch 5, but none when") as raised:
        take(held, ack(b"second", attempt=2, rows=after))
    assert raised.value.kind is ErrorKind.STALE_DATAFRAME
    assert counted(held) == {0: 1}


def test_subtasks_of_attempts_that_do_not_count_have_lost_something() -> None:
    held = batch()
    held.begun |= {1: 0, 2: 1, 3: 0, 4: 2}
    take(held, ack(subtask=0, attempt=1), ack(subtask=1, attempt=2))
    assert held.lost == {0, 2}
    take(held, ack(b"later", subtask=0, attempt=3), ack(subtask=2, attempt=4))
    assert held.lost == {0}, "what its first attempt has written"


def test_only_a_later_attempt_with_another_result_differs() -> None:
    held = batch()
    assert not held.differs(ack(b"first", attempt=4)), "there is none yet"
    take(held, ack(b"first", attempt=4))
    assert not held.differs(ack(b"first", attempt=9))
    assert not held.differs(ack(b"second", attempt=3))
    assert held.differs(ack(b"second", attempt=4))
    assert held.differs(ack(b"second", attempt=5))
    assert not held.differs(ack(b"second", attempt=5, subtask=1))


# ---- What is durable ----


def test_a_batch_is_settled_while_its_entry_covers_all_that_counts() -> None:
    whole = Batch(5, BatchTime(5000, 4000), {"op": batch()}, InlineBudget(0, 1))
    assert not whole.is_settled, "nothing counts, and there is no entry"
    whole.accepted = 2
    whole.durable, whole.covered = make_checkpoint("run", 1, 5)[0], 2
    assert whole.is_settled
    whole.accepted = 3
    assert not whole.is_settled


# ---- The bytes that may come with the acks ----


def test_every_subtask_gets_its_part_of_what_is_left() -> None:
    """Of all operators, in any order."""
    budget = InlineBudget(1000, 4)
    assert budget.limit_of("a", 0) == 250
    assert budget.limit_of("b", 0) == 250
    budget.sent("a", 0, 10)
    assert budget.limit_of("b", 1) == (1000 - 10 - 250) // 2
    budget.sent("b", 0, 0)
    budget.sent("b", 1, 370)
    assert budget.limit_of("a", 1) == 1000 - 10 - 370


def test_a_limit_stays_for_all_attempts_of_a_batch() -> None:
    """It decides where changes are cut into parts, and two attempts have to cut alike."""
    budget = InlineBudget(1000, 2)
    assert budget.limit_of("a", 0) == 500
    budget.sent("a", 0, 400)
    assert budget.limit_of("a", 0) == 500
    budget.sent("a", 0, 100)
    assert budget.limit_of("b", 0) == 900, "what the counting attempt has sent is what is gone"
    assert budget.limit_of("a", 0) == 500


def test_without_anything_left_nothing_comes_with_an_ack() -> None:
    budget = InlineBudget(10, 2)
    budget.limit_of("a", 0)
    budget.sent("a", 0, 30)
    assert budget.limit_of("b", 0) == 0
    assert budget.limit_of("c", 0) == 0, "more subtasks than were announced"
