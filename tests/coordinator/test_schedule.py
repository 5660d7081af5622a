"""When which subtask materializes its state: what makes it due, whose turn it is, and what is counted of the log."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from statelog.coordinator.materialization import MaterializationSchedule
from statelog.history.operator_history import History
from statelog.local.policy import MERGE_POLICY
from statelog.log.entry import Checkpoint
from tests.history.operator_history_support import base, checkpoint, segment
from tests.options import make_options

NEVER_S = 1e9
LARGE = 5 << 20


def schedule(parallelism: int = 1, slots: int = 1, now_s: float = 0.0, **options: object) -> MaterializationSchedule:
    """Of a log that is only due for its size, unless options say otherwise."""
    settings: dict[str, object] = {"materialization_interval_s": NEVER_S, "replay_budget_s": NEVER_S, **options}
    return MaterializationSchedule(make_options(**settings), MERGE_POLICY, "query/op", parallelism, slots, now_s)


def commit(planned: MaterializationSchedule, *sizes: int, backlog: bool = False) -> None:
    planned.committed(sizes, [backlog] * len(sizes))


def grants(planned: MaterializationSchedule, batch: int, parallelism: int, now_s: float = 0.0) -> list[bool | None]:
    return [planned.grant(subtask, batch, now_s) for subtask in range(parallelism)]


# ---- What makes it due ----


def test_the_first_materializations_are_spread_over_the_second_interval_of_a_run() -> None:
    parallelism = 64
    planned = schedule(parallelism, slots=parallelism, now_s=1000.0, materialization_interval_s=100)
    commit(planned, *[1] * parallelism)
    first: dict[int, float] = {}
    for now_s in range(1000, 1300):
        for subtask, is_due in enumerate(grants(planned, now_s, parallelism, now_s)):
            if is_due:
                first.setdefault(subtask, now_s)
    assert len(first) == parallelism
    for earliest in range(1100, 1200, 25):
        assert [one for one in first.values() if earliest < one <= earliest + 25], "in every quarter of it"
    assert all(1100 < now_s <= 1200 for now_s in first.values())


def test_what_is_due_now_is_not_put_off() -> None:
    planned = schedule(materialization_interval_s=0)
    commit(planned, 1)
    assert planned.grant(0, 0, 0.0) is True


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_state_that_no_checkpoint_has_changed_is_never_due(is_forced: bool) -> None:
    planned = schedule(materialization_interval_s=0)
    assert planned.grant(0, 0, NEVER_S, is_forced=is_forced) is None
    assert (planned.base_bytes, planned.log_bytes) == (0, 0)


@pytest.mark.parametrize("is_forced", [False, True])
def test_without_materialization_nothing_is_due(is_forced: bool) -> None:
    planned = schedule(materialization=False, materialization_interval_s=0)
    commit(planned, LARGE)
    assert planned.grant(0, 0, NEVER_S, is_forced=is_forced) is None


def test_a_log_is_large_above_a_megabyte_or_its_part_of_the_base() -> None:
    planned = schedule(max_log_to_base=0.5)
    commit(planned, 1 << 20)
    assert planned.grant(0, 0, 0.0) is None
    commit(planned, 1)
    assert planned.grant(0, 1, 0.0) is True
    planned.materialized(0, 6 << 20, 0, 0.0)
    commit(planned, 3 << 20)
    assert planned.grant(0, 2, 0.0) is None
    commit(planned, 1)
    assert planned.grant(0, 3, 0.0) is True


def test_after_a_materialization_the_logs_size_is_no_reason_until_the_subtask_has_rested() -> None:
    planned = schedule()
    commit(planned, LARGE)
    planned.grant(0, 0, 0.0)
    planned.materialized(0, 1, 10_000_000, 100.0)
    rest_s = 10_000_000 / MERGE_POLICY.materialized_bytes_per_s / MERGE_POLICY.size_share
    assert rest_s == 8
    commit(planned, LARGE)
    assert planned.grant(0, 1, 100 + rest_s - 0.001) is None
    assert planned.grant(0, 2, 100 + rest_s) is True


@pytest.mark.parametrize("options", [{"replay_budget_s": 0.05}, {"materialization_interval_s": 1}])
def test_a_subtask_that_rests_materializes_for_other_reasons(options: dict[str, Any]) -> None:
    planned = schedule(**options)
    commit(planned, LARGE)
    planned.grant(0, 0, 0.0)
    planned.materialized(0, 1, 1 << 30, 100.0)
    commit(planned, LARGE)
    assert planned.grant(0, 1, 101.0) is True


def test_every_checkpoint_takes_a_replay_some_time_even_if_it_is_empty() -> None:
    planned = schedule(replay_budget_s=0.05)
    for _ in range(10):
        commit(planned, 0)
    assert planned.grant(0, 0, 0.0) is None, "as long as the budget"
    commit(planned, 0)
    assert planned.grant(0, 1, 0.0) is True


def test_what_is_forced_comes_in_its_turn() -> None:
    planned = schedule(parallelism=2)
    commit(planned, 1, 1)
    assert [planned.grant(subtask, 0, 0.0, is_forced=True) for subtask in (0, 1)] == [True, None]


# ---- Whose turn it is ----


def test_at_least_one_subtask_at_a_time_does_maintenance() -> None:
    planned = schedule(parallelism=2, slots=0)
    commit(planned, LARGE, LARGE)
    assert grants(planned, 0, 2) == [True, None]


def test_a_materialization_goes_on_batch_after_batch_until_it_is_done() -> None:
    planned = schedule(parallelism=2)
    commit(planned, LARGE, LARGE)
    for batch in range(3):
        assert grants(planned, batch, 2) == [True, None]
        commit(planned, 1, 1)
    planned.materialized(0, LARGE, 0, 0.0)
    assert grants(planned, 3, 2) == [None, True]


def test_a_repetition_gets_the_same_answer_unless_an_attempt_before_has_finished() -> None:
    planned = schedule(parallelism=2, slots=2)
    planned.committed([LARGE, 1], [False, True])
    assert grants(planned, 0, 2) == grants(planned, 0, 2) == [True, False]
    planned.materialized(0, LARGE, 0, 0.0)
    commit(planned, LARGE * 2, 1)
    assert grants(planned, 0, 2) == [None, False], "that batch has had its maintenance"
    assert grants(planned, 1, 2) == [True, None], "the second has no backlog any more"


def test_subtasks_with_a_backlog_share_the_slots_of_a_batch_with_those_that_materialize() -> None:
    planned = schedule(parallelism=3, slots=2)
    planned.committed([LARGE, 1, 1], [False, True, True])
    assert grants(planned, 0, 3) == [True, False, None]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_subtask_waits_for_ever_however_many_are_due(slots: int) -> None:
    parallelism = 5
    planned = schedule(parallelism, slots, materialization_interval_s=0)
    last = [-1] * parallelism
    for batch in range(20):
        commit(planned, *[LARGE] * parallelism)
        begun = [subtask for subtask, materializes in enumerate(grants(planned, batch, parallelism)) if materializes]
        assert len(begun) == slots
        for subtask in begun:
            planned.materialized(subtask, LARGE, 0, 0.0)
            last[subtask] = batch
        assert batch - min(last) <= 2 * -(-parallelism // slots)


def test_a_materialization_in_progress_takes_one_slot() -> None:
    """Though its subtask is due, and has more changesets than the others."""
    planned = schedule(parallelism=2, slots=2)
    commit(planned, LARGE, LARGE)
    assert grants(planned, 0, 2) == [True, True]
    planned.materialized(1, 1, 0, 0.0)
    commit(planned, 1, LARGE)
    assert grants(planned, 1, 2) == [True, True]


def test_no_subtask_waits_for_one_that_is_not_due() -> None:
    """Though that has more changesets."""
    planned = schedule(parallelism=2)
    commit(planned, 1, 1)
    assert planned.grant(1, 0, 0.0, is_forced=True) is True
    planned.materialized(1, 1, 0, 0.0)
    commit(planned, 1, LARGE)
    assert grants(planned, 1, 2) == [None, True]


def test_a_free_slot_is_left_to_the_subtask_with_more_changesets() -> None:
    """Also if its task begins later."""
    planned = schedule(parallelism=3, slots=2, materialization_interval_s=0)
    commit(planned, 1, 1, 1)
    assert planned.grant(1, 0, 0.0) is True
    planned.materialized(1, 1, 0, 0.0)
    commit(planned, 1, 1, 1)
    assert [planned.grant(subtask, 1, 0.0) for subtask in (2, 1, 0)] == [True, None, True]


# ---- What is counted ----


def test_changes_that_came_while_a_materialization_went_on_stay_in_the_log() -> None:
    planned = schedule(parallelism=2, slots=2, replay_budget_s=0.015)
    commit(planned, LARGE, 10)
    assert grants(planned, 0, 2) == [True, None]
    for size in (3, 4):
        commit(planned, size, 10)
    planned.materialized(0, 1000, 0, 0.0)
    assert (planned.base_bytes, planned.log_bytes) == (1000, 7 + 30)
    assert grants(planned, 1, 2) == [None, True], "two checkpoints of three are left to replay"
    planned.materialized(1, 200, 0, 0.0)
    assert (planned.base_bytes, planned.log_bytes) == (1200, 7)
    commit(planned, 0, 0)
    commit(planned, 0, 0)
    assert planned.grant(0, 2, 0.0) is True


def test_what_is_materialized_as_a_part_of_its_batch_takes_nothing_off_the_log() -> None:
    """Nobody was told to take up what the log holds; the batch itself has added nothing."""
    planned = schedule(replay_budget_s=0.006)
    commit(planned, 10)
    planned.materialized(0, 1000, 0, 0.0)
    assert planned.log_bytes == 10
    commit(planned, 0)
    assert planned.grant(0, 0, 0.0) is True, "two checkpoints are to be replayed"
    planned.materialized(0, 1000, 0, 0.0)
    planned.materialized(0, 1000, 0, 0.0)
    assert planned.log_bytes == 0, "and what was taken off is not taken off again"
    commit(planned, 0)
    assert planned.grant(0, 1, 0.0) is None
    commit(planned, 0)
    assert planned.grant(0, 2, 0.0) is True


def test_the_next_materialization_is_due_an_interval_after_the_last() -> None:
    planned = schedule(materialization_interval_s=100)
    commit(planned, 1)
    assert planned.grant(0, 0, 1000.0) is True
    planned.materialized(0, 10, 0, 1000.0)
    commit(planned, 1)
    assert planned.grant(0, 1, 1099.0) is None
    assert planned.grant(0, 2, 1100.0) is True


@pytest.mark.parametrize("how", ["dropped", "failed"])
def test_what_came_to_nothing_is_begun_again_at_once(how: str) -> None:
    planned = schedule(parallelism=2)
    commit(planned, 1, 1)
    assert planned.grant(0, 0, 7.0, is_forced=True) is True
    getattr(planned, how)(0, 7.0)
    assert planned.grant(1, 1, 7.0, is_forced=True) is True, "its slot is free"
    planned.materialized(1, 1, 0, 7.0)
    assert grants(planned, 2, 2, 7.0) == [True, None], "although nothing forces it any more"


def test_only_failures_in_a_row_are_too_many() -> None:
    planned = schedule(materialization_max_failures=2, materialization_interval_s=0)
    for batch in range(2):
        commit(planned, 1)
        assert [planned.failed(0, 0.0) for _ in range(2)] == [False, False]
        assert planned.grant(0, batch, 0.0) is True, "it is tried again"
        planned.materialized(0, 1, 0, 0.0)
    assert [planned.failed(0, 0.0) for _ in range(3)] == [False, False, True]


# ---- What a new run finds ----


def committed(batch: int, *lengths: int) -> Checkpoint:
    segments = [segment(subtask, length=length) for subtask, length in enumerate(lengths)]
    return checkpoint(batch, *segments, parallelism=len(lengths))


def materialized(batch: int, *lengths: int, through: int, bytes_each: int) -> Checkpoint:
    """An entry from which on materialized states count that hold the batches up to one."""
    bases = []
    for subtask in range(len(lengths)):
        made = base(through, subtask, len(lengths))
        [level] = made.levels
        longer = replace(level, runs=[replace(run, length=bytes_each + subtask) for run in level.runs])
        bases.append(replace(made, levels=[longer]))
    return replace(committed(batch, *lengths), bases=bases)


def test_a_new_run_counts_what_lies_behind_the_materialized_states() -> None:
    entries = [committed(batch, 10**batch, 2 * 10**batch) for batch in range(3)]
    entries += [materialized(3, 1000, 3000, through=1, bytes_each=50), committed(4, 10_000, 30_000)]
    for batch, log_bytes, checkpoints in ((4, 300 + 4000 + 40_000, 3), (3, 300 + 4000, 2)):
        planned = schedule(parallelism=2, slots=2, replay_budget_s=0.005 * checkpoints + 0.004)
        planned.restore(History(entries), batch)
        assert (planned.base_bytes, planned.log_bytes) == (50 + 51, log_bytes)
        assert grants(planned, batch, 2) == [None, None]
        commit(planned, 0, 0)
        assert grants(planned, batch + 1, 2) == [True, True], "as many checkpoints as there are, and one more"


def test_with_another_parallelism_every_subtask_has_its_part_of_the_whole() -> None:
    entries = [committed(0, 8, 12), materialized(1, 4, 6, through=0, bytes_each=50), committed(2, 3, 3)]
    planned = schedule(parallelism=4, slots=4)
    planned.restore(History(entries), 2)
    assert (planned.base_bytes, planned.log_bytes) == (4 * (101 // 4), 4 * ((10 + 6) // 4))


@pytest.mark.parametrize("batch", [-1, 5])
def test_a_run_that_finds_no_checkpoint_begins_with_nothing(batch: int) -> None:
    planned = schedule()
    planned.restore(History([committed(0, 10)]), batch)
    assert (planned.base_bytes, planned.log_bytes) == (0, 0)


def test_a_checkpoint_whose_materialized_states_are_not_known_counts_nothing() -> None:
    forgotten = replace(committed(7, 10), log_start=3)
    planned = schedule()
    history = History([forgotten])
    planned.restore(history, 7)
    assert history.record(7) is not None
    assert (planned.base_bytes, planned.log_bytes) == (0, 0)
