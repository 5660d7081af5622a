"""What the store holds for an operator: what a run takes over, what is to be emptied, and what goes at its end."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from statelog import StorageError
from statelog.checkpoint.garbage import Inventory, Retention
from statelog.checkpoint.history import History
from statelog.checkpoint.parent import Parent, write_parent
from statelog.checkpoint.pins import MARGIN_S, Pin, StandingPins, pin_name, write_pin
from statelog.log.entry import INITIAL_BATCH, Checkpoint
from statelog.log.numbered import NumberedLog, base_name
from statelog.log.references import Base, Level, SegmentRef, StoredRun
from statelog.options import Options
from statelog.runs.key_groups import hash_range
from statelog.storage import LocalStore
from statelog.storage.links import LinkedStore, link
from statelog.storage.wrapper import StoreWrapper
from statelog.testing.clock import ManualClock
from tests.contract.log_contract import make_claim

NOW_S = 10_000
WHOLE = hash_range(0, 1)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data", "statelog.storage.posix.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


def make_inventory(root: Path, *, deletes_in_background: bool = False, orphan_min_age_s: float = 60.0) -> Inventory:
    options = Options(orphan_min_age_s=orphan_min_age_s)
    return Inventory(
        LinkedStore(LocalStore(root), LocalStore),
        "op",
        "operator 'op'",
        options,
        ManualClock(NOW_S),
        deletes_in_background=deletes_in_background,
    )


def opened(root: Path, *, epoch: int = 1) -> Inventory:
    made = make_inventory(root)
    made.open([], epoch, "run", ManualClock(NOW_S))
    return made


def claimed_log(root: Path) -> NumberedLog:
    log = NumberedLog(LocalStore(root), "op/log", ManualClock(NOW_S), appends=False, min_age_s=0)
    log.claim(make_claim("run"))
    return log


def run(name: str, offset: int = 0, length: int = 100) -> StoredRun:
    return StoredRun(name, offset, length, b"sum", 1, WHOLE.first, WHOLE.last)


def level(batch: int, *runs: StoredRun) -> Level:
    return Level(batch, batch, b"%d" % (batch - 1), b"%d" % batch, WHOLE.first, WHOLE.last, list(runs))


def keyed(batch: int, *levels: Level, log_start: int = 0, retained_from: int | None = -1) -> Checkpoint:
    """A checkpoint without changes of its own, from which on some materialized state counts."""
    entry = Checkpoint(1, batch, 0, "query", "run", "op", 1, [], b"keys", [], 0, 0, b"")
    bases = [Base(0, 1, list(levels))] if levels else []
    return replace(entry, bases=bases, log_start=log_start, retained_from=retained_from)


def test_a_run_that_was_refused_deletes_nothing_when_it_ends(tmp_path: Path) -> None:
    """The location is another's, whose first epoch may be running."""
    store = LocalStore(tmp_path)
    names = [f"op/{folder}/{epoch}/0/0-a.run" for folder in ("changes", "runs") for epoch in (0, 1, 2)]
    for name in names:
        store.put(name, b"x")
    make_inventory(tmp_path).close()
    assert [info.name for info in store.list()] == names


def test_what_a_run_writes_stays_from_its_start_on(tmp_path: Path) -> None:
    made = opened(tmp_path, epoch=3)
    assert not made.gate.may_go("op/changes/3/0/0-a.run")
    assert made.gate.may_go("op/changes/2/0/0-a.run")


def test_a_half_written_file_stays_while_its_writer_may_be_alive(tmp_path: Path) -> None:
    folder = tmp_path / "op/changes/1/0"
    folder.mkdir(parents=True)
    for name, age_s in ((".1.young.tmp", 59), (".1.old.tmp", 61)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (NOW_S - age_s, NOW_S - age_s))
    opened(tmp_path, epoch=2)
    assert [path.name for path in folder.iterdir()] == [".1.young.tmp"]


