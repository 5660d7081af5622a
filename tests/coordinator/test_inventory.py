"""What the store holds for a query: what a run takes over, what is to be emptied, and what goes at its end."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from statelog.coordinator.garbage import Inventory, Retention
from statelog.coordinator.standing_pins import StandingPins
from statelog.history.bases import BaseMap
from statelog.history.footprint import Footprint
from statelog.history.operator_history import History
from statelog.history.pins import MARGIN_S, Consumer, Pin, pin_name, write_pin
from statelog.history.query_history import QueryHistory, read_history
from statelog.log.entry import INITIAL_BATCH, Checkpoint, QueryCheckpoint
from statelog.log.numbered import NumberedLog, base_name
from statelog.log.references import Base, Level, SegmentRef, StoredRun
from statelog.options import Options, Tuning
from statelog.runs.key_groups import hash_range
from statelog.storage import LocalStore
from statelog.storage.links import LinkedStore, link
from statelog.storage.store import StoreWrapper
from statelog.testing.query import ManualClock
from tests.contract.log_contract import make_claim
from tests.coordinator.inventory_support import PinsRefused
from tests.entries import checkpoint_of, entry_of, query_of, segments_in

NOW_S = 10_000
IDENTITY, OTHER = "op-1", "other-2"
WHOLE = hash_range(0, 1)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


def make_inventory(root: Path, *, deletes_in_background: bool = False, orphan_min_age_s: float = 60.0) -> Inventory:
    options = Options(tuning=Tuning(orphan_min_age_s=orphan_min_age_s))
    return Inventory(
        LinkedStore(LocalStore(root), LocalStore),
        "/location",
        options,
        ManualClock(NOW_S),
        deletes_in_background=deletes_in_background,
    )


def opened(root: Path, *, epoch: int = 1) -> Inventory:
    made = make_inventory(root)
    made.open([], epoch, "run", ManualClock(NOW_S))
    made.work_for([IDENTITY])
    return made


def claimed_log(root: Path) -> NumberedLog:
    log = NumberedLog(LocalStore(root), "log", ManualClock(NOW_S), appends=False, min_age_s=0)
    log.claim(make_claim("run"))
    return log


def release(
    made: Inventory, entry: QueryCheckpoint, oldest: int, log: NumberedLog, changes_from: dict[str, int]
) -> None:
    made.release(entry, oldest, log, log.removable(entry.log_start), changes_from)


def run(name: str, offset: int = 0, length: int = 100) -> StoredRun:
    return StoredRun(name, offset, length, b"sum", 1, WHOLE.first, WHOLE.last)


def level(batch: int, *runs: StoredRun) -> Level:
    return Level(batch, batch, b"%d" % (batch - 1), b"%d" % batch, WHOLE.first, WHOLE.last, list(runs))


def keyed(
    batch: int, *levels: Level, log_start: int = 0, retained_from: int = -1, identity: str = IDENTITY
) -> Checkpoint:
    """A checkpoint without changes of its own, from which on some materialized state counts."""
    return checkpoint_of(
        batch,
        bases=[Base(0, 1, list(levels))] if levels else [],
        log_start=log_start,
        retained_from=retained_from,
        begins=batch == 0,
        identity=identity,
        uid=identity,
        token=b"%d" % batch,
    )


def add(made: Inventory, *checkpoints: Checkpoint, payload_bytes: int = 0, **values: Any) -> QueryCheckpoint:
    """Add a durable entry with a section for each checkpoint."""
    entry = entry_of(*checkpoints, **values)
    repeated: dict[str, BaseMap] = {}
    for checkpoint in checkpoints:
        is_repeating = checkpoint.base_ranges is not None and not checkpoint.begins
        record = made.query.histories[checkpoint.identity].latest_record if is_repeating else None
        if record is not None and record.base_map is not None:
            repeated[checkpoint.identity] = record.base_map
    made.add(entry, repeated, payload_bytes)
    return entry


def repeating(made: Inventory, checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint that repeats which materialized states count."""
    record = made.query.histories[checkpoint.identity].latest_record
    assert record is not None
    assert record.base_map is not None
    return replace(checkpoint, base_ranges=list(record.base_map.ranges))


