"""A restart that takes long: what it tells, and when it gives up."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from statelog import (
    CheckpointMetrics,
    ConfigurationError,
    ErrorKind,
    Observer,
    Options,
    RestoreProgress,
    StorageError,
    Tuning,
    meanings,
)
from statelog.coordinator.active_operator import Restore, RestoringSubtasks, SubtaskRestore
from statelog.coordinator.checkpoint_metrics import KeptMetrics
from statelog.history.restore_plan import ClippedSegment, RestorePlan
from statelog.log.references import Level, SegmentRef, StoredRun
from statelog.rpc.messages import ReadProgress, TaskId
from statelog.storage import LocalStore
from statelog.tasks.attempt import Restoring
from statelog.testing.query import ManualClock
from tests.attempts import make_attempt, telling
from tests.model.engine import Engine
from tests.unit.test_local_runs import read

BATCHES = 5


class SlowStore(LocalStore):
    """Every object of changesets takes 0.4 s to be read."""

    clock: ManualClock

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if "/changes/" in name:
            self.clock.advance(0.4)
        return super().read(name, offset=offset, length=length)


class Told(Observer):
    def __init__(self) -> None:
        self.progress: list[RestoreProgress] = []

    def restoring(self, progress: RestoreProgress) -> None:
        self.progress.append(progress)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def engine(tmp_path: Path, told: Told) -> Engine:
    engine = Engine(tmp_path, lambda key: hash(key) % 2**64, merge_fan_in=100, inline_budget_bytes=0)
    engine.start(1, 0)
    for batch in range(BATCHES):
        engine.run_commands(batch, 0, [((batch, None), ("set", batch)), ((0, "list"), ("append", str(batch)))])
    SlowStore.clock = engine.clock
    engine.open_store = SlowStore
    return engine


def restart(engine: Engine, told: Told, deadline_s: float | None) -> None:
    engine.options = Options(
        inline_budget_bytes=0, observer=told, restore_deadline_s=deadline_s, tuning=Tuning(merge_fan_in=100)
    )
    engine.start(1, BATCHES, keep_local=False)
    found = read(engine, BATCHES, *((number, None) for number in range(BATCHES)), (0, "list"))
    assert [found[number, None][0] for number in range(BATCHES)] == [[number] for number in range(BATCHES)]
    assert found[0, "list"][1] == [str(number) for number in range(BATCHES)]


def test_a_restart_that_takes_longer_than_a_second_tells_how_far_it_is(engine: Engine, told: Told) -> None:
    restart(engine, told, None)
    read = [one.read_bytes for one in told.progress]
    assert len(read) >= 2, "2 s, and one a second"
    assert read == sorted(read)
    assert 0 < read[0] < told.progress[0].known_bytes
    assert {one.known_bytes for one in told.progress} == {read[-1]}, (
        "known before it begins, and all of it read at the end"
    )
    assert {(one.uid, one.batch, one.subtasks) for one in told.progress} == {("op", BATCHES, 1)}


def test_a_restart_within_a_second_tells_nothing(engine: Engine, told: Told) -> None:
    engine.open_store = LocalStore
    restart(engine, told, 0.001)
    assert told.progress == []


def test_a_deadline_fails_with_what_is_missing(engine: Engine, told: Told) -> None:
    with pytest.raises(StorageError) as failure:
        restart(engine, told, 0.9)
    assert failure.value.kind is ErrorKind.RESTORE_DEADLINE
    message = str(failure.value)
    assert re.search(
        r"operator 'op', subtask 0, batch 5: after 1.2 s .* in 5 pieces, .* MB in 2 pieces are missing", message
    )
    assert f"next one in {engine.identity}/changes/1/0/3-" in message
    restart(engine, told, 3.0)


# ---- The task's side and the driver's, by themselves ----


SEGMENTS = [SegmentRef(0, 0, b"", 0, length, 1, 1, f"op-1/changes/{length}") for length in (10, 20, 30)]


class Restart:
    """One subtask's restart, which lacks three objects."""

    def __init__(self, deadline_s: float | None = None) -> None:
        self.clock = ManualClock(1000.0)
        self.told: list[tuple[int, int]] = []
        options = Options(restore_deadline_s=deadline_s)
        attempt = make_attempt(Path(), options=options, call=telling(self.told), clock=self.clock)
        self.restoring = Restoring(attempt)

    def lacks(self, *segments: SegmentRef) -> None:
        self.restoring.begin(
            RestorePlan(b"", 0, [ClippedSegment(one, 0, (1 << 64) - 1, is_shared=False) for one in segments])
        )

    def read_after(self, *seconds: float) -> None:
        for passed_s in seconds:
            self.clock.advance(passed_s)
            self.restoring.read()


def test_a_task_tells_once_a_second_what_it_has_read_of_what_it_lacks() -> None:
    restart = Restart()
    restart.lacks(*SEGMENTS)
    restart.read_after(0.5, 0.5, 0.875)
    assert restart.told == [(30, 60)]
    restart.clock.advance(0.25)
    restart.restoring.end()
    assert restart.told == [(30, 60), (60, 60)]
    assert (restart.restoring.took_s, restart.restoring.known_bytes) == (2.125, 60)


def test_a_task_that_is_done_within_a_second_tells_nothing_and_counts_what_it_read() -> None:
    restart = Restart()
    assert (restart.restoring.took_s, restart.restoring.known_bytes) == (0, 0)
    restart.lacks(*SEGMENTS)
    restart.read_after(0.1, 0.1, 0.1)
    restart.restoring.end()
    assert (restart.told, restart.restoring.known_bytes) == ([], 60)


