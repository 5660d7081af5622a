"""Whether locations are one place, however they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from statelog.storage.open import is_same_place, is_within

BUCKET = "s3://bucket/folder"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "state" / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to("state")
    return tmp_path


@pytest.mark.parametrize(
    "spelling", ["{}/state", "{}/state/", "file:{}/state", "file://{}/state", "{}/link", "{}/state/a/..", "{}//state"]
)
def test_spellings_of_one_directory(root: Path, spelling: str) -> None:
    location = spelling.format(root)
    assert is_same_place(location, str(root / "state"))
    assert is_within(location, f"file:{root}")
    assert is_within(f"{location}/a", str(root / "state"))
    assert not is_same_place(location, f"{root}/state/a")
    assert not is_within(location, f"{root}/state/a")


@pytest.mark.parametrize("other", ["{}/stat", "{}/state2", "s3://bucket{}/state", "{}"])
def test_other_places_than_a_directory(root: Path, other: str) -> None:
    assert not is_same_place(other.format(root), f"{root}/state")
    assert not is_within(other.format(root), f"{root}/state")


@pytest.mark.parametrize("location", [BUCKET, f"{BUCKET}/", "s3a://bucket/folder", "S3://bucket/folder//"])
def test_spellings_of_one_folder_in_a_bucket(location: str) -> None:
    assert is_same_place(location, BUCKET)
    assert is_within(location, BUCKET)
    assert is_within(location, "s3://bucket")
    assert is_within(f"{BUCKET}/below", location)
    assert not is_within(location, f"{BUCKET}/below")


@pytest.mark.parametrize(
    "other", ["gs://bucket/folder", "s3://another/folder", "s3://bucket/folder2", "/bucket/folder"]
)
def test_other_places_than_a_folder_in_a_bucket(other: str) -> None:
    assert not is_same_place(other, BUCKET)
    assert not is_within(other, BUCKET)
    assert not is_within(f"{other}/below", BUCKET)


@pytest.mark.parametrize("location", ["hdfs://name/a", "hdfs://name/a/", "HDFS://name:8020/a//"])
def test_spellings_of_one_folder_in_hdfs(location: str) -> None:
    assert is_same_place(location, "hdfs://name/a")
    assert is_within("hdfs://name/a/b", location)
    assert is_within(location, "hdfs://name")


def test_other_places_than_a_folder_in_hdfs() -> None:
    for other in ("hdfs://name/ab", "hdfs://other/a", "hdfs://name:9000/a", "/a", "s3://name/a"):
        assert not is_same_place(other, "hdfs://name/a")
        assert not is_within(f"{other}/b", "hdfs://name/a")
    assert not is_within(BUCKET, "hdfs://bucket/folder")


def test_places_that_only_spark_reaches() -> None:
    assert is_within("viewfs://name/a/b", "viewfs://name/a/")
    assert not is_within("viewfs://name/ab", "viewfs://name/a")
    assert not is_within("viewfs://name/a", "viewfs://other/a")
    assert not is_within("viewfs://name/a", "/a")
    assert not is_within(BUCKET, "viewfs://bucket/folder")
