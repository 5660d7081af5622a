"""Giving up the state of an operator: where it is looked for, and when that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import statelog
from statelog import ConfigurationError, ErrorKind
from statelog.checkpoint.query_operators import QueryLogs
from statelog.log.entry import Claim
from statelog.log.numbered import NumberedLog
from statelog.storage import LocalStore
from statelog.testing.clock import ManualClock
from tests.unit.test_query_operators import Places


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data", "statelog.storage.posix.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


class Query(Places):
    """The places of a query whose checkpointLocation is the folder ``query``."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        LocalStore(root / "query").put("metadata", json.dumps({"id": "query"}).encode())
        self.checkpoint = root / "query"

    def __call__(self, name: str) -> str:
        return str(self.checkpoint / "statelog") if name == "home" else super().__call__(name)

    def given_up(self, place: str) -> set[str]:
        """The uids whose state was given up at a place."""
        logs = QueryLogs.read("query", self(place), None, LocalStore)
        return logs.given_up


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def test_the_log_is_found_at_home_or_where_a_note_says(query: Query) -> None:
    query.write("home", "a", range(3), note={"a": "", "b": "far"})
    query.write("far", "b", range(2))
    dry = statelog.forget(query.checkpoint, "b", dry_run=True)
    assert (dry.uid, dry.folder, dry.batch) == ("b", f"{query('far')}/b", 1)
    assert query.given_up("far") == set()
    assert statelog.forget(query.checkpoint, "b") == dry
    assert (query.given_up("far"), query.given_up("home")) == ({"b"}, set())
    assert statelog.forget(query.checkpoint, "a").folder == f"{query('home')}/a"
    assert query.given_up("home") == {"a"}


def test_the_claim_is_the_querys_and_its_log_is_closed(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    def close(log: NumberedLog) -> None:
        closed.append(log.number)

    monkeypatch.setattr(NumberedLog, "close", close)
    query.write("home", "a", range(1))
    statelog.forget(query.checkpoint, "a")
    assert [number > 0 for number in closed] == [True], "once, and after it was claimed"
    entries = NumberedLog(LocalStore(query("home")), "a/log", ManualClock(), appends=True).read()
    [*_, claim] = entries
    assert isinstance(claim, Claim)
    assert (claim.query_id, claim.run_id, claim.uid, claim.gives_up) == ("query", "forget", "a", True)
    assert (len(claim.token), claim.time_ms > 10**12) == (16, True)


def test_of_an_operator_without_a_log_the_given_location_counts_or_home(query: Query) -> None:
    assert statelog.forget(query.checkpoint, "a").folder == f"{query('home')}/a"
    assert query.given_up("home") == {"a"}
    made = statelog.forget(query.checkpoint, "a", location=query("own"))
    assert (made.folder, made.batch) == (f"{query('own')}/a", None)
    assert query.given_up("own") == {"a"}


def test_an_operator_whose_state_is_gone_is_known_by_its_note(query: Query) -> None:
    query.write("home", "a", range(3), note={"a": "", "b": ""})
    assert statelog.forget(query.checkpoint, "b").batch is None
    assert query.given_up("home") == {"b"}
    assert statelog.forget(query.checkpoint, "b").batch is None, "again"


def test_a_uid_that_the_query_does_not_know_is_refused(query: Query) -> None:
    query.write("home", "a", range(3), note={"a": "", "b": ""})
    statelog.forget(query.checkpoint, "b")
    with pytest.raises(ConfigurationError, match=r"no operator 'c'; it has 'a', 'b'\.") as raised:
        statelog.forget(query.checkpoint, "c")
    assert raised.value.kind is ErrorKind.INVALID_OPTION
    assert not Path(query("home"), "c").exists()
    statelog.forget(query.checkpoint, "a")
    with pytest.raises(ConfigurationError, match=r"it has 'a', 'b'\."):
        statelog.forget(query.checkpoint, "c")


def test_a_location_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no checkpoint of a Spark query"):
        statelog.forget(tmp_path / "nothing", "a")