def test_what_only_a_replaced_entry_names_is_needed_no_more(tmp_path: Path) -> None:
    """A later attempt had another result, before anybody could go back to the earlier one's checkpoint."""
    made = opened(tmp_path)
    made.add(keyed(0), None, 0)
    made.add(keyed(1, level(0, run("op/runs/1/0/1-1/0.run"))), None, 0)
    revised = replace(keyed(1, level(0, run("op/runs/1/0/1-2/0.run"))), revision=1)
    made.add(revised, None, 0)
    made.release(revised, 1, claimed_log(tmp_path))
    assert not made.retention.needs("op/runs/1/0/1-1/0.run")
    assert made.retention.needs("op/runs/1/0/1-2/0.run")
    assert (made.retention.size_bytes, made.retention.needed_bytes) == (100, 100)


def test_the_materialized_states_are_repeated_by_the_entry_after_the_one_that_has_them(tmp_path: Path) -> None:
    made = opened(tmp_path)
    made.add(keyed(0), None, 0)
    made.add(keyed(1, level(0, run("op/runs/1/0/1-1/0.run"))), None, 1 << 20)
    record = made.history.record(1)
    assert record is not None
    assert record.base_map is not None
    assert [made.base_map_to_repeat(batch) for batch in range(4)] == [None, None, record.base_map, None]
    made.add(replace(keyed(2), base_ranges=list(record.base_map.ranges)), record.base_map, 1 << 20)
    assert made.base_map_to_repeat(3) is None, "it was repeated already"


# ---- Files to empty ----


def with_waste(root: Path) -> tuple[Inventory, list[Level]]:
    """A materialized state, one of whose files holds more that is not needed any more than what all others hold."""
    made = opened(root)
    part, rest = run("op/runs/1/0/b", 0, 10), run("op/runs/1/0/b", 10, 990)
    oldest, newest = level(0, run("op/runs/1/0/a")), level(2, run("op/runs/1/0/d"))
    made.add(keyed(0), None, 0)
    made.add(keyed(1, oldest, level(1, part, rest)), None, 0)
    assert not made.retention.wasteful
    middle = level(1, run("op/runs/1/0/c"), part)
    latest = keyed(2, oldest, middle, newest)
    made.add(latest, None, 0)
    made.release(latest, 2, claimed_log(root))
    return made, [oldest, middle, newest]


def test_levels_are_stored_again_from_the_first_one_with_a_wasteful_file_on(tmp_path: Path) -> None:
    """Also if it shares the level with others: a level is stored as a whole, and later ones go on from it."""
    made, [oldest, middle, newest] = with_waste(tmp_path)
    assert made.retention.wasteful
    assert "op/runs/1/0/b" in made.retention.wasteful
    assert not any(f"op/runs/1/0/{name}" in made.retention.wasteful for name in "acd")
    assert made.retention.lasting([oldest, middle, newest]) == [oldest]
    assert made.retention.lasting([middle, newest]) == []
    assert made.retention.lasting([oldest, newest]) == [oldest, newest]


def test_a_log_file_is_emptied_of_the_snapshots_that_keep_it(tmp_path: Path) -> None:
    """Every entry of operator state holds all of it: once an old snapshot is moved the log begins later."""
    made, log = opened(tmp_path), claimed_log(tmp_path)
    kept, large, small = bytes(10), bytes(1000), bytes(10)
    first = [SegmentRef(0, 0, b"kept", 0, 10, 1, 1), SegmentRef(1, 1, b"large", 10, 1000, 1, 1)]
    whole = Checkpoint(1, 0, 0, "query", "run", "op", 2, first, b"", [], 0, 0, b"", log_start=2, retained_from=-1)
    before = log.append(whole, [kept, large])
    made.add(before, None, 0)
    second = [before.segments[0], SegmentRef(1, 1, b"small", 0, 10, 1, 1)]
    after = log.append(replace(whole, batch=1, segments=second, log_start=before.number), [small])
    made.add(after, None, 0)
    made.release(after, 1, log)
    assert log.name_of(before.number) in made.retention.wasteful
    assert log.file_name not in made.retention.wasteful


