"""``statelog.delete_orphans``, object by object: what goes, and in which order."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import statelog
from statelog import ConfigurationError, CorruptionError, StorageError
from statelog.history.pins import MARGIN_S, pin_name
from statelog.log.entry import Parent
from statelog.storage import LocalStore, Store
from statelog.testing.faults import FaultPlan, FaultStore
from statelog.testing.query import ManualClock
from tests.contract.log_contract import make_claim
from tests.queries.list_orphans_support import Stored
from tests.stores import KeptStore


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "location")


def deleted(stored: Stored, *, age_s: float = 60.0, min_age_s: float = 60.0, release: bool = False) -> list[str]:
    """The names that are deleted at a time when everything has an age; checks that they are, and nothing else."""
    before = {info.name for info in stored.store.list()}
    clock = ManualClock(1000 + age_s)
    [reported, found] = [
        [
            info.name
            for info in statelog.delete_orphans(
                stored.directory, min_age_s=min_age_s, release=release, dry_run=dry_run, clock=clock
            )
        ]
        for dry_run in (True, False)
    ]
    assert reported == found
    assert before - {info.name for info in stored.store.list()} == set(found)
    return found


def test_objects_of_starts_before_the_newest_checkpoints_go(stored: Stored) -> None:
    """Not those of its own start, which may come to need them, nor those of a claim without a checkpoint."""
    stored.claim(1, 1)
    stored.claim(2, 2)
    stored.checkpoint(3, 2, 0, 1, "op/changes/1/0/needed")
    stored.claim(4, 3)
    for epoch in (1, 2, 3, 4):
        stored.put(f"op/changes/{epoch}/0/needed")
        stored.put(f"op/runs/{epoch}/0/a")
    assert deleted(stored, age_s=59.9) == [], "all are young"
    assert deleted(stored) == ["op/runs/1/0/a"]


def test_a_start_is_fenced_by_the_newest_checkpoint_whatever_older_ones_there_are(stored: Stored) -> None:
    stored.claim(1, 1)
    stored.checkpoint(2, 1, 0, 1)
    stored.claim(3, 2)
    stored.checkpoint(4, 2, 1, 1)
    for epoch in (1, 2):
        stored.put(f"op/changes/{epoch}/0/a")
    assert deleted(stored) == ["op/changes/1/0/a"]


def test_without_a_checkpoint_nothing_goes(stored: Stored) -> None:
    stored.claim(1, 1)
    stored.claim(2, 2)
    stored.put("op/changes/1/0/a")
    stored.put("op/initial/run/0.arrow")
    assert deleted(stored) == []


def test_what_the_checkpoint_before_the_newest_needs_stays(stored: Stored) -> None:
    """The newest may be lost with the machine. The one after it tells that it was not."""
    stored.claim(1, 1)
    stored.checkpoint(2, 1, 0, 1, "op/changes/1/0/a")
    stored.claim(3, 2)
    stored.checkpoint(4, 2, 0, 3, "op/changes/2/0/b")
    for name in ("op/changes/1/0/a", "op/changes/2/0/b"):
        stored.put(name)
    assert deleted(stored) == []
    stored.checkpoint(5, 2, 1, 3, "op/changes/2/0/b")
    assert deleted(stored) == [f"log/{1:020}.log", f"log/{2:020}.log", "op/changes/1/0/a"]


@pytest.mark.parametrize("scheme", ["", "kept:"], ids=["directory", "without appends"])
@pytest.mark.parametrize("is_same_file", [False, True])
def test_what_the_log_before_its_newest_entry_needs_stays(stored: Stored, scheme: str, is_same_file: bool) -> None:
    """Also if that log begins earlier, and where a log with several entries per file was copied to an object store."""
    statelog.register_store("kept", KeptStore)
    orphan, *needed = (f"op/changes/1/0/{name}" for name in "abcd")
    for name in (orphan, *needed):
        stored.put(name)
    stored.log_file(1, make_claim("run")(1), stored.entry(1, 0, 1, needed[0]))
    claim, before, newest = (
        make_claim("another run")(2),
        stored.entry(2, 1, 1, needed[1]),
        stored.entry(2, 1, 2, needed[2]),
    )
    if is_same_file:
        stored.log_file(2, claim, before, newest)
    else:
        stored.log_file(2, claim, before)
        stored.log_file(3, newest)
    clock = ManualClock(1060)
    found = statelog.delete_orphans(f"{scheme}{stored.directory}", min_age_s=60, clock=clock)
    assert [info.name for info in found] == [orphan]


def test_if_the_log_of_the_entry_before_the_newest_is_gone_what_is_left_of_it_counts(stored: Stored) -> None:
    """The query deletes files that only older entries need as soon as the newest one lasts."""
    first, second, third = (f"op/changes/1/0/{name}" for name in "abc")
    for name in (first, second, third):
        stored.put(name)
    stored.claim(1, 1)
    stored.checkpoint(2, 1, 0, 1, first)
    stored.claim(3, 2)
    stored.checkpoint(4, 2, 0, 1, second)
    stored.checkpoint(5, 2, 0, 4, third)
    stored.store.delete([f"log/{1:020}.log"])
    assert deleted(stored) == [first]


def test_log_files_go_up_to_the_first_that_stays(stored: Stored) -> None:
    """Later ones may be claims, by which an older driver sees that it is fenced as long as its own file exists."""
    for number in range(1, 5):
        stored.claim(number, number)
    stored.checkpoint(5, 4, 0, 4, f"log/{3:020}.log")
    stored.checkpoint(6, 4, 1, 5, f"log/{2:020}.log")
    assert deleted(stored) == [f"log/{1:020}.log"]
    stored.checkpoint(7, 4, 2, 7)
    stored.checkpoint(8, 4, 3, 7)
    os.utime(stored.directory / f"log/{3:020}.log", (1001, 1001))
    assert deleted(stored) == [f"log/{2:020}.log"]
    assert deleted(stored, age_s=61) == [f"log/{number:020}.log" for number in (3, 4, 5, 6)]


def test_log_files_go_one_after_the_other_after_all_else(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the call ends, a claim is there as long as the file before it, and each file as long as its objects."""
    for number in (1, 2):
        stored.claim(number, number)
        stored.put(f"op/runs/1/0/{number}")
    stored.checkpoint(3, 2, 0, 3)
    stored.checkpoint(4, 2, 1, 3)
    requests: list[list[str]] = []
    monkeypatch.setattr(LocalStore, "delete", lambda self, names: requests.append(names))
    clock = ManualClock(1060)
    statelog.delete_orphans(stored.directory, min_age_s=60, clock=clock)
    assert requests == [["op/runs/1/0/1", "op/runs/1/0/2"], [f"log/{1:020}.log"], [f"log/{2:020}.log"]]


