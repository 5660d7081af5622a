"""Spark's files without Spark: in a store, and in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from statelog import ConfigurationError, ErrorKind
from statelog.spark.checkpoint import location as checkpoint_location
from statelog.spark.checkpoint.checkpoint import DirectoryFiles, SparkCheckpoint, SparkFiles, StoreFiles
from statelog.spark.checkpoint.location import open_checkpoint, state_home, state_location
from statelog.spark.driver import internals
from statelog.storage import LocalStore
from statelog.storage.open import REGISTERED
from statelog.testing.faults import FaultStore
from tests.coordinator.crash_points_support import KillAt, Killed, When
from tests.queries.spark_files_contract import TEXT, SparkFilesContract


class TestStoreFiles(SparkFilesContract):
    @pytest.fixture
    def files(self, root: Path) -> SparkFiles:
        return StoreFiles(LocalStore(root))


class TestDirectoryFiles(SparkFilesContract):
    @pytest.fixture
    def files(self, root: Path) -> SparkFiles:
        return DirectoryFiles(LocalStore(root), root)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_move_in_a_store_loses_nothing_and_leaves_no_checksum_alone(when: When, tmp_path: Path) -> None:
    moves = 0
    for number in range(1, 100):
        root = tmp_path / str(number)
        (root / "offsets").mkdir(parents=True)
        contents = {"3": TEXT, ".3.crc": b"crc"}
        for name, data in contents.items():
            (root / "offsets" / name).write_bytes(data)
        plan = KillAt(number, when)
        try:
            StoreFiles(FaultStore(LocalStore(root), plan)).move("offsets/3", "aside/offsets/3")
            if not plan.killed_at:
                break
        except Killed:
            moves += 1
        for name, data in contents.items():
            copies = [path.read_bytes() for path in root.glob(f"*/offsets/{name}")] + [
                path.read_bytes() for path in root.glob(f"offsets/{name}")
            ]
            assert copies
            assert set(copies) == {data}
        assert (root / "offsets" / "3").exists() or not (root / "offsets" / ".3.crc").exists()
        StoreFiles(LocalStore(root)).move("offsets/3", "aside/offsets/3")
        assert {path.name: path.read_bytes() for path in (root / "aside" / "offsets").iterdir()} == contents
        assert not list(root.glob("offsets/*"))
    assert moves >= 6


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_that_was_replaced_never_has_the_checksum_of_the_one_before(number: int, tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "3").write_bytes(b"before")
    (tmp_path / "offsets" / ".3.crc").write_bytes(b"crc")
    with pytest.raises(Killed):
        StoreFiles(FaultStore(LocalStore(tmp_path), KillAt(number, "after"))).write("offsets/3", TEXT)
    assert (tmp_path / "offsets" / "3").read_bytes() == (b"before" if number == 1 else TEXT)
    assert not (tmp_path / "offsets" / ".3.crc").exists()


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_a_directory_is_one_however_it_is_written(tmp_path: Path, scheme: str) -> None:
    checkpoint = open_checkpoint(f"{scheme}{tmp_path}/", None)
    assert checkpoint.location == str(tmp_path)
    assert isinstance(checkpoint.files, DirectoryFiles)
    assert state_location(checkpoint, "s3://bucket/state") == f"{tmp_path}/statelog"


def test_a_bucket_needs_no_session() -> None:
    checkpoint = open_checkpoint("s3a://bucket/checkpoint/", None)
    assert type(checkpoint.files) is StoreFiles
    assert state_location(checkpoint, None) == "s3a://bucket/checkpoint/statelog"


def test_hdfs_needs_no_session() -> None:
    checkpoint = open_checkpoint("hdfs://cluster/checkpoint/", None)
    assert type(checkpoint.files) is StoreFiles
    assert state_location(checkpoint, None) == "hdfs://cluster/checkpoint/statelog"


@pytest.mark.parametrize("location", ["ofs://name:9862/checkpoints/a", "viewfs://cluster/a", "dbfs:/a"])
def test_another_file_system_needs_a_session(location: str) -> None:
    with pytest.raises(ConfigurationError, match="no Spark session is active") as refused:
        open_checkpoint(location, None)
    assert refused.value.kind is ErrorKind.UNSUPPORTED_FEATURE
    assert location.partition(":")[0] in refused.value.hint


class KnownFiles(StoreFiles):
    """Stands in for the files that a session's Hadoop reaches."""

    def __init__(self, session: object, location: str) -> None:
        self.location = f"known:{location}"


@pytest.mark.parametrize(
    ("location", "scheme", "is_hadoops"),
    [
        ("viewfs://home/query", "viewfs", True),
        ("/query", "viewfs", True),  # Hadoop's default file system
        ("s3://bucket/query", "s3", True),
        ("s3://bucket/query", "", False),  # Spark does not know it
        ("/query", "file", False),
        ("/query", "", False),
        ("file:///query", "viewfs", False),
    ],
)
def test_spark_says_of_what_file_system_a_checkpoint_location_is(
    location: str, scheme: str, is_hadoops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals, "file_system_scheme", lambda session, place: scheme)
    monkeypatch.setattr(checkpoint_location, "HadoopFiles", KnownFiles)
    opened = open_checkpoint(location, object())  # type: ignore[arg-type]  # any object is a session here
    assert isinstance(opened.files, KnownFiles) == is_hadoops
    expected = location.removeprefix("file://")
    assert opened.location == (f"known:{location}" if is_hadoops else expected)


@pytest.mark.parametrize(
    ("session", "reason"), [(None, "no Spark session is active"), (object(), "the session's Hadoop does not know it")]
)
def test_a_place_that_neither_reaches_is_refused(session: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "file_system_scheme", lambda session, place: "")
    with pytest.raises(ConfigurationError, match=f"viewfs://home/query has the scheme viewfs, but {reason}"):
        open_checkpoint("viewfs://home/query", session)


@pytest.mark.parametrize(
    ("home", "location", "expected"),
    [
        ("/query", None, "/query/statelog"),
        ("s3://bucket/query/", "/elsewhere", "s3://bucket/query/statelog"),
        ("viewfs://home/query", "/elsewhere", "/elsewhere"),
    ],
)
def test_state_is_below_the_checkpoint_location_where_a_store_can_be(
    home: str, location: str | None, expected: str, tmp_path: Path
) -> None:
    checkpoint = SparkCheckpoint(StoreFiles(LocalStore(tmp_path)), home)
    assert state_location(checkpoint, location) == expected


def test_state_is_there_too_if_a_store_is_registered_for_the_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTERED, "viewfs", LocalStore)
    assert state_home("viewfs://home/query/") == "viewfs://home/query/statelog"


def test_without_a_place_for_the_state_one_is_asked_for(tmp_path: Path) -> None:
    checkpoint = SparkCheckpoint(StoreFiles(LocalStore(tmp_path)), "viewfs://home/query")
    with pytest.raises(ConfigurationError, match="keeps no state in locations with the scheme viewfs.* Pass location="):
        state_location(checkpoint, None)
