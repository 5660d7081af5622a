"""Stores and logs on Azurite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from statelog.errors import ErrorKind, StorageError
from statelog.log.numbered import NumberedLog
from statelog.storage import Store, open_store
from statelog.testing.query import ManualClock
from tests.azure.server import Azurite
from tests.bucket_contract import BucketContract
from tests.contract.log_contract import PREFIX, LogContract

pytest_plugins = ("tests.azure.plugin",)


class TestAzureStore(BucketContract):
    many = 300

    @pytest.fixture
    def store(self, azure_location: str) -> Store:
        return open_store(azure_location)


@pytest.mark.extended
class TestLogOfBlobs(LogContract):
    @pytest.fixture
    def open_store(self, azure_location: str) -> Callable[[], Store]:
        return lambda: open_store(azure_location)

    def make_log(self, store: Store) -> NumberedLog:
        return NumberedLog(store, PREFIX, ManualClock(), appends=False)


def test_what_the_server_refuses(azure_location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(azure_location)
    store.put("x", b"1")
    nowhere = open_store("az://no-such-container/folder")
    for call in (
        partial(nowhere.read, "x"),
        partial(nowhere.put, "x", b"1"),
        partial(nowhere.put_if_absent, "x", b"1"),
        nowhere.list,
    ):
        with pytest.raises(StorageError, match="az://no-such-container/folder.*404 ContainerNotFound") as raised:
            call()
        assert raised.value.kind == ErrorKind.STORE_FAILED
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
    with pytest.raises(StorageError, match="403.*[Cc]redentials") as raised:
        store.read("x")
    assert raised.value.kind == ErrorKind.STORE_FAILED
    monkeypatch.undo()
    assert store.read("x") == b"1"


def test_the_variables_of_the_emulator_are_enough(
    azurite: Azurite, azure_location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in azurite.environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", azurite.address)
    store = open_store(azure_location)
    assert store.put_if_absent("x", b"1")
    assert not store.put_if_absent("x", b"2")
