"""Branches: a query that continues from another's files, while both run, and until it needs none of them any more."""

from __future__ import annotations

import itertools
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError, CorruptionError, ErrorKind, Options, StateMissingError, StorageError
from statelog.history.query_history import QueryHistory, read_history
from statelog.log.entry import Parent
from statelog.log.open import open_location
from statelog.queries import branch as branch_module
from statelog.queries import load as load_module
from statelog.queries.branch import branch_query
from statelog.queries.load import RestoreTarget
from statelog.spark.checkpoint import location as checkpoint_location
from statelog.storage import LocalStore, Store
from statelog.storage.links import is_link
from statelog.testing.faults import FaultStore
from statelog.testing.query import ManualClock
from tests.coordinator.crash_points_support import When
from tests.model.operator_engine import OperatorEngine
from tests.model.stored_files import is_pin
from tests.queries.branch_support import OPTIONS, branch_of, commit
from tests.queries.savepoint_faults_support import deaths
from tests.reading.pins_support import Stop
from tests.reading.story import STATES, Story, rows
from tests.stored_query import StoredQuery, saved_values


def require_state(story: Story) -> None:
    """Read the newest checkpoint from outside."""
    for state, expected in STATES.items():
        assert rows(statelog.read_state(story.location, state=state).read_all()) == expected(story.models[-1])


@pytest.mark.parametrize("inline_budget_bytes", [0, None], ids=["objects", "inline"])
@pytest.mark.parametrize("parallelism", [1, 3, 5])
def test_a_branch_goes_on_from_each_retained_checkpoint(
    tmp_path: Path, inline_budget_bytes: int | None, parallelism: int
) -> None:
    parent = Story(tmp_path / "parent", inline_budget_bytes=inline_budget_bytes, **OPTIONS)
    for _ in range(3):  # an element of a list remembers the epoch that appended it
        parent.start()
        parent.run_batches(3, random.Random(1))
    for at in (6, 7, 8, None):
        branch = branch_of(parent, tmp_path / f"branch-{at}", at)
        require_state(branch)
        branch.start(parallelism, keep_local=False)
        branch.run_batches(3, random.Random(at))
        require_state(branch)
    parent.run_batches(2, random.Random(2))
    require_state(parent)


def pins_of(story: Story) -> list[str]:
    return [info.name for info in LocalStore(story.location).list("pins/")]


def log_of(story: Story | OperatorEngine) -> QueryHistory:
    return read_history(open_location(story.location))


def links_of(story: Story | OperatorEngine) -> set[str]:
    """The parent's objects that the branch's log names."""
    return {name for name in log_of(story).object_names() if is_link(name)}


def test_parent_and_branch_go_on_until_the_branch_needs_the_parent_no_more(tmp_path: Path) -> None:
    rng = random.Random(1)
    parent = Story(tmp_path / "parent", inline_budget_bytes=0, **OPTIONS)
    parent.run_batches(9, rng)
    branch = branch_of(parent, tmp_path / "branch", 7)
    [pin] = pins_of(parent)
    branch.start(2, keep_local=False)
    for _ in range(60):
        story = rng.choice([parent, parent, branch])
        if rng.random() < 0.2:
            story.start(rng.choice([1, 2, 3]), keep_local=rng.random() < 0.5)
        story.run_batches(1, rng)
        require_state(story)
        if not pins_of(parent):
            break
        assert pins_of(parent) == [pin]
    assert not pins_of(parent), "the branch has never materialized all state anew"
    assert links_of(branch) == set()
    assert log_of(branch).parent is None
    parent.run_batches(8, rng)
    branch.start(1, keep_local=False)
    branch.run_batches(1, rng)
    require_state(branch)