def test_a_log_file_that_stays_anyway_is_not_emptied_of_materialized_state(tmp_path: Path) -> None:
    made, log = opened(tmp_path), claimed_log(tmp_path)
    made.add(log.append(keyed(0), []), None, 0)
    inside = [level(0, run("", 0, 10)), level(1, run("", 10, 990))]
    first = log.append(keyed(1, *inside), [bytes(1000)])
    made.add(first, None, 0)
    [held, _] = first.bases[0].levels
    second = log.append(keyed(2, held, level(1, run("op/runs/1/0/b", 0, 1)), log_start=first.number), [])
    made.add(second, None, 0)
    made.release(second, 2, log)
    assert made.retention.size_bytes > 2 * made.retention.needed_bytes
    assert not made.retention.wasteful


def with_files(**files: tuple[int, int]) -> Retention:
    """Files of so many bytes, of which so many are needed; they may take twice as many as that."""
    retention = Retention(2.0, "op/log")
    for name, (size_bytes, needed_bytes) in files.items():
        needed, rest = run(name, 0, needed_bytes), run(name, needed_bytes, size_bytes - needed_bytes)
        retention.add_runs([rest, needed])
        retention.remove_runs([rest])
    retention.choose_wasteful("op/log/9")
    return retention


@pytest.mark.parametrize(("size_bytes", "is_emptied"), [(100, False), (101, True)])
def test_a_file_is_emptied_if_it_is_larger_than_its_needed_bytes_allow(size_bytes: int, is_emptied: bool) -> None:
    retention = with_files(a=(size_bytes, 50))
    assert (retention.size_bytes, retention.needed_bytes) == (size_bytes, 50)
    assert retention.wasteful == ({"a"} if is_emptied else set())


def test_only_as_many_files_are_emptied_as_it_takes() -> None:
    """The most wasteful ones: that is the least to store again."""
    files = {"a": (100, 10), "b": (300, 20), "c": (200, 50)}
    assert with_files(**files, d=(1000, 800)).wasteful == set(), "all together are small enough"
    assert with_files(**files, d=(300, 230)).wasteful == {"b"}
    assert with_files(**files, d=(301, 230)).wasteful == {"b", "c"}
    assert with_files(**files).wasteful == {"a", "b", "c"}


def test_a_large_file_with_little_waste_does_not_keep_small_ones_from_being_emptied() -> None:
    assert with_files(large=(1000, 501), a=(300, 1), b=(300, 1)).wasteful == {"a", "b"}
    assert with_files(large=(1000, 500), a=(300, 1)).wasteful == {"a"}


def test_while_no_entry_goes_the_bytes_inside_are_not_counted() -> None:
    """Changes in their own entry stay as long as that; a revision names some in an older entry."""
    segments = [
        SegmentRef(subtask, 1, b"sum", 0, 10**subtask, 1, 1, name)
        for subtask, name in enumerate((f"op/log/{base_name(3)}", f"op/log/{base_name(2)}", "op/changes/1/2/0-a.run"))
    ]
    entry = replace(keyed(0), number=3, segments=segments, parallelism=3)
    for key_schema, size_bytes in ((b"keys", 110), (b"", 111)):
        retention, checkpoint = Retention(2.0, "op/log"), replace(entry, key_schema=key_schema)
        retention.add(checkpoint)
        assert retention.size_bytes == retention.needed_bytes == size_bytes
        retention.remove(checkpoint)
        assert retention.release() == ["op/changes/1/2/0-a.run"]
        assert retention.size_bytes == retention.needed_bytes == 0


def test_a_file_that_is_needed_again_stays() -> None:
    retention, part = Retention(2.0, "op/log"), run("op/runs/1/0/a")
    retention.add_runs([part])
    retention.remove_runs([part])
    retention.add_runs([part])
    assert retention.release() == []
    assert retention.needs(part.name)


# ---- What is retained, and what goes ----


def test_what_is_retained_is_what_the_newest_entry_says(tmp_path: Path) -> None:
    """Also if objects are gone: somebody may put them back."""
    made = opened(tmp_path)
    assert made.retained_from() == -1
    for batch in range(4):
        lost = SegmentRef(0, 0, b"sum", 0, 1, 1, 1, f"op/changes/1/0/{batch}")
        made.add(replace(keyed(batch, retained_from=min(batch, 2)), segments=[lost]), None, 0)
    assert made.retained_from() == 2


