"""What crashed runs left behind can be listed before anything is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

import statelog
from statelog import Step
from statelog.clock import ManualClock
from statelog.errors import ConfigurationError
from statelog.storage import LocalStore
from statelog.testing.crashes import Crash
from tests.model.engine import Engine
from tests.model.operator_engine import OperatorEngine


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
    assert [info.name.split("/")[:2] for info in found] == [["op", "changes"], ["op", "initial"]]
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
    name = f"op/log/{2:020}.log"
    late = store.read(name)
    for batch in range(2, 6):
        engine.run_subtask(batch, 0, [["add", "items", "x"]])
    assert name not in {info.name for info in store.list()}
    store.put_if_absent(name, late)
    found = statelog.list_orphans(engine.location, clock=ManualClock(10**12))
    assert [info.name for info in found] == [name]


def test_nothing_is_there(tmp_path: Path) -> None:
    assert statelog.list_orphans(str(tmp_path / "missing")) == []
    with pytest.raises(ConfigurationError, match="hdfs"):
        statelog.list_orphans("hdfs://host/folder")
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
