"""Manifests of savepoints, and what restoring and removing them may touch."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import statelog
from statelog import ConfigurationError, CorruptionError, StatelogError
from statelog.queries.save import UNFINISHED, begin_target
from statelog.reading.savepoint import Manifest
from statelog.storage import LocalStore, ObjectInfo
from tests.compat.savepoints_support import FIXTURES
from tests.stored_query import StoredQuery, saved_values


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(name="saved")
def make_saved(tmp_path: Path) -> Path:
    target = tmp_path / "saved"
    statelog.savepoint(StoredQuery(tmp_path / "query").run(["op"], range(3)).checkpoint, target)
    return target


class OneObject(LocalStore):
    """A place that holds something else than was written."""

    data = b""

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self.data


def test_damage_anywhere_in_a_manifest_is_refused(saved: Path) -> None:
    whole, store = (saved / "manifest.json").read_bytes(), OneObject(str(saved))
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        store.data = bytes(flipped)
        with pytest.raises(CorruptionError, match=r"saved/manifest\.json"):
            Manifest.read(store, str(saved))
    for length in range(len(whole)):
        store.data = whole[:length]
        with pytest.raises(CorruptionError, match=r"saved/manifest\.json"):
            Manifest.read(store, str(saved))
    store.data = whole
    assert Manifest.read(store, str(saved)).batch == 2


def test_a_damaged_manifest_restores_nothing(saved: Path, tmp_path: Path) -> None:
    manifest = saved / "manifest.json"
    damaged = manifest.read_bytes().replace(rb"\"value\":0", rb"\"value\":1")
    assert damaged != manifest.read_bytes()
    assert json.loads(damaged), "another offset of a source, and well-formed"
    manifest.write_bytes(damaged)
    with pytest.raises(CorruptionError):
        statelog.restore(saved, tmp_path / "new", claim=True)
    assert not (tmp_path / "new").exists()
    assert manifest.read_bytes() == damaged


def test_a_manifest_without_its_checksum_is_not_taken_for_an_older_one(saved: Path, tmp_path: Path) -> None:
    manifest = saved / "manifest.json"
    held = json.loads(manifest.read_bytes())
    for missing in (["checksum"], ["kind"], ["kind", "checksum"]):
        manifest.write_text(json.dumps({name: value for name, value in held.items() if name not in missing}))
        with pytest.raises(CorruptionError):
            statelog.restore(saved, tmp_path / "new")


def test_the_first_version_is_read() -> None:
    held = json.loads((FIXTURES / "v1" / "manifest.json").read_bytes())
    read = Manifest.read(LocalStore(str(FIXTURES / "v1")), "v1")
    assert held["version"] == 1
    assert (read.batch, read.query_id, read.offsets) == (held["batch"], held["query_id"], held["offsets"])
    assert [operator.uid for operator in read.operators] == [one["uid"] for one in held["operators"]]


def test_a_claimed_savepoint_is_removed_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    (saved / "README").write_text("mine")
    (saved / "operators" / "op" / "notes.txt").write_text("mine")
    done = statelog.restore(saved, tmp_path / "new", claim=True)
    assert files(saved) == {"README": b"mine", "operators/op/notes.txt": b"mine"}
    assert done.next_batch == 3
    statelog.savepoint(tmp_path / "new", tmp_path / "again")
    assert saved_values(tmp_path / "again") == {"op": 2}


@pytest.mark.parametrize("claim", [True, False])
@pytest.mark.parametrize("place", [".", "new", "spark", "operators/op", "../link/new"])
def test_nothing_is_restored_into_the_savepoint(place: str, claim: bool, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(saved)
    before = files(saved)
    with pytest.raises(ConfigurationError, match="is within"):
        statelog.restore(saved, saved / place, claim=claim)
    with pytest.raises(ConfigurationError, match="is within"):
        statelog.restore(saved, tmp_path / "new", location=str(saved / place), claim=claim)
    assert files(saved) == before
    assert not (tmp_path / "new").exists()


def test_a_savepoint_below_what_is_restored_can_be_claimed(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "new"
    shutil.copytree(saved, root / "savepoints" / "monday")
    statelog.restore(root / "savepoints" / "monday", root, claim=True)
    assert files(root / "savepoints" / "monday") == {}
    statelog.savepoint(root, tmp_path / "again")
    assert saved_values(tmp_path / "again") == {"op": 2}


@pytest.mark.parametrize("folder", ["offsets", "statelog", "statelog/op/runs/1"])
def test_a_savepoint_among_what_is_restored_is_refused(folder: str, saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "new"
    shutil.copytree(saved, root / folder / "monday")
    with pytest.raises(ConfigurationError, match="is within"):
        statelog.restore(root / folder / "monday", root, claim=True)


# ---- Two at a time ----


class MeetingStore(LocalStore):
    """Lets two writers look at a place before either writes to it."""

    def __init__(self, root: str, barrier: threading.Barrier) -> None:
        super().__init__(root)
        self._meeting: threading.Barrier | None = barrier

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        found = super().list(prefix)
        barrier, self._meeting = self._meeting, None
        if barrier is not None:
            barrier.wait(10)
        return found


@pytest.mark.parametrize("attempt", range(20))
def test_of_two_savepoints_into_one_place_only_one_is_written(attempt: int, tmp_path: Path) -> None:
    barrier = threading.Barrier(2)
    outcomes: list[Any] = []

    def begin(token: bytes) -> None:
        try:
            begin_target(MeetingStore(str(tmp_path), barrier), str(tmp_path), token)
            outcomes.append(token)
        except StatelogError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=begin, args=(token,)) for token in (b"1", b"2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [won] = [outcome for outcome in outcomes if isinstance(outcome, bytes)]
    [lost] = [outcome for outcome in outcomes if not isinstance(outcome, bytes)]
    assert isinstance(lost, ConfigurationError)
    assert files(tmp_path) == {UNFINISHED: won}


class LateStore(LocalStore):
    """Another savepoint is begun and finished between the first look and the first write."""

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        self.put("manifest.json", b"another's")
        return super().put_if_absent(name, data)


def test_a_savepoint_that_was_finished_meanwhile_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not empty"):
        begin_target(LateStore(str(tmp_path)), str(tmp_path), b"token")
    assert files(tmp_path) == {"manifest.json": b"another's"}


def test_a_savepoint_that_is_being_written_is_in_the_way(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path / "query").run(["op"], range(1))
    begin_target(LocalStore(str(tmp_path / "saved")), "saved", b"token")
    with pytest.raises(ConfigurationError, match="another savepoint is being written"):
        statelog.savepoint(query.checkpoint, tmp_path / "saved")


# ---- Names ----


def test_operators_and_states_with_similar_names_have_files_of_their_own(tmp_path: Path) -> None:
    names = ["a\N{NON-BREAKING HYPHEN}b", "a 11b", "A", "a"]
    query = StoredQuery(tmp_path).run(names, range(2), states=names)
    saved = statelog.savepoint(query.checkpoint, tmp_path / "saved")
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_bytes())
    found = {
        (operator["uid"], state["schema"]["name"]): pq.read_table(tmp_path / "saved" / file["name"])
        for operator in manifest["operators"]
        for state in operator["states"]
        for file in state["files"]
    }
    assert {uid: set(rows) for uid, rows in saved.rows.items()} == {name: {*names} for name in names}
    for uid in names:
        for state in names:
            assert found[uid, state].column("value_field").to_pylist() == [f"{uid} {state}"]
    paths = [str(path.relative_to(tmp_path)).lower() for path in (tmp_path / "saved").rglob("*.parquet")]
    assert len(set(paths)) == len(names) ** 2
    statelog.restore(tmp_path / "saved", tmp_path / "new")
    statelog.savepoint(tmp_path / "new", tmp_path / "again")
    again = json.loads((tmp_path / "again" / "manifest.json").read_bytes())
    assert again["operators"] == manifest["operators"]
