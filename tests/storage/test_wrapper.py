"""Wrappers forward the whole contract, so that a store in a wrapper can do whatever it can do alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest.mock import Mock, create_autospec

import pytest

from statelog.clock import SystemClock
from statelog.errors import ErrorKind, StorageError
from statelog.metrics import Measurements
from statelog.storage import LocalStore, Store
from statelog.storage.links import LinkedStore
from statelog.storage.retry import RetryingStore, RetryPolicy
from statelog.storage.store import StoreWrapper
from statelog.testing.faults import FaultPlan, FaultStore

_T = TypeVar("_T")

BUFFER = memoryview(bytearray(3))
CALLS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("x", offset=1, length=2),
    "read_into": lambda store: store.read_into(BUFFER, "x", offset=1),
    "size_bytes": lambda store: store.size_bytes("x"),
    "put": lambda store: store.put("x", b"data"),
    "put_if_absent": lambda store: store.put_if_absent("x", b"data"),
    "append": lambda store: store.append("x", [b"data"], at=4),
    "sync": lambda store: store.sync("x", start=4, end=8),
    "delete": lambda store: store.delete(["x", "y"]),
    "list": lambda store: store.list("folder/"),
    "remove_unfinished": lambda store: store.remove_unfinished("folder/", 7.0),
    "close": lambda store: store.close(),
}
PROPERTIES = {"can_append"}
CONTRACT = {name for name in vars(Store) if not name.startswith("_")}

WRAPPERS: dict[str, Callable[[Store], Store]] = {
    "wrapper": StoreWrapper,
    "faults": lambda inner: FaultStore(inner, FaultPlan()),
    "links": lambda inner: LinkedStore(inner, Mock()),
    "retries": lambda inner: RetryingStore(inner, RetryPolicy.none(), clock=SystemClock(), recorder=Measurements()),
}


class Named(StoreWrapper):
    """Notes the operations and names of its calls."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []

    def _call(self, operation: str, name: str, effect: Callable[[], _T]) -> _T:
        self.calls.append((operation, name))
        return effect()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_arguments_that_are_left_out(wrapper: str, tmp_path: Path) -> None:
    store = WRAPPERS[wrapper](LocalStore(tmp_path))
    store.put("x", b"data")
    assert store.read("x") == b"data"
    buffer = bytearray(4)
    assert store.read_into(memoryview(buffer), "x") == 4
    assert buffer == b"data"
    store.delete([])
    assert [info.name for info in store.list()] == ["x"]


def test_the_list_of_calls_is_the_contract() -> None:
    assert CALLS.keys() | PROPERTIES == CONTRACT


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("method", CALLS)
def test_every_method_of_the_contract_is_forwarded(wrapper: str, method: str) -> None:
    direct: Mock = create_autospec(Store, instance=True)
    inner: Mock = create_autospec(Store, instance=True)
    CALLS[method](direct)

    result = CALLS[method](WRAPPERS[wrapper](inner))

    assert inner.method_calls == direct.method_calls
    if method not in ("put", "append", "sync", "delete", "remove_unfinished", "close"):
        assert result is getattr(inner, method).return_value


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("can_append", [False, True])
def test_every_capability_is_forwarded(wrapper: str, can_append: bool) -> None:
    inner = create_autospec(Store, instance=True, can_append=can_append)

    assert WRAPPERS[wrapper](inner).can_append == can_append


def test_one_method_sees_every_request() -> None:
    store = Named(create_autospec(Store, instance=True))

    for name in CALLS:
        CALLS[name](store)

    folders = {"list": "folder/", "remove_unfinished": "folder/"}
    operations = ["read" if name == "read_into" else name for name in CALLS if name != "close"]
    assert store.calls == [(operation, folders.get(operation, "x")) for operation in operations]


def test_reads_into_a_buffer_fail_and_are_repeated_like_others(tmp_path: Path) -> None:
    LocalStore(tmp_path).put("x", b"data")
    faults = FaultStore(LocalStore(tmp_path), FaultPlan.at("read", kind=ErrorKind.STORE_BUSY))
    buffer = bytearray(4)
    with pytest.raises(StorageError, match="injected"):
        faults.read_into(memoryview(buffer), "x")

    faults = FaultStore(LocalStore(tmp_path), FaultPlan.at("read", kind=ErrorKind.STORE_BUSY))
    store = RetryingStore(faults, RetryPolicy(delay_s=0), clock=SystemClock(), recorder=Measurements())
    assert store.read_into(memoryview(buffer), "x") == 4
    assert buffer == b"data"


def test_messages_name_the_place_and_not_the_layers(tmp_path: Path) -> None:
    store = RetryingStore(LocalStore(tmp_path), RetryPolicy.none(), clock=SystemClock(), recorder=Measurements())
    assert str(LinkedStore(store, Mock())) == str(tmp_path)
