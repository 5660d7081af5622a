"""Operators that come to a query, leave it, or get another name: whose state continues, and whose starts empty."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from statelog import ConfigurationError, ErrorKind, FencedError, StateMissingError
from statelog.history.query_history import QueryHistory, read_history
from statelog.log.entry import Claim, Entry
from statelog.log.open import open_log
from statelog.storage import LocalStore
from statelog.testing.keyed import KeyedQuery
from statelog.testing.query import LocalOperator, ManualClock
from tests.model.engine import Key, command_query, command_rows
from tests.model.operator_engine import OperatorEngine
from tests.model.stored_files import give_up_state
from tests.options import make_options
from tests.query_runner import QueryRunner

LOW: Key = (1, None)
HIGH: Key = (2, None)
HASHES: dict[Key, int] = {LOW: 5, HIGH: (1 << 64) - 5}
EMPTY = {LOW: None, HIGH: None}


class Query:
    """A query of operators that hold a value for each of two keys."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.options = make_options(orphan_min_age_s=0, log_min_age_s=0, **options)
        self.runner = QueryRunner(directory, self.options)
        self._keyed: dict[str, KeyedQuery] = {}

    @property
    def location(self) -> str:
        return self.runner.location

    def start(self, uids: str, first_batch: int, parallelism: int = 2, *, keep_local: bool = True) -> None:
        """Start the query with operators of some one-letter names."""
        for uid in uids:
            self._keyed.setdefault(uid, command_query(uid, lambda key: HASHES[key], self.options))
        operators: list[LocalOperator] = [self._keyed[uid].operator for uid in uids]
        self.runner.start(operators, parallelism, first_batch, keep_local=keep_local)

    def write(self, batch: int, **new: int) -> None:
        """Set both keys of the operators that are named, in a batch of all."""
        self.run(batch, {uid: ("set", value) for uid, value in new.items()})

    def read(self, batch: int) -> dict[str, dict[Key, int | None]]:
        """Read both keys of each operator in a batch."""
        return self.run(batch, dict.fromkeys(self.runner.operators, ("read",)))

    def run(self, batch: int, commands: Mapping[str, Any]) -> dict[str, dict[Key, int | None]]:
        found: dict[str, dict[Key, int | None]] = {}
        for uid in self.runner.operators:
            command = commands.get(uid)
            rows = [] if command is None else [(key, command) for key in HASHES]
            outputs = self.runner.run_operator(uid, batch, command_rows(self._keyed[uid], rows))
            found[uid] = values_of(outputs)
        return found

    # ---- The log ----

    @property
    def entries(self) -> list[Entry]:
        return open_log(LocalStore(self.location), self.options, ManualClock()).read()

    @property
    def history(self) -> QueryHistory:
        return read_history(LocalStore(self.location))

    def names(self, prefix: str = "") -> list[str]:
        return [info.name for info in LocalStore(self.location).list(prefix)]

    def claim(self, query_id: str = "query", **news: Any) -> None:
        """Let a tool claim the location of the stopped query."""
        self.runner.release()
        log = open_log(LocalStore(self.location), self.options, ManualClock())
        log.claim(lambda epoch: Claim(epoch, query_id, "tool", f"tool {epoch}".encode(), 0, **news))
        log.close()

    def forget(self, uid: str) -> None:
        self.claim(ended=[self.history.names[uid]])

    def rename(self, uid: str, new: str) -> None:
        self.claim(renames={self.history.names[uid]: new})


def values_of(outputs: list[Any]) -> dict[Key, int | None]:
    found: dict[Key, int | None] = {}
    for output in outputs:
        for text in output.column(0).to_pylist():
            (number, name), read = json.loads(text)
            found[number, name] = read[0][0] if read and read[0] else None
    return found


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


# ---- Operators that are added ----


def test_an_added_operator_begins_empty_with_the_first_batch_of_the_start(
    query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "statelog")
    query.start("a", 0)
    query.write(0, a=1)
    assert "new in the query" not in caplog.text, "all are"
    query.start("ab", 1)
    assert f"operator 'b' at {query.location}: it is new in the query as of batch 1, and starts empty" in caplog.text
    assert "operator 'a'" not in caplog.text
    assert query.read(1) == {"a": {LOW: 1, HIGH: 1}, "b": EMPTY}
    query.write(2, b=2)
    caplog.clear()
    query.start("ab", 3, parallelism=3, keep_local=False)
    assert query.read(3) == {"a": {LOW: 1, HIGH: 1}, "b": {LOW: 2, HIGH: 2}}
    assert "new in the query" not in caplog.text
    begun = {
        (entry.batch, section.uid) for entry in query.history.entries for section in entry.sections if section.begins
    }
    assert begun == {(0, "a"), (1, "b")}
    assert query.history.retained_from == -1, "nothing of the other is given up"