def test_objects_that_a_start_has_written_before_its_claim_go_when_it_is_fenced(stored: Stored) -> None:
    for run in ("old", "new", "unknown"):
        stored.put(f"op/changes/0/0/{run}-7.run")
        stored.put(f"op/initial/{run}/0.arrow")
    stored.claim(1, 1, "old")
    stored.claim(2, 2, "new")
    assert deleted(stored) == []
    stored.checkpoint(3, 2, 0, 1, run="new")
    assert deleted(stored) == ["op/changes/0/0/old-7.run", "op/initial/old/0.arrow"]


def test_a_start_that_has_claimed_twice_is_not_fenced(stored: Stored) -> None:
    stored.put("op/initial/run/0.arrow")
    stored.claim(1, 1)
    stored.claim(2, 2)
    stored.checkpoint(3, 2, 0, 1)
    assert deleted(stored) == []


def test_objects_that_are_not_ours_stay(stored: Stored) -> None:
    stored.claim(1, 1)
    stored.claim(2, 2)
    stored.checkpoint(3, 2, 0, 1)
    others = ("op/notes.txt", "op/changes/notes.txt", "op/runs/-1/a", "op/other/1/a", "deep/in/op/changes/1/0/a")
    for name in (*others, "changes/1/0/a"):
        stored.put(name)
    assert deleted(stored) == []


