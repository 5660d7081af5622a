"""Another uid for an operator: one claim, with which all its checkpoints have the new name."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError, ErrorKind, FencedError, Options
from statelog.history.query_history import QueryHistory, read_history
from statelog.log.entry import Claim, Entry
from statelog.log.open import open_location, open_log
from statelog.queries import stopped
from statelog.spark.checkpoint import location as checkpoint_location
from statelog.storage import LocalStore
from statelog.testing.query import ManualClock
from tests.reading.story import rows
from tests.savepoints.test_rewind import Operators, spark_checkpoint
from tests.savepoints.test_savepoint_faults import deaths
from tests.stored_query import StoredQuery, saved_values
from tests.unit.test_crash_points import When


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


@pytest.fixture
def query(tmp_path: Path) -> StoredQuery:
    return StoredQuery(tmp_path / "query").run(["a", "b"], range(3))


def log_of(query: StoredQuery) -> QueryHistory:
    return read_history(open_location(query.location))


def newest(query: StoredQuery, target: Path) -> dict[str, Any]:
    """The operators of the query and their values, as a savepoint finds them."""
    statelog.savepoint(query.checkpoint, target)
    return saved_values(target)


def elements(query: StoredQuery, uid: str, at: int | str | None = None) -> int:
    """How many elements the list of an operator has, one for each batch."""
    return len(statelog.read_state(query.location, uid, state="list", at=at).read_all())


# ---- The state ----


def test_the_state_goes_on_under_the_new_uid(query: StoredQuery, tmp_path: Path) -> None:
    identity = log_of(query).names["a"]
    made = statelog.rename(query.checkpoint, "a", "c")
    assert (made.uid, made.former_uid, made.batch) == ("c", "a", 2)
    assert made.folder == f"{query.location}/{identity}"
    assert newest(query, tmp_path / "saved") == {"b": 2, "c": 2}
    query.run(["b", "c"], range(3, 5))
    query.run(["b", "c"], range(4, 6))
    assert newest(query, tmp_path / "later") == {"b": 5, "c": 5}
    assert log_of(query).names["c"] == identity
    found = statelog.read_state(query.location, "c", state="list").read_all()
    assert rows(found) == rows(statelog.read_state(query.location, "b", state="list").read_all())
    assert found.num_rows == 6


def test_it_is_one_claim(query: StoredQuery) -> None:
    store, identity = LocalStore(query.location), log_of(query).names["a"]
    before = {info.name: store.read(info.name) for info in store.list()}
    statelog.rename(query.checkpoint, "a", "c")
    after = {info.name: store.read(info.name) for info in store.list()}
    assert {name: after.pop(name) for name in before} == before
    assert len(after) == 1
    [*_, claim] = entries(query)
    assert isinstance(claim, Claim)
    assert (claim.query_id, claim.run_id, claim.renames) == ("query", "rename", {identity: "c"})
    assert (claim.follows, claim.ended, claim.begins_at) == (None, [], None)
    assert (len(claim.token), claim.time_ms > 10**12) == (16, True)


def entries(query: StoredQuery) -> list[Entry]:
    return open_log(LocalStore(query.location), Options(), ManualClock()).read()


def test_all_checkpoints_pins_and_readers_have_the_new_name(query: StoredQuery) -> None:
    pin = statelog.pin(query.location, "a", at=1, lasts_s=None, owner="audit").name
    query.run(["a", "b"], range(3, 5))
    statelog.rename(query.checkpoint, "a", "c")
    for batches in (None, range(5, 7)):
        if batches is not None:
            query.run(["b", "c"], batches)
        assert [info.uid for info in statelog.list_operators(query.location)] == ["b", "c"]
        assert {info.uid for info in statelog.list_checkpoints(query.location)} == {"b", "c"}
        assert [(info.name, info.uids) for info in statelog.list_pins(query.location)] == [(pin, ("c",))]
        assert statelog.list_pins(query.location, "c") != []
        for at, count in ((1, 2), (3, 4), (pin, 2)):
            assert elements(query, "c", at) == count
        assert elements(query, "a", pin) == 2, "the name of the pin's time is known to it"
        with pytest.raises(ConfigurationError, match="no operator 'a'; it has 'b', 'c'"):
            elements(query, "a")


def test_it_goes_there_and_back(query: StoredQuery, tmp_path: Path) -> None:
    """In several starts, or without a start in between."""
    batch = 3
    for names in ("aca", "acaca", "ac", "cda"):
        for old, new in itertools.pairwise(names):
            statelog.rename(query.checkpoint, old, new)
            assert log_of(query).names.keys() == {"b", new}
            if len(names) < 5:
                query.run([new, "b"], range(batch, batch + 1))
                batch += 1
        assert newest(query, tmp_path / f"saved-{batch}-{names}") == {"b": batch - 1, names[-1]: batch - 1}
    assert elements(query, "a") == batch


def test_names_are_exchanged(query: StoredQuery) -> None:
    before = log_of(query).names
    for old, new in (("a", "x"), ("b", "a"), ("x", "b")):
        statelog.rename(query.checkpoint, old, new)
    assert log_of(query).names == {"a": before["b"], "b": before["a"]}
    query.run(["a", "b"], range(3, 4))
    assert log_of(query).names == {"a": before["b"], "b": before["a"]}


def test_a_rewind_keeps_the_name(query: StoredQuery) -> None:
    """Also to a checkpoint that was written under the old one."""
    statelog.rename(query.checkpoint, "a", "c")
    query.run(["b", "c"], range(3, 5))
    (query.checkpoint / "offsets" / "5").write_text((query.checkpoint / "offsets" / "4").read_text())
    assert statelog.rewind(query.checkpoint, to=1).operators == ["b", "c"]
    query.run(["b", "c"], range(2, 4))
    assert log_of(query).names.keys() == {"b", "c"}
    assert elements(query, "c") == 4


# ---- Two at a time ----


def meanwhile(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Do something once, between a tool's look at the log and its claim."""
    put, done = LocalStore.put_if_absent, list[str]()

    def put_later(store: LocalStore, name: str, data: bytes) -> bool:
        if not done:
            done.append(name)
            do()
        return put(store, name, data)

    monkeypatch.setattr(LocalStore, "put_if_absent", put_later)


