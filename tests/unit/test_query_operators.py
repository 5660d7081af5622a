"""Which operators a query has, and where their logs are, as their checkpoints note it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from statelog import ConfigurationError, ErrorKind
from statelog.checkpoint.query_operators import (
    OperatorChanges,
    OperatorLog,
    QueryLogs,
    noted_location,
    operators_of,
)
from statelog.log.entry import Claim, QueryOperators
from statelog.log.numbered import NumberedLog
from statelog.log.open import operator_folder
from statelog.storage import LocalStore, Store
from statelog.storage.names import former_name_part, name_part
from statelog.testing.clock import ManualClock
from tests.contract.log_contract import make_checkpoint
from tests.model.stored_files import give_up_state


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data", "statelog.storage.posix.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


class Places:
    """Locations by a short name, with logs of operators."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, name: str) -> str:
        return str(self._root / name)

    def write(
        self,
        place: str,
        uid: str,
        batches: range,
        *,
        run: str = "run-1",
        query_id: str = "query",
        note: Mapping[str, str] | None = None,
        started_ms: int = 1,
        folder: str = "",
        claim_uid: str = "",
    ) -> None:
        """Let a run of an operator have checkpoints of some batches; `note` is of uids and short names of places."""
        log = NumberedLog(LocalStore(self(place)), f"{folder or uid}/log", ManualClock(), appends=True)
        epoch = 0

        def make(number: int) -> Claim:
            nonlocal epoch
            epoch = number
            return Claim(number, query_id, run, claim_uid or uid, b"", 0)

        log.claim(make)
        held = None if note is None else {other: self(name) if name else "" for other, name in note.items()}
        operators = None if held is None else QueryOperators(started_ms, held)
        for batch in batches:
            entry, payload = make_checkpoint(run, epoch, batch)
            entry = replace(entry, query_id=query_id, uid=uid, operators=operators, batch_time_ms=1000 + started_ms)
            log.append(entry, payload)

    def read(self, given: str | None = None, home: str = "home") -> QueryLogs:
        return QueryLogs.read("query", self(home), None if given is None else self(given), LocalStore)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def where(logs: list[OperatorLog]) -> list[tuple[str, str]]:
    return [(log.uid, Path(log.location).name) for log in logs]


# ---- Which logs are the query's ----


def test_the_querys_logs_are_looked_for_at_home_and_at_the_given_location(places: Places) -> None:
    places.write("home", "a", range(2))
    places.write("given", "b", range(3))
    places.write("elsewhere", "c", range(3))
    places.write("home", "other", range(9), query_id="another")
    places.write("home", "no checkpoint", range(0))
    assert where(places.read().found) == [("a", "home")]
    found = places.read("given")
    assert where(found.found) == [("b", "given"), ("a", "home")]
    assert where(places.read("home").found) == [("a", "home")], "no log is read twice"
    assert (found.newest(), found.newest(1), found.newest(-1)) == (2, 1, None)
    assert where(places.read("given", home="nowhere").found) == [("b", "given")]


def test_a_log_knows_the_runs_that_have_claimed_it_or_written_to_it(places: Places) -> None:
    places.write("home", "a", range(2), run="run-1")
    places.write("home", "a", range(0), run="run-2")
    [log] = places.read().found
    assert log.runs == {"run-1", "run-2"}
    assert (log.newest, log.root) == (1, "a")


# ---- Which operators there are ----


def test_operators_elsewhere_are_looked_up_where_the_notes_say(places: Places) -> None:
    """A log that is found so may have a newer note, which says more."""
    places.write("home", "a", range(3), note={"a": "", "b": "far"}, started_ms=1)
    places.write("far", "b", range(3), note={"a": "", "b": "far", "c": "farther", "d": "far"}, started_ms=2)
    places.write("farther", "c", range(2))
    places.write("far", "d", range(3))
    places.write("home", "former", range(1))
    logs = places.read()
    found = logs.at(2)
    assert where(found.operators) == [("a", "home"), ("b", "far"), ("c", "farther"), ("d", "far")]
    assert (found.missing, where(found.former), found.is_noted) == ({}, [("former", "home")], True)
    known = [("a", "home"), ("former", "home"), ("b", "far"), ("c", "farther"), ("d", "far")]
    assert where(logs.found) == known
    assert where(logs.at(1).operators) == where(found.operators)
    assert where(logs.found) == known, "what is known is not looked up again"


def test_state_that_is_not_where_a_note_says_is_missing(places: Places) -> None:
    """So is that of another query or operator in its place."""
    note = {"a": "", "b": "far", "c": "far", "d": "nowhere"}
    places.write("home", "a", range(3), note=note)
    places.write("far", "b", range(3), query_id="another")
    places.write("far", "x", range(3), folder="c")
    found = places.read().at(2)
    assert where(found.operators) == [("a", "home")]
    assert found.missing == {"b": places("far"), "c": places("far"), "d": places("nowhere")}