@pytest.mark.parametrize("parallelism", [2, 3])
def test_it_begins_empty_again_when_its_first_batch_is_repeated(query: Query, parallelism: int) -> None:
    """Under another identity, so that nothing of the first time is taken for its own; the other continues."""
    query.start("a", 0)
    query.write(0, a=1)
    query.start("ab", 1)
    query.write(1, a=9, b=9)
    former = query.history.names
    query.start("ab", 1, parallelism)
    assert query.read(1) == {"a": {LOW: 1, HIGH: 1}, "b": EMPTY}
    names = query.history.names
    assert names["a"] == former["a"]
    assert names["b"] != former["b"]
    assert query.read(2) == {"a": {LOW: 1, HIGH: 1}, "b": EMPTY}


def test_what_the_first_time_has_stored_goes(tmp_path: Path) -> None:
    query = Query(tmp_path, inline_budget_bytes=0)
    query.start("a", 0)
    query.write(0, a=1)
    query.start("ab", 1)
    query.write(1, b=1)
    former = query.history.names["b"]
    assert query.names(f"{former}/")
    query.start("ab", 1)
    query.write(1, b=2)
    assert query.names(f"{former}/") == []
    assert query.names(f"{query.history.names['b']}/")


def test_a_start_without_it_may_repeat_the_batch_with_which_it_began(query: Query) -> None:
    query.start("a", 0)
    query.write(0, a=1)
    query.start("ab", 1)
    query.write(1, a=2, b=2)
    query.start("a", 1)
    assert query.read(1) == {"a": {LOW: 1, HIGH: 1}}
    assert list(query.history.names) == ["a"]
    query.start("ab", 2)
    assert query.read(2)["b"] == EMPTY


def test_an_unkeyed_operator_begins_empty_too(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path)
    engine.start(2, 0)
    for subtask in range(2):
        engine.run_subtask(0, subtask, [["add", "items", "a"]], [])
    engine.coordinator.close()
    give_up_state(open_log(LocalStore(engine.location), engine.options, engine.clock), engine.query_id, engine.uid)
    engine.start(3, 1)
    for subtask in range(3):
        output = engine.run_subtask(1, subtask, [["read"]], [])
        assert output[0] == [subtask, 3, False, False], "it is not restored"
        assert output[1][0]["items"] == []


# ---- Operators that leave ----


def test_a_start_that_leaves_an_operator_behind_does_not_claim(query: Query) -> None:
    query.start("ab", 0)
    query.write(0, a=1, b=1)
    before = query.entries
    with pytest.raises(ConfigurationError, match="at batch 0 the query also has an operator 'b'") as caught:
        query.start("a", 1)
    assert caught.value.kind is ErrorKind.OPERATOR_REMOVED
    assert query.entries == before


def test_an_operator_whose_state_was_given_up_may_be_left_out(query: Query) -> None:
    query.start("ab", 0)
    query.write(0, a=1, b=2)
    query.forget("b")
    query.start("a", 1)
    assert query.read(1) == {"a": {LOW: 1, HIGH: 1}}
    query.start("a", 2)
    assert query.read(2) == {"a": {LOW: 1, HIGH: 1}}


def test_an_operator_whose_state_was_given_up_begins_anew_if_it_is_not(query: Query) -> None:
    query.start("ab", 0)
    query.write(0, a=1, b=2)
    former = query.history.names["b"]
    query.forget("b")
    query.start("ab", 1)
    assert query.read(1) == {"a": {LOW: 1, HIGH: 1}, "b": EMPTY}
    assert query.history.names["b"] != former


def test_no_way_back_brings_given_up_state_again(query: Query) -> None:
    """Also to a checkpoint that had it."""
    query.start("ab", 0)
    for batch in range(3):
        query.write(batch, a=batch, b=batch)
    target = query.history.at(1)
    assert target is not None
    query.forget("b")
    query.claim(follows=target.id)
    query.start("ab", 2)
    assert query.read(2) == {"a": {LOW: 1, HIGH: 1}, "b": EMPTY}


def test_the_last_operator_may_be_given_up_too(query: Query) -> None:
    """The query continues from its checkpoint, which has no operator any more."""
    query.start("a", 0)
    query.write(0, a=1)
    query.forget("a")
    query.start("b", 1)
    assert query.read(1) == {"b": EMPTY}


def test_the_objects_of_given_up_state_go_with_the_next_start(tmp_path: Path) -> None:
    query = Query(tmp_path, inline_budget_bytes=0, retained_checkpoints=2)
    query.start("ab", 0)
    for batch in range(3):
        query.write(batch, a=batch, b=batch)
    former = query.history.names["b"]
    query.forget("b")
    assert query.names(f"{former}/"), "nobody deletes them while a query may still run"
    query.start("a", 3)
    assert query.names(f"{former}/") == []
    query.write(3, a=3)
    assert query.history.ended == [former], "as long as entries have a section of it"
    query.start("a", 4, keep_local=False)
    assert query.read(4) == {"a": {LOW: 3, HIGH: 3}}