def test_a_branch_is_made_however_fast_its_parent_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each request in turn, the parent makes more checkpoints than it retains; and all it forgets is deleted."""
    story = Story(tmp_path / "story", inline_budget_bytes=0, **OPTIONS)
    story.run_batches(6, random.Random(1))
    for number in itertools.count(1, 5):
        parent = story.copied(tmp_path / f"{number}-parent")
        parent.start(keep_local=False)

        def work(parent: Story = parent, number: int = number) -> None:
            parent.run_batches(OPTIONS["retained_checkpoints"] + 2, random.Random(2))
            commit(parent, tmp_path / str(number) / "parent")

        stop = Stop(number, work)

        def opened(location: str, stop: Stop = stop) -> Store:
            return FaultStore(open_location(location), stop)

        with monkeypatch.context() as patched:
            for module in (load_module, checkpoint_location):
                patched.setattr(module, "open_location", opened)
            branch = branch_of(parent, tmp_path / str(number))
        parent.run_batches(6, random.Random(3))
        require_state(branch)
        branch.start(2, keep_local=False)
        branch.run_batches(1, random.Random(4))
        require_state(branch)
        if stop.requests < number:
            break
    assert number > 20


@pytest.mark.parametrize("inline_budget_bytes", [0, None], ids=["objects", "inline"])
def test_a_branch_that_stood_still_for_weeks_still_starts(tmp_path: Path, inline_budget_bytes: int | None) -> None:
    parent = Story(tmp_path / "parent", inline_budget_bytes=inline_budget_bytes, orphan_min_age_s=0, **OPTIONS)
    parent.run_batches(5, random.Random(1))
    branch = branch_of(parent, tmp_path / "branch")
    parent.engine.clock.advance(30 * 86400)
    parent.start(2, keep_local=False)
    parent.run_batches(20, random.Random(2))
    parent.start(1, keep_local=False)
    clock = ManualClock(parent.engine.clock.now_s())
    statelog.delete_orphans(parent.location, clock=clock, release=True)
    assert links_of(branch) > links_of(parent)
    branch.start(3, keep_local=False)
    branch.run_batches(2, random.Random(3))
    require_state(branch)
    require_state(parent)


def test_a_pin_of_the_branch_keeps_the_parents_objects(tmp_path: Path) -> None:
    parent = Story(tmp_path / "parent", inline_budget_bytes=0, **OPTIONS)
    parent.run_batches(5, random.Random(1))
    branch = branch_of(parent, tmp_path / "branch")
    at = len(branch.models) - 1
    pin = statelog.pin(branch.location, at=at, lasts_s=None, owner="audit").name
    branch.start(2, keep_local=False)
    branch.run_batches(40, random.Random(2))
    assert links_of(branch) == set()
    assert len(pins_of(parent)) == 1
    parent.run_batches(20, random.Random(3))
    assert rows(statelog.read_state(branch.location, state="value", at=at).read_all()) == STATES["value"](
        branch.models[at]
    )
    statelog.unpin(branch.location, pin)
    branch.run_batches(8, random.Random(4))
    assert pins_of(parent) == []


def test_a_branch_of_a_branch(tmp_path: Path) -> None:
    parent = Story(tmp_path / "parent", inline_budget_bytes=0, **OPTIONS)
    parent.run_batches(5, random.Random(1))
    first = branch_of(parent, tmp_path / "first")
    first.start(2, keep_local=False)
    first.run_batches(1, random.Random(2))
    second = branch_of(first, tmp_path / "second")
    assert {name.split("!/")[0] for name in links_of(second)} == {parent.location, first.location}
    first.run_batches(40, random.Random(3))
    assert links_of(first) == set()
    assert len(pins_of(parent)) == 1, "for the second branch"
    parent.run_batches(20, random.Random(4))
    second.start(3, keep_local=False)
    second.run_batches(40, random.Random(5))
    require_state(second)
    assert pins_of(first) == []
    first.run_batches(8, random.Random(6))
    assert pins_of(parent) == []


def test_pins_of_branches_that_are_gone_are_released_on_request(tmp_path: Path) -> None:
    parent = Story(tmp_path / "parent", inline_budget_bytes=0, **OPTIONS)
    parent.run_batches(5, random.Random(1))
    branch = branch_of(parent, tmp_path / "branch")
    branch_of(parent, tmp_path / "gone")
    lasting = statelog.pin(parent.location, lasts_s=None, owner="audit").name
    shutil.rmtree(tmp_path / "gone")
    clock = ManualClock(time.time() + 60)
    statelog.delete_orphans(parent.location, min_age_s=0, clock=clock)
    assert len(pins_of(parent)) == 3
    statelog.delete_orphans(parent.location, min_age_s=3600, clock=clock, release=True)
    assert len(pins_of(parent)) == 3, "the branch may be about to be made"
    released = statelog.delete_orphans(parent.location, min_age_s=0, clock=clock, release=True)
    assert [info.name for info in released if is_pin(info.name)]
    assert lasting in pins_of(parent)
    assert len(pins_of(parent)) == 2
    require_state(branch)


def test_another_branch_in_the_place_of_one_does_not_keep_its_pin(tmp_path: Path) -> None:
    parent = Story(tmp_path / "parent", inline_budget_bytes=0, **OPTIONS)
    parent.run_batches(5, random.Random(1))
    branch_of(parent, tmp_path / "branch")
    [former] = pins_of(parent)
    shutil.rmtree(tmp_path / "branch")
    branch = branch_of(parent, tmp_path / "branch")
    assert len(pins_of(parent)) == 2
    released = statelog.delete_orphans(parent.location, min_age_s=0, release=True, clock=ManualClock(time.time() + 60))
    assert [info.name for info in released] == [former]
    assert len(pins_of(parent)) == 1
    require_state(branch)


def test_the_commands_on_stored_state_know_a_branch(tmp_path: Path) -> None:
    parent = Story(tmp_path / "parent", inline_budget_bytes=0, **OPTIONS)
    parent.run_batches(6, random.Random(1))
    branch = branch_of(parent, tmp_path / "branch")
    assert all(one.is_equal for one in statelog.compare(parent.location, branch.location))
    assert statelog.verify(branch.location).damages == ()
    branch.start(2, keep_local=False)
    branch.run_batches(2, random.Random(2))
    commit(branch, tmp_path / "branch/checkpoint")
    checkpoint = str(tmp_path / "branch/checkpoint")
    assert statelog.verify(branch.location).whole == {"op": 7}
    statelog.savepoint(checkpoint, tmp_path / "saved", location=branch.location)
    saved = statelog.read_state(tmp_path / "saved", state="value")
    assert rows(saved.read_all()) == STATES["value"](branch.models[-1])
    assert statelog.rewind(checkpoint, location=branch.location, to=6).next_batch == 7
    [lost, *_] = sorted(links_of(branch))
    Path(lost.replace("!", "")).unlink()
    [damage] = statelog.verify(branch.location).damages[:1]
    assert damage.name == lost


# ---- Whole queries ----


@pytest.mark.parametrize("at", [3, None])
def test_all_operators_of_a_query_are_branched(tmp_path: Path, at: int | None) -> None:
    query = StoredQuery(tmp_path / "query").run(["a", "b"], range(6))
    made = statelog.branch(query.checkpoint, tmp_path / "branch", at=at)
    last = 5 if at is None else at
    assert (made.next_batch, made.checkpoint_location) == (last + 1, str(tmp_path / "branch"))
    assert statelog.savepoint(tmp_path / "branch", tmp_path / "saved").query_id == made.query_id
    assert saved_values(tmp_path / "saved") == {"a": last, "b": last}
    names, theirs = (
        read_history(open_location(location)).names for location in (f"{tmp_path}/branch/statelog", query.location)
    )
    assert names == theirs, "operators keep their identities"


def test_an_unkeyed_operator_is_branched(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path / "parent", inline_budget_bytes=0)
    engine.start(2, 0)
    for batch in range(4):
        for subtask in range(2):
            engine.run_subtask(batch, subtask, [["add", "items", f"{batch}-{subtask}"]])
    target = RestoreTarget(
        location=str(tmp_path / "branch/location"),
        query_id="query",
        run_id="branch",
        batch=3,
        options=Options(),
        clock=ManualClock(0),
        new_token=lambda: bytes(16),
    )
    branch_query(log_of(engine), Parent(engine.location, 3, f"pins/{0:020}-0000000000000000.json"), target)
    branch = OperatorEngine(tmp_path / "branch", open_store=open_location, retained_checkpoints=2)
    branch.start(1, 4)
    assert len(links_of(branch)) == 2
    for batch in range(4, 8):
        branch.run_subtask(batch, 0, [["add", "items", f"{batch}-0"]])
    found = statelog.read_state(branch.location, state="items").read_all()["value_field"].to_pylist()
    assert sorted(found) == sorted(
        [f"{batch}-{subtask}" for batch in range(4) for subtask in range(2)] + [f"{batch}-0" for batch in range(4, 8)]
    )
    assert links_of(branch) == set()
    assert log_of(branch).parent is None


# ---- Failures and mistakes ----


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_branch_that_is_not_finished_is_none_and_harms_nothing(
    when: When, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pin stays until it is released."""
    query = StoredQuery(tmp_path / "query").run(["a", "b"], range(3))
    state = query.checkpoint / "statelog"
    before = {path: path.read_bytes() for path in query.checkpoint.rglob("*") if path.is_file()}
    target, finished = tmp_path / "branch", []

    def check() -> None:
        finished.append((target / "metadata").exists())
        if finished[-1]:
            statelog.savepoint(target, tmp_path / f"saved-{len(finished)}")
            assert saved_values(tmp_path / f"saved-{len(finished)}") == {"a": 2, "b": 2}
        shutil.rmtree(target, ignore_errors=True)
        statelog.delete_orphans(state, min_age_s=0, release=True, clock=ManualClock(time.time() + 60))
        assert {path: path.read_bytes() for path in query.checkpoint.rglob("*") if path.is_file()} == before

    modules = (load_module, checkpoint_location)
    assert deaths(monkeypatch, when, lambda: statelog.branch(query.checkpoint, target), check, modules) >= 12
    assert not all(finished)


