"""Giving up the state of an operator: one claim, after which the operator has ended, and only pins keep its state."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import statelog
from statelog import ConfigurationError, ErrorKind, Options, StateMissingError
from statelog.history.query_history import QueryHistory, read_history
from statelog.log.entry import Claim, Entry
from statelog.log.numbered import NumberedLog
from statelog.log.open import open_location, open_log
from statelog.queries import stopped
from statelog.spark.checkpoint import location as checkpoint_location
from statelog.storage import LocalStore
from statelog.testing.query import ManualClock
from tests.coordinator.crash_points_support import When
from tests.options import make_options
from tests.queries.rewind_support import SMALL, Operators, spark_checkpoint
from tests.queries.savepoint_faults_support import deaths
from tests.stored_query import StoredQuery, saved_values


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


@pytest.fixture
def query(tmp_path: Path) -> StoredQuery:
    return StoredQuery(tmp_path / "query").run(["a", "b"], range(3))


def log_of(query: StoredQuery) -> QueryHistory:
    return read_history(open_location(query.location))


def entries(query: StoredQuery) -> list[Entry]:
    return open_log(LocalStore(query.location), Options(), ManualClock()).read()


def elements(query: StoredQuery, uid: str, at: int | str | None = None) -> int:
    """How many elements the list of an operator has, one for each batch."""
    return len(statelog.read_state(query.location, uid, state="list", at=at).read_all())


# ---- The claim ----


@pytest.mark.parametrize("has_own_location", [False, True])
def test_it_is_one_claim(tmp_path: Path, has_own_location: bool) -> None:
    query = StoredQuery(tmp_path / "query", tmp_path / "own" if has_own_location else None).run(["a", "b"], range(3))
    store, identity = LocalStore(query.location), log_of(query).names["b"]
    before = {info.name: store.read(info.name) for info in store.list()}
    location = query.location if has_own_location else None
    dry = statelog.forget(query.checkpoint, "b", location=location, dry_run=True)
    assert (dry.uid, dry.folder, dry.batch) == ("b", f"{query.location}/{identity}", 2)
    assert {info.name: store.read(info.name) for info in store.list()} == before
    assert statelog.forget(query.checkpoint, "b", location=location) == dry
    after = {info.name: store.read(info.name) for info in store.list()}
    assert {name: after.pop(name) for name in before} == before
    assert len(after) == 1
    [*_, claim] = entries(query)
    assert isinstance(claim, Claim)
    assert (claim.query_id, claim.run_id, claim.ended) == ("query", "forget", [identity])
    assert (claim.follows, claim.renames, claim.begins_at) == (None, {}, None)
    assert (len(claim.token), claim.time_ms > 10**12) == (16, True)


def test_its_log_is_closed(query: StoredQuery, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    def close(log: NumberedLog) -> None:
        closed.append(log.number)

    monkeypatch.setattr(NumberedLog, "close", close)
    statelog.forget(query.checkpoint, "a")
    assert [number > 0 for number in closed] == [True], "once, and after it was claimed"


def test_again_it_is_done(query: StoredQuery) -> None:
    first = statelog.forget(query.checkpoint, "a")
    known = len(entries(query))
    again = statelog.forget(query.checkpoint, "a")
    assert (again.uid, again.folder, again.batch) == ("a", first.folder, None)
    assert len(entries(query)) == known


# ---- Afterwards ----


@pytest.mark.parametrize("uids", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_the_others_keep_their_state_and_the_operator_begins_anew(
    query: StoredQuery, tmp_path: Path, uids: list[str]
) -> None:
    before = log_of(query).names
    with pytest.raises(ConfigurationError, match="also has an operator 'b'"):
        query.run(["a"], range(3, 4))
    statelog.forget(query.checkpoint, "b")
    assert [info.uid for info in statelog.list_operators(query.location)] == ["a"]
    with pytest.raises(ConfigurationError, match="no operator 'b'; it has 'a'.*if a pin keeps it"):
        elements(query, "b", 2)
    query.run(uids, range(3, 6))
    query.run(uids, range(6, 8))
    statelog.savepoint(query.checkpoint, tmp_path / "saved")
    assert saved_values(tmp_path / "saved") == dict.fromkeys(uids, 7)
    names = log_of(query).names
    assert names["a"] == before["a"]
    assert "b" not in names or names["b"] != before["b"]
    assert {uid: elements(query, uid) for uid in uids} == {uid: 8 if uid == "a" else 5 for uid in uids}


def test_what_a_pin_keeps_stays_readable_by_the_pins_name(query: StoredQuery) -> None:
    pin = statelog.pin(query.location, at=1, lasts_s=None, owner="audit").name
    own = statelog.pin(query.location, "b", at=2, lasts_s=None, owner="audit").name
    statelog.forget(query.checkpoint, "b")
    for uids in ([], ["a"], ["a", "b"]):
        if uids:
            start = len(query.times)
            query.run(uids, range(start, start + 12))
        statelog.delete_orphans(query.location, min_age_s=0, clock=ManualClock(2e10))
        assert (elements(query, "b", pin), elements(query, "b", own)) == (2, 3)
        assert {info.name: info.uids for info in statelog.list_pins(query.location)} == {pin: ("a", "b"), own: ("b",)}
        assert statelog.verify(query.location).damages == ()
        with pytest.raises((StateMissingError, ConfigurationError)):
            elements(query, "b", 1)
    assert elements(query, "a", 1) == 2


def test_a_branch_keeps_it(query: StoredQuery, tmp_path: Path) -> None:
    statelog.branch(query.checkpoint, tmp_path / "branch")
    statelog.forget(query.checkpoint, "b")
    query.run(["a"], range(3, 20))
    statelog.delete_orphans(query.location, min_age_s=0, release=True, clock=ManualClock(2e10))
    statelog.savepoint(tmp_path / "branch", tmp_path / "saved")
    assert saved_values(tmp_path / "saved") == {"a": 2, "b": 2}


def files_of(operators: Operators, identity: str) -> set[str]:
    return {path.name for path in (Path(operators.location) / identity).rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_renamed", [False, True])
def test_the_next_start_deletes_the_state(tmp_path: Path, is_renamed: bool) -> None:
    spark_checkpoint(tmp_path, range(7), range(6))
    operators = Operators(tmp_path, make_options(**{**SMALL, "inline_budget_bytes": 0}))
    operators.run("ab", 0, 5)
    identity = operators.history.names["b"]
    uid = "b"
    if is_renamed:
        statelog.rename(tmp_path, "b", "c", location=operators.location)
        uid = "c"
    statelog.forget(tmp_path, uid, location=operators.location)
    assert files_of(operators, identity)
    operators.start("a", 6)
    assert files_of(operators, identity) == set()
    assert operators.value("a", 6) == 5


@pytest.mark.parametrize("is_renamed", [False, True])
def test_gc_deletes_the_state_once_no_pin_keeps_it(tmp_path: Path, is_renamed: bool) -> None:
    spark_checkpoint(tmp_path, range(7), range(6))
    operators = Operators(tmp_path, make_options(**{**SMALL, "inline_budget_bytes": 0}))
    operators.run("ab", 0, 5)
    identity = operators.history.names["b"]
    pin = statelog.pin(operators.location, "b", lasts_s=None, owner="audit").name
    uid = "b"
    if is_renamed:
        statelog.rename(tmp_path, "b", "c", location=operators.location)
        uid = "c"
    statelog.forget(tmp_path, uid, location=operators.location)
    operators.run("a", 6, 9)

    def gc() -> set[str]:
        """The files of the operator that are deleted."""
        before = files_of(operators, identity)
        found = statelog.delete_orphans(operators.location, min_age_s=0, clock=ManualClock(2e10))
        left = files_of(operators, identity)
        assert before - left == {Path(info.name).name for info in found if info.name.startswith(f"{identity}/")}
        return before - left

    assert gc() == set()
    statelog.unpin(operators.location, pin)
    assert files_of(operators, identity) != set()
    assert gc() != set()
    assert files_of(operators, identity) == set()
    assert statelog.verify(operators.location).damages == ()
    operators.start("a", 10)
    assert operators.value("a", 10) == 9


# ---- Queries without an operator ----


def test_the_first_operator_of_a_query_begins_with_the_batch_that_comes_next(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path)
    query.commit(range(5))
    with pytest.raises(StateMissingError, match="there is no checkpoint.*run statelog.forget"):
        query.run(["a"], range(5, 6))
    made = statelog.forget(query.checkpoint, "a")
    assert (made.uid, made.folder, made.batch) == ("a", query.location, None)
    [claim] = entries(query)
    assert isinstance(claim, Claim)
    assert (claim.begins_at, claim.ended, claim.run_id) == (5, [], "forget")
    assert statelog.forget(query.checkpoint, "a", dry_run=True) == made
    assert len(entries(query)) == 1
    query.run(["a"], range(5, 8))
    assert elements(query, "a") == 3
    query.run(["a"], range(8, 9))
    assert elements(query, "a") == 4


def test_a_batch_after_that_is_not_skipped(tmp_path: Path) -> None:
    """Spark has committed the first batch, and it has no checkpoint: a rewind repeats it."""
    query = StoredQuery(tmp_path)
    query.commit(range(5))
    statelog.forget(query.checkpoint, "a")
    query.run(["a"], range(5, 6), lacks_last=True)
    query.offer(6)
    with pytest.raises(StateMissingError, match="there is no checkpoint"):
        query.run(["a"], range(6, 7))
    done = statelog.rewind(query.checkpoint)
    assert (done.next_batch, done.taken_back, done.operators) == (5, [5], [])
    query.run(["a"], range(5, 7))
    assert elements(query, "a") == 2


def test_a_query_that_ran_without_its_operators_may_get_one_again(query: StoredQuery) -> None:
    """Its batches without an operator have no checkpoints; what pins keep of the time before stays readable."""
    pin = statelog.pin(query.location, at=2, lasts_s=None, owner="audit").name
    for uid in "ab":
        statelog.forget(query.checkpoint, uid)
    query.commit(range(3, 6))
    with pytest.raises(StateMissingError, match="the newest is checkpoint 2"):
        query.run(["c"], range(6, 7))
    assert statelog.forget(query.checkpoint, "c").batch is None
    query.run(["c"], range(6, 9))
    query.run(["c"], range(9, 20))
    assert elements(query, "c") == 14
    assert elements(query, "a", pin) == 3
    assert statelog.verify(query.location).damages == ()


def test_the_operators_of_a_query_that_has_stood_still_begin_with_its_next_batch(query: StoredQuery) -> None:
    for uid in "ab":
        statelog.forget(query.checkpoint, uid)
    query.run(["b", "c"], range(3, 5))
    assert {uid: elements(query, uid) for uid in "bc"} == {"b": 2, "c": 2}


# ---- Deaths and mistakes ----


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_at_any_step_is_mended_by_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: When
) -> None:
    whole = StoredQuery(tmp_path / "whole").run(["a", "b"], range(3))
    query = StoredQuery(tmp_path / "query")
    count = 0

    def begin() -> None:
        shutil.rmtree(query.root, ignore_errors=True)
        shutil.copytree(whole.root, query.root)

    def check() -> None:
        nonlocal count
        count += 1
        statelog.forget(query.checkpoint, "a")
        assert log_of(query).names.keys() == {"b"}
        query.runs = 1 + count
        query.times = dict(whole.times)
        query.run(["a", "b"], range(3, 4))
        assert (elements(query, "a"), elements(query, "b")) == (1, 4)
        begin()

    begin()
    forget = statelog.forget
    assert deaths(monkeypatch, when, lambda: forget(query.checkpoint, "a"), check, [checkpoint_location, stopped]) >= 8


def test_an_operator_that_was_renamed_meanwhile_is_not_given_up(
    query: StoredQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, done = LocalStore.put_if_absent, list[str]()

    def put_later(store: LocalStore, name: str, data: bytes) -> bool:
        if not done:
            done.append(name)
            statelog.rename(query.checkpoint, "a", "c")
        return put(store, name, data)

    monkeypatch.setattr(LocalStore, "put_if_absent", put_later)
    with pytest.raises(ConfigurationError, match="no operator 'a'; it has 'b', 'c'"):
        statelog.forget(query.checkpoint, "a")


def test_a_uid_that_the_query_does_not_know_is_refused(query: StoredQuery) -> None:
    statelog.forget(query.checkpoint, "b")
    with pytest.raises(ConfigurationError, match=r"no operator 'c'; it has 'a'\.") as raised:
        statelog.forget(query.checkpoint, "c")
    assert raised.value.kind is ErrorKind.INVALID_OPTION
    statelog.forget(query.checkpoint, "a")
    with pytest.raises(ConfigurationError, match=r"it has none\."):
        statelog.forget(query.checkpoint, "c")


def test_the_state_of_another_query_is_left_alone(query: StoredQuery, tmp_path: Path) -> None:
    other = StoredQuery(tmp_path / "other", query_id="other")
    other.commit(range(2))
    known = len(entries(query))
    with pytest.raises(
        ConfigurationError, match="the state there belongs to query query, not to query other"
    ) as raised:
        statelog.forget(other.checkpoint, "a", location=query.location)
    assert raised.value.kind is ErrorKind.OTHER_OWNER
    assert len(entries(query)) == known


def test_a_location_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no checkpoint of a Spark query"):
        statelog.forget(tmp_path / "nothing", "a")
