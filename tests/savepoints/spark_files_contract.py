"""Conformance tests of Spark's files, for a subclass per implementation."""

from __future__ import annotations

from pathlib import Path

import pytest

from statelog.errors import ErrorKind, StorageError
from statelog.spark.checkpoint.checkpoint import SparkFiles

TEXT = b'v1\n{"batchTimestampMs":1}\n\xff\n'


def visible(names: list[str]) -> list[str]:
    return [name for name in names if not name.rpartition("/")[2].startswith(".")]


class SparkFilesContract:
    """A subclass overrides the fixture :meth:`files`, which gives the files of the empty directory `root`."""

    has_checksums = False
    """Whether files get checksums."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "odd %41#name" / "checkpoint"

    @pytest.fixture
    def files(self, root: Path) -> SparkFiles:
        raise NotImplementedError

    def test_a_new_location_has_no_files(self, files: SparkFiles) -> None:
        assert files.list("offsets") == []
        files.write("commits/0", b"v1\n{}")
        assert files.list("offsets") == files.list("commit") == []

    @pytest.mark.parametrize("data", [b"", TEXT, bytes(range(256)) * 5_000])
    def test_what_was_written_is_read(self, files: SparkFiles, root: Path, data: bytes) -> None:
        files.write("sources/0/7.compact", data)
        assert files.read("sources/0/7.compact") == data
        assert (root / "sources" / "0" / "7.compact").read_bytes() == data

    def test_a_file_that_spark_has_not_written_here_is_read(self, files: SparkFiles, root: Path) -> None:
        (root / "offsets").mkdir(parents=True)
        (root / "offsets" / "3").write_bytes(TEXT)
        assert files.list("offsets") == ["offsets/3"]
        assert files.read("offsets/3") == TEXT

    def test_files_of_all_folders_below_are_listed_in_order(self, files: SparkFiles) -> None:
        for name in ("sources/1/0", "metadata", "sources/0/1", "sources/0/0", "sources/0/deep/er/x", "sources2/0"):
            files.write(name, TEXT)
        expected = ["sources/0/0", "sources/0/1", "sources/0/deep/er/x", "sources/1/0"]
        assert visible(files.list("sources")) == expected
        assert visible(files.list("sources/0")) == expected[:3]

    @pytest.mark.parametrize("folder", ["", "offsets/"])
    def test_a_missing_file_is_named(self, files: SparkFiles, folder: str) -> None:
        files.write("offsets/3", TEXT)
        with pytest.raises(StorageError, match=f"checkpoint/{folder}4") as caught:
            files.read(f"{folder}4")
        assert caught.value.kind is ErrorKind.OBJECT_MISSING

    def test_another_failure_is_not_that_of_a_missing_file(self, files: SparkFiles) -> None:
        files.write("offsets/3", TEXT)
        with pytest.raises(StorageError) as caught:
            files.write("offsets/3/4", TEXT)
        assert caught.value.kind is ErrorKind.STORE_FAILED
        with pytest.raises(StorageError) as caught:
            files.move("offsets/3", "offsets/3/4")
        assert caught.value.kind is ErrorKind.STORE_FAILED
        assert files.read("offsets/3") == TEXT

    def test_a_written_file_replaces_another_one_and_its_checksum(self, files: SparkFiles, root: Path) -> None:
        files.write("offsets/3", TEXT)
        (root / "offsets" / ".3.crc").write_bytes(b"crc of another file")
        for data in (b"", TEXT * 100, b"short"):
            files.write("offsets/3", data)
            assert files.read("offsets/3") == data
        assert (root / "offsets" / ".3.crc").exists() == self.has_checksums
        assert visible(files.list("offsets")) == ["offsets/3"]

    def test_a_moved_file_is_at_its_new_name_alone(self, files: SparkFiles, root: Path) -> None:
        for batch in range(3):
            files.write(f"offsets/{batch}", TEXT + bytes([batch]))
        files.move("offsets/1", "statelog-rewound/1/offsets/1")
        files.move("offsets/2", "statelog-rewound/1/offsets/2")
        assert visible(files.list("offsets")) == ["offsets/0"]
        assert visible(files.list("statelog-rewound")) == [f"statelog-rewound/1/offsets/{batch}" for batch in (1, 2)]
        assert files.read("statelog-rewound/1/offsets/2") == TEXT + b"\2"
        left = {path.name for path in (root / "offsets").iterdir()}
        assert left <= {"0", ".0.crc"}, "no checksum stays without its file"

    def test_a_later_file_takes_the_place_of_a_moved_one(self, files: SparkFiles) -> None:
        files.write("commits/3", TEXT)
        files.move("commits/3", "aside/commits/3")
        files.write("commits/3", b"another, longer one" * 50)
        assert files.read("commits/3") == b"another, longer one" * 50
        assert files.read("aside/commits/3") == TEXT

    def test_a_missing_file_is_not_moved(self, files: SparkFiles) -> None:
        files.move("commits/3", "aside/commits/3")
        files.write("commits/2", TEXT)
        files.move("commits/3", "aside/commits/3")
        assert files.list("aside") == []
        assert visible(files.list("commits")) == ["commits/2"]
