"""A location that does not begin with nothing: state that is there before its first batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from statelog.checkpoint.coordinator import Coordinator
from statelog.checkpoint.history import History
from statelog.checkpoint.views import initial_checkpoint
from statelog.log.entry import INITIAL_BATCH, Checkpoint
from statelog.log.references import StoredRun
from statelog.runs.times import NO_TIME_MS
from statelog.storage import LocalStore
from tests.model.engine import Engine, Key

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
    [entry] = [one for one in source.open_log(LocalStore(source.location)).read() if isinstance(one, Checkpoint)]
    [changes] = entry.by_subtask()[0]
    stored = LocalStore(source.location)
    made = Engine(tmp_path, hash_of)
    LocalStore(made.location).put("op/runs/1/0/given.run", stored.read(changes.name))
    run = StoredRun("op/runs/1/0/given.run", 0, changes.length, changes.checksum, changes.rows, 5, 5)
    given = {0: [run]}
    open_empty = Coordinator.open

    def open_given(self: Coordinator, first_batch: int, **_: object) -> None:
        open_empty(self, first_batch, given if first_batch == 0 else None)

    monkeypatch.setattr(Coordinator, "open", open_given)
    return made


def founding(engine: Engine) -> Checkpoint:
    found = History(engine.open_log(LocalStore(engine.location)).read()).at(INITIAL_BATCH)
    assert found is not None
    return found


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


def test_the_checkpoint_before_the_first_says_whose_it_is_and_has_no_time(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "statelog")
    engine.start(2, 0)
    assert "new in the query" not in caplog.text
    found = founding(engine)
    assert (found.epoch, found.revision, found.query_id, found.run_id, found.uid) == (1, 0, "query", "run-1", "op")
    assert (found.batch_time_ms, found.watermark_ms, found.retained_from) == (0, NO_TIME_MS, INITIAL_BATCH)
    assert (found.parallelism, found.log_start) == (2, found.number)
    assert {state.name for state in found.states} == {"value", "list", "map"}
    assert found.key_schema
    assert found.settings
    assert [(one.base.subtask, one.base.through) for one in found.base_ranges or ()] == [(0, -1), (1, -1)]


@pytest.mark.parametrize(("batch", "first"), [(INITIAL_BATCH, INITIAL_BATCH), (7, 0)])
def test_the_state_stands_for_all_batches_before(engine: Engine, batch: int, first: int) -> None:
    """Those of the query that it was saved of, too."""
    engine.start(2, 0)
    made = initial_checkpoint(replace(founding(engine), batch=batch), {})
    assert [(level.first, level.last) for base_range in made.base_ranges or () for level in base_range.base.levels] == [
        (first, batch)
    ] * 2
