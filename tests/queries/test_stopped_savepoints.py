"""Savepoints of stopped queries hold every operator that the query has, as of its newest batch, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import statelog
from statelog import ConfigurationError, ErrorKind, StateMissingError
from tests.stored_query import StoredQuery, saved_values


def test_an_operator_whose_state_was_given_up_is_left_out(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run(["kept", "lost"], range(2))
    statelog.forget(query.checkpoint, "lost")
    saved = statelog.savepoint(query.checkpoint, tmp_path / "at once")
    assert (saved.batch, list(saved.rows), saved_values(tmp_path / "at once")) == (1, ["kept"], {"kept": 1})
    query.run(["kept"], range(2, 10))
    saved = statelog.savepoint(query.checkpoint, tmp_path / "later")
    assert (saved.batch, list(saved.rows), saved_values(tmp_path / "later")) == (9, ["kept"], {"kept": 9})


def test_a_query_that_has_no_operator_any_more_is_refused(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run(["a"], range(2))
    statelog.forget(query.checkpoint, "a")
    for call in (statelog.savepoint, statelog.branch):
        with pytest.raises(
            ConfigurationError, match="as of batch 1, the state of all of the query's operators has been given up"
        ) as refused:
            call(query.checkpoint, tmp_path / "new")
        assert refused.value.kind is ErrorKind.CHECKPOINT_MISSING
        assert not (tmp_path / "new").exists()


def test_a_renamed_operator_has_its_new_name_in_every_batch(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run(["before"], range(5))
    statelog.rename(query.checkpoint, "before", "after")
    query.run(["after"], range(5, 10))
    for batch in (3, 9):
        statelog.savepoint(query.checkpoint, tmp_path / f"saved-{batch}", batch=batch)
        assert saved_values(tmp_path / f"saved-{batch}") == {"after": batch}


def test_state_in_a_location_of_its_own_is_found_if_it_is_named(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path, tmp_path / "own").run(["a", "b"], range(3))
    with pytest.raises(ConfigurationError, match="Pass location="):
        statelog.savepoint(query.checkpoint, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    statelog.savepoint(query.checkpoint, tmp_path / "saved", location=query.location)
    assert saved_values(tmp_path / "saved") == {"a": 2, "b": 2}


def test_a_committed_batch_without_a_checkpoint_is_no_reason_for_an_older_savepoint(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run(["a", "b"], range(5), lacks_last=True)
    with pytest.raises(StateMissingError, match=r"committed batch 4, but .*newest checkpoint is 3.*choose batch 3"):
        statelog.savepoint(query.checkpoint, tmp_path / "saved")
    assert statelog.savepoint(query.checkpoint, tmp_path / "saved", batch=3).batch == 3
    assert saved_values(tmp_path / "saved") == {"a": 3, "b": 3}


def test_an_older_batch_has_the_operators_of_its_time(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run(["first"], range(2)).run(["first", "added"], range(2, 4))
    for batch, uids in ((1, ["first"]), (3, ["added", "first"])):
        statelog.savepoint(query.checkpoint, tmp_path / f"saved-{batch}", batch=batch)
        assert saved_values(tmp_path / f"saved-{batch}") == dict.fromkeys(uids, batch)


def test_checkpoints_of_batches_that_were_taken_back_do_not_count(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run(["kept", "late"], range(8))
    query.forget(range(3, 8))
    query.run(["kept", "late"], range(3, 6), time_ms=9000)
    assert statelog.savepoint(query.checkpoint, tmp_path / "saved").batch == 5
    assert saved_values(tmp_path / "saved") == {"kept": 5, "late": 5}


def test_the_state_of_another_query_does_not_count(tmp_path: Path) -> None:
    one = StoredQuery(tmp_path / "one").run(["a"], range(5))
    other = StoredQuery(tmp_path / "other", query_id="other").run(["a"], range(5))
    with pytest.raises(ConfigurationError, match="holds no state of statelog that belongs to query other"):
        statelog.savepoint(other.checkpoint, tmp_path / "saved", location=one.location)


def test_a_copy_of_the_state_counts_where_it_was_given(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run(["a"], range(3))
    (query.checkpoint / "statelog").rename(tmp_path / "copy")
    query.run(["a"], range(3), time_ms=5000)
    with pytest.raises(StateMissingError, match=r"committed batch 2, but .*/copy has no checkpoint of it"):
        statelog.savepoint(query.checkpoint, tmp_path / "saved", location=str(tmp_path / "copy"))
    assert statelog.savepoint(query.checkpoint, tmp_path / "saved").batch == 2


def test_a_savepoint_within_the_querys_own_folders_is_refused(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path, tmp_path / "own").run(["a"], range(3))
    for target in (query.checkpoint / "offsets" / "x", tmp_path / "own" / "monday"):
        with pytest.raises(ConfigurationError, match="is within"):
            statelog.savepoint(query.checkpoint, target, location=str(tmp_path / "own"))
        assert not target.exists()
    statelog.savepoint(query.checkpoint, query.checkpoint / "saved", location=str(tmp_path / "own"))
    assert saved_values(query.checkpoint / "saved") == {"a": 2}


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_directories_may_be_written_as_uris(scheme: str, tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run(["a"], range(3))
    statelog.savepoint(f"{scheme}{query.checkpoint}", f"{scheme}{tmp_path}/saved")
    done = statelog.restore(f"{scheme}{tmp_path}/saved", f"{scheme}{tmp_path}/restored")
    assert done.checkpoint_location == f"{scheme}{tmp_path}/restored"
    statelog.savepoint(tmp_path / "restored", tmp_path / "again")
    assert saved_values(tmp_path / "again") == saved_values(tmp_path / "saved") == {"a": 2}