def test_of_several_notes_the_one_of_the_newest_run_counts_whose_batch_spark_knows(places: Places) -> None:
    places.write("home", "a", range(3), note={"a": ""}, started_ms=5)
    places.write("home", "b", range(3), note={"a": "", "b": ""}, started_ms=3)
    places.write("home", "c", range(3))
    for time_ms, uids in ((None, ["a"]), (1005, ["a"]), (1003, ["a", "b"])):
        found = places.read().at(2, time_ms)
        assert [log.uid for log in found.operators] == uids
        assert [log.uid for log in found.former] == [uid for uid in "abc" if uid not in uids]
    assert not places.read().at(2, 7).is_noted


def test_without_a_note_an_operator_may_lack_the_newest_batch_and_no_more(places: Places) -> None:
    for uid, count in (("a", 6), ("b", 5), ("c", 4)):
        places.write("home", uid, range(count))
    found = places.read().at(5)
    assert (where(found.operators), where(found.former)) == ([("a", "home"), ("b", "home")], [("c", "home")])
    assert (found.missing, found.is_noted) == ({}, False)


def test_of_copies_that_at_the_given_location_counts_and_then_that_where_it_should_be(places: Places) -> None:
    for place in ("home", "given", "far"):
        places.write(place, "a", range(3), note={"a": "far"})
    for given, expected in ((None, "far"), ("given", "given"), ("far", "far"), ("home", "home")):
        [log] = places.read(given).at(2).operators
        assert Path(log.location).name == expected
    of_home = places.read("far").of("a")
    assert of_home is not None
    assert Path(of_home.location).name == "far"
    of_home = places.read().of("a")
    assert of_home is not None
    assert Path(of_home.location).name == "home"
    assert places.read().of("b") is None


def test_a_copy_counts_where_none_should_be(places: Places) -> None:
    places.write("given", "a", range(3), note={"a": ""})
    logs = places.read("given", home="nowhere")
    logs.given = None
    assert where(logs.at(2).operators) == [("a", "given")]


def test_a_location_is_noted_so_that_it_is_the_same_from_any_folder() -> None:
    assert noted_location(None) == ""
    assert noted_location("s3://bucket/folder") == "s3://bucket/folder"
    assert noted_location("/some/../folder") == "/folder"
    assert noted_location("folder") == os.path.join(os.getcwd(), "folder")


# ---- Folders of older locations ----


@pytest.mark.parametrize("uid", ["a\N{NON-BREAKING HYPHEN}b", "#" * 85])
def test_a_folder_belongs_to_whose_checkpoint_is_the_newest(places: Places, uid: str) -> None:
    """Or, without any, to who claimed it last. Another operator may have had its name, before folders had others."""
    former = former_name_part(uid)
    assert name_part(uid) != former
    if uid.startswith("#"):
        assert len(former) == 255, "the longest that a file system takes"
    store = LocalStore(places("home"))
    assert operator_folder(store, uid) == name_part(uid), "there is nothing yet"
    places.write("home", "another", range(0), folder=former)
    assert operator_folder(store, uid) == name_part(uid)
    places.write("home", uid, range(0), folder=former)
    assert operator_folder(store, uid) == former
    places.write("home", uid, range(2), folder=former)
    places.write("home", "another", range(0), folder=former)
    assert operator_folder(store, uid) == former, "a claim that no checkpoint follows changes nothing"
    places.write("home", "another", range(2, 3), folder=former)
    assert operator_folder(store, uid) == name_part(uid)


def test_an_operator_is_a_folder_with_a_log_and_nothing_deeper(tmp_path: Path) -> None:
    """Beside the operators there may be savepoints, copies of damaged objects, and Spark's own files."""
    store = LocalStore(tmp_path)
    for name in (
        "a/log/1.log",
        "b/log/1.log",
        "b/log/2.log",
        "c/changes/1.run",
        "log",
        "d/log",
        "offsets/1",
        "statelog-damaged/1/e/log/1.log",
        "savepoint/log/part/0.parquet",
    ):
        store.put(name, b"x")
    assert operators_of(store) == ["a", "b"]


# ---- Added and removed operators ----


def changes(places: Places, **operators: str) -> OperatorChanges:
    """The view of a start whose operators are at these places."""
    return OperatorChanges("query", places("home"), {uid: places(name) for uid, name in operators.items()}, LocalStore)


