from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from statelog import Finding
from statelog.clock import SystemClock
from statelog.errors import ErrorKind, StorageError
from statelog.storage import Store, open_store
from statelog.testing.contracts import StoreContract
from statelog.tools.doctor.finding import Place
from statelog.tools.doctor.location import (
    Marks,
    Probe,
    Traces,
    check_from_driver,
    check_from_executor,
    check_marks,
    remove_probe,
)
from tests.bucket_contract import BucketContract
from tests.s3.server import RadosGateway

pytest_plugins = ("tests.s3.plugin",)


class TestS3Store(BucketContract):
    @pytest.fixture
    def store(self, s3_location: str) -> Store:
        return open_store(s3_location)


class TestS3StoreInAFolderWithAWidelyUsedName(StoreContract):
    """Objects beside the folder, with names that start like it, are not the store's."""

    @pytest.fixture
    def store(self, s3_location: str) -> Store:
        above = open_store(s3_location.replace("s3:", "s3a:"))
        for name in ("state", "state-2/x", "state.log", "stat/x"):
            above.put(name, b"another's")
        return open_store(f"{s3_location}/state/")


def test_what_the_server_refuses(s3_location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(s3_location)
    store.put("x", b"1")
    nowhere = open_store("s3://no-such-bucket/folder")
    for call in (
        partial(nowhere.read, "x"),
        partial(nowhere.put, "x", b"1"),
        partial(nowhere.put_if_absent, "x", b"1"),
        partial(nowhere.delete, ["x"]),
        nowhere.list,
    ):
        with pytest.raises(StorageError, match="s3://no-such-bucket/folder.*404 NoSuchBucket") as raised:
            call()
        assert raised.value.kind == ErrorKind.STORE_FAILED
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageError, match="403 SignatureDoesNotMatch.*[Cc]redentials") as raised:
        store.read("x")
    assert raised.value.kind == ErrorKind.STORE_FAILED
    monkeypatch.undo()
    assert store.read("x") == b"1"


def test_a_profile_of_the_shared_files_is_let_in(
    s3_location: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("boto3", reason="boto3, which reads AWS profiles, is not installed")
    key, secret = (os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    keys = f"aws_access_key_id = {key}\naws_secret_access_key"
    (tmp_path / "credentials").write_text(f"[right]\n{keys} = {secret}\n[wrong]\n{keys} = {secret[::-1]}\n")
    endpoint = f"region = us-east-1\nendpoint_url = {os.environ['AWS_ENDPOINT_URL']}\n"
    (tmp_path / "config").write_text(f"[profile right]\n{endpoint}[profile wrong]\n{endpoint}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "right")
    store = open_store(s3_location)
    assert store.put_if_absent("x", b"1")
    assert not store.put_if_absent("x", b"2")
    assert store.read("x") == b"1"
    monkeypatch.setenv("AWS_PROFILE", "wrong")
    with pytest.raises(StorageError, match="403 SignatureDoesNotMatch"):
        store.read("x")


@pytest.mark.usefixtures("s3_server")
def test_a_server_that_goes_away() -> None:
    with RadosGateway() as server, pytest.MonkeyPatch.context() as patch:
        server.create_bucket("bucket")
        for name, value in server.environment.items():
            patch.setenv(name, value)
        store = open_store("s3://bucket/folder")
        store.put("x", b"1")
        server.stop()
        for call in (partial(store.put, "y", b"1"), partial(store.read, "x"), store.list):
            with pytest.raises(StorageError) as raised:
                call()
            assert raised.value.is_transient


# ---- The doctor ----


def diagnosed(location: str) -> list[Finding]:
    """The doctor's findings of a location, without Spark."""
    store, probe, place, traces = open_store(location), Probe(location, "probe/doctor-1"), Place("driver", ""), Traces()
    found = list(check_from_driver(store, probe, place, SystemClock(), traces))
    marks: list[Marks] = []
    if traces.is_written:
        found += check_from_executor(store, probe, place, marks.append)
        found += check_marks(store, probe, place, [(place, one) for one in marks])
    found += remove_probe(store, probe, place, traces)
    return found


def test_the_doctor_finds_nothing_wrong_and_leaves_nothing(s3_location: str) -> None:
    found = diagnosed(s3_location)
    assert {one.level for one in found} == {"ok"}
    assert "location-shared" in {one.check for one in found}
    assert open_store(s3_location).list() == []


def test_the_doctor_names_what_wrong_credentials_need(s3_location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x" * 40)
    [found] = diagnosed(s3_location)
    assert found.level == "error"
    assert "403" in found.found
    assert "Check the credentials" in found.remedy
    assert "s3:ListBucket" in found.remedy


def test_the_doctor_finds_that_there_is_no_bucket(s3_server: RadosGateway) -> None:
    [found] = diagnosed("s3://no-such-bucket/x")
    assert found.level == "error"
    assert "Check the bucket's name" in found.remedy
