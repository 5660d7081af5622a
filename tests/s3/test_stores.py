from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from statelog import Finding
from statelog.clock import SystemClock
from statelog.diagnosis.finding import Place
from statelog.diagnosis.location import (
    Marks,
    Probe,
    Traces,
    check_from_driver,
    check_from_executor,
    check_marks,
    remove_probe,
)
from statelog.errors import ErrorKind, StorageError
from statelog.storage import Store, open_store
from statelog.storage.probe import check_put_if_absent
from statelog.testing.contracts import StoreContract
from tests.s3.server import RadosGateway

pytest_plugins = ("tests.s3.plugin",)


class TestS3Store(StoreContract):
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


def test_the_server_is_safe(s3_location: str) -> None:
    store = open_store(s3_location)
    check_put_if_absent(store)
    assert store.list() == []


def test_a_race_to_create_has_one_winner(s3_location: str) -> None:
    stores = [pickle.loads(pickle.dumps(open_store(s3_location))) for _ in range(16)]
    with ThreadPoolExecutor(len(stores)) as pool:
        for number in range(25):
            name = f"log/{number:020d}"
            tokens = [b"%d by %d" % (number, writer) for writer in range(len(stores))]
            won = list(pool.map(lambda store, token, name=name: store.put_if_absent(name, token), stores, tokens))
            assert won.count(True) == 1
            assert stores[0].read(name) == tokens[won.index(True)]


def test_more_objects_than_one_answer_lists(s3_location: str) -> None:
    store = open_store(s3_location)
    names = [f"changes/{number:05d}.run" for number in range(1200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(store.put, data=b"1"), names))
    assert [info.name for info in store.list("changes/")] == names
    assert [info.name for info in store.list("changes/0011")] == names[110:120]
    store.delete([*names[:1100], "never/there"])
    assert [info.name for info in store.list()] == names[1100:]


def test_a_large_object(s3_location: str) -> None:
    store = open_store(s3_location)
    data = bytes(range(256)) * (32 << 12)
    store.put("large", data)
    assert store.size_bytes("large") == 32 << 20
    assert store.read("large", offset=(32 << 20) - 3) == data[-3:]
    assert store.read("large", offset=1 << 20, length=1 << 20) == data[1 << 20 : 2 << 20]
    assert store.read("large") == data


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