def test_materialized_state_counts_and_all_is_read_when_the_state_is_there() -> None:
    """Another subtask of the host may have read the rest."""
    restart = Restart()
    run = StoredRun("op-1/runs/1/0/a.run", 0, 40, b"", 1, 0, 9)
    restart.restoring.begin(RestorePlan(b"", 0, [], [Level(0, 0, b"", b"", 0, 9, [run, replace(run, offset=40)])]))
    restart.read_after(1)
    restart.restoring.end()
    assert restart.told == [(40, 80), (80, 80)]


def test_what_two_entries_name_is_read_once_and_a_second_fetch_begins_anew() -> None:
    """A run that was damaged on its way is fetched again."""
    restart = Restart()
    restart.lacks(SEGMENTS[0], SEGMENTS[0])
    restart.read_after(0, 0)
    restart.lacks(*SEGMENTS[1:])
    restart.read_after(1, 1, 1)
    assert restart.told == [(20, 10 + 50), (50, 10 + 50), (50, 10 + 50)]


def test_the_deadline_is_over_when_it_has_passed_and_something_is_missing() -> None:
    restart = Restart(1.0)
    restart.lacks(*SEGMENTS)
    restart.read_after(1.0)
    with pytest.raises(StorageError, match="1 pieces are missing"):
        restart.read_after(0.1)
    late = Restart(1.0)
    late.lacks(*SEGMENTS[:1])
    late.read_after(5.0)
    late.restoring.read()


def test_what_is_added_to_a_table_counts_on_top_of_what_was_read() -> None:
    """All runs are here then, also those that another subtask of the host has read."""
    restart = Restart()
    restart.lacks(*SEGMENTS)
    restart.read_after(0.5)
    restart.restoring.begin_table(100)
    for seconds, size_bytes in ((0.5, 40), (0.5, 70), (0.5, 90)):
        restart.clock.advance(seconds)
        restart.restoring.added(size_bytes)
    assert restart.told == [(60 + 40, 60 + 100), (60 + 90, 60 + 100)]
    restart.restoring.end()
    assert restart.told[2:] == [(60 + 100, 60 + 100)]


def test_the_deadline_is_over_when_it_has_passed_and_something_is_not_in_the_table() -> None:
    restart = Restart(1.0)
    restart.restoring.begin_table(10_000_000)
    restart.clock.advance(1.0)
    restart.restoring.added(4_000_000)
    restart.clock.advance(0.1)
    with pytest.raises(StorageError, match=r"after 1\.1 s .* 6\.0 of their 10\.0 MB are in its table") as failure:
        restart.restoring.added(6_000_000)
    assert failure.value.kind is ErrorKind.RESTORE_DEADLINE
    restart.restoring.added(10_000_000)


def test_the_driver_adds_up_the_subtasks_of_a_batch(told: Told) -> None:
    run: Any = SimpleNamespace(query_id="query", uid="op")
    clock = ManualClock()
    subtasks = RestoringSubtasks(run, told, "op", clock)
    assert subtasks.latest is None
    for batch, subtask, read_bytes in [(0, 0, 1), (0, 1, 2), (0, 0, 3), (1, 1, 4)]:
        subtasks.note(ReadProgress(TaskId("query", "run", "op", "", batch, subtask, 9), read_bytes, 10))
    assert [(one.batch, one.subtasks, one.read_bytes, one.known_bytes) for one in told.progress] == [
        (0, 1, 1, 10), (0, 2, 3, 20), (0, 2, 5, 20), (1, 1, 4, 10),
    ]  # fmt: skip
    assert subtasks.latest == Restore(1, (SubtaskRestore(1, 4, 10),), 0.0, None), "a batch begins anew"


def test_the_rest_of_a_restore_is_estimated(told: Told) -> None:
    run: Any = SimpleNamespace(query_id="query", uid="op")
    clock = ManualClock()
    subtasks = RestoringSubtasks(run, told, "op", clock)

    def note(subtask: int, read_bytes: int, known_bytes: int) -> Restore | None:
        clock.advance(2.0)
        subtasks.note(ReadProgress(TaskId("query", "run", "op", "", 0, subtask, 9), read_bytes, known_bytes))
        return subtasks.latest

    first, second, third = note(1, 50, 100), note(1, 100, 100), note(0, 100, 400)
    assert first == Restore(0, (SubtaskRestore(1, 50, 100),), 0.0, None)
    assert second == Restore(0, (SubtaskRestore(1, 100, 100),), 2.0, 0.0)
    assert third is not None
    assert (third.read_bytes, third.known_bytes, third.took_s) == (200, 500, 4.0)
    assert third.left_s == 300 / (150 / 4.0)
    clock.advance(10.0)
    assert subtasks.latest is not None
    assert subtasks.latest.took_s == 14.0, "it goes on"
    ended = note(0, 400, 400)
    clock.advance(10.0)
    assert subtasks.latest == ended, "it is over"


def test_the_last_restore_is_kept(told: Told) -> None:
    kept = KeptMetrics(told)
    for batch, restored_bytes in [(0, 0), (1, 10), (2, 0)]:
        numbers: dict[str, Any] = dict.fromkeys(meanings(), 0) | {"restored_bytes": restored_bytes}
        kept.checkpoint(CheckpointMetrics("query", "op", batch, **numbers))
    assert kept.last_restore is not None
    assert kept.last_restore.batch == 1
    assert [one.batch for one in kept.recent] == [0, 1, 2]


@pytest.mark.parametrize("deadline_s", [0, -1.0])
def test_a_deadline_is_a_time(deadline_s: float) -> None:
    with pytest.raises(ConfigurationError, match="restore_deadline_s"):
        Options(restore_deadline_s=deadline_s)