def test_a_run_that_was_refused_deletes_nothing_when_it_ends(tmp_path: Path) -> None:
    """The location is another's, whose first epoch may be running."""
    store = LocalStore(tmp_path)
    names = [f"op-1/{folder}/{epoch}/0/0-a.run" for folder in ("changes", "runs") for epoch in (0, 1, 2)]
    for name in names:
        store.put(name, b"x")
    make_inventory(tmp_path).close()
    assert [info.name for info in store.list()] == names


def test_what_a_run_writes_stays_from_its_start_on(tmp_path: Path) -> None:
    made = opened(tmp_path, epoch=3)
    assert not made.gate.may_go("op-1/changes/3/0/0-a.run")
    assert made.gate.may_go("op-1/changes/2/0/0-a.run")


def test_a_half_written_file_stays_while_its_writer_may_be_alive(tmp_path: Path) -> None:
    folder = tmp_path / "op-1/changes/1/0"
    folder.mkdir(parents=True)
    for name, age_s in ((".1.young.tmp", 59), (".1.old.tmp", 61)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (NOW_S - age_s, NOW_S - age_s))
    opened(tmp_path, epoch=2)
    assert [path.name for path in folder.iterdir()] == [".1.young.tmp"]


def test_what_only_a_replaced_entry_names_is_needed_no_more(tmp_path: Path) -> None:
    """A later attempt had another result, before anybody could go back to the earlier one's checkpoint."""
    made = opened(tmp_path)
    add(made, keyed(0))
    add(made, keyed(1, level(0, run("op-1/runs/1/0/1-1/0.run"))))
    revised = replace(keyed(1, level(0, run("op-1/runs/1/0/1-2/0.run"))), revision=1)
    release(made, add(made, revised), 1, claimed_log(tmp_path), {})
    assert not made.retention.needs("op-1/runs/1/0/1-1/0.run")
    assert made.retention.needs("op-1/runs/1/0/1-2/0.run")
    assert (made.retention.size_bytes, made.retention.needed_bytes) == (100, 100)


def test_the_materialized_states_are_repeated_by_the_entry_after_the_one_that_has_them(tmp_path: Path) -> None:
    made = opened(tmp_path)
    add(made, keyed(0))
    add(made, keyed(1, level(0, run("op-1/runs/1/0/1-1/0.run"))), payload_bytes=1 << 20)
    record = made.query.histories[IDENTITY].record(1)
    assert record is not None
    assert record.base_map is not None
    found = [made.base_map_to_repeat(IDENTITY, batch) for batch in range(4)]
    assert found == [None, None, record.base_map, None]
    assert made.base_map_to_repeat(OTHER, 2) is None
    add(made, repeating(made, keyed(2)), payload_bytes=1 << 20)
    assert made.base_map_to_repeat(IDENTITY, 3) is None, "it was repeated already"


# ---- Files to empty ----


def with_waste(root: Path) -> tuple[Inventory, list[Level]]:
    """A materialized state, one of whose files holds more that is no longer needed than what all others hold."""
    made = opened(root)
    part, rest = run("op-1/runs/1/0/b", 0, 10), run("op-1/runs/1/0/b", 10, 990)
    oldest, newest = level(0, run("op-1/runs/1/0/a")), level(2, run("op-1/runs/1/0/d"))
    add(made, keyed(0))
    add(made, keyed(1, oldest, level(1, part, rest)))
    assert not made.retention.wasteful
    middle = level(1, run("op-1/runs/1/0/c"), part)
    release(made, add(made, keyed(2, oldest, middle, newest)), 2, claimed_log(root), {})
    return made, [oldest, middle, newest]


def test_levels_are_stored_again_from_the_first_one_with_a_wasteful_file_on(tmp_path: Path) -> None:
    """Also if it shares the level with others: a level is stored as a whole, and later ones continue from it."""
    made, [oldest, middle, newest] = with_waste(tmp_path)
    assert made.retention.wasteful
    assert "op-1/runs/1/0/b" in made.retention.wasteful
    assert not any(f"op-1/runs/1/0/{name}" in made.retention.wasteful for name in "acd")
    assert made.retention.lasting([oldest, middle, newest]) == [oldest]
    assert made.retention.lasting([middle, newest]) == []
    assert made.retention.lasting([oldest, newest]) == [oldest, newest]


