"""The parent of a branch: its pin there stays while the branch needs an object of it, and goes after that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from statelog import CorruptionError, StorageError
from statelog.checkpoint.parent import Parent, ParentObjects, read_parent, write_parent
from statelog.checkpoint.pins import Pin, StandingPins, pin_name, write_pin
from statelog.log.references import SegmentRef
from statelog.sealed import seal
from statelog.storage import LocalStore, Store, open_store
from statelog.storage.links import is_link, link
from statelog.testing.faults import FaultPlan, FaultStore
from tests.short_log import ROOT, ShortLog, changes

PIN = "op/pins/1.json"
NOTE = f"{ROOT}/parent.json"


class Branch:
    """A branch whose batch 0 has its changes at the parent, and batch 1 its own."""

    def __init__(self, location: Path) -> None:
        self.location = location
        self.there = LocalStore(location)
        self.there.put(PIN, b"pin")
        self.log = ShortLog()
        self.link = link(str(location), changes(0))
        self.log.run(0, segments=[SegmentRef(0, 1, b"", 0, 10, 1, 1, self.link)])
        self.log.run(1)
        write_parent(self.log.store, ROOT, Parent(str(location), 0, PIN))

    def opened(self, store: Store | None = None) -> ParentObjects:
        made = ParentObjects(store or self.log.store, ROOT, "operator 'op'")
        made.open(self.log.history())
        return made

    def pins(self) -> StandingPins:
        """The branch's own pins, as listed now."""
        made = StandingPins(self.log.store, ROOT, self.log.clock)
        made.look(self.log.history())
        return made

    @property
    def is_pinned(self) -> bool:
        return (self.location / PIN).exists()


@pytest.fixture
def branch(tmp_path: Path) -> Branch:
    return Branch(tmp_path / "parent")


def nothing(name: str) -> bool:
    return False


def test_the_parent_is_noted_in_the_branch(branch: Branch) -> None:
    assert read_parent(branch.log.store, ROOT) == Parent(str(branch.location), 0, PIN)
    assert read_parent(branch.log.store, "another") is None
    assert branch.log.store.objects[NOTE][0] == seal(Parent(str(branch.location), 0, PIN), "statelog parent", 1)
    branch.log.store.put(NOTE, b"{}")
    with pytest.raises(CorruptionError, match=NOTE):
        read_parent(branch.log.store, ROOT)


def test_the_pin_goes_once_the_last_object_of_the_parents_may_go(branch: Branch) -> None:
    """The gate of deletions knows what checkpoints, batches and jobs need."""
    parent = branch.opened()
    parent.release(nothing, branch.pins())
    parent.release(lambda name: not is_link(name), branch.pins())
    assert branch.is_pinned
    parent.release(is_link, branch.pins())
    assert not branch.is_pinned
    assert read_parent(branch.log.store, ROOT) is None
    branch.there.put(PIN, b"somebody else's")
    parent.release(is_link, branch.pins())
    assert branch.is_pinned


def test_what_was_released_is_not_asked_for_again(branch: Branch) -> None:
    """Nothing can reference it any more, so its entry may be forgotten while a pin of the branch stands."""
    name = put_pin(branch)
    parent = branch.opened()
    parent.release(is_link, branch.pins())
    branch.log.store.delete([name])
    parent.release(nothing, branch.pins())
    assert not branch.is_pinned


def put_pin(branch: Branch, batch: int = 0) -> str:
    """Pin a checkpoint of the branch."""
    name = pin_name(ROOT, batch, b"pin")
    write_pin(branch.log.store, name, Pin.of(ROOT, branch.log.history(), batch, owner="test", made_ms=0, lasts_s=None))
    return name


def test_a_pin_of_the_branch_keeps_that_at_the_parent(branch: Branch) -> None:
    name = put_pin(branch, 1)
    parent = branch.opened()
    parent.release(is_link, branch.pins())
    assert branch.is_pinned
    branch.log.store.delete([name])
    parent.release(is_link, branch.pins())
    assert not branch.is_pinned


def test_a_pin_of_own_objects_alone_keeps_nothing_at_the_parent(branch: Branch) -> None:
    log = branch.log
    made = Pin.of_changes(ROOT, log.history(), 1, owner="test", made_ms=0, lasts_s=None, since=1, max_bytes=1 << 20)
    write_pin(log.store, pin_name(ROOT, 1, b"own"), made)
    branch.opened().release(is_link, branch.pins())
    assert not branch.is_pinned


def test_an_operator_that_is_no_branch_asks_nobody(branch: Branch) -> None:
    branch.log.store.delete([NOTE])
    parent = branch.opened()
    branch.log.store.requests.clear()
    pins = branch.pins()
    branch.log.store.requests.clear()
    parent.release(is_link, pins)
    assert branch.log.store.requests == []
    assert branch.is_pinned


def test_a_damaged_note_leaves_the_pin(branch: Branch, caplog: pytest.LogCaptureFixture) -> None:
    branch.log.store.put(NOTE, b"{}")
    branch.opened().release(is_link, branch.pins())
    assert branch.is_pinned
    assert "the pin at its parent stays for ever" in caplog.text


@pytest.mark.parametrize("is_unknown", [False, True])
def test_a_parent_that_cannot_be_reached_is_tried_again(
    branch: Branch, is_unknown: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if nobody knows its store here any more."""
    parent = branch.opened()
    with monkeypatch.context() as patched:
        refuse: Callable[[str], Store] = unknown if is_unknown else unreachable
        patched.setattr("statelog.checkpoint.parent.open_location", refuse)
        parent.release(is_link, branch.pins())
    assert "the pin at its parent could not be removed yet" in caplog.text
    assert branch.is_pinned
    assert read_parent(branch.log.store, ROOT) is not None
    parent.release(is_link, branch.pins())
    assert not branch.is_pinned


def unreachable(location: str) -> Store:
    return FaultStore(LocalStore(location), FaultPlan.at("delete"))


def unknown(location: str) -> Store:
    return open_store("nobodys://" + location)


def test_a_start_that_ends_before_the_note_goes_leaves_that_to_the_next(branch: Branch) -> None:
    """The pin goes first: without the note nobody would know of it."""
    parent = branch.opened(FaultStore(branch.log.store, FaultPlan.at("delete")))
    parent.release(is_link, branch.pins())
    assert not branch.is_pinned
    assert read_parent(branch.log.store, ROOT) is not None
    branch.opened().release(is_link, branch.pins())
    assert read_parent(branch.log.store, ROOT) is None


def test_a_store_that_fails_does_not_tell_that_there_is_no_parent(branch: Branch) -> None:
    with pytest.raises(StorageError):
        branch.opened(FaultStore(branch.log.store, FaultPlan.at("read")))
