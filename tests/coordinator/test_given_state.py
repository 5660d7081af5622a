"""An operator that does not begin with nothing: it is given state, and its first checkpoint says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from statelog.coordinator.coordinator import Coordinator
from statelog.coordinator.views import given_base
from statelog.history.query_history import QueryHistory
from statelog.log.entry import INITIAL_BATCH, Checkpoint
from statelog.log.references import StoredRun
from statelog.storage import LocalStore
from tests.model.engine import Engine, Key
from tests.model.stored_files import give_up_state

GIVEN = "op-given/runs/1/0/given.run"
OPEN = Coordinator.open
LOW: Key = (1, None)
HIGH: Key = (2, None)
HASHES: dict[Key, int] = {LOW: 5, HIGH: (1 << 64) - 5}


def hash_of(key: Key) -> int:
    return HASHES[key]


def values(engine: Engine, batch: int) -> dict[int, list[int] | None]:
    parts = engine.parts([(LOW, ("read",)), (HIGH, ("read",))])
    answers = [one for subtask, part in enumerate(parts) for one in engine.run_commands(batch, subtask, part)]
    return {key[0]: read[0] for key, read in answers}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An operator of two subtasks that is given state of the lower one, in an object of the location."""
    source = Engine(tmp_path / "source", hash_of, file_merging="off", inline_budget_bytes=0)
    source.start(2, 0)
    source.run_commands(0, 0, [(LOW, ("set", 7))])
    source.run_commands(0, 1, [])
    history = QueryHistory(source.open_log(LocalStore(source.location)).read()).of("op")
    assert history is not None
    assert history.latest is not None
    [changes] = history.latest.by_subtask()[0]
    stored = LocalStore(source.location)
    made = Engine(tmp_path, hash_of)
    LocalStore(made.location).put(GIVEN, stored.read(changes.name))
    run = StoredRun(GIVEN, 0, changes.length, changes.checksum, changes.rows, 5, 5)
    given = {"op": {0: [run]}}

    def open_given(self: Coordinator, first_batch: int, **_: object) -> None:
        OPEN(self, first_batch, given)

    monkeypatch.setattr(Coordinator, "open", open_given)
    return made


def beginning(engine: Engine) -> Checkpoint:
    """The checkpoint of the operator's first batch."""
    found = QueryHistory(engine.open_log(LocalStore(engine.location)).read()).of("op")
    assert found is not None
    first = found.at(0)
    assert first is not None
    return first


def test_what_is_given_is_the_state_before_the_first_batch(engine: Engine) -> None:
    engine.start(2, 0)
    assert values(engine, 0) == {1: [7], 2: None}
    engine.run_commands(1, 0, [(LOW, ("set", 8))])
    engine.run_commands(1, 1, [(HIGH, ("set", 9))])
    engine.start(3, 2, keep_local=False)
    assert values(engine, 2) == {1: [8], 2: [9]}


def test_a_first_batch_that_is_repeated_begins_with_it_again(engine: Engine) -> None:
    engine.start(2, 0)
    engine.run_commands(0, 0, [(LOW, ("set", 8))])
    engine.run_commands(0, 1, [])
    engine.start(2, 0, keep_local=False)
    assert values(engine, 0) == {1: [7], 2: None}


def test_the_first_checkpoint_says_that_it_begins_and_with_what(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is written before it."""
    caplog.set_level("INFO", "statelog")
    engine.start(2, 0)
    assert "new in the query" not in caplog.text
    assert QueryHistory(engine.open_log(LocalStore(engine.location)).read()).latest is None
    values(engine, 0)
    found = beginning(engine)
    assert found.begins
    assert found.identity == engine.identity
    assert [(one.base.subtask, one.base.through) for one in found.base_ranges or ()] == [(0, -1), (1, -1)]
    assert [run.name for one in found.base_ranges or () for run in one.runs] == [GIVEN]
    values(engine, 1)
    latest = QueryHistory(engine.open_log(LocalStore(engine.location)).read()).latest
    assert latest is not None
    assert (latest.batch, latest.sections[0].begins) == (1, False)


def test_a_revision_of_the_first_checkpoint_begins_with_it_too(engine: Engine) -> None:
    engine.start(2, 0)
    values(engine, 0)
    engine.run_commands(0, 0, [(LOW, ("set", 8))])
    found = beginning(engine)
    assert (found.revision, found.begins) == (1, True)
    assert [run.name for one in found.base_ranges or () for run in one.runs] == [GIVEN]
    assert values(engine, 1) == {1: [8], 2: None}


def test_an_operator_that_begins_later_is_given_its_state_then(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "statelog")
    with monkeypatch.context() as without:
        without.setattr(Coordinator, "open", OPEN)
        former = Engine(engine.directory, hash_of, uid="former")
        former.start(1, 0)
        former.run_commands(0, 0, [])
    entry = QueryHistory(former.open_log(LocalStore(engine.location)).read()).latest
    assert entry is not None
    former.coordinator.close()
    give_up_state(former.open_log(LocalStore(engine.location)), "query", "former")
    engine.start(2, 1, keep_local=False)
    assert "operator 'op'" in caplog.text
    assert "new in the query as of batch 1, and starts with the tables of its initialState" in caplog.text
    assert values(engine, 1) == {1: [7], 2: None}


@pytest.mark.parametrize(("batch", "first"), [(INITIAL_BATCH, INITIAL_BATCH), (7, 0)])
def test_state_that_was_saved_stands_for_all_batches_before(batch: int, first: int) -> None:
    """Those of the query that it was saved of, too."""
    ranges = given_base("op-1", 2, batch, {}, first)
    assert [(level.first, level.last) for one in ranges for level in one.base.levels] == [(first, batch)] * 2
    assert [one.base.subtask for one in ranges] == [0, 1]
    [only] = given_base("op-1", 1, 7, {})
    assert [(level.first, level.last) for level in only.base.levels] == [(7, 7)]
