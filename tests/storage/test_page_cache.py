"""The simulated machine: what a crash leaves is what was synced, and of the rest a beginning of each stretch."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from statelog.errors import ErrorKind, StorageError
from tests.storage.page_cache import Machine

PAGE = 64
MORE = bytes(range(1, 251))


class Syncs:
    """Whether syncs fail, or the machine dies in them."""

    def __init__(self) -> None:
        self.fail = self.die = False

    def __call__(self) -> bool:
        if self.die:
            raise KeyboardInterrupt
        return self.fail


def machine_with_log(seed: int) -> tuple[Machine, Syncs]:
    syncs = Syncs()
    machine = Machine(random.Random(seed), syncs)
    machine.open_store().put("log", b"head")
    return machine, syncs


def test_what_was_synced_is_there_after_a_crash() -> None:
    machine = Machine(random.Random(1))
    store = machine.open_store()
    assert store.can_append
    store.put("log", b"head")
    store.append("log", [b"one", MORE], at=4)
    machine.crash()
    assert machine.open_store().read("log") == b"headone" + MORE
    store.append("log", [b"two"], at=4)
    machine.crash()
    assert machine.open_store().read("log") == b"headtwo", "what stood beyond is gone on the disk too"


@pytest.mark.parametrize("way", ["fail", "die"])
def test_of_what_was_not_synced_some_pages_are_there(way: str) -> None:
    lengths = set()
    for seed in range(60):
        machine, syncs = machine_with_log(seed)
        setattr(syncs, way, True)
        store = machine.open_store()
        with suppress(StorageError, KeyboardInterrupt):
            store.append("log", [MORE], at=4)
        assert store.read("log") == b"head" + MORE, "processes see it"
        machine.crash()
        left = machine.open_store().read("log")
        assert (b"head" + MORE).startswith(left)
        lengths.add(len(left))
    assert lengths == {4, PAGE, 2 * PAGE, 3 * PAGE, 4 + len(MORE)}


def test_a_later_sync_does_without_the_pages_of_one_that_failed() -> None:
    lost = set()
    for seed in range(60):
        machine, syncs = machine_with_log(seed)
        store = machine.open_store()
        syncs.fail = True
        with pytest.raises(StorageError, match="sync log failed"):
            store.append("log", [MORE], at=4)
        syncs.fail = False
        store.append("log", [b"!" * PAGE], at=4 * PAGE - 2)
        machine.crash()
        data = machine.open_store().read("log")
        whole = b"head" + MORE + b"!" * PAGE
        assert len(data) == len(whole)
        pages = [data[start : start + PAGE] == whole[start : start + PAGE] for start in range(0, len(whole), PAGE)]
        assert pages[3:] == [True, True], "of the pages that were written again nothing is lost"
        assert pages[:3] == sorted(pages[:3], reverse=True)
        lost.add(3 - sum(pages[:3]))
    assert lost == {0, 1, 2, 3}


def test_what_is_written_again_is_synced() -> None:
    for seed in range(20):
        machine, syncs = machine_with_log(seed)
        store = machine.open_store()
        syncs.fail = True
        with pytest.raises(StorageError):
            store.append("log", [MORE], at=4)
        syncs.fail = False
        store.sync("log", start=4, end=4 + len(MORE))
        machine.crash()
        assert machine.open_store().read("log") == b"head" + MORE
        syncs.die = True
        with pytest.raises(KeyboardInterrupt):
            machine.open_store().sync("log", start=0, end=100)
        machine.crash()
        assert machine.open_store().read("log") == b"head" + MORE, "the same bytes, whichever are written"


def test_its_files_are_objects() -> None:
    store = Machine(random.Random(1)).open_store()
    assert store.put_if_absent("log/1", b"12345")
    assert not store.put_if_absent("log/1", b"other")
    store.put("runs/1", b"")
    assert [store.read("log/1"), store.read("log/1", offset=1, length=2), store.read("log/1", offset=3)] == [
        b"12345",
        b"23",
        b"45",
    ]
    assert [(info.name, info.size_bytes) for info in store.list()] == [("log/1", 5), ("runs/1", 0)]
    assert [info.name for info in store.list("log/")] == ["log/1"]
    store.append("log/1", [b"6"], at=5)
    with pytest.raises(StorageError, match="6 bytes end before offset 7"):
        store.append("log/1", [b"8"], at=7)
    assert store.size_bytes("log/1") == 6
    store.delete(["log/1", "never"])
    with pytest.raises(StorageError) as error:
        store.read("log/1")
    assert error.value.kind is ErrorKind.OBJECT_MISSING
