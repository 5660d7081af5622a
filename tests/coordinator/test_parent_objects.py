"""The parent of a branch: entries name it while the branch needs an object of it, and then its pin there goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from statelog.coordinator.garbage import Inventory
from statelog.coordinator.standing_pins import StandingPins
from statelog.errors import CorruptionError
from statelog.history import pins
from statelog.history.footprint import Footprint
from statelog.history.pins import Consumer, Pin, pin_name, write_pin
from statelog.log.entry import Parent, QueryCheckpoint
from statelog.log.references import SegmentRef
from statelog.options import Options
from statelog.storage import LocalStore, Store, open_store
from statelog.storage.links import is_link, link
from statelog.testing.faults import FaultPlan, FaultStore
from tests.short_log import ShortLog, base, base_range, changes

PIN = pin_name(0, b"the branch")


class Branch:
    """A branch whose batch 0 has its changes at the parent, and batch 1 its own."""

    def __init__(self, location: Path) -> None:
        self.location = location
        self.parent = Parent(str(location), 0, PIN)
        self.log = ShortLog()
        self.link = link(str(location), changes(0))
        self.run(0, segments=[SegmentRef(0, 1, b"", 0, 10, 1, 1, self.link)])
        self.run(1)
        self.put_pin()
        self.inventory = self.opened()

    def put_pin(self, branch: str = "/branch") -> None:
        """Write a pin at the parent under the name that the entries have."""
        pin = Pin.on(Footprint.of(self.log.query(), 0), pins.Branch(branch) if branch else None, owner="test")
        LocalStore(self.location).delete([PIN])
        write_pin(LocalStore(self.location), PIN, pin)

    def run(self, batch: int, **values: Any) -> QueryCheckpoint:
        """Write an entry that names the parent."""
        return self.log.run(batch, entry={"parent": self.parent}, **values)

    def opened(self) -> Inventory:
        """What a start takes over."""
        made = Inventory(self.log.store, "/branch", Options(), self.log.clock, deletes_in_background=False)
        made.parent.open(self.log.query())
        return made

    def look(self, may_go: Callable[[str], bool]) -> None:
        """List the pins, and see what is needed by a gate of deletions."""
        unreferenced = self.inventory.parent.unreferenced(lambda name: not may_go(name))
        pins = StandingPins(self.log.store, self.log.clock)
        pins.look(self.log.query())
        self.inventory.parent.look(unreferenced, may_go, pins)

    def commit(self, parent: Parent | None = None) -> None:
        """Write another entry, which names a parent or none."""
        batch = len(self.log.query().entries)
        self.inventory.parent.committed(self.log.run(batch, entry={"parent": parent}))

    @property
    def named(self) -> Parent | None:
        """What the next entry names."""
        return self.inventory.parent.to_name()

    @property
    def is_pinned(self) -> bool:
        return (self.location / PIN).exists()


@pytest.fixture
def branch(tmp_path: Path) -> Branch:
    return Branch(tmp_path / "parent")


def nothing(name: str) -> bool:
    return False


def test_the_parent_is_named_as_long_as_an_object_of_it_is_needed(branch: Branch) -> None:
    """The gate of deletions knows what checkpoints, batches and jobs need."""
    assert branch.named == branch.parent, "before anybody has looked"
    branch.look(nothing)
    branch.look(lambda name: not is_link(name))
    assert branch.named == branch.parent
    branch.look(is_link)
    assert branch.named is None


def test_the_pin_goes_once_an_entry_that_does_not_name_the_parent_is_durable(branch: Branch) -> None:
    branch.look(is_link)
    assert branch.named is None
    branch.look(is_link)
    assert branch.is_pinned, "the newest entry still names it"
    assert not branch.inventory.parent.is_due
    branch.commit()
    assert branch.inventory.parent.is_due
    branch.look(is_link)
    assert not branch.is_pinned
    assert not branch.inventory.parent.is_due
    branch.put_pin()
    branch.commit()
    branch.look(is_link)
    assert branch.is_pinned


@pytest.mark.parametrize("others", ["", "/branch-2", "s3://bucket/branch"])
def test_a_pin_of_somebody_else_stays(branch: Branch, others: str, caplog: pytest.LogCaptureFixture) -> None:
    """A forged entry may name any pin of the parent; only the branch's own pin is deleted."""
    branch.put_pin(others)
    branch.look(is_link)
    branch.commit()
    branch.look(is_link)
    assert branch.is_pinned
    assert "is not its pin, and stays" in caplog.text
    assert not branch.inventory.parent.is_due


@pytest.mark.parametrize("content", [b"precious", b""])
def test_an_object_that_is_no_pin_stays(branch: Branch, content: bytes) -> None:
    LocalStore(branch.location).put(PIN, content)
    branch.look(is_link)
    branch.commit()
    branch.look(is_link)
    assert (branch.location / PIN).read_bytes() == content


@pytest.mark.parametrize(
    "name", ["precious.txt", "pins/precious.txt", "pins/../precious.txt", "log/" + 20 * "0" + ".log"]
)
def test_an_entry_whose_pin_is_no_name_of_a_pin_is_refused(branch: Branch, name: str) -> None:
    branch.log.run(2, entry={"parent": Parent(str(branch.location), 0, name)})
    with pytest.raises(CorruptionError, match="is not a pin name"):
        branch.log.query()


def test_an_entry_that_names_the_parent_keeps_its_pin(branch: Branch) -> None:
    branch.commit(branch.named)
    branch.look(nothing)
    assert branch.is_pinned
    assert branch.named == branch.parent


