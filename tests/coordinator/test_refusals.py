"""Calls of tasks that are refused, and what the user is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from statelog import ConfigurationError, ErrorKind
from statelog.coordinator.admission import OperatorConfig, incomplete_batch, require_own_partition
from statelog.coordinator.batch import AcceptedAck, Batch, BatchTime, InlineBudget, OperatorBatch
from statelog.rpc.messages import Begin, TaskId
from tests.acks import make_ack


def run(parallelism: int) -> OperatorConfig:
    return OperatorConfig("query", "run", "op", parallelism, b"keys", [])


def task(batch: int, subtask: int = 0) -> TaskId:
    return TaskId("query", "run", "op", "instance", batch, subtask, 7)


def batch_of(*uids: str, parallelism: int = 2) -> Batch:
    operators = {uid: OperatorBatch(5, BatchTime(0, 0), parallelism) for uid in uids}
    return Batch(5, BatchTime(0, 0), operators, InlineBudget(0, 1))


@pytest.mark.parametrize(("parallelism", "end"), [(3, "0, 1, 2"), (10, "7, 8, 9"), (11, "8, 9, ...")])
def test_of_many_subtasks_that_are_missing_the_first_ten_are_named(parallelism: int, end: str) -> None:
    error = incomplete_batch(5, batch_of("op", parallelism=parallelism), [run(parallelism)], "here")
    shown = error.message.partition("to completion: operator 'op': ")[2].partition(". The query")[0]
    assert shown.startswith("0, 1, 2")
    assert shown.endswith(end)


def test_of_several_operators_those_that_lack_subtasks_are_named() -> None:
    batch = batch_of("first", "second", "third")
    roster = [replace(run(2), uid=uid) for uid in batch.operators]
    for uid, subtask in (("first", 0), ("first", 1), ("second", 0)):
        batch.operators[uid].acks[subtask] = AcceptedAck(make_ack(task(5, subtask), b"sum"), b"")
    error = incomplete_batch(5, batch, roster, "here")
    assert "did not run to completion: operator 'second': 1; operator 'third': 0, 1. The query" in error.message
    assert error.kind is ErrorKind.CHECKPOINT_INCOMPLETE


@pytest.mark.parametrize("input_rows", [0, 1, 2])
def test_only_rows_tell_that_a_partition_was_renumbered(input_rows: int) -> None:
    request = Begin(task(5, subtask=1), 2, input_rows, None, "token")
    batch = OperatorBatch(5, BatchTime(0, 0), 3)
    if not input_rows:
        require_own_partition(request, batch, run(3), "here")
        return
    with pytest.raises(ConfigurationError, match="subtask 1 of 3 ran as partition 2") as caught:
        require_own_partition(request, batch, run(3), "here")
    assert caught.value.kind is ErrorKind.PARTITIONS_RENUMBERED
