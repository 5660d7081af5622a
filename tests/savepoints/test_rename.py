"""Another uid for an operator: the state stays, whenever the process dies, and nobody takes the old log for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import statelog
from statelog import ConfigurationError, ErrorKind, Options, StateMissingError
from statelog.checkpoint.admission import begins_state
from statelog.checkpoint.query_operators import OperatorChanges
from statelog.log.entry import QueryOperators
from statelog.log.open import open_location, open_log
from statelog.reading.source import read_history
from statelog.savepoints import branch as save_module
from statelog.spark import checkpoint_location
from statelog.storage import LocalStore
from statelog.streams import branch as branch_module
from statelog.streams import rename as rename_module
from statelog.testing.clock import ManualClock
from tests.reading.story import rows
from tests.savepoints.test_savepoint_faults import deaths
from tests.stored_query import StoredQuery
from tests.unit.test_crash_points import Killed, When


@pytest.fixture
def query(tmp_path: Path) -> StoredQuery:
    return StoredQuery(tmp_path / "query").run({"a": None, "b": tmp_path / "own"}, range(3))


def newest(query: StoredQuery, target: Path) -> set[str]:
    """The operators of the query, as a savepoint finds them."""
    return set(statelog.savepoint(query.checkpoint, target).rows)


def test_the_state_goes_on_under_the_new_uid(query: StoredQuery, tmp_path: Path) -> None:
    made = statelog.rename(query.checkpoint, "a", "c")
    home = query.checkpoint / "statelog"
    assert (made.uid, made.former_uid, made.batch) == ("c", "a", 2)
    assert (made.folder, made.former_folder) == (f"{home}/c", f"{home}/a")
    assert newest(query, tmp_path / "saved") == {"b", "c"}
    query.run({"c": None, "b": tmp_path / "own"}, range(3, 5))
    query.run({"c": None, "b": tmp_path / "own"}, range(4, 6))
    assert newest(query, tmp_path / "later") == {"b", "c"}
    found = statelog.read_state(str(home), "c", state="list").read_all()
    assert rows(found) == rows(statelog.read_state(str(tmp_path / "own"), "b", state="list").read_all())
    assert found.num_rows == 6


def test_an_operator_with_a_location_of_its_own(query: StoredQuery, tmp_path: Path) -> None:
    made = statelog.rename(query.checkpoint, "b", "c")
    assert made.folder == str(tmp_path / "own" / "c")
    query.run({"a": None, "c": tmp_path / "own"}, range(3, 5))
    assert newest(query, tmp_path / "saved") == {"a", "c"}


def test_it_goes_back_and_forth(query: StoredQuery, tmp_path: Path) -> None:
    for number, (old, new) in enumerate([("a", "c"), ("c", "a"), ("a", "c")]):
        statelog.rename(query.checkpoint, old, new)
        query.run({new: None, "b": tmp_path / "own"}, range(3 + number, 4 + number))
    assert newest(query, tmp_path / "saved") == {"b", "c"}
    assert statelog.read_state(str(query.checkpoint / "statelog"), "c", state="list").read_all().num_rows == 6


def changes(query: StoredQuery, **locations: str) -> OperatorChanges:
    home = str(query.checkpoint / "statelog")
    return OperatorChanges("query", home, {uid: place or home for uid, place in locations.items()}, open_location)


def test_the_old_uid_cannot_be_given_up(query: StoredQuery, tmp_path: Path) -> None:
    """Otherwise a start could leave the renamed operator behind, and begin the old one empty."""
    statelog.rename(query.checkpoint, "a", "c")
    with pytest.raises(ConfigurationError, match="operator 'a' was renamed to 'c'"):
        statelog.forget(query.checkpoint, "a")
    for own in (tmp_path / "other", None):
        query.run({"a": own}, range(0, 1))
        location = None if own is None else str(own)
        assert statelog.forget(query.checkpoint, "a", location=location).batch == 0, "it is an operator of its own now"


def test_the_old_log_does_not_begin_anew(query: StoredQuery) -> None:
    statelog.rename(query.checkpoint, "a", "c")
    entries = open_log(LocalStore(query.checkpoint / "statelog"), "a", Options(), ManualClock()).read()
    assert not begins_state(entries, "query", 3, lambda: False)
    assert begins_state(entries, "query", 3, lambda: True)


def test_a_start_has_to_use_the_new_uid(query: StoredQuery, tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    statelog.rename(query.checkpoint, "a", "x")
    statelog.rename(query.checkpoint, "x", "c")
    before = read_history(open_location(own), "b").at(2)
    assert before is not None
    assert before.operators == QueryOperators(1, {"a": "", "b": own})
    changes(query, c="", b=own).require_none_removed(before, "here")
    assert not changes(query, c="", b=own).has_added("c", 2, None, "here")
    for uid, locations in (("a", {"a": "", "b": own}), ("new", {"new": "", "b": own})):
        with pytest.raises(ConfigurationError, match="also had an operator 'c'") as raised:
            changes(query, **locations).has_added(uid, 2, None, "here")
        assert raised.value.kind is ErrorKind.OPERATOR_REMOVED
    assert changes(query, a="", b=own, c="").has_added("a", 2, None, "here"), "it may come back beside the renamed one"
    with pytest.raises(ConfigurationError, match=r"operator 'a'.* was renamed to 'c', which .*forget\(.*'c'\)"):
        changes(query, b=own).require_none_removed(before, "here")
    statelog.forget(query.checkpoint, "c")
    changes(query, b=own).require_none_removed(before, "here")


def note(query: StoredQuery, uid: str) -> QueryOperators | None:
    """The operators of the query, as the checkpoint of batch 2 notes them."""
    checkpoint = read_history(open_location(str(query.checkpoint / "statelog")), uid).at(2)
    assert checkpoint is not None
    return checkpoint.operators


def test_the_new_log_notes_the_operators_for_want_of_a_later_note(query: StoredQuery, tmp_path: Path) -> None:
    statelog.rename(query.checkpoint, "a", "c")
    assert note(query, "c") == QueryOperators(0, {"b": str(tmp_path / "own"), "c": ""})


def test_the_new_log_notes_operators_of_older_checkpoints_without_notes(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path / "query").run({"a": None, "b": None}, range(3), notes=False)
    statelog.rename(query.checkpoint, "a", "c")
    home = str(query.checkpoint / "statelog")
    assert note(query, "c") == QueryOperators(0, {"b": home, "c": home})


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoredQuery:
    """A query with two operators in one location, and with the new log of a renaming that has died."""
    query = StoredQuery(tmp_path / "query").run({"a": None, "b": None}, range(3))

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(rename_module, "give_up", die)
        with pytest.raises(Killed):
            statelog.rename(query.checkpoint, "a", "c")
    return query


def has_run(query: StoredQuery) -> None:
    query.run({"a": None, "b": None, "c": None}, range(3, 4))


def is_elsewhere(query: StoredQuery) -> None:
    shutil.copytree(query.checkpoint / "statelog" / "c", query.root / "own" / "c")


def was_moved(query: StoredQuery) -> None:
    home = query.checkpoint.rename(query.root / "moved") / "statelog"
    query.checkpoint = home.parent


@pytest.mark.parametrize("change", [has_run, is_elsewhere, was_moved])
def test_only_what_the_same_renaming_has_left_is_replaced(
    interrupted: StoredQuery, change: Callable[[StoredQuery], None]
) -> None:
    change(interrupted)
    location = str(interrupted.root / "own") if change is is_elsewhere else None
    with pytest.raises(ConfigurationError, match="has, or had, an operator of this uid") as raised:
        statelog.rename(interrupted.checkpoint, "a", "c", location=location)
    assert raised.value.kind is ErrorKind.OTHER_OWNER


def test_what_the_renaming_of_another_operator_has_left_is_not_replaced(interrupted: StoredQuery) -> None:
    for uid, new_uid in (("b", "c"), ("a", "b")):
        with pytest.raises(ConfigurationError, match="has, or had, an operator of this uid"):
            statelog.rename(interrupted.checkpoint, uid, new_uid)
    assert statelog.rename(interrupted.checkpoint, "a", "c").batch == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_at_any_step_is_mended_by_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: When
) -> None:
    whole = StoredQuery(tmp_path / "whole").run({"a": None, "b": None}, range(3))
    root = tmp_path / "query"
    query = StoredQuery(root)
    count = 0

    def begin() -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(whole.root, root)

    def check() -> None:
        nonlocal count
        count += 1
        found = newest(query, root / "saved")
        assert found in ({"a", "b"}, {"b", "c"})
        if found == {"a", "b"}:
            statelog.rename(query.checkpoint, "a", "c")
        query.runs = 1 + count
        query.times = dict(whole.times)
        query.run({"c": None, "b": None}, range(3, 4))
        state = query.checkpoint / "statelog"
        assert statelog.read_state(str(state), "c", state="list").read_all().num_rows == 4
        begin()

    begin()
    modules = (branch_module, save_module, checkpoint_location, rename_module)
    assert deaths(monkeypatch, when, lambda: statelog.rename(query.checkpoint, "a", "c"), check, modules) >= 8


def test_mistakes_are_named(query: StoredQuery) -> None:
    with pytest.raises(ConfigurationError, match="has no operator 'x'; it has 'a', 'b'"):
        statelog.rename(query.checkpoint, "x", "c")
    with pytest.raises(ConfigurationError, match="has, or had, an operator of this uid"):
        statelog.rename(query.checkpoint, "a", "b")
    with pytest.raises(ConfigurationError, match="uid is ''"):
        statelog.rename(query.checkpoint, "a", "")
    query.forget(range(0, 3))
    with pytest.raises(StateMissingError):
        statelog.rename(query.checkpoint, "a", "c")
