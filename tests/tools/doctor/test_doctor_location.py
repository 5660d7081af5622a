"""The doctor's checks of a location, on stores that break one promise each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from statelog import Finding, Store
from statelog.errors import ErrorKind, StorageError
from statelog.storage import LocalStore, ObjectInfo
from statelog.storage.store import StoreWrapper
from statelog.testing.query import ManualClock
from statelog.tools.doctor.finding import Place
from statelog.tools.doctor.location import (
    Marks,
    Probe,
    Traces,
    check_from_driver,
    check_from_executor,
    check_marks,
    check_store,
    new_probe,
    remove_probe,
)
from tests.stores import MemoryStore, WholeObjects

_T = TypeVar("_T")

DRIVER = Place("driver", "here")
EXECUTOR = Place("executor 1", "there")
NOW_S = 1_780_000_000.0
PROBE = Probe("s3://bucket/some/folder", "probe/doctor-1")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_S)


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock)


class Denied(StoreWrapper):
    """Refuses an operation, as S3 does."""

    def __init__(self, inner: Store, operation: str) -> None:
        super().__init__(inner)
        self._operation = operation

    def _call(self, operation: str, name: str, effect: Callable[[], _T]) -> _T:
        if operation == self._operation:
            raise StorageError(
                f"{operation} s3://bucket/some/folder/{name} failed: 403 AccessDenied: no.",
                hint="Check the credentials.",
            )
        return effect()


class Forgetful(StoreWrapper):
    """Breaks one promise."""

    def __init__(self, inner: Store, promise: str) -> None:
        super().__init__(inner)
        self._promise = promise

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        data = super().read(name, offset=offset, length=length)
        return data[:-1] if self._promise == ("read" if length is None else "read a part") else data

    def size_bytes(self, name: str) -> int:
        return super().size_bytes(name) + (self._promise == "size")

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        if self._promise == "absent":
            self.put(name, data)
            return True
        return super().put_if_absent(name, data)

    def append(self, name: str, parts: list[bytes | memoryview], *, at: int) -> None:
        if self._promise == "append":
            at = self.size_bytes(name)
        super().append(name, parts, at=at)

    def delete(self, names: list[str]) -> None:
        if self._promise != "delete":
            super().delete(names)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return [] if self._promise == "list" else super().list(prefix)


def from_driver(store: Store, clock: ManualClock, probe: Probe = PROBE) -> tuple[list[Finding], Traces]:
    traces = Traces()
    return list(check_from_driver(store, probe, DRIVER, clock, traces)), traces


def end(store: Store, probe: Probe = PROBE, traces: Traces | None = None) -> list[Finding]:
    return list(remove_probe(store, probe, DRIVER, traces or Traces(is_written=True)))


# ---- A store that keeps its promises ----


@pytest.mark.parametrize("can_append", [True, False])
def test_a_good_store_is_ok_and_empty_afterwards(store: MemoryStore, clock: ManualClock, can_append: bool) -> None:
    used: Store = store if can_append else WholeObjects(store)
    found, traces = from_driver(used, clock)
    marks: list[Marks] = []
    of_executor = list(check_from_executor(used, PROBE, EXECUTOR, marks.append))
    compared = list(check_marks(used, PROBE, DRIVER, [(EXECUTOR, one) for one in marks]))

    assert {one.level for one in (*found, *of_executor, *compared)} == {"ok"}
    assert [one.check for one in found] == ["location", "clock"]
    assert ("appends" in found[0].found) == can_append == any(name == "append" for name, _ in store.requests)
    assert [one.where for one in of_executor] == ["executor 1"]
    assert "executor 1" in compared[0].found
    assert traces.is_written
    assert store.objects
    assert {name for name, content in store.objects.items() if content[0] == PROBE.content} == {
        PROBE.witness,
        *(one.written for one in marks),
    }
    assert all(name.startswith("probe/doctor-1/") for _, name in store.requests)
    assert end(used) == []
    assert not store.objects


def test_appended_bytes_are_made_durable(store: MemoryStore) -> None:
    synced: list[tuple[int, int]] = []

    class Noted(StoreWrapper):
        def sync(self, name: str, *, start: int, end: int) -> None:
            synced.append((start, end))
            assert end == self.size_bytes(name)

    assert [one.level for one in check_store(Noted(store), PROBE, DRIVER)] == ["ok"]
    assert synced == [(0, len(PROBE.content) + 2)]


def test_two_diagnoses_write_in_two_folders() -> None:
    assert new_probe("x").folder != new_probe("x").folder


# ---- Stores that do not ----


@pytest.mark.parametrize("promise", ["read", "read a part", "size", "absent", "append", "list", "delete"])
def test_a_broken_promise_is_an_error(store: MemoryStore, clock: ManualClock, promise: str) -> None:
    inner = store if promise == "append" else WholeObjects(store)
    found = list(check_store(Forgetful(inner, promise), PROBE, DRIVER))
    assert found
    assert all(one.level == "error" and "not safe" in one.found and one.remedy for one in found)
    assert promise == "delete" or not store.objects


def test_an_executor_whose_store_breaks_a_promise_leaves_no_marks(store: MemoryStore, clock: ManualClock) -> None:
    from_driver(store, clock)
    marks: list[Marks] = []
    found = list(check_from_executor(Forgetful(store, "size"), PROBE, EXECUTOR, marks.append))
    assert [one.level for one in found] == ["error"]
    assert not marks


def test_an_executor_leaves_a_mark_only_once_its_object_is_written(store: MemoryStore, clock: ManualClock) -> None:
    from_driver(store, clock)
    marks: list[Marks] = []
    with pytest.raises(StorageError):
        list(check_from_executor(Denied(store, "put"), PROBE, EXECUTOR, marks.append))
    assert not marks


def test_an_executor_that_may_not_read_says_so(store: MemoryStore, clock: ManualClock) -> None:
    from_driver(store, clock)
    [found] = check_from_executor(Denied(store, "read"), PROBE, EXECUTOR, lambda _: None)
    assert (found.level, found.check) == ("error", "location")
    assert "403" in found.found


def test_a_store_that_lists_nothing_tells_no_time(store: MemoryStore, clock: ManualClock) -> None:
    found, _ = from_driver(Forgetful(store, "list"), clock)
    assert {one.check for one in found} == {"location"}


@pytest.mark.parametrize(
    ("operation", "named"),
    [("put_if_absent", "put_if_absent"), ("read", "read"), ("list", "list"), ("delete", "delete")],
)
def test_a_denied_request_is_an_error_that_names_the_permissions(
    store: MemoryStore, clock: ManualClock, operation: str, named: str
) -> None:
    found, traces = from_driver(Denied(store, operation), clock)
    errors = [one for one in found if one.level == "error"]
    assert errors
    assert f"{named} s3://bucket/some/folder/probe/doctor-1" in errors[0].found
    assert "403 AccessDenied" in errors[0].found
    assert errors[0].remedy.startswith("Check the credentials. Grant s3:GetObject, s3:PutObject and s3:DeleteObject")
    assert "arn:aws:s3:::bucket/some/folder/*, and s3:ListBucket for arn:aws:s3:::bucket." in errors[0].remedy
    assert traces.is_written == (operation != "put_if_absent")


@pytest.mark.parametrize(
    ("location", "named"),
    [
        ("gs://b/f", "Storage Object User for the bucket b"),
        ("az://c/f", "Storage Blob Data Contributor for the container c"),
    ],
)
def test_other_clouds_have_roles(store: MemoryStore, clock: ManualClock, location: str, named: str) -> None:
    [found] = from_driver(Denied(store, "put_if_absent"), clock, Probe(location, "probe/doctor-1"))[0]
    assert named in found.remedy


def failing(message: str) -> Store:
    class Failing(StoreWrapper):
        def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
            raise StorageError(message, hint="Look at it.")

    return Failing(MemoryStore(ManualClock(NOW_S)))


@pytest.mark.parametrize(
    ("location", "message", "remedy"),
    [
        ("s3://bucket", "failed: 403 no", "arn:aws:s3:::bucket/*, and"),
        ("s3://bucket", "failed: 500 no", ""),
        ("/some/folder", "x: Permission denied", "The process runs as user"),
        ("/some/folder", "x: Operation not permitted", "The process runs as user"),
        ("/some/folder", "x: No space left on device", ""),
    ],
)
def test_only_a_denied_request_needs_permissions(clock: ManualClock, location: str, message: str, remedy: str) -> None:
    [found] = from_driver(failing(message), clock, Probe(location, "probe/doctor-1"))[0]
    assert found.found == message
    assert remedy in found.remedy if remedy else found.remedy == "Look at it."


def test_a_missing_object_that_is_denied_needs_the_permission_to_list(store: MemoryStore) -> None:
    class Hiding(StoreWrapper):
        def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
            try:
                return super().read(name, offset=offset, length=length)
            except StorageError as error:
                assert error.kind is ErrorKind.OBJECT_MISSING
                raise StorageError("read x failed: 403.", hint="Check the credentials.") from error

    [found] = check_store(Hiding(store), PROBE, DRIVER)
    assert found.level == "error"
    assert "does not report a deleted object as missing" in found.found
    assert "s3:ListBucket for arn:aws:s3:::bucket" in found.remedy


@pytest.mark.parametrize(("ahead_s", "level"), [(60, "ok"), (-60, "ok"), (61, "warning"), (-61, "warning")])
def test_the_clock_of_the_store(clock: ManualClock, ahead_s: float, level: str) -> None:
    found, _ = from_driver(MemoryStore(ManualClock(NOW_S + ahead_s)), clock)
    assert (found[-1].check, found[-1].level) == ("clock", level)
    if level == "warning":
        assert f"61.0 s {'ahead of' if ahead_s > 0 else 'behind'} the driver's" in found[-1].found


# ---- Between hosts ----


def test_an_executor_that_does_not_see_the_drivers_object_writes_nothing(
    store: MemoryStore, clock: ManualClock
) -> None:
    from_driver(store, clock)
    elsewhere, marks = MemoryStore(clock), list[Marks]()
    [found] = check_from_executor(elsewhere, PROBE, EXECUTOR, marks.append)
    assert (found.level, found.check, found.host) == ("error", "location-shared", "there")
    assert "is not seen here" in found.found
    assert "mount under one path" in found.remedy
    assert not elsewhere.objects
    assert not marks


def test_an_executor_that_goes_on_after_the_end_leaves_nothing(store: MemoryStore, clock: ManualClock) -> None:
    class Ended(StoreWrapper):
        """The driver removes everything while the executor's first checks end."""

        def delete(self, names: list[str]) -> None:
            super().delete(names)
            if [name for name in store.objects if name != PROBE.witness] == []:
                end(store)

    from_driver(store, clock)
    marks: list[Marks] = []
    found = list(check_from_executor(Ended(store), PROBE, EXECUTOR, marks.append))
    assert [one.level for one in found] == ["ok"]
    assert not marks
    assert not store.objects