def test_an_entry_that_was_being_written_may_still_name_the_parent(branch: Branch) -> None:
    """Until one that does not is durable, a crash leads back to it, and the pin has to stay."""
    named = branch.named
    branch.look(is_link)
    branch.commit(named)
    branch.look(is_link)
    assert branch.is_pinned
    assert not branch.inventory.parent.is_due
    branch.commit(branch.named)
    branch.look(is_link)
    assert not branch.is_pinned


def test_an_object_that_was_let_go_is_not_asked_for_again(branch: Branch) -> None:
    """Nothing can reference it any more, so the gate may forget it while a pin of the branch stands."""
    name = put_pin(branch)
    branch.look(is_link)
    assert branch.named == branch.parent
    branch.log.store.delete([name])
    branch.look(nothing)
    assert branch.named is None


def put_pin(branch: Branch, batch: int = 0) -> str:
    """Pin a checkpoint of the branch."""
    name = pin_name(batch, b"pin")
    write_pin(branch.log.store, name, Pin.on(Footprint.of(branch.log.query(), batch), owner="test"))
    return name


def test_a_pin_of_the_branch_keeps_that_at_the_parent(branch: Branch) -> None:
    name = put_pin(branch, 1)
    branch.look(is_link)
    assert branch.named == branch.parent
    branch.log.store.delete([name])
    branch.look(is_link)
    assert branch.named is None


def test_a_pin_of_own_objects_alone_keeps_nothing_at_the_parent(branch: Branch) -> None:
    made = Pin.on(
        Footprint.of_changes(branch.log.history(), 1, since=1), Consumer(1 << 20), owner="test", made_ms=0, lasts_s=None
    )
    write_pin(branch.log.store, pin_name(1, b"own"), made)
    branch.look(is_link)
    assert branch.named is None


def test_an_object_that_is_given_up_after_the_pins_were_listed_stays_for_now(branch: Branch) -> None:
    """A pin may have been written between the list and that."""
    pins = StandingPins(branch.log.store, branch.log.clock)
    before = branch.inventory.parent.unreferenced(is_link)
    pins.look(branch.log.query())
    branch.inventory.parent.look(before, is_link, pins)
    assert branch.named == branch.parent
    branch.look(is_link)
    assert branch.named is None


def test_a_pin_that_cannot_be_read_may_need_an_object(branch: Branch) -> None:
    branch.log.store.put(pin_name(1, b"damaged"), b"damaged")
    branch.look(is_link)
    assert branch.named == branch.parent


def test_a_query_that_is_no_branch_asks_nobody(branch: Branch) -> None:
    branch.commit()
    branch.inventory = branch.opened()
    branch.log.store.requests.clear()
    pins = StandingPins(branch.log.store, branch.log.clock)
    branch.inventory.parent.look(branch.inventory.parent.unreferenced(lambda _: False), is_link, pins)
    assert branch.log.store.requests == []
    assert branch.named is None
    assert branch.is_pinned


@pytest.mark.parametrize("is_unknown", [False, True])
def test_a_parent_that_cannot_be_reached_is_tried_again(
    branch: Branch, is_unknown: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if nobody knows its store here any more."""
    branch.look(is_link)
    branch.commit()
    with monkeypatch.context() as patched:
        refuse: Callable[[str], Store] = unknown if is_unknown else unreachable
        patched.setattr("statelog.coordinator.garbage.open_location", refuse)
        branch.look(is_link)
    assert "the branch's pin at its parent could not be removed yet" in caplog.text
    assert branch.is_pinned
    assert branch.inventory.parent.is_due
    branch.look(is_link)
    assert not branch.is_pinned


def unreachable(location: str) -> Store:
    return FaultStore(LocalStore(location), FaultPlan.at("delete"))


def unknown(location: str) -> Store:
    return open_store("nobodys://" + location)


# ---- With all that decides which objects are needed ----


def test_a_branch_gives_up_its_pin_once_its_checkpoints_need_no_object_of_its_parents(branch: Branch) -> None:
    """The entry after the last one that needs one does not name the parent; that one being durable, the pin goes."""
    made, log = branch.inventory, branch.log
    made.open(log.query().entries, 1, "run", log.clock)
    named: list[bool] = []
    pinned: list[bool] = []
    for batch in range(2, 7):
        values: dict[str, Any] = {"bases": [base(1)]} if batch == 2 else {}
        if batch == 3:
            values = {"base_ranges": [base_range(1)]}
        before = made.parent.to_name()
        entry = log.run(batch, entry={"parent": before}, **values)
        made.add(entry, {}, 0)
        made.release(entry, batch - 1, log.log, log.log.removable(entry.log_start), {})
        made.deleter.look()
        named.append(before is not None)
        pinned.append(branch.is_pinned)
    assert named == [True, True, True, False, False], "checkpoint 3 is the first that can do without"
    assert pinned == [True, True, True, False, False]


def test_the_newest_entry_tells_what_is_needed_although_the_line_went_back(branch: Branch) -> None:
    """The files of the location need no object of the parent any more, and the pin there is gone."""
    target = branch.log.run(2, entry={"parent": branch.parent}, base_ranges=[base_range(1)])
    branch.log.run(3)
    branch.log.claim(follows=target.id)
    branch.inventory = branch.opened()
    assert branch.named is None
    branch.look(is_link)
    branch.commit(branch.named)
    branch.look(is_link)
    assert branch.is_pinned