@pytest.mark.parametrize(
    ("other", "message"),
    [(("a", "d"), "no operator 'a'; it has 'b', 'd'"), (("b", "c"), "has an operator 'c'")],
    ids=["the same operator", "the same name"],
)
def test_of_two_at_once_the_second_finds_what_the_first_has_done(
    query: StoredQuery, monkeypatch: pytest.MonkeyPatch, other: tuple[str, str], message: str
) -> None:
    meanwhile(monkeypatch, lambda: statelog.rename(query.checkpoint, *other))
    with pytest.raises(ConfigurationError, match=message):
        statelog.rename(query.checkpoint, "a", "c")
    assert log_of(query).names.keys() == {"a", "b", other[1]} - {other[0]}


def test_of_two_at_once_both_count_if_they_can(query: StoredQuery, monkeypatch: pytest.MonkeyPatch) -> None:
    before = log_of(query).names
    meanwhile(monkeypatch, lambda: statelog.rename(query.checkpoint, "b", "d"))
    statelog.rename(query.checkpoint, "a", "c")
    assert log_of(query).names == {"c": before["a"], "d": before["b"]}


def test_an_operator_that_was_given_up_meanwhile_is_not_renamed(
    query: StoredQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, lambda: statelog.forget(query.checkpoint, "a"))
    with pytest.raises(ConfigurationError, match="no operator 'a'; it has 'b'"):
        statelog.rename(query.checkpoint, "a", "c")


