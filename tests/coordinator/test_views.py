"""What the subtasks of a batch start from: in the first batch of a run, and after every other one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from statelog.coordinator.admission import OperatorConfig
from statelog.coordinator.batch import AcceptedAck, BatchTime, OperatorBatch
from statelog.coordinator.views import Views
from statelog.history.operator_history import History
from statelog.log.entry import Checkpoint
from statelog.log.references import Base, Level, SegmentRef
from statelog.rpc.messages import SnapshotView, TaskId
from statelog.runs import digests
from statelog.runs.times import NO_TIME_MS
from tests.acks import make_ack
from tests.entries import checkpoint_of

KEYED = OperatorConfig("query", "run", "op", 2, b"keys", [])
WITHOUT_KEYS = dataclasses.replace(KEYED, key_schema=b"")
IDENTITY = "op-1"
ORIGINS = [digests.genesis(IDENTITY, subtask, 2) for subtask in range(2)]


def segment(batch: int, subtask: int) -> SegmentRef:
    return SegmentRef(subtask, 1, b"%d of %d" % (batch, subtask), 0, 10, 1, 1, f"op/changes/{batch}-{subtask}")


def checkpoint(batch: int, run: OperatorConfig = KEYED) -> Checkpoint:
    segments = [segment(batch, subtask) for subtask in range(2)]
    counts: list[list[int]] = [] if run.has_keys else [[], []]
    return checkpoint_of(
        batch, segments, parallelism=2, key_schema=run.key_schema, element_counts=counts, begins=batch == 0
    )


def heads(*batches: int) -> list[bytes]:
    """The digests after the changesets of some batches."""
    found = []
    for subtask, head in enumerate(ORIGINS):
        for batch in batches:
            head = digests.extend(head, batch, [b"%d of %d" % (batch, subtask)])
        found.append(head)
    return found


def durable(entry: Checkpoint, *fired_ms: int) -> OperatorBatch:
    made = OperatorBatch(entry.batch, BatchTime(0, 0), 2, durable=entry)
    for subtask, timers_to_ms in enumerate(fired_ms):
        task = TaskId("query", "run", "op", "instance", entry.batch, subtask, 1)
        fired: dict[str, Any] = {"timers_to_ms": timers_to_ms, "arrivals_to_ms": timers_to_ms - 5}
        made.acks[subtask] = AcceptedAck(make_ack(task, b"", 0, 0, 0, "", 0.0, **fired), b"")
    return made


@pytest.mark.parametrize("first_batch", [0, 1, 2, 3])
def test_a_run_starts_from_the_checkpoint_before_its_first_batch(first_batch: int) -> None:
    """Never from the newest: a batch whose entry is there already is repeated."""
    history = History([checkpoint(batch) for batch in range(3)])
    found = Views.of_first_batch(KEYED, IDENTITY, history, first_batch)
    assert (found.genesis_digests, found.heads) == (ORIGINS, heads(*range(first_batch)))
    assert (found.timers_after_ms, found.snapshots) == ([NO_TIME_MS] * 2, [])
    assert found.arrivals_after_ms == [NO_TIME_MS] * 2


@pytest.mark.parametrize("first_batch", [0, 1, 2, 3])
def test_an_operator_without_keys_starts_from_the_snapshots_before_its_first_batch(first_batch: int) -> None:
    history = History([checkpoint(batch, WITHOUT_KEYS) for batch in range(3)])
    found = Views.of_first_batch(WITHOUT_KEYS, IDENTITY, history, first_batch)
    if first_batch == 0:
        assert found.snapshots == [SnapshotView()] * 2
    else:
        stored = [start.snapshots for start in found.snapshots]
        assert stored == [[segment(first_batch - 1, 0)]] * 2, "all are empty, so that one is as good as the other"


def test_the_next_batch_starts_from_the_changesets_of_the_one_before() -> None:
    first = Views.of_first_batch(KEYED, IDENTITY, History(), 0)
    second = first.after(durable(checkpoint(0), 70, 80))
    assert (second.genesis_digests, second.heads, second.timers_after_ms) == (ORIGINS, heads(0), [70, 80])
    assert second.arrivals_after_ms == [65, 75]
    third = second.after(durable(checkpoint(1), 90, 91))
    assert (third.heads, third.timers_after_ms) == (heads(0, 1), [90, 91])


def test_a_state_that_is_materialized_through_the_batch_is_what_the_next_starts_from() -> None:
    """One that only older batches are part of changes nothing of where the subtask is."""
    bases = [Base(subtask, 2, [Level(0, last, b"", b"own digest", 0, 9, [])]) for subtask, last in ((0, 4), (1, 5))]
    points = Views.of_first_batch(KEYED, IDENTITY, History(), 0)
    after = points.after(durable(replace(checkpoint(5), bases=bases), 0, 0))
    assert after.heads == [heads(5)[0], b"own digest"]


def test_without_keys_the_next_batch_starts_from_the_new_snapshots_as_they_are() -> None:
    points = Views.of_first_batch(WITHOUT_KEYS, IDENTITY, History(), 0)
    after = points.after(durable(checkpoint(0, WITHOUT_KEYS)))
    assert after.snapshots == [SnapshotView([segment(0, subtask)], None) for subtask in range(2)]