# ---- Pins ----


@pytest.fixture
def orphan(stored: Stored) -> Stored:
    """An orphan of a start that is fenced, at second 1000."""
    stored.claim(1, 1)
    stored.claim(2, 2)
    stored.checkpoint(3, 2, 0, 1)
    stored.put("op/changes/1/0/a")
    return stored


def test_an_expired_pin_goes_at_any_age_and_frees_what_it_kept(orphan: Stored) -> None:
    pin = orphan.pin(b"pin", "op/changes/1/0/a", lasts_s=100.0)
    assert deleted(orphan, age_s=100 + MARGIN_S) == []
    assert deleted(orphan, age_s=101 + MARGIN_S, min_age_s=10**6) == [pin]
    assert deleted(orphan, age_s=101 + MARGIN_S) == ["op/changes/1/0/a"]


def test_pins_of_branches_that_are_gone_go_only_on_request_and_after_a_while(orphan: Stored, tmp_path: Path) -> None:
    """A branch that is about to be made has no log yet."""
    gone = orphan.pin(b"gone", "op/changes/1/0/a", lasts_s=None, branch=str(tmp_path / "gone"))
    assert statelog.delete_orphans(orphan.directory, min_age_s=0) == []
    assert deleted(orphan, age_s=1000) == []
    assert deleted(orphan, age_s=59.9, release=True) == []
    assert deleted(orphan, age_s=60, release=True) == ["op/changes/1/0/a", gone]


@pytest.fixture
def branch(tmp_path: Path) -> Stored:
    """A branch whose start has claimed its log, and has written no entry yet."""
    made = Stored(tmp_path / "branch")
    made.claim(1, 1)
    return made


def test_pins_that_a_branch_relies_on_stay_and_those_of_nobody_else_go(orphan: Stored, branch: Stored) -> None:
    own = str(branch.directory)
    kept = orphan.pin(b"kept", "op/changes/1/0/a", lasts_s=None, branch=own)
    former = orphan.pin(b"former", lasts_s=None, branch=own)
    orphan.pin(b"by hand", lasts_s=None)
    branch.log_file(2, branch.entry(1, 5, 1, parent=Parent("/parent", 5, kept)))
    assert deleted(orphan, age_s=60, release=True) == [former]
    branch.log_file(3, branch.entry(1, 6, 1, parent=Parent("/parent", 5, pin_name(5, b"another"))))
    assert deleted(orphan, age_s=60, release=True) == ["op/changes/1/0/a", kept]


def test_the_pin_of_a_branch_goes_exactly_when_its_newest_entry_does_not_name_it(
    orphan: Stored, branch: Stored
) -> None:
    """Whatever claims come after that entry: what the branch needs is known once its next entry is there."""
    kept = orphan.pin(b"kept", "op/changes/1/0/a", lasts_s=None, branch=str(branch.directory))
    parent = Parent(str(orphan.directory), 5, kept)
    branch.log_file(2, branch.entry(1, 5, 1, parent=parent))
    branch.log_file(3, branch.entry(1, 6, 1, parent=parent))
    told: list[dict[str, Any]] = [
        {},
        {"ended": ["op"]},
        {"follows": b"1 5"},
        {"follows": b""},
        {"renames": {"op": "x"}},
    ]
    for number, news in enumerate(told):
        branch.log_file(4 + number, replace(make_claim("tool")(2 + number), **news))
        assert deleted(orphan, age_s=60, release=True) == [], news
    branch.log_file(9, branch.entry(6, 7, 1))
    assert deleted(orphan, age_s=60, release=True) == ["op/changes/1/0/a", kept]