def test_an_error_leaves_no_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = StoredQuery(tmp_path / "query").run(["a", "b"], range(3))
    (query.checkpoint / "sources/0").mkdir(parents=True)
    monkeypatch.setattr(branch_module, "branch_query", refuse)
    with pytest.raises(StorageError, match="no space"):
        statelog.branch(query.checkpoint, tmp_path / "branch")
    assert list(query.checkpoint.glob("statelog/pins/*")) == []


def refuse(*arguments: Any) -> None:
    raise StorageError("There is no space.")


def test_mistakes_are_named(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path / "query").run(["a", "b"], range(6))
    with pytest.raises(ConfigurationError, match="holds no checkpoint of a Spark query"):
        statelog.branch(tmp_path / "nowhere", tmp_path / "branch")
    with pytest.raises(StateMissingError, match="Batch 9 is not one that Spark has committed"):
        statelog.branch(query.checkpoint, tmp_path / "branch", at=9)
    with pytest.raises(ConfigurationError, match="already holds a checkpoint of a Spark query"):
        statelog.branch(query.checkpoint, query.checkpoint)
    with pytest.raises(ConfigurationError, match="The checkpointLocation .* is within .*/statelog"):
        statelog.branch(query.checkpoint, query.checkpoint / "statelog" / "branch")
    for place in (query.location, f"{query.location}/pins/1", str(query.checkpoint / "offsets")):
        with pytest.raises(ConfigurationError, match="The location of the branch's state .* is within"):
            statelog.branch(query.checkpoint, tmp_path / "branch", new_location=place)
    statelog.branch(query.checkpoint, tmp_path / "branch")
    with pytest.raises(ConfigurationError, match="already holds a checkpoint of a Spark query"):
        statelog.branch(query.checkpoint, tmp_path / "branch")
    (tmp_path / "branch/metadata").unlink()
    shutil.rmtree(tmp_path / "branch/offsets")
    shutil.rmtree(tmp_path / "branch/commits")
    with pytest.raises(ConfigurationError, match="already holds state.*Branch into an empty location"):
        statelog.branch(query.checkpoint, tmp_path / "branch")
    assert len(list(query.checkpoint.glob("statelog/pins/*"))) == 1, "that of the branch"


def test_a_branch_without_its_parent_says_which_object_is_gone(tmp_path: Path) -> None:
    parent = Story(tmp_path / "parent", inline_budget_bytes=0, **OPTIONS)
    parent.run_batches(5, random.Random(1))
    branch = branch_of(parent, tmp_path / "branch")
    shutil.rmtree(parent.location)
    branch.start(2, keep_local=False)
    with pytest.raises(CorruptionError, match=rf"{parent.location}/op-.*No such file") as gone:
        branch.run_batches(1, random.Random(2))
    assert gone.value.kind is ErrorKind.OBJECT_MISSING