def test_the_driver_must_see_what_an_executor_has_written(store: MemoryStore) -> None:
    [found] = check_marks(store, PROBE, DRIVER, [(EXECUTOR, Marks("probe/doctor-1/mark", won=False))])
    assert (found.level, found.check) == ("error", "location-shared")
    assert "executor 1 (there)" in found.found


def test_without_executors_there_is_nothing_to_compare(store: MemoryStore) -> None:
    assert list(check_marks(store, PROBE, DRIVER, [])) == []


def test_two_winners_of_the_race_are_an_error(store: MemoryStore, clock: ManualClock) -> None:
    from_driver(store, clock)
    marks: list[Marks] = []
    for _ in range(2):
        list(check_from_executor(store, PROBE, EXECUTOR, marks.append))
    assert [one.won for one in marks] == [True, False]
    both = [(EXECUTOR, marks[0]), (Place("executor 2", "host"), Marks(marks[1].written, won=True))]
    [found] = check_marks(store, PROBE, DRIVER, both)
    assert found.level == "error"
    assert "executor 1 (there), executor 2 (host) have created the same object" in found.found


# ---- Directories ----


def test_directories_that_were_missing_are_removed_again(tmp_path: Path) -> None:
    location = tmp_path / "a" / "b"
    probe, store = Probe(str(location), "probe/doctor-1"), LocalStore(location)
    found, traces = from_driver(store, ManualClock(tmp_path.stat().st_mtime), probe)
    assert {one.level for one in found} == {"ok"}
    assert traces.made == [location, tmp_path / "a"]
    (location / "probe" / "doctor-1" / ".1.x.tmp").write_text("of a killed process")
    assert end(store, probe, traces) == []
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_written_meanwhile_stays(tmp_path: Path, clock: ManualClock) -> None:
    probe, store = Probe(str(tmp_path / "a"), "probe/doctor-1"), LocalStore(tmp_path / "a")
    _, traces = from_driver(store, clock, probe)
    store.put("main/log/1", b"a query")
    end(store, probe, traces)
    assert [info.name for info in store.list()] == ["main/log/1"]


def test_a_file_in_place_of_the_directory_is_an_error(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "file"
    path.write_text("")
    found, traces = from_driver(LocalStore(path), clock, Probe(f"file:{path}", "probe/doctor-1"))
    assert [(one.level, one.found) for one in found] == [("error", f"{path} is not a directory.")]
    assert not traces.is_written


def test_objects_that_cannot_be_removed_are_a_warning(store: MemoryStore, clock: ManualClock) -> None:
    from_driver(store, clock)
    denied = Denied(store, "delete")
    [found] = end(denied)
    assert found.level == "warning"
    assert found.remedy == "Remove probe/doctor-1 yourself."
    assert end(denied, traces=Traces()) == []