def test_the_log_of_a_branch_that_cannot_be_read_stops_everything(orphan: Stored, branch: Stored) -> None:
    kept = orphan.pin(b"kept", "op/changes/1/0/a", lasts_s=None, branch=str(branch.directory))
    branch.log_file(2, branch.entry(1, 5, 1, parent=Parent(str(orphan.directory), 5, kept)))
    path = branch.directory / f"log/{2:020}.log"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    before = orphan.store.list()
    with pytest.raises(CorruptionError, match=f"log/{2:020}.log"):
        statelog.delete_orphans(orphan.directory, min_age_s=0, release=True)
    assert orphan.store.list() == before


def test_a_pin_that_cannot_be_read_stops_everything(orphan: Stored) -> None:
    name = orphan.pin(b"pin")
    orphan.put(name, b"{}")
    with pytest.raises(CorruptionError, match="because a pin cannot be read") as stopped:
        statelog.delete_orphans(orphan.directory, min_age_s=0)
    assert f"statelog unpin LOCATION {name}" in stopped.value.hint
    assert (orphan.directory / "op/changes/1/0/a").exists()


def test_a_pin_that_goes_after_it_was_listed_keeps_nothing(orphan: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    name = orphan.pin(b"pin", "op/changes/1/0/a")
    store = LocalStore(orphan.directory)
    read = store.read

    def going(asked: str, **part: Any) -> bytes:
        if asked == name:
            store.delete([name])
        return read(asked, **part)

    monkeypatch.setattr(store, "read", going)
    monkeypatch.setattr("statelog.reading.open.open_location", lambda location: store)
    found = statelog.delete_orphans(orphan.directory, min_age_s=60, clock=ManualClock(1060))
    assert [info.name for info in found] == ["op/changes/1/0/a"]


# ---- Arguments, mistakes and failures ----


def test_it_deletes_unless_it_is_told_only_to_report(orphan: Stored) -> None:
    clock = ManualClock(1060)
    reported = statelog.delete_orphans(orphan.directory, min_age_s=60, clock=clock, dry_run=True)
    assert orphan.store.read("op/changes/1/0/a") == b"x"
    assert statelog.delete_orphans(orphan.directory, min_age_s=60, clock=clock) == reported
    with pytest.raises(StorageError):
        orphan.store.read("op/changes/1/0/a")


def test_the_age_is_told_by_the_machines_clock_unless_there_is_another(orphan: Stored) -> None:
    orphan.store.put("op/changes/1/0/young", b"x")
    assert [info.name for info in statelog.delete_orphans(orphan.directory)] == ["op/changes/1/0/a"]


def test_a_location_without_operators_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no state"):
        statelog.delete_orphans(tmp_path)


def test_a_failed_deletion_can_be_repeated(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.claim(1, 1)
    stored.claim(2, 2)
    stored.checkpoint(3, 2, 0, 1)
    for name in "ab":
        stored.put(f"op/runs/1/0/{name}")
    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "delete", fail)
        with pytest.raises(StorageError):
            deleted(stored)
    assert deleted(stored) == ["op/runs/1/0/a", "op/runs/1/0/b"]


def test_nothing_goes_if_the_store_fails_to_tell_what_is_needed(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        stored.claim(number, number)
    stored.checkpoint(3, 2, 0, 1)
    stored.checkpoint(4, 2, 1, 3)
    stored.put("op/runs/1/0/a")
    stored.pin(b"pin")
    before = stored.store.list()
    for number in itertools.count(1):
        faults = FaultStore(LocalStore(stored.directory), FaultPlan.at(call=number))
        monkeypatch.setattr("statelog.reading.open.open_location", lambda location, faults=faults: faults)
        try:
            statelog.delete_orphans(stored.directory, min_age_s=60, clock=ManualClock(1060), dry_run=True)
        except StorageError:
            continue
        break
    assert number == faults.calls + 1 > 10
    assert stored.store.list() == before


def fail(self: Store, names: list[str]) -> None:
    raise StorageError("The disk is gone.")
