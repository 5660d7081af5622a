"""What a materialization may name, when it counts, and what is kept while it might."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from statelog import ProtocolError, StateMissingError, StorageError
from statelog.coordinator.grants import Grants, is_within_grant
from statelog.local.materializer import Grant
from statelog.log.references import Level
from statelog.options import Options
from statelog.rpc.messages import JobOutcome
from statelog.runs import digests
from statelog.storage import LocalStore
from statelog.testing.faults import FaultPlan, FaultStore
from tests.acks import make_ack
from tests.coordinator.grants_support import OLD, OLDER, Attempts, history_of, level
from tests.model.engine import Engine
from tests.options import changed_options

FOLDER = "op-1/runs/1/0/5-9"


GRANT = Grant("5-9", b"3", OLDER, FOLDER)
NEW = level(4, 4, b"3", b"4", f"{FOLDER}/4-a-0.run", f"{FOLDER}/4-a-1.run")


# ---- What a grant lets a job name ----


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([*OLDER, NEW], True),
        ([*OLDER, level(4, 4, b"3", b"4", "")], True),
        ([OLD, level(3, 4, b"2", b"4", f"{FOLDER}/4-a-0.run")], True),
        ([level(0, 4, b"0", b"4", f"{FOLDER}/4-a-0.run")], True),
        ([OLD, replace(OLDER[1], last=4, after=b"4")], True),
        ([replace(OLD, last=4, after=b"4")], True),
        ([OLDER[1], NEW], False),
        ([OLD, NEW], False),
        ([*OLDER, replace(NEW, before=b"2")], False),
        ([*OLDER, level(4, 4, b"3", b"4", "op-1/runs/1/0/5-8/4-a-0.run")], False),
        ([*OLDER, level(4, 4, b"3", b"4", "op-1/runs/1/1/5-9/4-a-0.run")], False),
        ([*OLDER, level(4, 4, b"3", b"4", f"{FOLDER}/4-a-0.run", "op-1/runs/1/0/5-8/4-a-1.run")], False),
        ([OLD, level(3, 4, b"2", b"4", "op-1/runs/1/0/5-8/4-a-0.run")], False),
        ([OLD, level(3, 4, b"2", b"4", OLD.runs[0].name)], False),
        ([level(0, 4, b"0", b"4", OLD.runs[0].name, "op-1/runs/1/0/5-8/4-a-0.run")], False),
        ([level(0, 2, b"0", b"2", "op-1/runs/1/0/2-1/2-a-0.run"), OLDER[1], NEW], False),
        ([replace(OLD, runs=[replace(OLD.runs[0], checksum=b"?")]), OLDER[1], NEW], False),
    ],
)
def test_levels_are_the_bases_first_ones_and_one_more(levels: list[Level], expected: bool) -> None:
    assert is_within_grant(levels, GRANT) is expected


def test_a_grant_ends_once_and_only_its_own_outcome_ends_it() -> None:
    grants = Grants(lambda subtask: f"op-1/runs/1/{subtask}")
    first, second = (grants.open(subtask, "5-9", b"3", OLDER) for subtask in (0, 1))
    assert first.folder == FOLDER
    assert grants.of(0) == first
    assert not grants.end_pending(0), "what is durable is not its outcome"
    assert grants.of(0) == first
    grants.take(0)
    assert grants.of(0) is None, "no other outcome of the job counts"
    assert grants.has(0)
    assert grants.is_open(f"{FOLDER}/4-a-0.run"), "the checkpoint with it is not durable yet"
    assert grants.end_pending(0)
    assert not grants.has(0)
    assert not grants.is_open(f"{FOLDER}/4-a-0.run")
    assert not grants.end_pending(0)
    assert not grants.end(0)
    assert grants.of(1) == second
    assert grants.ended() == [FOLDER]
    assert grants.ended() == []


def test_a_job_that_leaves_nothing_is_not_swept_up_after() -> None:
    grants = Grants(lambda subtask: f"op-1/runs/1/{subtask}")
    grants.open(0, "5-9", b"3", OLDER)
    assert grants.end(0, has_leftovers=False)
    assert grants.ended() == []


def test_a_run_that_is_over_has_no_grants() -> None:
    grants = Grants(lambda subtask: f"op-1/runs/1/{subtask}")
    grants.open(0, "5-9", b"3", OLDER)
    grants.take(0)
    grants.end_all()
    assert (grants.of(0), grants.has(0), grants.is_open(f"{FOLDER}/4-a-0.run")) == (None, False, False)
    grants.open(0, "6-9", b"3", OLDER)
    assert not grants.end_pending(0)


# ---- Through the coordinator ----


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    made = Engine(tmp_path, lambda key: 0, file_merging="off")
    made.options = _options(made.options)
    return made


def _options(options: Options, **changed: Any) -> Options:
    return changed_options(options, materialization_interval_s=0, retained_checkpoints=2, log_min_age_s=0, **changed)


@pytest.fixture
def attempts(engine: Engine) -> Attempts:
    engine.start(1, 0)
    return Attempts(engine)


def test_a_job_counts_once_and_one_of_another_host_not_at_all(attempts: Attempts) -> None:
    attempts.batch(0)
    begun = attempts.begin(1)
    job = attempts.grant(begun).job
    here, there = attempts.store(begun, 0, "a"), attempts.store(begun, 0, "b")
    assert attempts.ack(1, b"1", here, job) is JobOutcome.ACCEPTED
    attempts.begin(1)
    assert attempts.ack(1, b"1", there, job) is JobOutcome.VOID
    begun = attempts.begin(2)
    assert attempts.grant(begun).job != job
    assert attempts.ack(2, b"2", there, job) is JobOutcome.VOID, "it was begun on an older base"
    assert attempts.runs == [here[0].runs[0].name], "what the other host has stored is gone"
    begun = attempts.begin(3)
    job = attempts.grant(begun).job
    newer = attempts.store(begun, 2)
    assert newer[0] == here[0]
    assert attempts.ack(3, b"3", newer, job) is JobOutcome.ACCEPTED
    assert [base.levels for base in attempts.latest.bases] == [newer]


def test_a_call_that_is_repeated_for_want_of_its_reply_gets_the_same(attempts: Attempts) -> None:
    attempts.batch(0)
    begun = attempts.begin(1)
    levels, job = attempts.store(begun, 0), attempts.grant(begun).job
    for _ in range(3):
        assert attempts.ack(1, b"1", levels, job) is JobOutcome.ACCEPTED
    assert attempts.latest.bases[0].levels == levels
    assert attempts.latest.revision == 0
    attempts.batch(2)
    assert attempts.runs == [levels[0].runs[0].name]


def test_a_job_that_comes_with_a_repetition_is_kept_for_the_next_batch(attempts: Attempts) -> None:
    """The checkpoint is there already, and the same result again writes nothing."""
    attempts.batch(0)
    begun = attempts.begin(1)
    levels, job = attempts.store(begun, 0), attempts.grant(begun).job
    attempts.ack(1, b"1")
    again = attempts.begin(1)
    assert attempts.grant(again).job == job
    assert attempts.ack(1, b"1", levels, job) is JobOutcome.OPEN
    assert attempts.latest.bases == []
    attempts.begin(2)
    assert attempts.runs == [levels[0].runs[0].name]
    assert attempts.ack(2, b"2", levels, job) is JobOutcome.ACCEPTED
    assert attempts.latest.bases[0].levels == levels


def test_a_job_that_comes_with_another_result_is_part_of_the_revision(attempts: Attempts) -> None:
    attempts.batch(0)
    begun = attempts.begin(1)
    levels, job = attempts.store(begun, 0), attempts.grant(begun).job
    attempts.ack(1, b"1")
    attempts.begin(1)
    assert attempts.ack(1, b"another", levels, job) is JobOutcome.ACCEPTED
    assert (attempts.latest.revision, attempts.latest.bases[0].levels) == (1, levels)
    attempts.begin(1)
    assert attempts.ack(1, b"a third") is JobOutcome.NONE
    assert (attempts.latest.revision, attempts.latest.bases[0].levels) == (2, levels), "and of every later one"


def test_a_job_for_another_state_is_void_and_begun_again(attempts: Attempts) -> None:
    attempts.batch(0)
    begun = attempts.begin(1)
    job = attempts.grant(begun).job
    [made] = attempts.store(begun, 0)
    assert attempts.ack(1, b"1", [replace(made, after=b"?" * 16)], job) is JobOutcome.VOID
    assert attempts.latest.bases == []
    begun = attempts.begin(2)
    assert attempts.grant(begun).job != job, "its slot is free again"
    assert attempts.runs == []


@pytest.mark.parametrize("wrong", ["old runs", "own and old runs", "without the base", "another base"])
def test_a_job_that_names_what_it_was_not_granted_is_void(attempts: Attempts, wrong: str) -> None:
    """Although the objects are there and the digests fit: nobody has checked that they hold that state."""
    attempts.batch(0)
    begun = attempts.begin(1)
    [known] = attempts.store(begun, 0)
    assert attempts.ack(1, b"1", [known], attempts.grant(begun).job) is JobOutcome.ACCEPTED
    begun = attempts.begin(2)
    _, own = attempts.store(begun, 1)
    old = known.runs[0].name
    levels = {
        "old runs": [level(0, 1, known.before, begun.view.head, old, old)],
        "own and old runs": [known, level(1, 1, own.before, begun.view.head, own.runs[0].name, old)],
        "without the base": [own],
        "another base": [replace(known, first=-1), own],
    }[wrong]
    assert attempts.ack(2, b"2", levels, attempts.grant(begun).job) is JobOutcome.VOID
    assert (attempts.latest.batch, attempts.latest.bases) == (2, [])


def test_the_newest_level_of_a_job_is_the_one_that_must_fit(attempts: Attempts) -> None:
    attempts.batch(0)
    begun = attempts.begin(1)
    attempts.ack(1, b"1", attempts.store(begun, 0), attempts.grant(begun).job)
    begun = attempts.begin(2)
    known, own = attempts.store(begun, 1)
    levels = [known, replace(own, after=b"?" * 16)]
    assert attempts.ack(2, b"2", levels, attempts.grant(begun).job) is JobOutcome.VOID


def test_a_job_may_not_hold_changes_of_a_batch_that_can_be_repeated(attempts: Attempts) -> None:
    attempts.batch(0)
    attempts.batch(1)
    begun = attempts.begin(1)
    after = digests.extend(begun.view.head, 1, [digests.checksum(b"1")])
    [made] = attempts.store(begun, 1)
    assert attempts.ack(1, b"1", [replace(made, after=after)], attempts.grant(begun).job) is JobOutcome.VOID
    attempts.batch(2)
    assert attempts.latest.bases == []


def test_a_job_that_comes_late_does_not_end_the_one_of_now(attempts: Attempts) -> None:
    attempts.batch(0)
    begun = attempts.begin(1)
    old, levels = attempts.grant(begun).job, attempts.store(begun, 0)
    attempts.ack(1, b"1", levels, old)
    now = attempts.grant(attempts.begin(2)).job
    assert attempts.ack(2, b"2", levels, old) is JobOutcome.VOID
    again = attempts.begin(2)
    assert attempts.grant(again).job == now
    assert attempts.ack(2, b"2", job=old, materialization_failure="no room") is JobOutcome.VOID
    begun = attempts.begin(3)
    assert attempts.grant(begun).job == now
    assert attempts.ack(3, b"3", attempts.store(again, 1), now) is JobOutcome.ACCEPTED


def test_a_failure_counts_once(attempts: Attempts) -> None:
    attempts.batch(0)
    job = attempts.grant(attempts.begin(1)).job
    for _ in range(5):
        assert attempts.ack(1, b"1", job=job, materialization_failure="no room") is JobOutcome.VOID
        attempts.begin(1)
    attempts.ack(1, b"1")
    begun = attempts.begin(2)
    assert attempts.ack(2, b"2", attempts.store(begun, 1), attempts.grant(begun).job) is JobOutcome.ACCEPTED


def test_a_changeset_in_a_foreign_object_is_refused(attempts: Attempts) -> None:
    begun = attempts.begin(0)
    folder = f"{attempts.engine.identity}/changes"
    for name in (
        f"{folder}/1/1/0-a.run",
        f"{folder}/0/0/0-a.run",
        "op-2/changes/1/0/0-a.run",
        f"{begun.permit.upload_prefix}/1-a.run",
    ):
        with pytest.raises(ProtocolError, match=f"subtask 0 named {name} as its changeset of batch 0"):
            attempts.ack(0, b"", name=name)
    assert attempts.ack(0, b"", name=f"{begun.permit.upload_prefix}/0-a.run") is JobOutcome.NONE


@pytest.mark.parametrize("change", [{"subtask": 1}, {"attempt": 5}])
@pytest.mark.parametrize("is_inline", [True, False])
def test_a_changeset_of_another_attempt_is_refused(attempts: Attempts, change: dict[str, int], is_inline: bool) -> None:
    begun = attempts.begin(0)
    message = make_ack(
        attempts.task(0), digests.checksum(b"x"), 1, name="" if is_inline else f"{begun.permit.upload_prefix}/0-a.run"
    )
    message.segments[0] = replace(message.segments[0], **change)
    with pytest.raises(ProtocolError, match="which is not below .* or not of attempt"):
        attempts.engine.coordinator.ack(message, b"x" if is_inline else b"")


def test_without_changelog_a_foreign_level_fails_the_task(engine: Engine) -> None:
    engine.options = _options(engine.options, changelog=False)
    engine.start(1, 0)
    attempts = Attempts(engine)
    begun = attempts.begin(0)
    job = attempts.grant(begun).job
    after = digests.extend(begun.view.head, 0, [b"sum"])
    foreign = level(0, 0, begun.view.head, after, "op-1/runs/1/0/another/0-a-0.run")
    own = level(0, 0, begun.view.head, after, f"{attempts.grant(begun).folder}/0-a-0.run")
    for levels, name in (([foreign], job), ([own], "another"), ([replace(own, last=1)], job)):
        with pytest.raises(ProtocolError, match="subtask 0 names stored state in batch 0"):
            attempts.ack(0, b"", levels, name, has_changeset=False)
    assert attempts.ack(0, b"", [own], job, has_changeset=False) is JobOutcome.ACCEPTED


@pytest.mark.parametrize("operation", ["append", "put_if_absent"])
def test_close_keeps_the_runs_of_a_revision_in_doubt(tmp_path: Path, operation: str) -> None:
    """Revision 0 is durable, revision 1 was written and its answer lost: whoever reads the log finds revision 1."""
    call = 2 if operation == "append" else 3
    stores = iter([FaultStore(LocalStore(tmp_path / "location"), FaultPlan.at(operation, call=call, when="after"))])
    engine = Engine(
        tmp_path,
        lambda key: 0,
        file_merging="across" if operation == "append" else "within",
        open_store=lambda location: next(stores, None) or LocalStore(location),
    )
    engine.options = _options(engine.options, changelog=False, inline_budget_bytes=0)
    engine.start(1, 0)
    engine.run_commands(0, 0, [((1, None), ("set", 1))])
    with pytest.raises(StorageError):
        engine.run_commands(0, 0, [((1, None), ("set", 2))])
    engine.coordinator.close()
    engine.start(1, 1, keep_local=False)
    assert engine.run_commands(1, 0, [((1, None), ("read",))])[0][1][0] == [2]


# ---- What entries say is retained ----


def batches(engine: Engine, first: int, last: int) -> None:
    for batch in range(first, last):
        engine.run_commands(batch, 0, [((1, None), ("append", str(batch)))])


def test_entries_record_the_oldest_checkpoint_that_can_be_restored(engine: Engine) -> None:
    engine.start(1, 0)
    batches(engine, 0, 6)
    assert history_of(engine).retained_from == 4
    engine.options = dataclasses.replace(engine.options, retained_checkpoints=20)
    engine.start(1, 6)
    batches(engine, 6, 8)
    assert history_of(engine).retained_from == 4, "what is gone does not come back with another setting"


@pytest.mark.parametrize("merging", ["across", "within"])
def test_a_checkpoint_that_is_given_up_is_refused_although_its_entry_is_there(tmp_path: Path, merging: str) -> None:
    engine = Engine(tmp_path, lambda key: 0, file_merging=merging)
    engine.options = _options(engine.options, inline_budget_bytes=0, materialization=False)
    engine.start(1, 0)
    batches(engine, 0, 9)
    history = history_of(engine)
    assert history.at(5) is not None, "later ones build on it"
    with pytest.raises(StateMissingError, match="needs checkpoint 5, but the oldest that is retained is checkpoint 7"):
        engine.start(1, 6)
    engine.start(1, 8)
    assert engine.run_commands(8, 0, [((1, None), ("read",))])[0][1][1] == [str(batch) for batch in range(8)]


def test_a_held_checkpoint_stays_until_it_is_let_go(engine: Engine) -> None:
    engine.start(1, 0)
    batches(engine, 0, 5)
    with engine.coordinator.holding(3) as held:
        assert held is not None
        batches(engine, 5, 12)
        history = history_of(engine)
        assert history.retained_from == 3
        stored = {info.name for info in LocalStore(engine.location).list()}
        record = held.histories[engine.identity].record(3)
        assert record is not None
        assert record.base_map is not None
        assert {run.name for base_range in record.base_map.ranges for run in base_range.runs} <= stored
        with engine.coordinator.holding(1) as gone:
            assert gone is None, "it was no longer retained"
            batches(engine, 12, 14)
        assert history_of(engine).retained_from == 3
    batches(engine, 14, 15)
    assert history_of(engine).retained_from == 13


def test_a_run_is_closed_once(engine: Engine) -> None:
    engine.start(1, 0)
    batches(engine, 0, 2)
    store = LocalStore(engine.location)
    engine.coordinator.close()
    name = f"{engine.identity}/changes/1/0/0-another.run"
    store.put(name, b"of whoever has the location now")
    engine.coordinator.close()
    assert store.read(name)
