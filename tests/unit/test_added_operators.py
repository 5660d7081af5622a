"""An operator that a query gets after its first batch, or whose state was given up: it begins with nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from statelog import ConfigurationError, ErrorKind, FencedError, StateMissingError
from statelog.checkpoint.admission import begins_state
from statelog.checkpoint.coordinator import Coordinator
from statelog.log.entry import Checkpoint, Entry, renamed_to
from statelog.log.open import open_log
from statelog.log.references import StoredRun
from statelog.storage import LocalStore
from tests.contract.log_contract import make_checkpoint, make_claim
from tests.model.engine import Engine, Key
from tests.model.operator_engine import OperatorEngine
from tests.model.stored_files import StoredFiles, give_up_state

LOW: Key = (1, None)
HIGH: Key = (2, None)
HASHES: dict[Key, int] = {LOW: 5, HIGH: (1 << 64) - 5}


def values(engine: Engine, batch: int) -> dict[int | None, list[int] | None]:
    """Read both keys in a batch."""
    parts = engine.parts([(LOW, ("read",)), (HIGH, ("read",))])
    answers = [one for subtask, part in enumerate(parts) for one in engine.run_commands(batch, subtask, part)]
    return {key[0]: read[0] for key, read in answers}


def write(engine: Engine, batch: int, value: int) -> None:
    """Set both keys in a batch."""
    for subtask, part in enumerate(engine.parts([(LOW, ("set", value)), (HIGH, ("set", value))])):
        engine.run_commands(batch, subtask, part)


def give_up(engine: Engine, query_id: str = "query") -> None:
    engine.release()
    give_up_state(engine.open_log(LocalStore(engine.location)), query_id, engine.uid)


def checkpoints(engine: Engine) -> list[Checkpoint]:
    entries = engine.open_log(LocalStore(engine.location)).read()
    return [entry for entry in entries if isinstance(entry, Checkpoint)]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path, lambda key: HASHES[key])


class Changes:
    """Stands for what the checkpoints of other operators tell: this one was added. Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def has_added(self, *arguments: Any) -> bool:
        self.asked.append(arguments)
        return True

    def require_none_removed(self, before: Checkpoint, name: str) -> None:
        self.asked.append((before.batch, name))
        if before.batch == 13:
            raise ConfigurationError("an operator is missing.")


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> Changes:
    """What every start is told of other operators."""
    changes, made = Changes(), Coordinator.__init__

    def make(self: Coordinator, *args: Any, **more: Any) -> None:
        more["changes"] = changes
        made(self, *args, **more)

    monkeypatch.setattr(Coordinator, "__init__", make)
    return changes


@pytest.fixture
def added(engine: Engine, changes: Changes) -> Engine:
    """An operator that the others' checkpoints do not know."""
    return engine


