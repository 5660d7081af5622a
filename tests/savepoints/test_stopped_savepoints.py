"""Savepoints of stopped queries hold every operator that the query has, as of its newest batch, or are refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import statelog
from statelog import ConfigurationError, ErrorKind, StateMissingError
from statelog.checkpoint.query_operators import QueryLogs, operators_of
from statelog.storage import LocalStore
from tests.stored_query import StoredQuery, saved_values

noted = pytest.mark.parametrize("notes", [True, False], ids=["noted", "as version 1"])


@noted
def test_an_operator_that_the_query_lost_is_left_out(
    notes: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    query = StoredQuery(tmp_path)
    query.run({"kept": None, "lost": None}, range(2), notes=notes).run({"kept": None}, range(2, 10), notes=notes)
    with caplog.at_level(logging.WARNING):
        saved = statelog.savepoint(query.checkpoint, tmp_path / "saved")
    assert (saved.batch, list(saved.rows), saved_values(tmp_path / "saved")) == (9, ["kept"], {"kept": 9})
    assert [record.getMessage() for record in caplog.records if "'lost'" in record.getMessage()] != []


@noted
def test_an_operator_that_was_renamed_before_the_first_commit_is_left_out(notes: bool, tmp_path: Path) -> None:
    query = StoredQuery(tmp_path)
    query.run({"before": None}, range(1), notes=notes)
    query.run({"after": None}, range(10), notes=notes)
    assert statelog.savepoint(query.checkpoint, tmp_path / "saved").batch == 9
    assert saved_values(tmp_path / "saved") == {"after": 9}


def test_operators_with_locations_of_their_own_are_saved_with_the_others(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path)
    own = {"home": None, "own": tmp_path / "own", "other": tmp_path / "other"}
    query.run(own, range(3))
    assert statelog.savepoint(query.checkpoint, tmp_path / "one").batch == 2
    assert saved_values(tmp_path / "one") == {"home": 2, "own": 2, "other": 2}
    statelog.savepoint(query.checkpoint, tmp_path / "two", location=str(tmp_path / "own"))
    assert saved_values(tmp_path / "two") == {"home": 2, "own": 2, "other": 2}


def test_all_operators_are_found_from_the_location_of_one(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run({"a": tmp_path / "own", "b": tmp_path / "other"}, range(3))
    with pytest.raises(ConfigurationError, match="Pass location="):
        statelog.savepoint(query.checkpoint, tmp_path / "none")
    statelog.savepoint(query.checkpoint, tmp_path / "saved", location=str(tmp_path / "other"))
    assert saved_values(tmp_path / "saved") == {"a": 2, "b": 2}


def test_an_operator_whose_state_is_gone_is_named(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run({"home": None, "own": tmp_path / "own"}, range(3))
    (tmp_path / "own").rename(tmp_path / "moved")
    with pytest.raises(ConfigurationError, match=f"an operator 'own', and {tmp_path}/own holds no state") as refused:
        statelog.savepoint(query.checkpoint, tmp_path / "saved")
    assert refused.value.kind is ErrorKind.CHECKPOINT_MISSING
    assert not (tmp_path / "saved").exists()
    statelog.savepoint(query.checkpoint, tmp_path / "saved", location=str(tmp_path / "moved"))
    assert saved_values(tmp_path / "saved") == {"home": 2, "own": 2}


@noted
def test_a_committed_batch_that_an_operator_lacks_is_no_reason_for_an_older_savepoint(
    notes: bool, tmp_path: Path
) -> None:
    query = StoredQuery(tmp_path).run({"a": None, "b": None}, range(5), notes=notes, lacking=["b"])
    with pytest.raises(StateMissingError, match=r"committed batch 4, and operator 'b'.*newest is 3.*choose batch 3"):
        statelog.savepoint(query.checkpoint, tmp_path / "saved")
    assert statelog.savepoint(query.checkpoint, tmp_path / "saved", batch=3).batch == 3
    assert saved_values(tmp_path / "saved") == {"a": 3, "b": 3}


def test_an_older_batch_has_the_operators_of_its_time(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path)
    query.run({"kept": None, "lost": tmp_path / "own"}, range(2)).run({"kept": None}, range(2, 4))
    statelog.savepoint(query.checkpoint, tmp_path / "saved", batch=1)
    assert saved_values(tmp_path / "saved") == {"kept": 1, "lost": 1}


def test_checkpoints_of_batches_that_were_taken_back_do_not_count(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run({"kept": None, "lost": None}, range(8), started_ms=100)
    query.forget(range(3, 8))
    # The clock has been put back, so the first run seems to be the later one.
    query.run({"kept": None}, range(3, 6), started_ms=50, time_ms=9000)
    assert statelog.savepoint(query.checkpoint, tmp_path / "saved").batch == 5
    assert saved_values(tmp_path / "saved") == {"kept": 5}


def test_the_newest_run_tells_which_operators_there_are(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run({"kept": None, "a lost one": None, "lost": None}, range(4))
    query.forget(range(3, 4))
    query.run({"kept": None}, range(3, 4))
    assert statelog.savepoint(query.checkpoint, tmp_path / "saved").batch == 3
    assert saved_values(tmp_path / "saved") == {"kept": 3}


def test_logs_of_other_queries_do_not_count(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run({"a": None}, range(5))
    logs = QueryLogs.read("another", str(query.checkpoint / "statelog"), None, LocalStore)
    assert (logs.found, logs.newest()) == ([], None)
    logs = QueryLogs.read("query", str(query.checkpoint / "statelog"), None, LocalStore)
    assert (logs.newest(), logs.newest(up_to=4), [log.uid for log in logs.at(4).operators]) == (4, 4, ["a"])


def test_a_copy_of_the_state_counts_where_it_was_given(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run({"a": None}, range(3))
    (query.checkpoint / "statelog").rename(tmp_path / "copy")
    query.run({"a": None}, range(3), time_ms=5000)
    with pytest.raises(StateMissingError, match=r"committed batch 2, and operator 'a'"):
        statelog.savepoint(query.checkpoint, tmp_path / "saved", location=str(tmp_path / "copy"))
    assert statelog.savepoint(query.checkpoint, tmp_path / "saved").batch == 2


def test_a_savepoint_within_the_locations_own_folders_is_refused(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run({"a": tmp_path / "own"}, range(3))
    for target in (query.checkpoint / "offsets" / "x", tmp_path / "own" / "a" / "runs" / "1"):
        with pytest.raises(ConfigurationError, match="is within"):
            statelog.savepoint(query.checkpoint, target, location=str(tmp_path / "own"))


def test_a_savepoint_beside_the_operators_is_taken_for_none_of_them(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run({"a": None}, range(3), states=["log"])
    state = query.checkpoint / "statelog"
    statelog.savepoint(query.checkpoint, state / "monday")
    assert (state / "monday" / "operators" / "a" / "states" / "log").is_dir()
    assert statelog.list_orphans(str(state), min_age_s=0) == []
    assert statelog.savepoint(query.checkpoint, tmp_path / "other").rows == {"a": {"log": 1}}
    assert operators_of(LocalStore(str(state))) == ["a"]


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_directories_may_be_written_as_uris(scheme: str, tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run({"a": None}, range(3))
    statelog.savepoint(f"{scheme}{query.checkpoint}", f"{scheme}{tmp_path}/saved")
    done = statelog.restore(f"{scheme}{tmp_path}/saved", f"{scheme}{tmp_path}/restored")
    assert done.checkpoint_location == f"{scheme}{tmp_path}/restored"
    statelog.savepoint(tmp_path / "restored", tmp_path / "again")
    assert saved_values(tmp_path / "again") == saved_values(tmp_path / "saved") == {"a": 2}
