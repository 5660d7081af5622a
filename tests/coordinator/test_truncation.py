"""When an entry repeats the materialized states: so that the log can begin later, and at most doubles."""

from __future__ import annotations

import msgspec
import pytest

from statelog.coordinator.garbage import Truncation
from statelog.history.bases import BaseMap
from statelog.history.operator_history import Record
from statelog.log.references import Base, Level, SegmentRef, StoredRun
from statelog.runs.key_groups import hash_range
from tests.entries import checkpoint_of


def base(subtask: int, parallelism: int, through: int, runs: int = 1) -> Base:
    own = hash_range(subtask, parallelism)
    names = [f"op/runs/12/{subtask}/1234-56/1234-0123abcd-{number}.run" for number in range(runs)]
    stored = [StoredRun(name, 0, 12_345_678, bytes(16), 123_456, own.first, own.last) for name in names]
    level = Level(0, through, bytes(16), bytes(16), own.first, own.last, stored)
    return Base(subtask, parallelism, [level])


def cover_of(*bases: Base) -> BaseMap:
    base_map = BaseMap()
    for one in bases:
        base_map = base_map.replace(one).base_map
    return base_map


def record(batch: int, base_map: BaseMap | None, *segments: SegmentRef) -> Record:
    return Record(checkpoint_of(batch, segments), base_map, 0, [], [], 0)


def grown(size_bytes: int = 1 << 20) -> Truncation:
    made = Truncation()
    made.committed(record(0, None), None, size_bytes)
    return made


def test_without_materialized_state_there_is_nothing_to_repeat() -> None:
    assert grown().base_map_to_repeat(record(1, None)) is None
    assert grown().base_map_to_repeat(record(1, BaseMap())) is None


def test_states_are_repeated_once_all_of_them_are_newer_than_at_the_last_time() -> None:
    """As long as one subtask has none the log must stay from its begin on."""
    made = grown()
    half = cover_of(base(0, 2, 5))
    assert made.base_map_to_repeat(record(6, half)) is None
    first = cover_of(base(0, 2, 5), base(1, 2, 0))
    assert made.base_map_to_repeat(record(6, first)) is first
    made.committed(record(7, first), first, 1 << 20)
    assert made.base_map_to_repeat(record(7, first)) is None
    one_newer = cover_of(base(0, 2, 7), base(1, 2, 0))
    assert made.base_map_to_repeat(record(8, one_newer)) is None
    all_newer = cover_of(base(0, 2, 7), base(1, 2, 1))
    assert made.base_map_to_repeat(record(9, all_newer)) is all_newer


def test_a_revision_repeats_what_its_former_entry_has_repeated() -> None:
    made, states = grown(), cover_of(base(0, 1, 5))
    for _ in range(3):
        assert made.base_map_to_repeat(record(6, states)) is states
        made.committed(record(7, states), states, 1 << 20)
    assert made.base_map_to_repeat(record(7, states)) is None


@pytest.mark.parametrize(("subtasks", "runs"), [(1, 30), (30, 0), (5, 5)])
@pytest.mark.parametrize("has_segments", [False, True])
def test_a_log_that_repeats_them_is_at_most_about_twice_as_large(subtasks: int, runs: int, has_segments: bool) -> None:
    base_map = cover_of(*(base(subtask, subtasks, 3, runs) for subtask in range(subtasks)))
    size_bytes = len(msgspec.msgpack.encode(base_map.ranges))
    segment = SegmentRef(0, 0, bytes(16), 0, 1000, 10, 10, "op/changes/12/0/1234-0123abcd.run")
    made, log_bytes, repeated_at = Truncation(), 0, []
    for batch in range(10_000):
        repeated = made.base_map_to_repeat(record(batch, base_map))
        if repeated is not None:
            repeated_at.append(log_bytes)
            base_map = cover_of(*(base(subtask, subtasks, batch, runs) for subtask in range(subtasks)))
        segments, payload_bytes = ([segment], 0) if has_segments else ([], 50)
        made.committed(record(batch + 1, base_map, *segments), repeated, payload_bytes)
        log_bytes += len(msgspec.msgpack.encode(segments)) + payload_bytes
        if len(repeated_at) == 3:
            break
    growths = [repeated_at[0], repeated_at[1] - repeated_at[0], repeated_at[2] - repeated_at[1]]
    assert all(size_bytes / 3 < growth < 3 * size_bytes for growth in growths)