def test_a_note_of_the_batch_before_proves_that_an_operator_is_new(places: Places) -> None:
    places.write("home", "a", range(3), note={"a": "", "b": ""}, started_ms=1)
    start = changes(places, a="home", b="home", c="far")
    for uid, batch, time_ms, expected in (
        ("c", 2, None, True),
        ("c", 2, 1001, True),
        ("c", 2, 1002, False),
        ("c", 3, None, False),
        ("b", 2, None, False),
    ):
        assert start.has_added(uid, batch, time_ms, "here") is expected, (uid, batch, time_ms)
    assert not changes(places, c="far").has_added("c", 2, None, "here"), "no operator of the start is near the note"


def test_a_log_without_notes_or_of_another_query_proves_nothing(places: Places) -> None:
    places.write("home", "a", range(3))
    places.write("home", "x", range(3), query_id="another", note={"x": ""})
    assert not changes(places, a="home", c="home").has_added("c", 2, None, "here")


def give_up(places: Places, place: str, uid: str, query_id: str = "query", *, renamed_to: str = "") -> None:
    log = NumberedLog(LocalStore(places(place)), f"{uid}/log", ManualClock(), appends=True)
    give_up_state(log, query_id, uid, renamed_to)


@pytest.mark.parametrize("far", [False, True])
def test_a_start_without_an_operator_is_refused_until_its_state_is_given_up(places: Places, far: bool) -> None:
    place, noted = ("far", places("far")) if far else ("home", "")
    places.write(place, "b", range(3))
    before = replace(make_checkpoint("a", 1, 2)[0], operators=QueryOperators(1, {"a": "", "b": noted}))
    changes(places, a="home", b="home", c="home").require_none_removed(before, "here")
    start = changes(places, a="home", c="home")

    def require_refusal() -> None:
        with pytest.raises(ConfigurationError, match=r"here: at batch 2 .* operator 'b'.*forget\(.*'b'\)") as raised:
            start.require_none_removed(before, "here")
        assert raised.value.kind is ErrorKind.OPERATOR_REMOVED

    require_refusal()
    give_up(places, place, "b", "another")
    require_refusal()
    give_up(places, place, "b")
    start.require_none_removed(before, "here")
    places.write(place, "b", range(4, 5))
    require_refusal()


def test_no_log_is_read_of_operators_that_the_start_has(places: Places) -> None:
    """Every operator of every start asks."""

    def unreachable(location: str) -> Store:
        raise AssertionError(location)

    before = replace(make_checkpoint("a", 1, 2)[0], operators=QueryOperators(1, {"a": "", "b": ""}))
    start = OperatorChanges("query", places("home"), dict.fromkeys("abc", places("home")), unreachable)
    start.require_none_removed(before, "here")


def test_logs_that_lead_round_in_a_circle_do_not_show_that_state_was_given_up(places: Places) -> None:
    """A folder was replaced by an older copy of it, so the state of both is gone."""
    places.write("home", "a", range(3))
    give_up(places, "home", "a", renamed_to="b")
    give_up(places, "home", "b", renamed_to="a")
    before = replace(make_checkpoint("c", 1, 2)[0], operators=QueryOperators(1, {"a": "", "c": ""}))
    with pytest.raises(ConfigurationError, match="also had an operator 'a'"):
        changes(places, c="home").require_none_removed(before, "here")


def test_an_operator_with_another_uid_is_not_new(places: Places) -> None:
    places.write("home", "a", range(3), note={"a": ""})
    start = changes(places, b="home")
    with pytest.raises(ConfigurationError, match="operator 'a'"):
        start.has_added("b", 2, None, "here")
    give_up(places, "home", "a")
    assert not start.has_added("b", 2, None, "here"), "the note went with the state"


def test_without_a_note_nothing_is_known_to_be_removed(places: Places) -> None:
    changes(places, a="home").require_none_removed(make_checkpoint("a", 1, 2)[0], "here")


def test_given_up_state_is_not_missing(places: Places) -> None:
    places.write("home", "a", range(3), note={"a": "", "b": "", "c": ""})
    places.write("home", "b", range(3), note={"a": "", "b": "", "c": ""})
    give_up(places, "home", "b")
    found = places.read().at(2)
    assert (where(found.operators), list(found.missing)) == ([("a", "home")], ["c"])


def test_only_the_claims_uid_is_given_up_and_only_without_a_later_checkpoint(places: Places) -> None:
    places.write("home", "a", range(3), note={"a": ""})
    assert places.read().given_up == set()
    give_up(places, "home", "a", "another")
    assert places.read().given_up == set()
    give_up(places, "home", "a")
    assert places.read().given_up == {"a"}
    places.write("home", "a", range(3, 4), note={"a": ""})
    assert places.read().given_up == set()
