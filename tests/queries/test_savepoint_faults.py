"""Deaths at every store operation of taking a savepoint and of restoring it: what is half done counts for nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import statelog
from statelog import ConfigurationError
from statelog.reading.savepoint import Manifest
from statelog.spark.checkpoint.checkpoint import SparkCheckpoint, StoreFiles
from statelog.storage import LocalStore
from tests.compat.fixtures_support import KEYS, expected, write_location
from tests.compat.savepoints_support import BATCH, FIXTURES, collecting, keyed, restored, runner
from tests.coordinator.crash_points_support import When
from tests.model.engine import command_rows
from tests.queries.savepoint_faults_support import deaths
from tests.reading.saved import save as saved
from tests.stored_query import StoredQuery

both = pytest.mark.parametrize("when", ["before", "after"])


def require_all(directory: Path) -> None:
    """Both operators continue, and the keyed one with all its state."""
    query, op, words = runner(directory), keyed(), collecting()
    query.start([op.operator, words.operator], 2, BATCH + 1)
    model = expected()
    outputs = query.run_operator("op", BATCH + 1, command_rows(op, [(key, ("read",)) for key in KEYS]))
    found = [json.loads(text) for output in outputs for text in output.column(0).to_pylist()]
    wanted = [[list(key), model.run(key, ("read",))] for key in KEYS]
    assert sorted(found, key=json.dumps) == sorted(wanted, key=json.dumps)
    query.release()


@both
def test_a_savepoint_that_is_not_finished_is_none_and_harms_nothing(
    when: When, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_location(tmp_path, "across")
    location, target = tmp_path / "location", tmp_path / "savepoint"
    before = {path: path.read_bytes() for path in location.rglob("*") if path.is_file()}

    def check() -> None:
        assert not (target / "manifest.json").exists()
        assert {path: path.read_bytes() for path in location.rglob("*") if path.is_file()} == before
        shutil.rmtree(target, ignore_errors=True)

    assert deaths(monkeypatch, when, lambda: saved(str(location), target, BATCH), check) >= 3


@both
def test_a_restore_that_is_not_finished_can_be_repeated(
    when: When, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = FIXTURES / "v1"
    attempts = 0

    def directory() -> Path:
        return tmp_path / str(attempts)

    def check() -> None:
        nonlocal attempts
        try:
            restored(fixture, directory())
        except ConfigurationError as error:
            assert "already holds state" in str(error), "it had come to the checkpoint"
            shutil.rmtree(directory())
            restored(fixture, directory())
        require_all(directory())
        attempts += 1

    assert deaths(monkeypatch, when, lambda: restored(fixture, directory()), check) >= 8
    require_all(directory())
    assert Manifest.read(LocalStore(str(fixture)), "fixture").batch == BATCH


@both
def test_a_checkpoint_is_that_of_a_query_once_all_of_it_is_there(
    when: When, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would start a query with nothing but an id at its first batch."""
    query = StoredQuery(tmp_path).run(["a"], range(3))
    statelog.savepoint(query.checkpoint, tmp_path / "saved")
    target, interrupted = tmp_path / "restored", []

    def check() -> None:
        whole = {path.name for path in (target / "commits").glob("[0-9]*")} == {"2"}
        whole = whole and {path.name for path in (target / "offsets").glob("[0-9]*")} == {"1", "2"}
        assert whole or not (target / "metadata").exists()
        interrupted.append(whole)
        shutil.rmtree(target, ignore_errors=True)

    deaths(monkeypatch, when, lambda: statelog.restore(tmp_path / "saved", target), check)
    assert not all(interrupted)
    assert SparkCheckpoint(StoreFiles(LocalStore(target)), str(target)).query_id()