@pytest.mark.parametrize("tool", ["rename", "forget"])
def test_a_query_that_runs_loses_its_log(tmp_path: Path, tool: str) -> None:
    spark_checkpoint(tmp_path, range(4), range(3))
    operators = Operators(tmp_path)
    operators.run("ab", 0, 2)
    operators.start("ab", 3)
    if tool == "rename":
        statelog.rename(tmp_path, "a", "c", location=operators.location)
    else:
        statelog.forget(tmp_path, "a", location=operators.location)
    operators.set("a", 3)
    with pytest.raises(FencedError):
        operators.set("b", 3)
    assert operators.history.names.keys() == ({"b", "c"} if tool == "rename" else {"b"})
    latest = operators.history.latest
    assert latest is not None
    assert latest.batch == 2


# ---- The program ----


def test_a_start_has_to_use_the_new_uid(query: StoredQuery) -> None:
    identity = log_of(query).names["a"]
    statelog.rename(query.checkpoint, "a", "x")
    statelog.rename(query.checkpoint, "x", "c")
    for uids in (["a", "b"], ["new", "b"], ["b"]):
        with pytest.raises(ConfigurationError, match="at batch 2 the query also has an operator 'c'") as raised:
            query.run(uids, range(3, 4))
        assert raised.value.kind is ErrorKind.OPERATOR_REMOVED
    query.run(["a", "b", "c"], range(3, 4))
    assert log_of(query).names["c"] == identity
    assert (elements(query, "a"), elements(query, "c")) == (1, 4), "it may come back beside the renamed one"


def test_the_old_uid_cannot_be_given_up(query: StoredQuery) -> None:
    statelog.rename(query.checkpoint, "a", "c")
    with pytest.raises(ConfigurationError, match="no operator 'a'; it has 'b', 'c'"):
        statelog.forget(query.checkpoint, "a")
    query.run(["a", "b", "c"], range(3, 4))
    assert statelog.forget(query.checkpoint, "a").batch == 3, "it is an operator of its own now"


# ---- Deaths and mistakes ----


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_at_any_step_is_mended_by_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: When
) -> None:
    whole = StoredQuery(tmp_path / "whole").run(["a", "b"], range(3))
    root = tmp_path / "query"
    query = StoredQuery(root)
    count = 0

    def begin() -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(whole.root, root)

    def check() -> None:
        nonlocal count
        count += 1
        found = newest(query, root / "saved").keys()
        assert found in ({"a", "b"}, {"b", "c"})
        if found == {"a", "b"}:
            statelog.rename(query.checkpoint, "a", "c")
        query.runs = 1 + count
        query.times = dict(whole.times)
        query.run(["c", "b"], range(3, 4))
        assert elements(query, "c") == 4
        begin()

    begin()
    rename = statelog.rename
    assert (
        deaths(monkeypatch, when, lambda: rename(query.checkpoint, "a", "c"), check, [checkpoint_location, stopped])
        >= 8
    )


def test_mistakes_are_named(query: StoredQuery, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no operator 'x'; it has 'a', 'b'"):
        statelog.rename(query.checkpoint, "x", "c")
    for new in "ab":
        with pytest.raises(ConfigurationError, match=f"has an operator '{new}'") as raised:
            statelog.rename(query.checkpoint, "a", new)
        assert raised.value.kind is ErrorKind.OTHER_OWNER
    with pytest.raises(ConfigurationError, match="uid is ''"):
        statelog.rename(query.checkpoint, "a", "")
    with pytest.raises(ConfigurationError, match="no checkpoint of a Spark query"):
        statelog.rename(tmp_path, "a", "c")
    other = StoredQuery(tmp_path / "other", query_id="other").run(["a"], range(1))
    with pytest.raises(ConfigurationError, match="holds no state of statelog that belongs to query other"):
        statelog.rename(other.checkpoint, "a", "c", location=query.location)
    assert log_of(query).names.keys() == {"a", "b"}
