"""What crashed runs left behind can be listed before anything is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import statelog
from statelog import Step
from statelog.errors import ConfigurationError
from statelog.history.pins import MARGIN_S
from statelog.storage import LocalStore
from statelog.testing.query import Crash, ManualClock
from tests.contract.log_contract import make_claim
from tests.model.engine import Engine
from tests.model.operator_engine import OperatorEngine
from tests.model.stored_files import folder_of
from tests.queries.list_orphans_support import Stored


def test_orphans_are_what_the_next_start_removes(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path, inline_budget_bytes=0, retained_checkpoints=2)
    store = LocalStore(engine.location)
    engine.start(2, 0)
    for batch in range(3):
        for subtask in range(2):
            engine.run_subtask(batch, subtask, [["add", "items", "x"]])
    clock = ManualClock(10**12)
    assert statelog.list_orphans(engine.location, clock=clock) == []
    engine.observer.arm(Step.ACKING)
    with pytest.raises(Crash):
        engine.run_subtask(3, 0, [["add", "items", "x"]])
    store.put("elsewhere/file", b"not ours")
    store.put("op/initial/run/0.arrow", b"rows")
    found = statelog.list_orphans(engine.location, clock=clock)
    assert [folder_of(info.name) for info in found] == ["changes", "initial"]
    assert statelog.list_orphans(engine.location, min_age_s=10**12, clock=clock) == []
    before = {info.name for info in store.list()}
    engine.clock.advance(10**12)
    engine.start(2, 3)
    assert before - {info.name for info in store.list()} == {info.name for info in found}
    assert statelog.list_orphans(engine.location, clock=clock) == []


def test_a_claim_removes_the_initial_state_of_the_runs_that_it_fences_off(tmp_path: Path) -> None:
    """Not of one that has not claimed yet, and whose rows are young: it may be about to."""
    engine = OperatorEngine(tmp_path)
    engine.clock = ManualClock(1000)
    store = LocalStore(engine.location)
    engine.start(1, 0)
    rows = [f"op/initial/{run}/0.arrow" for run in ("run-1", "run-2", "unknown")]
    for name in rows:
        store.put(name, b"rows")
    engine.start(1, 0)
    assert [info.name for info in store.list("op/initial/")] == rows[1:]
    engine.runs -= 1  # the run begins again: a task opens the location that another one could not
    engine.start(1, 0)
    assert [info.name for info in store.list("op/initial/")] == rows[1:]


def test_leftovers_of_the_log_are_orphans(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path, file_merging="within", retained_checkpoints=2)
    store = LocalStore(engine.location)
    engine.start(1, 0)
    for batch in range(2):
        engine.run_subtask(batch, 0, [["add", "items", "x"]])
    name = f"log/{2:020}.log"
    late = store.read(name)
    for batch in range(2, 6):
        engine.run_subtask(batch, 0, [["add", "items", "x"]])
    assert name not in {info.name for info in store.list()}
    store.put_if_absent(name, late)
    found = statelog.list_orphans(engine.location, clock=ManualClock(10**12))
    assert [info.name for info in found] == [name]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


def test_only_what_the_newest_checkpoint_needs_of_the_log_is_no_leftover(stored: Stored) -> None:
    """Files in front of its first one go, but for those with a snapshot that has not changed since."""
    for number in range(1, 7):
        stored.put(f"log/{number:020}.log", b"left behind")
    stored.claim(5, 2)
    stored.checkpoint(6, 2, 0, 4, "op/changes/2/0/a")
    stored.checkpoint(7, 2, 1, 5, f"log/{3:020}.log")
    stored.put("log/notes.txt")
    found = [f"log/{number:020}.log" for number in (1, 2, 4)]
    assert stored.orphans() == found, "nor what is none of the log's files"
    assert stored.orphans(age_s=59.9) == [], "nor what is young"


def test_objects_of_a_run_that_is_about_to_claim_are_no_leftovers(stored: Stored) -> None:
    stored.claim(1, 1)
    stored.claim(2, 2)
    stored.checkpoint(3, 2, 0, 1, "op/changes/2/0/needed")
    for epoch in (1, 2, 3):
        for name in (f"op/changes/{epoch}/0/needed", f"op/runs/{epoch}/0/a"):
            stored.put(name)
    assert stored.orphans() == ["op/changes/1/0/needed", "op/runs/1/0/a", "op/runs/2/0/a"]


def test_what_a_pin_keeps_is_no_leftover_until_it_has_expired(stored: Stored) -> None:
    log_file, object_name = f"log/{1:020}.log", "op/changes/1/0/a"
    stored.claim(1, 1)
    stored.claim(2, 2)
    stored.checkpoint(3, 2, 0, 2)
    stored.put(object_name)
    stored.pin(b"pin", object_name, log_file)
    assert stored.orphans(age_s=100 + MARGIN_S) == []
    assert stored.orphans(age_s=101 + MARGIN_S) == [log_file, object_name]


def test_without_a_checkpoint_all_of_the_log_may_be_needed(stored: Stored) -> None:
    stored.put("op/changes/1/0/a")
    stored.claim(1, 1)
    assert stored.orphans() == ["op/changes/1/0/a"]


def test_objects_of_an_operator_whose_state_was_given_up_are_orphans_at_once(stored: Stored) -> None:
    stored.claim(1, 1)
    stored.checkpoint(2, 1, 0, 1, "op/changes/1/0/a")
    stored.put("op/changes/1/0/a")
    assert stored.orphans() == []
    stored.log_file(3, replace(make_claim("forget")(2), ended=["op"]))
    assert stored.orphans() == ["op/changes/1/0/a"]


def test_what_only_checkpoints_that_were_taken_back_need_is_an_orphan(stored: Stored) -> None:
    stored.claim(1, 1)
    for batch, name in enumerate("ab"):
        stored.checkpoint(2 + batch, 1, batch, 1, f"op/changes/1/0/{name}")
        stored.put(f"op/changes/1/0/{name}")
    assert stored.orphans() == []
    stored.log_file(4, replace(make_claim("rewind")(2), follows=b"1 0"))
    assert stored.orphans() == ["op/changes/1/0/b"]


def test_the_age_is_told_by_the_machines_clock_unless_there_is_another(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path)
    engine.start(1, 0)
    LocalStore(engine.location).put("op/changes/1/0/a", b"x")
    assert statelog.list_orphans(engine.location) == []
    assert [info.name for info in statelog.list_orphans(engine.location, min_age_s=0)] == ["op/changes/1/0/a"]


def test_nothing_is_there(tmp_path: Path) -> None:
    assert statelog.list_orphans(str(tmp_path / "missing")) == []
    with pytest.raises(ConfigurationError, match="viewfs"):
        statelog.list_orphans("viewfs://host/folder")
    (tmp_path / "file").write_text("no directory")
    assert statelog.list_orphans(str(tmp_path / "file")) == []


def test_half_written_files_of_killed_writers_go_with_a_later_start(tmp_path: Path) -> None:
    """A process that is killed while it writes leaves a file that no listing shows."""
    engine = Engine(tmp_path, lambda key: 0, inline_budget_bytes=0)
    engine.start(1, 0)
    engine.run_commands(0, 0, [((1, None), ("set", 1))])
    [upload] = (tmp_path / "location").rglob("*.run")
    left = upload.with_name(".4711.killed.tmp")
    left.write_bytes(bytes(5 << 20))
    engine.start(1, 1)
    assert not left.exists()
