"""Stores that users register for schemes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError, Options
from statelog.clock import SystemClock
from statelog.log.open import open_retrying_store
from statelog.metrics import Measurements
from statelog.spark.worker.worker import pickled_stores
from statelog.storage import LocalStore, Store, open_store
from statelog.storage.open import is_same_place, is_within, local_path
from statelog.storage.retry import RetryingStore
from statelog.testing.contracts import StoreContract
from tests.model.engine import Command, Engine, Key
from tests.stores import KeptStore


@pytest.fixture(autouse=True)
def kept() -> None:
    statelog.register_store("kept", KeptStore)


class TestRegisteredStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"kept:{tmp_path}")


def not_called(location: str) -> Store:
    raise AssertionError(location)


@pytest.mark.parametrize("scheme", ["", "k", "Kept", "kept:", "kept://", "1kept", "ke pt", "kept_1", None])
def test_a_malformed_scheme_is_refused(scheme: Any) -> None:
    with pytest.raises(ConfigurationError, match="malformed"):
        statelog.register_store(scheme, not_called)


@pytest.mark.parametrize("scheme", ["file", "s3", "s3a", "gs", "az", "abfs", "abfss"])
def test_a_scheme_that_is_built_in_is_refused(scheme: str) -> None:
    with pytest.raises(ConfigurationError, match="built in"):
        statelog.register_store(scheme, not_called)


def test_a_scheme_has_one_factory(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'kept' is registered with another factory"):
        statelog.register_store("kept", not_called)
    statelog.register_store("kept", KeptStore)
    assert isinstance(open_store(f"kept:{tmp_path}"), KeptStore)


def test_what_is_no_factory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="factory is '/data'"):
        statelog.register_store("folder", "/data")  # type: ignore[arg-type]  # a user's mistake
    statelog.register_store("wrong", str)  # type: ignore[arg-type]  # a user's mistake
    with pytest.raises(ConfigurationError, match="returned 'wrong:x' for wrong:x"):
        open_store("wrong:x")


def test_the_factory_gets_the_location_as_it_was_written(tmp_path: Path) -> None:
    open_store(f"kept:{tmp_path}").put("x", b"1")
    assert LocalStore(tmp_path).read("x") == b"1"
    assert isinstance(open_store(f"KEPT:{tmp_path}"), KeptStore), "a scheme is the same in capitals"


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"lost, which is not supported.*s3://.*kept.*register_store"):
        open_store("lost:/x")


def test_requests_of_a_registered_store_are_repeated(tmp_path: Path) -> None:
    store = open_retrying_store(f"kept:{tmp_path}", Options(), SystemClock(), Measurements())
    assert isinstance(store.own, RetryingStore)


def test_a_directory_is_asked_for_where_one_is_needed() -> None:
    with pytest.raises(ConfigurationError, match="is not in a file system of this host, but a directory is required"):
        local_path("kept:/a")


def test_places_of_a_registered_scheme_are_compared_by_their_parts() -> None:
    assert is_same_place("kept:/a/b/", "KEPT:///a//b")
    assert is_within("kept://host/a/b", "kept://host/a")
    for other in ("kept:/a", "kept:/a/bc", "kept://a/b", "/a/b", "s3://a/b"):
        assert not is_same_place(other, "kept:/a/b")
        assert not is_within(other, "kept:/a/b")


def test_a_query_goes_on_from_a_registered_location(tmp_path: Path) -> None:
    """With another parallelism, on a host without local files."""
    engine = Engine(
        tmp_path,
        lambda key: (key[0] or 0) << 61,
        file_merging="within",
        open_store=lambda path: open_store(f"kept:{path}"),
    )
    keys: list[Key] = [(number, None) for number in range(8)]

    def run(batch: int, command: Command) -> list[Any]:
        parts = enumerate(engine.parts([(key, command) for key in keys]))
        return [found for subtask, commands in parts for found in engine.run_commands(batch, subtask, commands)]

    engine.start(2, 0)
    for batch in range(5):
        run(batch, ("set", batch))
    engine.start(3, 5, keep_local=False)

    assert [found[0] for _, found in run(5, ("read",))] == [[4]] * 8


def test_a_factory_that_cannot_be_sent_is_an_error_before_the_query() -> None:
    script = """
import threading
from functools import partial
import statelog
from statelog.spark.worker.worker import pickled_stores

statelog.register_store("kept", partial(print, threading.Lock()))
try:
    pickled_stores()
except statelog.ConfigurationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "The factory of the scheme 'kept' cannot be sent to the workers: TypeError" in done.stdout


def test_a_process_without_the_registration_adopts_it(tmp_path: Path) -> None:
    open_store(f"kept:{tmp_path}").put("x", b"1")
    script = f"""
import pickle
from statelog.spark.worker.worker import DriverStores, adopt_stores
from statelog.storage import open_store

adopt_stores({pickled_stores()!r})
print(open_store({f"kept:{tmp_path}"!r}).read("x"))
try:
    adopt_stores(pickle.dumps(DriverStores({{"gone": b"cno_such_module\\nStore\\n."}}, None)))
except Exception as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("b'1'\n"), done.stderr
    assert "The factory of the scheme 'gone' cannot be loaded in the Python workers: ModuleNotFoundError" in done.stdout
