"""What a store has that defines no more than it must."""

from __future__ import annotations

import threading

import pytest

from statelog.errors import CorruptionError, ErrorKind, StorageError
from statelog.storage import ObjectInfo, Store
from statelog.storage.store import if_present, read_ahead


class SmallStore(Store):
    """Objects in a dictionary; missing ones have no error of their own."""

    def __init__(self) -> None:
        self.objects = {"x": b"0123456789"}

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self.objects[name][offset:][:length]

    def size_bytes(self, name: str) -> int:
        return len(self.objects[name])

    def put(self, name: str, data: bytes | memoryview) -> None:
        self.objects[name] = bytes(data)

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        return self.objects.setdefault(name, bytes(data)) == data

    def delete(self, names: list[str]) -> None:
        self.objects = {name: data for name, data in self.objects.items() if name not in names}

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return []


def test_it_writes_whole_objects() -> None:
    store = SmallStore()
    assert not store.can_append
    with pytest.raises(StorageError, match=r"append x failed: .*SmallStore.* cannot append\. Hint: Write whole"):
        store.append("x", [b"more"], at=10)
    store.sync("x", start=0, end=10)
    store.remove_unfinished("", 7.0)
    store.close()


@pytest.mark.parametrize(
    ("size_bytes", "offset", "found"), [(3, 0, b"012"), (3, 4, b"456"), (4, 8, b"89--"), (2, 10, b"--")]
)
def test_it_reads_into_a_buffer(size_bytes: int, offset: int, found: bytes) -> None:
    buffer = bytearray(b"-" * size_bytes)
    assert SmallStore().read_into(memoryview(buffer), "x", offset=offset) == len(found.rstrip(b"-"))
    assert buffer == found


def test_its_reads_begin_at_the_start() -> None:
    buffer = bytearray(2)
    assert SmallStore().read_into(memoryview(buffer), "x") == 2
    assert buffer == b"01"


def test_only_a_missing_object_is_none() -> None:
    def fail(kind: ErrorKind) -> bytes:
        raise StorageError("read x failed", kind=kind)

    assert if_present(lambda: b"data") == b"data"
    assert if_present(lambda: fail(ErrorKind.OBJECT_MISSING)) is None
    with pytest.raises(StorageError, match="read x failed"):
        if_present(lambda: fail(ErrorKind.STORE_BUSY))


def test_reading_ahead_keeps_the_order_and_its_bounds() -> None:
    lock = threading.Lock()
    state = {"running": 0, "most": 0, "read": 0}
    barrier = threading.Barrier(3, timeout=20)

    def read(number: int) -> int:
        with lock:
            state["running"] += 1
            state["read"] += 1
            state["most"] = max(state["most"], state["running"])
        if number < 3:
            barrier.wait()
        with lock:
            state["running"] -= 1
        return number * number

    drawn: list[int] = []
    results = read_ahead((drawn.append(number) or number for number in range(50)), read, 3)  # type: ignore[func-returns-value]  # None, so that the number counts
    assert next(results) == 0
    assert drawn == [0, 1, 2], "as many as there are threads"
    assert list(results) == [number * number for number in range(1, 50)]
    assert state["most"] == 3


def test_an_error_while_reading_ahead_comes_in_its_place() -> None:
    def read(number: int) -> int:
        if number == 3:
            raise CorruptionError("three")
        return number

    results = read_ahead(range(9), read, 4)
    assert [next(results), next(results), next(results)] == [0, 1, 2]
    with pytest.raises(CorruptionError, match="three"):
        next(results)