def test_what_a_log_of_version_1_retains_is_what_is_there(tmp_path: Path) -> None:
    made = opened(tmp_path)
    LocalStore(tmp_path).put("op/changes/1/0/new", b"x")
    for batch, name in enumerate(("gone", "new", "new")):
        segment = SegmentRef(0, 0, b"sum", 0, 1, 1, 1, f"op/changes/1/0/{name}")
        whole = Checkpoint(1, batch, 0, "query", "run", "op", 1, [segment], b"", [], 0, 0, b"")
        made.add(whole, None, 0)
    assert made.retained_from() == 1


def test_a_file_of_the_log_is_deleted_once(tmp_path: Path) -> None:
    """And so the ones of claims can go in their turn."""

    class Noted(StoreWrapper):
        def delete(self, names: list[str]) -> None:
            deleted.extend(names)
            super().delete(names)

    deleted: list[str] = []
    store = Noted(LocalStore(tmp_path))
    made = Inventory(store, "op", "operator 'op'", Options(), ManualClock(NOW_S), deletes_in_background=False)
    made.open([], 1, "run", ManualClock(NOW_S))
    log = claimed_log(tmp_path)
    for batch in range(4):
        placed = log.append(keyed(batch, level(batch, run(f"op/runs/1/0/{batch}")), log_start=log.number + 1), [])
        made.add(placed, None, 0)
        made.release(placed, batch, log)
    assert [name for name in deleted if "/log/" in name] == [log.name_of(number) for number in range(1, 5)]


