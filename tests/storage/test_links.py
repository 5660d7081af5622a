"""Links: a branch reads its parent's objects where they are, and never deletes one."""

from __future__ import annotations

import pytest

from statelog import StorageError
from statelog.storage.links import LinkedStore, is_link, link, split_link
from statelog.testing.query import ManualClock
from tests.stores import MemoryStore


class Places:
    """Stores in memory by location, and how often each was opened."""

    def __init__(self) -> None:
        self.stores: dict[str, MemoryStore] = {}
        self.opened: list[str] = []
        self.closed: list[str] = []

    def open(self, location: str) -> MemoryStore:
        self.opened.append(location)
        made = self.stores.setdefault(location, Noted(location, self.closed))
        made.objects["op/a"] = (location.encode(), 0.0)
        return made


class Noted(MemoryStore):
    """Notes that it is closed."""

    def __init__(self, location: str, closed: list[str]) -> None:
        super().__init__(ManualClock())
        self._location, self._closed = location, closed

    def close(self) -> None:
        self._closed.append(self._location)


@pytest.fixture
def places() -> Places:
    return Places()


@pytest.fixture
def store(places: Places) -> LinkedStore:
    return LinkedStore(places.open("own"), places.open)


@pytest.mark.parametrize("location", ["/data/parent", "s3://bucket/parent", "/odd!/parent"])
def test_a_link_names_a_location_and_an_object_there(location: str) -> None:
    made = link(location, "op/a")
    assert is_link(made)
    assert split_link(made) == (location, "op/a")
    assert link(f"{location}/", "op/a") == made
    assert link("/another", made) == made, "the object stays where it is, also for a branch of a branch"
    assert not is_link("op/a")


def test_a_link_is_read_at_its_location_and_other_names_at_the_own(store: LinkedStore, places: Places) -> None:
    for name, content in (("op/a", b"own"), ("/parent!/op/a", b"/parent"), ("/other!/op/a", b"/other")):
        assert store.read(name) == content
        assert store.read(name, offset=1, length=2) == content[1:3]
        assert store.size_bytes(name) == len(content)
        buffer = bytearray(2)
        assert store.read_into(memoryview(buffer), name) == 2
        assert buffer == content[:2]
        assert store.read_into(memoryview(buffer), name, offset=1) == 2
        assert buffer == content[1:3]
    with pytest.raises(StorageError, match="op/b is missing"):
        store.read("/parent!/op/b")
    assert places.opened == ["own", "/parent", "/other"], "each once"
    assert store.own is places.stores["own"]


def test_only_own_objects_are_deleted(store: LinkedStore, places: Places) -> None:
    """The parent's belong to it, or to other branches too."""
    store.read("/parent!/op/a")
    store.delete(["/parent!/op/a", "op/a"])
    assert list(places.stores["/parent"].objects) == ["op/a"]
    deleted = [name for operation, name in places.stores["own"].requests if operation == "delete"]
    assert deleted == ["op/a"], "a store may have no object of such a name"


def test_all_stores_are_closed_and_opened_again_when_needed(store: LinkedStore, places: Places) -> None:
    store.read("/parent!/op/a")
    store.close()
    assert places.closed == ["own", "/parent"]
    assert store.read("/parent!/op/a") == b"/parent"
    assert places.opened == ["own", "/parent", "/parent"]
    store.close()
    assert places.closed == ["own", "/parent"] * 2