def test_a_log_file_is_emptied_of_the_snapshots_that_keep_it(tmp_path: Path) -> None:
    """Every entry of operator state holds all of it: once an old snapshot is moved the log begins later."""
    made, log = opened(tmp_path), claimed_log(tmp_path)
    kept, large, small = bytes(10), bytes(1000), bytes(10)
    first = [SegmentRef(0, 0, b"kept", 0, 10, 1, 1), SegmentRef(1, 1, b"large", 10, 1000, 1, 1)]
    whole = checkpoint_of(0, first, parallelism=2, key_schema=b"", log_start=2)
    before = log.append(entry_of(whole), [kept, large])
    made.add(before, {}, 0)
    second = [segments_in(before)[0], SegmentRef(1, 1, b"small", 0, 10, 1, 1)]
    after = log.append(entry_of(replace(whole, batch=1, segments=second, log_start=before.number)), [small])
    made.add(after, {}, 0)
    release(made, after, 1, log, {})
    assert log.name_of(before.number) in made.retention.wasteful
    assert log.file_name not in made.retention.wasteful


def test_a_log_file_that_stays_anyway_is_not_emptied_of_materialized_state(tmp_path: Path) -> None:
    made, log = opened(tmp_path), claimed_log(tmp_path)
    made.add(log.append(entry_of(keyed(0)), []), {}, 0)
    inside = [level(0, run("", 0, 10)), level(1, run("", 10, 990))]
    first = log.append(entry_of(keyed(1, *inside)), [bytes(1000)])
    made.add(first, {}, 0)
    [held, _] = first.sections[0].bases[0].levels
    second = log.append(entry_of(keyed(2, held, level(1, run("op-1/runs/1/0/b", 0, 1)), log_start=first.number)), [])
    made.add(second, {}, 0)
    release(made, second, 2, log, {})
    assert made.retention.size_bytes > 2 * made.retention.needed_bytes
    assert not made.retention.wasteful


def with_files(**files: tuple[int, int]) -> Retention:
    """Files of so many bytes, of which so many are needed; they may take twice as many as that."""
    retention = Retention(2.0)
    for name, (size_bytes, needed_bytes) in files.items():
        needed, rest = run(name, 0, needed_bytes), run(name, needed_bytes, size_bytes - needed_bytes)
        retention.add_runs([rest, needed])
        retention.remove_runs([rest])
    retention.choose_wasteful("log/9")
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
        for subtask, name in enumerate((f"log/{base_name(3)}", f"log/{base_name(2)}", "op-1/changes/1/2/0-a.run"))
    ]
    entry = replace(keyed(0), number=3, segments=segments, parallelism=3)
    for key_schema, size_bytes in ((b"keys", 110), (b"", 111)):
        retention, checkpoint = Retention(2.0), replace(entry, key_schema=key_schema)
        retention.add(checkpoint)
        assert retention.size_bytes == retention.needed_bytes == size_bytes
        retention.remove(checkpoint)
        assert retention.release() == ["op-1/changes/1/2/0-a.run"]
        assert retention.size_bytes == retention.needed_bytes == 0


def test_a_file_that_is_needed_again_stays() -> None:
    retention, part = Retention(2.0), run("op-1/runs/1/0/a")
    retention.add_runs([part])
    retention.remove_runs([part])
    retention.add_runs([part])
    assert retention.release() == []
    assert retention.needs(part.name)


# ---- What is retained, and what goes ----


def test_what_is_retained_is_what_the_newest_entry_says(tmp_path: Path) -> None:
    """Also if objects are gone: somebody may put them back."""
    made = opened(tmp_path)
    assert made.query.retained_from == -1
    for batch in range(4):
        lost = SegmentRef(0, 0, b"sum", 0, 1, 1, 1, f"op-1/changes/1/0/{batch}")
        add(made, replace(keyed(batch, retained_from=min(batch, 2)), segments=[lost]))
    assert made.query.retained_from == 2
    assert [made.query.has_batch(batch) for batch in range(4)] == [False, False, True, True]


def test_a_file_of_the_log_is_deleted_once(tmp_path: Path) -> None:
    """And so the ones of claims can go in their turn."""

    class Noted(StoreWrapper):
        def delete(self, names: list[str]) -> None:
            deleted.extend(names)
            super().delete(names)

    deleted: list[str] = []
    store = Noted(LocalStore(tmp_path))
    made = Inventory(store, "/location", Options(), ManualClock(NOW_S), deletes_in_background=False)
    made.open([], 1, "run", ManualClock(NOW_S))
    log = claimed_log(tmp_path)
    for batch in range(4):
        one = keyed(batch, level(batch, run(f"op-1/runs/1/0/{batch}")), log_start=log.number + 1)
        placed = log.append(entry_of(one), [])
        made.add(placed, {}, 0)
        release(made, placed, batch, log, {})
    assert [name for name in deleted if name.startswith("log/")] == [log.name_of(number) for number in range(1, 5)]