def test_a_run_that_ends_has_deleted_what_it_leaves(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    before = set(threading.enumerate())
    made = make_inventory(tmp_path, deletes_in_background=True)
    made.open([], 1, "run", ManualClock(NOW_S))
    made.gate.begin(1, 0)
    made.grants.open(0, "0-1", b"base", [])
    for name in ("op/changes/1/0/0-a.run", "op/runs/1/0/0-1/0.run"):
        store.put(name, b"x")
    made.close()
    assert store.list() == []
    assert set(threading.enumerate()) == before


class Watched(StoreWrapper):
    """Tells when it has deleted something; a bucket, or a directory."""

    def __init__(self, root: Path, is_bucket: bool) -> None:
        super().__init__(LocalStore(root))
        self._is_bucket = is_bucket
        self.has_deleted = threading.Event()

    @property
    def can_append(self) -> bool:
        return not self._is_bucket

    def delete(self, names: list[str]) -> None:
        super().delete(names)
        self.has_deleted.set()


@pytest.mark.parametrize("is_bucket", [False, True])
def test_only_a_store_that_charges_for_lists_makes_deletions_wait(tmp_path: Path, is_bucket: bool) -> None:
    store, clock = Watched(tmp_path, is_bucket), ManualClock(NOW_S)
    made = Inventory(store, "op", "operator 'op'", Options(), clock, deletes_in_background=True)
    made.open([], 1, "run", clock)

    def is_soon_gone(number: int) -> bool:
        store.has_deleted.clear()
        store.put(f"op/runs/1/0/{number}.run", b"x")
        made.deleter.delete([f"op/runs/1/0/{number}.run"])
        is_soon = store.has_deleted.wait(0.5)
        assert is_soon or (is_bucket and number > 0) or store.has_deleted.wait(60)
        return is_soon

    is_soon_gone(0)  # the first round waits for none
    # On a slow machine some may take longer for no reason.
    assert any(map(is_soon_gone, [1] if is_bucket else range(1, 5))) is not is_bucket
    made.close()
    assert store.list() == []


# ---- Pins of the coordinator's own ----


def pinned(root: Path) -> list[int]:
    """The batches of the pins."""
    return [int(Path(info.name).name.partition("-")[0]) for info in LocalStore(root).list("op/pins/")]


def test_the_first_checkpoint_of_an_interval_is_pinned_once_it_is_certain(tmp_path: Path) -> None:
    clock, log = ManualClock(NOW_S), claimed_log(tmp_path)
    options = Options(retained_s={30: 1000})
    made = Inventory(LocalStore(tmp_path), "op", "operator 'op'", options, clock, deletes_in_background=False)
    made.open([], 1, "run", clock)
    found: list[list[int]] = []
    for batch in range(5):
        made.add(log.append(replace(keyed(batch), batch_time_ms=10_000 * batch), []), None, 0)
        found.append(pinned(tmp_path))
    assert found == [[], [0], [0], [0], [0, 3]]


class PinsRefused(StoreWrapper):
    """Takes no pins for a while."""

    refuses = True

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        if "/pins/" in name and self.refuses:
            raise StorageError("put failed: no.")
        return super().put_if_absent(name, data)


def test_a_pin_that_could_not_be_written_is_written_with_the_next_checkpoint(tmp_path: Path) -> None:
    """Although no other is due, and nothing is to be deleted: until then all checkpoints since stay."""
    store, clock, log = PinsRefused(LocalStore(tmp_path)), ManualClock(NOW_S), claimed_log(tmp_path)
    made = Inventory(store, "op", "operator 'op'", Options(retained_s={3600: 7200}), clock, deletes_in_background=False)
    made.open([], 1, "run", clock)
    found: list[list[int]] = []
    for batch in range(4):
        store.refuses = batch < 3
        made.add(log.append(replace(keyed(batch), batch_time_ms=10_000 * batch), []), None, 0)
        found.append(pinned(tmp_path))
    assert found == [[], [], [], [0]]
    assert made.points.pending == []


def test_a_branch_gives_up_its_pin_once_it_needs_no_object_of_its_parents(tmp_path: Path) -> None:
    parent, branch = LocalStore(tmp_path / "parent"), LocalStore(tmp_path / "branch")
    parent.put("op/pins/ours.json", b"pin")
    write_parent(branch, "op", Parent(str(tmp_path / "parent"), 0, "op/pins/ours.json"))
    linked = SegmentRef(0, 0, b"sum", 0, 1, 1, 1, link(str(tmp_path / "parent"), "op/changes/1/0/0-a.run"))
    made = make_inventory(tmp_path / "branch")
    made.open([replace(keyed(0), segments=[linked])], 1, "run", ManualClock(NOW_S))
    made.add(keyed(1, level(0, run("op/runs/1/0/1-1/0.run"))), None, 0)
    made.deleter.look()
    assert parent.list("op/pins/")
    record = made.history.latest_record
    assert record is not None
    assert record.base_map is not None
    latest = replace(keyed(2), base_ranges=list(record.base_map.ranges))
    made.add(latest, None, 0)
    made.release(latest, 2, claimed_log(tmp_path / "branch"))
    assert parent.list("op/pins/") == []
    assert branch.list("op/parent.json") == []


def test_objects_of_a_parent_are_no_waste_of_the_branch(tmp_path: Path) -> None:
    """To store their parts again would free nothing."""
    retention = Retention(2.0, "op/log")
    part, rest = (run(link("parent", "op/runs/1/0/a"), offset, length) for offset, length in ((0, 10), (10, 9000)))
    own, waste = run("op/runs/2/0/b", 0, 10), run("op/runs/2/0/b", 10, 90)
    retention.add_runs([part, rest, own, waste])
    assert (retention.size_bytes, retention.needed_bytes) == (100, 9110)
    retention.remove_runs([rest, waste])
    retention.choose_wasteful("op/log/9")
    assert retention.wasteful == {"op/runs/2/0/b"}
    retention.remove_runs([part, own])
    assert retention.release() == [part.name, own.name][::-1]
    assert (retention.size_bytes, retention.needed_bytes) == (0, 0)


# ---- The changes that consumers need ----


def consumer_pin(root: Path, since: int, batch: int, max_bytes: int = 1 << 20, lasts_s: float = 100.0) -> str:
    """Write a consumer's pin; returns its name."""
    history = History([keyed(number) for number in range(batch + 1)])
    made = Pin.of_changes(
        "op", history, batch, owner="test", made_ms=0, lasts_s=lasts_s, since=since, max_bytes=max_bytes
    )
    name = pin_name("op", batch, b"%d" % since)
    write_pin(LocalStore(root), name, made)
    os.utime(root / name, (NOW_S, NOW_S))
    return name


def test_changes_stay_until_the_pins_were_listed_after_them(tmp_path: Path) -> None:
    clock = ManualClock(NOW_S)
    pins = StandingPins(LocalStore(tmp_path), "op", clock)
    assert pins.changes_from == INITIAL_BATCH
    pins.look(History([keyed(batch) for batch in range(5)]))
    assert (pins.changes_from, pins.has_seen(4), pins.has_seen(5)) == (5, True, False)
    name = consumer_pin(tmp_path, 2, 7)
    assert pins.changes_from == 5, "what it keeps of these it names"
    pins.look(History([keyed(batch) for batch in range(9)]))
    assert (pins.changes_from, pins.has_seen(8)) == (2, True)
    clock.advance(100 + MARGIN_S + 1)
    assert pins.look(History([keyed(batch) for batch in range(10)])) == [name]
    assert pins.changes_from == 10


def test_pins_that_have_expired_are_deleted(tmp_path: Path) -> None:
    consumer_pin(tmp_path, 2, 7, lasts_s=-MARGIN_S - 1)
    standing = consumer_pin(tmp_path, 3, 7)
    opened(tmp_path).deleter.look()
    assert [info.name for info in LocalStore(tmp_path).list("op/pins/")] == [standing]


def test_a_consumer_keeps_changes_up_to_its_bytes(tmp_path: Path) -> None:
    pins = StandingPins(LocalStore(tmp_path), "op", ManualClock(NOW_S))
    history = History([keyed(batch) for batch in range(12)])
    kept_bytes = history.changes_bytes(3)
    near, far = consumer_pin(tmp_path, 3, 7, kept_bytes), consumer_pin(tmp_path, 2, 7, kept_bytes)
    assert pins.look(history) == [far]
    assert pins.changes_from == 3
    history.retain(2)
    history.add(keyed(12))
    assert pins.look(history) == [far, near]


def test_while_a_pin_cannot_be_read_all_changes_stay(tmp_path: Path) -> None:
    name = consumer_pin(tmp_path, 2, 7)
    (tmp_path / name).write_bytes(b"damaged")
    pins = StandingPins(LocalStore(tmp_path), "op", ManualClock(NOW_S))
    pins.look(History([keyed(batch) for batch in range(9)]))
    assert pins.changes_from == INITIAL_BATCH


def with_changes(root: Path, listed_after: int) -> Inventory:
    """Six checkpoints, of which the last two need only the changes from batch 4 on; pins were listed once."""
    made = opened(root)
    for batch in range(6):
        entry = keyed(batch, *([level(3, run("op/runs/1/0/3-1/0.run"))] if batch == 3 else []))
        before = made.history.record(3)
        if before is not None and before.base_map is not None:
            entry = replace(entry, base_ranges=list(before.base_map.ranges))
        made.add(entry, None, 0)
        if batch == listed_after:
            made.deleter.look()
    return made


def test_pins_are_listed_before_changes_are_given_up(tmp_path: Path) -> None:
    made = with_changes(tmp_path, listed_after=2)
    assert made.changes_from(1) == 3, "no other changes can go"
    assert made.changes_from(4) == 6
    made.release(keyed(5), 4, claimed_log(tmp_path), 3)
    assert made.history.at(3) is not None
    made.release(keyed(5), 4, claimed_log(tmp_path), 6)
    assert made.history.at(3) is None


def test_pins_are_not_listed_again_for_changes_that_they_were_listed_after(tmp_path: Path) -> None:
    assert with_changes(tmp_path, listed_after=3).changes_from(4) == 4


def test_operator_state_has_no_changes(tmp_path: Path) -> None:
    made = opened(tmp_path)
    assert made.changes_from(0) is None
    made.add(replace(keyed(0), key_schema=b""), None, 0)
    assert made.changes_from(0) is None
