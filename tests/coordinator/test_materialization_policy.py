"""What a subtask is told to do after a batch, and what is known of its state afterwards."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from statelog import CheckpointMetrics, Observer, Options, Tuning
from statelog.coordinator.grants import Grants
from statelog.coordinator.materialization import MaterializationPolicy
from statelog.local.materializer import MaintenanceRequest
from statelog.log.references import Base, Level
from statelog.rpc.messages import Begun, JobOutcome, TaskId
from statelog.storage import LocalStore, ObjectInfo
from statelog.testing.query import ManualClock
from tests.coordinator.grants_support import OLDER, Attempts
from tests.model.engine import Engine

NEVER_S = 1e9
DUE = Options(
    file_merging="off", materialization_interval_s=0, retained_checkpoints=2, tuning=Tuning(orphan_min_age_s=0)
)
NOT_DUE = dataclasses.replace(DUE, materialization_interval_s=NEVER_S)
AT_ONCE = dataclasses.replace(DUE, tuning=dataclasses.replace(DUE.tuning, changelog=False))


class Metrics(Observer):
    """Those of the last checkpoint."""

    last: CheckpointMetrics

    def checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.last = metrics


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def engine(tmp_path: Path, metrics: Metrics) -> Engine:
    return Engine(tmp_path, lambda key: 0)


def start(engine: Engine, options: Options, metrics: Metrics, parallelism: int = 1, first_batch: int = 0) -> Attempts:
    engine.options = dataclasses.replace(options, observer=metrics)
    engine.start(parallelism, first_batch)
    return Attempts(engine)


def level_of(begun: Begun, attempts: Attempts, batch: int, token: str) -> Level:
    """The state after a batch, in one object: the materialized state of a batch without changelog."""
    made = attempts.store(begun, batch, token)[-1]
    return replace(made, first=0, before=begun.view.genesis, after=token.encode() * 16)


# ---- When, and from which state ----


def test_a_new_run_materializes_what_the_run_before_has_left(engine: Engine, metrics: Metrics) -> None:
    attempts = start(engine, DUE, metrics)
    for batch in range(3):
        attempts.batch(batch)
    attempts = start(engine, DUE, metrics, first_batch=3)
    assert attempts.grant(attempts.begin(3)).known == []
    attempts.ack(3, b"345")
    assert metrics.last.log_bytes == 3 + 3


def test_a_grant_names_the_newest_level_that_its_job_begins_with(engine: Engine, metrics: Metrics) -> None:
    attempts = start(engine, DUE, metrics)
    attempts.batch(0)
    levels: list[Level] = []
    for batch in (1, 2):
        begun = attempts.begin(batch)
        levels = attempts.store(begun, batch - 1)
        attempts.ack(batch, b"x", levels, attempts.grant(begun).job)
    assert len(levels) == 2
    assert attempts.grant(attempts.begin(3)).base == levels[1].after


def test_a_subtask_without_need_is_left_alone_and_one_with_large_merges_only_merges(
    engine: Engine, metrics: Metrics
) -> None:
    attempts = start(engine, NOT_DUE, metrics)
    attempts.batch(0)
    assert attempts.begin(1).permit.maintenance is None
    attempts.ack(1, b"1", has_backlog=True)
    request = attempts.begin(2).permit.maintenance
    assert request is not None
    assert (request.grant, request.is_due) == (None, False)


class Wasteful:
    """An inventory in which the newer level of subtask 0 lies in a file that is to be emptied."""

    wasteful = True

    def __init__(self) -> None:
        self._grants = Grants(lambda subtask: f"op-1/runs/1/{subtask}")
        self.retention = self
        self.history: Any = SimpleNamespace(levels=lambda genesis, subtask, parallelism, batch: self._base(subtask))

    def grants_of(self, identity: str) -> Grants:
        return self._grants

    def _base(self, subtask: int) -> list[Level]:
        return OLDER if subtask == 0 else OLDER[:1]

    def lasting(self, levels: list[Level]) -> list[Level]:
        return levels[:1]


def wasteful_orders(options: Options, parallelism: int) -> MaterializationPolicy:
    config: Any = SimpleNamespace(query_id="query", uid="op", parallelism=parallelism)
    inventory: Any = Wasteful()
    return MaterializationPolicy(
        *(config, "op-1", inventory, lambda: inventory.history, options, ManualClock(), parallelism, "operator 'op'"),
        inline_bytes=77,
    )


def test_what_lies_in_a_wasteful_file_is_stored_again_before_it_is_due() -> None:
    orders = wasteful_orders(NOT_DUE, parallelism=2)
    checkpoint: object = SimpleNamespace(revision=0, bases=[])
    acks = [SimpleNamespace(ack=SimpleNamespace(total_bytes=1, has_backlog=False))] * 2
    orders.committed(checkpoint, acks)  # type: ignore[arg-type]  # stand-ins with the fields that are read

    def request(subtask: int) -> MaintenanceRequest | None:
        return orders.request(TaskId("query", "run", "op", "", 4, subtask, subtask), b"genesis")

    first = request(0)
    assert first is not None
    assert first.grant is not None
    assert first.grant.known == OLDER[:1], "the job takes up the rest"
    assert first.inline_bytes == 77
    assert request(1) is None


def test_a_subtask_rests_by_what_was_stored_anew_and_not_by_its_whole_state() -> None:
    options = dataclasses.replace(
        NOT_DUE, replay_budget_s=NEVER_S, tuning=dataclasses.replace(NOT_DUE.tuning, changelog=False)
    )
    orders = wasteful_orders(options, parallelism=1)
    [run_of_10_mb] = [replace(one, length=10_000_000) for one in OLDER[0].runs]
    levels = [replace(OLDER[0], runs=[run_of_10_mb]), replace(OLDER[1], runs=[])]
    checkpoint: object = SimpleNamespace(revision=0, bases=[Base(0, 1, levels)])
    ack = SimpleNamespace(ack=SimpleNamespace(total_bytes=100_000_000, has_backlog=False))
    orders.committed(checkpoint, [ack])  # type: ignore[arg-type,list-item]  # as above
    orders.committed(SimpleNamespace(revision=0, bases=[]), [ack])  # type: ignore[arg-type,list-item]  # as above
    assert orders.schedule.grant(0, 1, 0.0) is True


# ---- Whose outcome counts ----


def test_a_job_may_come_with_the_second_of_two_attempts(engine: Engine, metrics: Metrics) -> None:
    """The batch has no checkpoint yet, so the job is part of its first."""
    attempts = start(engine, DUE, metrics, parallelism=2)
    other = Attempts(engine, 1)
    attempts.batch(0)
    other.batch(0)
    begun = attempts.begin(1)
    attempts.ack(1, b"1")
    attempts.begin(1)
    levels = [replace(one, last_hash=(1 << 63) - 1) for one in attempts.store(begun, 0)]
    assert attempts.ack(1, b"1", levels, attempts.grant(begun).job) is JobOutcome.ACCEPTED
    other.batch(1)
    assert [base.levels for base in attempts.latest.bases] == [levels]


def test_a_void_job_gives_its_slot_to_the_next_subtask(engine: Engine, metrics: Metrics) -> None:
    """The engine runs two subtasks at a time."""
    attempts = start(engine, DUE, metrics, parallelism=3)
    others = [Attempts(engine, 1), Attempts(engine, 2)]
    for one in (attempts, *others):
        one.batch(0)
    begun = attempts.begin(1)
    assert [one.begin(1).permit.maintenance is None for one in others] == [False, True]
    [made] = attempts.store(begun, 0)
    job = attempts.grant(begun).job
    assert attempts.ack(1, b"1", [replace(made, after=b"?" * 16)], job) is JobOutcome.VOID
    for one in others:
        one.ack(1, b"1")
    assert others[1].begin(2).permit.maintenance is not None


def test_without_changelog_only_the_attempt_that_counts_has_its_state_taken(engine: Engine, metrics: Metrics) -> None:
    attempts = start(engine, AT_ONCE, metrics)
    begun = attempts.begin(0)
    job, here, there = (
        attempts.grant(begun).job,
        level_of(begun, attempts, 0, "a"),
        level_of(begun, attempts, 0, "b"),
    )
    assert attempts.ack(0, b"", [here], job, has_changeset=False) is JobOutcome.ACCEPTED
    first = attempts.attempt
    attempts.begin(0)
    attempts.attempt, second = first, attempts.attempt
    assert attempts.ack(0, b"", [there], job, has_changeset=False) is JobOutcome.VOID, "of an earlier attempt"
    attempts.attempt = second
    assert attempts.latest.bases[0].levels == [here]
    attempts.begin(1)
    assert attempts.runs == [here.runs[0].name]


# ---- What is known of the sizes ----


def test_another_result_of_a_batch_is_not_counted_twice(engine: Engine, metrics: Metrics) -> None:
    attempts = start(engine, DUE, metrics)
    attempts.batch(0)
    begun = attempts.begin(1)
    attempts.ack(1, b"one", attempts.store(begun, 0), attempts.grant(begun).job)
    assert (metrics.last.base_bytes, metrics.last.log_bytes) == (1, 3)
    for data in (b"uno", b"eins"):
        attempts.begin(1)
        attempts.ack(1, data)
        assert (metrics.last.revision > 0, metrics.last.base_bytes, metrics.last.log_bytes) == (True, 1, 3)


def test_without_changelog_the_size_of_the_state_is_known(engine: Engine, metrics: Metrics) -> None:
    attempts = start(engine, AT_ONCE, metrics)
    begun = attempts.begin(0)
    attempts.ack(0, b"", [level_of(begun, attempts, 0, "a")], attempts.grant(begun).job, has_changeset=False)
    assert metrics.last.base_bytes == 1


class ListedStore(LocalStore):
    """Counts the listings of a materialization's folder."""

    listed = 0

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        ListedStore.listed += "/runs/1/" in prefix
        return super().list(prefix)


def test_without_changelog_only_lost_attempts_are_looked_for(engine: Engine, metrics: Metrics) -> None:
    """A listing is a request, and most batches have none that is lost."""
    engine.open_store = ListedStore
    attempts = start(engine, AT_ONCE, metrics)
    ListedStore.listed = 0
    for batch in range(3):
        begun = attempts.begin(batch)
        attempts.ack(
            batch, b"", [level_of(begun, attempts, batch, "a")], attempts.grant(begun).job, has_changeset=False
        )
    assert ListedStore.listed == 0
    attempts.begin(2)
    attempts.begin(3)
    assert ListedStore.listed == 1