def test_giving_up_fences_off_a_start_that_goes_on(query: Query) -> None:
    query.start("ab", 0)
    query.write(0, a=1, b=1)
    coordinator = query.runner.coordinator
    query.forget("b")
    query.runner.coordinator = coordinator
    with pytest.raises(FencedError, match="epoch 1 does not own the log"):
        query.write(1, a=2, b=2)


# ---- Operators that get another name ----


def test_a_renamed_operator_keeps_its_state(tmp_path: Path) -> None:
    query = Query(tmp_path, inline_budget_bytes=0)
    query.start("ab", 0)
    query.write(0, a=1, b=2)
    identity = query.history.names["b"]
    query.rename("b", "c")
    assert query.history.names == {"a": query.history.names["a"], "c": identity}
    query.start("ac", 1)
    assert query.read(1) == {"a": {LOW: 1, HIGH: 1}, "c": {LOW: 2, HIGH: 2}}
    query.write(2, c=3)
    assert query.history.names["c"] == identity
    query.start("ac", 3, parallelism=3, keep_local=False)
    assert query.read(3)["c"] == {LOW: 3, HIGH: 3}


def test_the_former_name_is_that_of_no_operator(query: Query) -> None:
    query.start("ab", 0)
    query.write(0, a=1, b=2)
    query.rename("b", "c")
    with pytest.raises(ConfigurationError, match="also has an operator 'c'"):
        query.start("ab", 1)
    query.start("abc", 1)
    assert query.read(1) == {"a": {LOW: 1, HIGH: 1}, "b": EMPTY, "c": {LOW: 2, HIGH: 2}}


def test_a_batch_that_is_repeated_knows_the_new_name(query: Query) -> None:
    query.start("ab", 0)
    query.write(0, a=1, b=2)
    query.write(1, a=5, b=6)
    query.rename("b", "c")
    query.start("ac", 1)
    assert query.read(1) == {"a": {LOW: 1, HIGH: 1}, "c": {LOW: 2, HIGH: 2}}


@pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
def test_names_may_go_round(query: Query, order: tuple[str, str, str]) -> None:
    query.start("abc", 0)
    query.write(0, a=1, b=2, c=3)
    names = query.history.names
    query.claim(renames={names[uid]: new for uid, new in zip("abc", order, strict=True)})
    query.start("abc", 1)
    expected = {new: {LOW: value, HIGH: value} for value, new in enumerate(order, 1)}
    assert query.read(1) == expected


# ---- Queries without a checkpoint ----


def test_without_a_word_no_state_is_a_mistake(query: Query) -> None:
    with pytest.raises(StateMissingError, match=r"needs checkpoint 6, but there is no checkpoint.*forget\(") as raised:
        query.start("a", 7)
    assert raised.value.kind is ErrorKind.CHECKPOINT_MISSING
    assert query.names() == [], "nothing is claimed"


def test_a_query_begins_with_the_batch_that_its_user_has_named(query: Query) -> None:
    query.claim(begins_at=7)
    query.start("ab", 7)
    assert query.read(7) == {"a": EMPTY, "b": EMPTY}
    query.write(8, a=8)
    query.start("ab", 9, keep_local=False)
    assert query.read(9) == {"a": {LOW: 8, HIGH: 8}, "b": EMPTY}
    assert query.history.oldest is not None
    assert query.history.oldest.batch == 7
    with pytest.raises(StateMissingError, match="needs checkpoint 5, but the oldest that is retained is checkpoint 7"):
        query.start("ab", 6)


def test_its_first_batch_may_be_repeated(query: Query) -> None:
    """Before it has a checkpoint, and after that."""
    query.claim(begins_at=7)
    query.start("a", 7)
    for value in range(3):
        query.start("a", 7)
        assert query.read(7) == {"a": EMPTY}
        query.write(7, a=value)
    query.start("a", 8)
    assert query.read(8) == {"a": {LOW: 2, HIGH: 2}}


def test_another_query_is_not_helped_by_what_one_was_told(query: Query) -> None:
    query.claim("another", begins_at=7)
    with pytest.raises(StateMissingError):
        query.start("a", 7)
    query.claim(begins_at=7)
    query.start("a", 7)


def test_state_that_is_there_is_not_replaced_silently(query: Query) -> None:
    query.start("a", 0)
    query.write(0, a=1)
    query.claim(begins_at=7)
    with pytest.raises(StateMissingError, match="the newest is checkpoint 0"):
        query.start("a", 7)