def test_a_run_that_ends_has_deleted_what_it_leaves(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    before = set(threading.enumerate())
    made = make_inventory(tmp_path, deletes_in_background=True)
    made.open([], 1, "run", ManualClock(NOW_S))
    made.gate.begin(1, 0)
    made.work_for([IDENTITY])
    made.grants_of(IDENTITY).open(0, "0-1", b"base", [])
    for name in ("op-1/changes/1/0/0-a.run", "op-1/runs/1/0/0-1/0.run"):
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
    made = Inventory(store, "/location", Options(), clock, deletes_in_background=True)
    made.open([], 1, "run", clock)

    def is_soon_gone(number: int) -> bool:
        store.has_deleted.clear()
        store.put(f"op-1/runs/1/0/{number}.run", b"x")
        made.deleter.delete([f"op-1/runs/1/0/{number}.run"])
        is_soon = store.has_deleted.wait(0.5)
        assert is_soon or (is_bucket and number > 0) or store.has_deleted.wait(60)
        return is_soon

    is_soon_gone(0)  # the first round waits for none
    # On a slow machine some may take longer for no reason.
    assert any(map(is_soon_gone, [1] if is_bucket else range(1, 5))) is not is_bucket
    made.close()
    assert store.list() == []


# ---- Operators that come and go ----


def stored(root: Path) -> list[str]:
    """The objects of the operators."""
    return [info.name for info in LocalStore(root).list() if not info.name.startswith(("log/", "pins/"))]


def put_changes(root: Path, batch: int, identity: str) -> Checkpoint:
    """A checkpoint with changes in an object, which is there."""
    name = f"{identity}/changes/1/0/{batch}-a.run"
    LocalStore(root).put(name, b"x")
    segment = SegmentRef(0, 0, b"sum", 0, 1, 1, 1, name)
    return replace(keyed(batch, identity=identity), segments=[segment])


def test_what_an_operator_has_stored_goes_with_the_last_retained_checkpoint_that_has_it(tmp_path: Path) -> None:
    """Of its changes, and of its materialized states."""
    made, log = opened(tmp_path, epoch=2), claimed_log(tmp_path)
    base_name_of_other = f"{OTHER}/runs/1/0/1-1/0.run"
    LocalStore(tmp_path).put(base_name_of_other, b"x")
    for batch in range(2):
        add(made, keyed(batch), put_changes(tmp_path, batch, OTHER))
    last = replace(put_changes(tmp_path, 2, OTHER), bases=[Base(0, 1, [level(1, run(base_name_of_other))])])
    add(made, keyed(2), last)
    everything = stored(tmp_path)
    for batch in range(3, 8):
        entry = add(made, keyed(batch))
        release(made, entry, batch - 2, log, {})
        has_other = batch - 2 <= 2
        assert stored(tmp_path) == (everything if has_other else [])
        assert (OTHER in made.query.histories) == has_other
    assert (made.retention.size_bytes, made.retention.needed_bytes) == (0, 0)


def test_what_an_operator_has_stored_goes_when_all_of_its_checkpoints_were_taken_back(tmp_path: Path) -> None:
    """It began with a batch that another start repeats without it."""
    made, log = opened(tmp_path, epoch=2), claimed_log(tmp_path)
    for batch in range(2):
        add(made, keyed(batch))
    begun = replace(put_changes(tmp_path, 2, OTHER), begins=True, base_ranges=[])
    add(made, keyed(2), begun)
    add(made, keyed(3), put_changes(tmp_path, 3, OTHER))
    assert len(stored(tmp_path)) == 2
    entry = add(made, keyed(2))
    release(made, entry, 1, log, {})
    assert stored(tmp_path) == []
    assert list(made.query.histories) == [IDENTITY]


def test_the_consumers_of_one_operator_keep_no_changes_of_another(tmp_path: Path) -> None:
    made, log = opened(tmp_path, epoch=2), claimed_log(tmp_path)
    for batch in range(4):
        add(made, *(put_changes(tmp_path, batch, identity) for identity in (IDENTITY, OTHER)))
    consumer_pin(tmp_path, 1, 3)
    materialized = [
        replace(put_changes(tmp_path, 4, identity), bases=[Base(0, 1, [level(3)])]) for identity in (IDENTITY, OTHER)
    ]
    add(made, *materialized)
    made.deleter.look()
    for batch in (5, 6):
        parts = [repeating(made, put_changes(tmp_path, batch, identity)) for identity in (IDENTITY, OTHER)]
        entry = add(made, *parts)
    made.deleter.look()
    changes_from = made.changes_from(6)
    assert changes_from == {IDENTITY: 1, OTHER: 7}
    release(made, entry, 6, log, changes_from)
    assert stored(tmp_path) == [
        *(f"{IDENTITY}/changes/1/0/{batch}-a.run" for batch in range(1, 7)),
        *(f"{OTHER}/changes/1/0/{batch}-a.run" for batch in range(4, 7)),
    ]


def held_back(made: Inventory, oldest: int, most_bytes: float) -> dict[str, int]:
    """The operators that hold the log back, and up to which batch each has to materialize its state."""
    made.find_log_holder(oldest, lambda _: most_bytes)
    found = {identity: made.needed_by(identity) for identity in made.query.histories}
    return {identity: batch for identity, batch in found.items() if batch is not None}


def test_an_operator_that_alone_keeps_much_of_the_log_has_to_materialize_its_state(tmp_path: Path) -> None:
    """As much as the others can do without; with one operator, or if they keep it too, there is none."""
    made = opened(tmp_path)
    for batch in range(6):
        others = keyed(batch, *([level(3)] if batch == 4 else []), identity=OTHER)
        add(made, keyed(batch), repeating(made, others) if batch == 5 else others, payload_bytes=100)
    assert held_back(made, 5, 399) == {}, "the other operator is not in this start"
    made.work_for([IDENTITY, OTHER])
    assert held_back(made, 5, 399) == {IDENTITY: 4}
    assert held_back(made, 5, 400) == {}
    assert held_back(made, 3, 0) == {}, "a rewind to 3 needs all changes of both"
    add(made, keyed(6, level(5)), keyed(6, identity=OTHER), payload_bytes=100)
    add(made, *(repeating(made, keyed(7, identity=identity)) for identity in (IDENTITY, OTHER)), payload_bytes=100)
    assert held_back(made, 7, 199) == {OTHER: 6}, "the changes of batches 4 and 5"
    assert held_back(made, 7, 200) == {}


def test_an_operator_whose_entries_hold_its_whole_state_holds_no_log_back(tmp_path: Path) -> None:
    made = opened(tmp_path)
    made.work_for([IDENTITY, OTHER])
    for batch in range(6):
        add(made, keyed(batch), replace(keyed(batch, identity=OTHER), key_schema=b""), payload_bytes=100)
    assert held_back(made, 5, 499) == {IDENTITY: 5}


# ---- What was taken back ----


def cut_at(made: Inventory) -> list[int]:
    return [cut.batch for cut in made.query.cuts]


def test_what_was_taken_back_is_noted_while_a_pin_may_speak_of_it(tmp_path: Path) -> None:
    """The entry of batch 2 was pinned, then it was replaced, and now none of that time is retained."""
    made, log = opened(tmp_path), claimed_log(tmp_path)
    written = [log.append(entry_of(keyed(batch)), []) for batch in range(3)]
    for entry in written:
        made.add(entry, {}, 0)
    name = pin_name(2, b"pin")
    pin = Pin.on(Footprint.of(made.query, 2))
    write_pin(LocalStore(tmp_path), name, pin)
    made.deleter.look()
    revised = log.append(entry_of(replace(keyed(2), token=b"revised", revision=1)), [])
    made.add(revised, {}, 0)
    assert not pin.is_on_line(made.query)
    for batch in range(3, 6):
        one = keyed(batch, *([level(2)] if batch == 3 else []))
        entry = log.append(entry_of(repeating(made, one) if batch > 3 else one), [])
        made.add(entry, {}, 0)
        release(made, entry, batch, log, {})
        assert not pin.is_on_line(made.query)
    assert made.query.at(2) is None
    assert cut_at(made) == [1]
    assert not pin.is_on_line(made.query)
    LocalStore(tmp_path).delete([name])
    made.deleter.look()
    release(made, entry, 5, log, {IDENTITY: 5})
    assert cut_at(made) == []


def test_an_entry_whose_write_has_failed_may_have_been_pinned(tmp_path: Path) -> None:
    """It is in the log, although its writer does not know; another one of the batch takes its place."""
    made, log = opened(tmp_path), claimed_log(tmp_path)
    made.add(log.append(entry_of(keyed(0)), []), {}, 0)
    for token in (b"lost", b"known"):
        entry = entry_of(replace(keyed(1), token=token))
        made.gate.doubt(entry)
        placed = log.append(entry, [])
        if token == b"lost":
            pin = Pin.on(Footprint.of(read_history(LocalStore(tmp_path)), 1))
            write_pin(LocalStore(tmp_path), pin_name(1, b"pin"), pin)
    made.add(placed, {}, 0)
    release(made, placed, 0, log, {})
    assert not pin.is_on_line(made.query)
    for batch in range(2, 6):
        one = keyed(batch, *([level(1)] if batch == 2 else []))
        entry = entry_of(repeating(made, one) if batch > 2 else one)
        made.gate.doubt(entry)
        placed = log.append(entry, [])
        made.add(placed, {}, 0)
        release(made, placed, batch, log, {})
        assert not pin.is_on_line(made.query)
    assert made.query.at(1) is None
    assert cut_at(made) == [-1, 0], "of the others nothing was in doubt"


# ---- Pins of the coordinator's own ----


def pinned(root: Path) -> list[int]:
    """The batches of the pins."""
    return [int(Path(info.name).name.partition("-")[0]) for info in LocalStore(root).list("pins/")]


def test_the_first_checkpoint_of_an_interval_is_pinned_once_it_is_certain(tmp_path: Path) -> None:
    clock, log = ManualClock(NOW_S), claimed_log(tmp_path)
    options = Options(retained_s={30: 1000})
    made = Inventory(LocalStore(tmp_path), "/location", options, clock, deletes_in_background=False)
    made.open([], 1, "run", clock)
    found: list[list[int]] = []
    for batch in range(5):
        made.add(log.append(entry_of(replace(keyed(batch), batch_time_ms=10_000 * batch)), []), {}, 0)
        found.append(pinned(tmp_path))
    assert found == [[], [0], [0], [0], [0, 3]]


def test_a_pin_that_could_not_be_written_is_written_with_the_next_checkpoint(tmp_path: Path) -> None:
    """Although no other is due, and nothing is to be deleted: until then all checkpoints since stay."""
    store, clock, log = PinsRefused(LocalStore(tmp_path)), ManualClock(NOW_S), claimed_log(tmp_path)
    made = Inventory(store, "/location", Options(retained_s={3600: 7200}), clock, deletes_in_background=False)
    made.open([], 1, "run", clock)
    found: list[list[int]] = []
    for batch in range(4):
        store.refuses = batch < 3
        made.add(log.append(entry_of(replace(keyed(batch), batch_time_ms=10_000 * batch)), []), {}, 0)
        found.append(pinned(tmp_path))
    assert found == [[], [], [], [0]]
    assert made.points.pending == []


def test_objects_of_a_parent_are_no_waste_of_the_branch(tmp_path: Path) -> None:
    """To store their parts again would free nothing."""
    retention = Retention(2.0)
    part, rest = (run(link("parent", "op-1/runs/1/0/a"), offset, length) for offset, length in ((0, 10), (10, 9000)))
    own, waste = run("op-1/runs/2/0/b", 0, 10), run("op-1/runs/2/0/b", 10, 90)
    retention.add_runs([part, rest, own, waste])
    assert (retention.size_bytes, retention.needed_bytes) == (100, 9110)
    retention.remove_runs([rest, waste])
    retention.choose_wasteful("log/9")
    assert retention.wasteful == {"op-1/runs/2/0/b"}
    retention.remove_runs([part, own])
    assert retention.release() == [part.name, own.name][::-1]
    assert (retention.size_bytes, retention.needed_bytes) == (0, 0)


# ---- The changes that consumers need ----


def query_to(last: int) -> QueryHistory:
    """A query's history up to a batch."""
    return query_of(keyed(batch) for batch in range(last + 1))


def consumer_pin(
    root: Path, since: int, batch: int, max_bytes: int = 1 << 20, lasts_s: float = 100.0, identity: str = IDENTITY
) -> str:
    """Write a consumer's pin; returns its name."""
    history = History([keyed(number, identity=identity) for number in range(batch + 1)])
    made = Pin.on(
        Footprint.of_changes(history, batch, since=since), Consumer(max_bytes), owner="test", made_ms=0, lasts_s=lasts_s
    )
    name = pin_name(batch, b"%d" % since)
    write_pin(LocalStore(root), name, made)
    os.utime(root / name, (NOW_S, NOW_S))
    return name


def test_changes_stay_until_the_pins_were_listed_after_them(tmp_path: Path) -> None:
    clock = ManualClock(NOW_S)
    pins = StandingPins(LocalStore(tmp_path), clock)
    assert pins.changes_from(IDENTITY) == INITIAL_BATCH
    pins.look(query_to(4))
    assert (pins.changes_from(IDENTITY), pins.has_seen(4), pins.has_seen(5)) == (5, True, False)
    name = consumer_pin(tmp_path, 2, 7)
    assert pins.changes_from(IDENTITY) == 5, "what it keeps of these it names"
    pins.look(query_to(8))
    assert (pins.changes_from(IDENTITY), pins.has_seen(8)) == (2, True)
    clock.advance(100 + MARGIN_S + 1)
    assert pins.look(query_to(9)) == [name]
    assert pins.changes_from(IDENTITY) == 10


def test_pins_that_have_expired_are_deleted(tmp_path: Path) -> None:
    consumer_pin(tmp_path, 2, 7, lasts_s=-MARGIN_S - 1)
    standing = consumer_pin(tmp_path, 3, 7)
    opened(tmp_path).deleter.look()
    assert [info.name for info in LocalStore(tmp_path).list("pins/")] == [standing]


def test_a_consumer_keeps_changes_up_to_its_bytes(tmp_path: Path) -> None:
    pins = StandingPins(LocalStore(tmp_path), ManualClock(NOW_S))
    query = query_to(11)
    kept_bytes = query.histories[IDENTITY].changes_bytes(3)
    near, far = consumer_pin(tmp_path, 3, 7, kept_bytes), consumer_pin(tmp_path, 2, 7, kept_bytes)
    assert pins.look(query) == [far]
    assert pins.changes_from(IDENTITY) == 3
    query.retain(2, {})
    query.add(entry_of(keyed(12)))
    assert pins.look(query) == [far, near]


def test_while_a_pin_cannot_be_read_all_changes_stay(tmp_path: Path) -> None:
    name = consumer_pin(tmp_path, 2, 7)
    (tmp_path / name).write_bytes(b"damaged")
    pins = StandingPins(LocalStore(tmp_path), ManualClock(NOW_S))
    pins.look(query_to(8))
    assert pins.changes_from(IDENTITY) == INITIAL_BATCH


def with_changes(root: Path, listed_after: int) -> Inventory:
    """Six checkpoints, of which the last two need only the changes from batch 4 on; pins were listed once."""
    made = opened(root)
    for batch in range(6):
        one = keyed(batch, *([level(3, run("op-1/runs/1/0/3-1/0.run"))] if batch == 3 else []))
        add(made, repeating(made, one) if batch > 3 else one)
        if batch == listed_after:
            made.deleter.look()
    return made


def test_pins_are_listed_before_changes_are_given_up(tmp_path: Path) -> None:
    made, log = with_changes(tmp_path, listed_after=2), claimed_log(tmp_path)
    assert made.changes_from(1) == {IDENTITY: 3}, "no other changes can go"
    assert made.changes_from(4) == {IDENTITY: 6}
    release(made, entry_of(keyed(5)), 4, log, {IDENTITY: 3})
    assert made.query.at(3) is not None
    assert made.query.histories[IDENTITY].at(3) is not None
    release(made, entry_of(keyed(5)), 4, log, {IDENTITY: 6})
    assert made.query.at(3) is None
    assert made.query.histories[IDENTITY].at(3) is None


def test_pins_are_not_listed_again_for_changes_that_they_were_listed_after(tmp_path: Path) -> None:
    assert with_changes(tmp_path, listed_after=3).changes_from(4) == {IDENTITY: 4}


def test_operator_state_has_no_changes(tmp_path: Path) -> None:
    made = opened(tmp_path)
    assert made.changes_from(0) == {}
    add(made, replace(keyed(0), key_schema=b""), keyed(0, identity=OTHER))
    assert made.changes_from(0) == {OTHER: 1}
