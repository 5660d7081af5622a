"""The simulated machine: what a crash leaves is what was synced, and of the rest any pages and names."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import pairwise

import pytest

from statelog.errors import ErrorKind, StorageError
from tests.storage.page_cache import Machine

PAGES = (512, 4096)
MORE = bytes(range(1, 256)) * 130


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
    machine = Machine(random.Random(seed), syncs, page_bytes=PAGES[seed % 2])
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
    lengths, found = set(), set()
    for seed in range(300):
        machine, syncs = machine_with_log(seed)
        setattr(syncs, way, True)
        store = machine.open_store()
        with suppress(StorageError, KeyboardInterrupt):
            store.append("log", [MORE], at=4)
        assert store.read("log") == b"head" + MORE, "processes see it"
        machine.crash()
        left = machine.open_store().read("log")
        whole = b"head" + MORE
        page = PAGES[seed % 2]
        assert left[:4] == b"head"
        kept = [left[at : at + page] == whole[at : at + page] for at in range(0, len(whole), page)]
        for place, is_kept in enumerate(kept[1:], 1):
            assert is_kept or not any(left[place * page : (place + 1) * page])
        lengths.add(len(left))
        found |= {("kept" if one else "lost", "kept" if other else "lost") for one, other in pairwise(kept)}
    assert len(found) == 4, "in any order"
    assert len(lengths) > 20
    assert {4, 4 + len(MORE)} <= lengths


def test_a_later_sync_does_without_the_pages_of_one_that_failed() -> None:
    lost = set()
    for seed in range(0, 120, 2):
        machine, syncs = machine_with_log(seed)
        store = machine.open_store()
        syncs.fail = True
        with pytest.raises(StorageError, match="sync log failed"):
            store.append("log", [MORE], at=4)
        syncs.fail = False
        page = PAGES[0]
        store.append("log", [b"!" * page], at=4 * page - 2)
        machine.crash()
        data = machine.open_store().read("log")
        whole = (b"head" + MORE)[: 4 * page - 2] + b"!" * page
        assert len(data) == len(whole)
        pages = tuple(data[start : start + page] == whole[start : start + page] for start in range(0, len(whole), page))
        assert pages[3:] == (True, True), "of the pages that were written again nothing is lost"
        lost.add(pages[:3])
    assert len(lost) == 8, "any of the others are"


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


def test_a_name_is_on_the_disk_once_its_folder_was_synced() -> None:
    fails = [False]
    found = set()
    for seed in range(40):
        machine = Machine(random.Random(seed), names_fail=lambda: fails[0])
        store = machine.open_store()
        store.put("log/1", b"one")
        fails[0] = True
        with pytest.raises(StorageError, match="sync of a folder failed"):
            store.delete(["log/1"])
        with pytest.raises(StorageError, match="sync of a folder failed"):
            store.put("log/2", b"two")
        with pytest.raises(StorageError):
            store.put_if_absent("log/2", b"another")
        fails[0] = False
        assert [info.name for info in store.list()] == ["log/2"]
        if seed >= 30:
            store.sync("log/2", start=0, end=0)
        machine.crash()
        left = tuple(info.name for info in machine.open_store().list())
        assert seed < 30 or left == ("log/2",)
        found.add(left)
    assert found == {(), ("log/1",), ("log/2",), ("log/1", "log/2")}