def test_a_start_asks_of_the_batch_before_its_first(
    added: Engine, changes: Changes, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"operator 'op' at {added.location}/op"
    caplog.set_level("INFO", "statelog")
    added.start(2, 7)
    assert set(changes.asked) == {("op", 6, 1006, name)}
    assert f"{name}: it is new in the query as of batch 7, and starts empty" in caplog.text
    write(added, 7, 7)
    changes.asked.clear()
    caplog.clear()
    added.start(2, 8)
    assert set(changes.asked) == {(7, name)}
    assert "new in the query" not in caplog.text


def test_a_start_says_that_an_added_operator_is_given_state(
    added: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given, opened = {0: [StoredRun("op/runs/1/0/given.run", 0, 1, b"", 1, 5, 5)]}, Coordinator.open
    monkeypatch.setattr(Coordinator, "open", lambda self, first_batch, **_: opened(self, first_batch, given))
    caplog.set_level("INFO", "statelog")
    added.start(2, 7)
    assert "as of batch 7, and starts with the state of its initialTables" in caplog.text


def test_a_start_that_leaves_an_operator_behind_does_not_claim(added: Engine) -> None:
    added.start(2, 13)
    write(added, 13, 1)
    before = max(entry.epoch for entry in added.open_log(LocalStore(added.location)).read())
    with pytest.raises(ConfigurationError, match="an operator is missing"):
        added.start(2, 14)
    assert {entry.epoch for entry in added.open_log(LocalStore(added.location)).read()} == {before}


def test_an_added_operator_begins_empty_at_the_next_batch(added: Engine) -> None:
    added.start(2, 7)
    [before] = checkpoints(added)
    assert (before.batch, before.is_initial, before.retained_from, before.batch_time_ms) == (6, True, 6, 1006)
    assert before.operators is None, "a start without the operator must not take it for a removed one"
    assert values(added, 7) == {1: None, 2: None}
    write(added, 8, 8)
    added.start(3, 9, keep_local=False)
    assert values(added, 9) == {1: [8], 2: [8]}


@pytest.mark.parametrize("parallelism", [2, 3])
def test_its_first_batch_begins_empty_again_if_it_is_repeated(added: Engine, parallelism: int) -> None:
    added.start(2, 7)
    write(added, 7, 7)
    added.start(parallelism, 7)
    assert values(added, 7) == {1: None, 2: None}
    assert [(one.batch, one.parallelism) for one in checkpoints(added)][-2:] == [(6, parallelism), (7, parallelism)]


def test_without_a_proof_no_state_is_a_mistake(engine: Engine) -> None:
    with pytest.raises(StateMissingError, match=r"needs checkpoint 6, but there is no checkpoint.*forget\(") as raised:
        engine.start(2, 7)
    assert raised.value.kind is ErrorKind.CHECKPOINT_MISSING
    assert not Path(engine.location, "op").exists(), "nothing is claimed"


def test_old_state_of_an_operator_that_is_added_again_is_not_replaced_silently(added: Engine) -> None:
    added.start(2, 0)
    write(added, 0, 1)
    with pytest.raises(StateMissingError, match="the newest is checkpoint 0"):
        added.start(2, 7)


def test_given_up_state_is_gone_and_its_objects_too(engine: Engine) -> None:
    engine.options = replace(engine.options, inline_budget_bytes=0, log_min_age_s=0)
    engine.start(2, 0)
    for batch in range(3):
        write(engine, batch, batch)
    give_up(engine)
    assert checkpoints(engine) == []
    engine.start(3, 3)
    assert StoredFiles(engine).unreferenced == []
    assert values(engine, 3) == {1: None, 2: None}
    write(engine, 4, 40)
    engine.start(1, 5, keep_local=False)
    assert values(engine, 5) == {1: [40], 2: [40]}
    first = min(info.name for info in LocalStore(engine.location).list("op/log/"))
    assert first > "op/log/00000000000000000002.log", "the given up part of the log goes"


def test_giving_up_fences_off_a_start_that_goes_on(engine: Engine) -> None:
    engine.start(2, 0)
    write(engine, 0, 1)
    give_up(engine)
    with pytest.raises(FencedError, match="epoch 1 does not own the log"):
        write(engine, 1, 2)


def test_another_query_is_not_helped_by_what_one_gave_up(engine: Engine) -> None:
    give_up(engine, "another")
    with pytest.raises(StateMissingError):
        engine.start(2, 7)
    give_up(engine)
    engine.start(2, 7)


def entries_of(*batches: int, gives_up: bool = False, is_initial: bool = False) -> list[Entry]:
    claim = structs.replace(make_claim("a")(1), gives_up=gives_up)
    made = [structs.replace(make_checkpoint("a", 1, batch)[0], is_initial=is_initial) for batch in batches]
    return [*made, claim]


@pytest.mark.parametrize(
    ("entries", "first_batch", "is_added", "expected"),
    [
        ([], 0, False, True),
        (entries_of(0, 1), 0, False, True),
        ([], 5, False, False),
        ([], 5, True, True),
        (entries_of(gives_up=True), 5, False, True),
        (entries_of(4), 5, True, False),
        (entries_of(4, gives_up=True), 5, False, False),
        (entries_of(4, is_initial=True), 5, False, True),
        (entries_of(2), 5, True, False),
        (entries_of(5, 6), 5, True, True),
        (entries_of(5, 6), 5, False, False),
    ],
)
def test_the_first_batch_of_an_operator(entries: list[Entry], first_batch: int, is_added: bool, expected: bool) -> None:
    assert begins_state(entries, "query", first_batch, lambda: is_added) is expected


def test_an_unkeyed_operator_begins_empty_too(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path)
    engine.start(2, 0)
    for subtask in range(2):
        engine.run_subtask(0, subtask, [["add", "items", "a"]], [])
    engine.coordinator.close()
    log = open_log(LocalStore(engine.location), engine.uid, engine.options, engine.clock)
    give_up_state(log, engine.query_id, engine.uid)
    engine.start(3, 1)
    [initial] = [entry for entry in engine.read_log() if isinstance(entry, Checkpoint)]
    assert (initial.batch, initial.is_initial, initial.base_ranges) == (0, True, None)
    assert engine.run_subtask(1, 0, [["read"]], [])[0] == [0, 3, False, False], "it is not restored"


def test_an_operator_has_the_uid_that_its_querys_last_claim_gave_it() -> None:
    claim = make_claim("a")(1)
    renamed = structs.replace(claim, gives_up=True, renamed_to="b")
    other = structs.replace(renamed, query_id="another", renamed_to="c")
    checkpoint, _ = make_checkpoint("a", 1, 0)
    cases: list[tuple[list[Entry], str]] = [
        ([], ""),
        ([checkpoint, claim], ""),
        ([renamed, checkpoint, other, claim], "b"),
        ([renamed, structs.replace(renamed, renamed_to="d")], "d"),
        ([renamed, structs.replace(claim, gives_up=True)], ""),
    ]
    for entries, expected in cases:
        assert renamed_to(entries, "query") == expected
