"""Files come and go: what is released when, what is moved, and what stays for drivers that come back late."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from statelog.coordinator.garbage import Retention
from statelog.errors import CorruptionError, FencedError, StateMissingError, StorageError
from statelog.history.query_history import QueryHistory
from statelog.log.entry import FRAME_HEADER_BYTES, Checkpoint, QueryCheckpoint, encode_frame
from statelog.log.numbered import NumberedLog
from statelog.log.references import SegmentRef
from statelog.rpc.messages import Begin, TaskId
from statelog.runs import digests
from statelog.storage import LocalStore
from statelog.storage.store import StoreWrapper
from statelog.testing.faults import FaultPlan, FaultStore
from statelog.testing.query import ManualClock
from tests.acks import make_ack
from tests.contract.log_contract import PREFIX, checkpoints, make_checkpoint, make_claim
from tests.entries import checkpoint_of, segments_in
from tests.model.operator_engine import OperatorEngine

MERGING = ["across", "within", "off"]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


# ---- Counting ----


def checkpoint(batch: int, *places: tuple[str, int, int]) -> Checkpoint:
    """A checkpoint of operator state with segments at (file, offset, length)."""
    segments = [SegmentRef(i, i, b"", offset, length, 1, 1, name) for i, (name, offset, length) in enumerate(places)]
    return checkpoint_of(batch, segments, parallelism=len(places), key_schema=b"")


def test_a_file_goes_with_the_last_segment_that_is_named() -> None:
    retention = Retention(2.0)
    first = checkpoint(0, ("a", 0, 10), ("a", 10, 10))
    second = checkpoint(1, ("a", 10, 10), ("b", 0, 10))
    third = checkpoint(2, ("b", 0, 10), ("c", 0, 10))
    for added in (first, second, third):
        retention.add(added)
    assert (retention.size_bytes, retention.needed_bytes) == (40, 40)
    retention.remove(first)
    assert retention.release() == []
    assert (retention.size_bytes, retention.needed_bytes) == (40, 30)
    retention.remove(second)
    assert retention.release() == ["a"]
    assert retention.release() == []
    assert [retention.needs(name) for name in "abc"] == [False, True, True]
    retention.remove(third)
    assert retention.release() == ["b", "c"]


def test_files_of_the_log_are_released_by_the_log() -> None:
    retention = Retention(2.0)
    added = checkpoint(0, ("log/1.log", 0, 10), ("op-1/changes/x", 0, 10))
    retention.add(added)
    retention.remove(added)
    assert retention.release() == ["op-1/changes/x"]
    assert not retention.needs("log/1.log")


def test_the_most_wasteful_closed_files_are_emptied() -> None:
    retention = Retention(2.0)
    full, half, little, newest = files = [f"log/{number}" for number in range(4)]
    everything = checkpoint(0, *((name, offset, 10) for name in files for offset in range(0, 100, 10)))
    parts = {full: 10, half: 5, little: 1, newest: 1}
    needed = checkpoint(1, *((name, offset * 10, 10) for name, count in parts.items() for offset in range(count)))
    for added in (everything, needed):
        retention.add(added)
    retention.choose_wasteful(newest)
    assert not retention.wasteful, "nothing is wasted yet"
    retention.remove(everything)
    assert (retention.size_bytes, retention.needed_bytes) == (400, 170)
    retention.choose_wasteful(newest)
    assert [name for name in files if name in retention.wasteful] == [little]
    for limit, chosen in ((3.0, []), (1.0, [half, little])):
        other = Retention(limit)
        for added in (everything, needed):
            other.add(added)
        other.remove(everything)
        other.choose_wasteful(newest)
        assert [name for name in files if name in other.wasteful] == chosen


def test_a_file_that_is_needed_again_before_it_went_stays() -> None:
    """A revision names what the entry before it did."""
    retention = Retention(2.0)
    entry = checkpoint(0, ("a", 0, 10))
    retention.add(entry)
    retention.remove(entry)
    retention.add(entry)
    assert retention.release() == []
    assert retention.needs("a")


@pytest.mark.parametrize(
    ("limit", "waste", "chosen"),
    [
        (1.0, {"a": 1, "b": 0}, ["a"]),
        (1.0, {"a": 2, "b": 1}, ["a", "b"]),
        (1.0, {"a": 0, "b": 0}, []),
        (2.0, {"a": 60, "b": 60}, ["b"]),
        (2.0, {"a": 100, "b": 0}, []),
        (2.0, {"a": 80, "b": 70, "c": 0}, []),
        (2.0, {"a": 80, "b": 80, "c": 30}, ["b"]),
        (2.0, {"a": 81, "b": 80, "c": 30}, ["a", "b"]),
    ],
)
def test_no_more_files_are_emptied_than_are_too_large_together(
    limit: float, waste: dict[str, int], chosen: list[str]
) -> None:
    """Of files of 100 bytes each, of which so many are no longer needed."""
    retention = Retention(limit)
    held = checkpoint(0, *((f"op-1/runs/{name}", 0, 100 - wasted) for name, wasted in waste.items() if wasted < 100))
    rest = checkpoint(0, *((f"op-1/runs/{name}", 100 - wasted, wasted) for name, wasted in waste.items() if wasted))
    for added in (held, rest):
        retention.add(added)
    retention.remove(rest)
    retention.choose_wasteful("log/1")
    assert [name for name in waste if f"op-1/runs/{name}" in retention.wasteful] == chosen
    assert bool(retention.wasteful) == bool(chosen)


def test_what_was_wasteful_is_not_for_ever() -> None:
    retention = Retention(2.0)
    held, rest, more = checkpoint(0, ("a", 0, 10)), checkpoint(0, ("a", 10, 90)), checkpoint(1, ("b", 0, 500))
    for added in (held, rest):
        retention.add(added)
    retention.remove(rest)
    retention.choose_wasteful("log")
    assert "a" in retention.wasteful
    retention.add(more)
    retention.choose_wasteful("log")
    assert not retention.wasteful


def test_changes_inside_their_own_entry_stay_with_it() -> None:
    """Later checkpoints build on the entry of keyed state; of operator state the newest entry is enough."""
    own, elsewhere = f"log/{3:020}.log", "op-1/changes/1/0/x"
    held = replace(checkpoint(0, (own, 0, 10), (elsewhere, 0, 10)), number=3)
    for key_schema, expected in ((b"", [True, True]), (b"keys", [False, True])):
        retention = Retention(2.0)
        retention.add(replace(held, key_schema=key_schema))
        assert [retention.needs(name) for name in (own, elsewhere)] == expected
    retention = Retention(2.0)
    retention.add(replace(held, key_schema=b"keys", number=4))
    assert retention.needs(own), "a revision is not the entry that holds them"


# ---- Drivers that come back late ----


def open_log(root: Path, clock: ManualClock, merging: str, plan: FaultPlan | None = None) -> NumberedLog:
    store = FaultStore(LocalStore(root), plan or FaultPlan())
    return NumberedLog(store, PREFIX, clock, appends=merging == "across", max_file_bytes=900, min_age_s=60)


def placed(run: str, epoch: int, batch: int, log_start: int) -> tuple[QueryCheckpoint, list[bytes]]:
    entry, payload = make_checkpoint(run, epoch, batch)
    return replace(entry, log_start=log_start), payload


@pytest.mark.parametrize("merging", ["across", "within"])
@pytest.mark.parametrize("pause_s", [0.0, 1000.0])
def test_a_driver_that_was_suspended_for_longer_than_the_minimum_age(
    tmp_path: Path, merging: str, pause_s: float
) -> None:
    """All that fenced it may be deleted by then, so that its entry's number is free again."""
    clock = ManualClock(1000)
    older, newer = open_log(tmp_path, clock, merging), open_log(tmp_path, clock, merging)
    older.claim(make_claim("a"))
    older.append(*make_checkpoint("a", 1, 0))
    clock.advance(pause_s / 2)
    newer.claim(make_claim("b"))
    for batch in range(6):
        entry = newer.append(*placed("b", 2, batch, newer.number))
        clock.advance(pause_s / 8)
        names = newer.removable(entry.log_start)
        LocalStore(tmp_path).delete(names)
        newer.forget(names)
    remaining = [Path(info.name).stem for info in LocalStore(tmp_path).list()]
    assert (len(remaining) <= 2) == bool(pause_s), "claims stay for their time, and no longer"
    before = open_log(tmp_path, clock, merging).read()
    for _ in range(2):
        with pytest.raises(FencedError):
            older.append(*make_checkpoint("a", 1, 1))
    older.close()
    assert open_log(tmp_path, clock, merging).read() == before
    newer.append(*placed("b", 2, 6, newer.number))
    found = open_log(tmp_path, clock, merging).claim(make_claim("c"))
    assert checkpoints(found)[-1].batch == 6


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_driver_whose_clocks_stood_still(tmp_path: Path, is_replaced: bool) -> None:
    """It does not know that it slept, and finds its number free: its own newest file is gone, or another driver's."""
    clock, store = ManualClock(1000), LocalStore(tmp_path)
    older, newer = open_log(tmp_path, ManualClock(1000), "within"), open_log(tmp_path, clock, "within")
    older.claim(make_claim("a"))
    own = older.append(*make_checkpoint("a", 1, 0))
    own_name = older.file_name
    newer.claim(make_claim("b"))
    for batch in range(6):
        entry = newer.append(*placed("b", 2, batch, newer.number))
        clock.advance(60)
        names = newer.removable(entry.log_start)
        store.delete(names)
        newer.forget(names)
    if is_replaced:
        store.put(own_name, b"".join(encode_frame(*make_checkpoint("c", 1, 0))))
    with pytest.raises(FencedError, match="its file (is gone|was replaced)"):
        older.append(*make_checkpoint("a", 1, 1))
    found = checkpoints(open_log(tmp_path, clock, "within").claim(make_claim("d")))
    assert own not in found
    assert found[-1] == entry


def test_a_claim_that_was_prepared_before_the_log_went_on(tmp_path: Path) -> None:
    """The number that it takes was used and is free again: what the log holds now is newer."""
    clock, store = ManualClock(1000), LocalStore(tmp_path)
    newer = open_log(tmp_path, clock, "within")

    def go_on() -> None:
        newer.claim(make_claim("b"))
        for batch in range(6):
            entry = newer.append(*placed("b", 2, batch, newer.number))
            clock.advance(60)
            names = newer.removable(entry.log_start)
            store.delete(names)
            newer.forget(names)

    open_log(tmp_path, clock, "within").claim(make_claim("a"))
    late = open_log(tmp_path, clock, "within", FaultPlan.at("put_if_absent", action=go_on))
    with pytest.raises(FencedError, match="newer than its claim"):
        late.claim(make_claim("c"))
    with pytest.raises(FencedError):
        late.append(*make_checkpoint("c", 2, 0))
    found = open_log(tmp_path, clock, "within").claim(make_claim("d"))
    assert [entry.batch for entry in checkpoints(found)] == [4, 5]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_wall_clock_or_a_monotonic_clock_that_moved_is_a_pause(tmp_path: Path, is_late: bool) -> None:
    class TwoClocks(ManualClock):
        shift_s = 0.0

        def now_s(self) -> float:
            return super().now_s() + self.shift_s

    clock = TwoClocks(1000)
    calls = FaultStore(LocalStore(tmp_path), FaultPlan())
    log = NumberedLog(calls, PREFIX, clock, appends=False, min_age_s=60)
    log.claim(make_claim("a"))
    before = calls.calls
    clock.shift_s = 31.0 if is_late else 29.0
    log.append(*make_checkpoint("a", 1, 0))
    assert calls.calls - before == 2 + is_late, "a look at the own file, and one at the log only after a pause"


def test_an_entry_that_lands_after_it_was_deleted_is_no_part_of_the_log(tmp_path: Path) -> None:
    """A repeated request of a write that succeeded long ago."""
    clock, store = ManualClock(1000), LocalStore(tmp_path)
    log = open_log(tmp_path, clock, "within")
    log.claim(make_claim("a"))
    for batch in range(6):
        entry = log.append(*placed("a", 1, batch, log.number))
    names = log.removable(entry.log_start)
    late = {name: store.read(name) for name in names}
    assert len(late) == 4, "the claim is too young"
    store.delete(names)
    log.forget(names)
    expected = open_log(tmp_path, clock, "within").read()
    name, data = sorted(late.items())[1]
    store.put_if_absent(name, data)
    assert open_log(tmp_path, clock, "within").read() == expected
    log.append(*placed("a", 1, 6, log.number))
    newer = open_log(tmp_path, clock, "across")
    assert checkpoints(newer.claim(make_claim("b")))[-1].batch == 6
    entry = newer.append(*placed("b", 2, 7, newer.number))
    assert name not in newer.removable(entry.log_start), "it was not read, and may be a claim"
    clock.advance(60)
    assert name in newer.removable(entry.log_start)


def test_a_needed_file_that_is_gone_is_damage(tmp_path: Path) -> None:
    clock, store = ManualClock(1000), LocalStore(tmp_path)
    log = open_log(tmp_path, clock, "within")
    log.claim(make_claim("a"))
    for batch in range(4):
        log.append(*placed("a", 1, batch, 3))
    store.delete([f"{PREFIX}/{1:020}.log", f"{PREFIX}/{2:020}.log"])
    assert [entry.batch for entry in checkpoints(open_log(tmp_path, clock, "within").read())] == [1, 2, 3]
    store.delete([f"{PREFIX}/{3:020}.log"])
    with pytest.raises(CorruptionError, match="but lacks 3"):
        open_log(tmp_path, clock, "within").read()


def test_a_file_that_is_begun_names_the_end_of_the_one_before(tmp_path: Path) -> None:
    log = open_log(tmp_path, ManualClock(1000), "across")
    log.claim(make_claim("a"))
    written = [log.append(*make_checkpoint("a", 1, batch)) for batch in range(6)]
    files = sorted((tmp_path / PREFIX).iterdir())
    assert len(files) > 1
    whole = files[0].read_bytes()
    files[0].write_bytes(whole + b"from a write that failed")
    assert checkpoints(open_log(tmp_path, ManualClock(), "across").read()) == written
    files[0].write_bytes(whole[:-1])
    with pytest.raises(CorruptionError, match=files[0].name):
        open_log(tmp_path, ManualClock(), "across").read()


# ---- Leaks ----


class Load:
    """Checkpoints of operator state without tasks: some snapshots change, some are large, some attempts get lost."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = OperatorEngine(root, max_file_bytes=20_000)
        self.attempt = 0
        self.batch = 0
        self.snapshots: list[bytes | None] = []

    def start(self, merging: str, parallelism: int) -> None:
        self.engine.file_merging = merging
        self.engine.start(parallelism, self.batch)
        self.snapshots = [None] * parallelism

    def run_batch(self) -> None:
        for subtask in range(self.engine.parallelism):
            if self.rng.random() < 0.02:
                self._attempt(subtask, acks=False)
            self._attempt(subtask, acks=True)
        self.batch += 1

    def _attempt(self, subtask: int, *, acks: bool) -> None:
        coordinator, rng = self.engine.coordinator, self.rng
        self.attempt += 1
        task = TaskId("query", f"run-{self.engine.runs}", "op", "instance", self.batch, subtask, self.attempt)
        begun = coordinator.begin(Begin(task, subtask, 0, None, "token"))
        held = self.snapshots[subtask]
        if held is not None and rng.random() < 0.3:
            if acks:
                message = make_ack(task, digests.checksum(held), 0, 0, 0, "", 0.0, is_unchanged=True)
                coordinator.ack(message, b"")
            return
        data = rng.randbytes(rng.choice((50, 500, 3000)))
        name = (
            f"{begun.permit.upload_prefix}/{self.batch}-{self.attempt}.snapshot"
            if len(data) > begun.permit.inline_bytes
            else ""
        )
        if name:
            LocalStore(self.engine.location).put(name, data)
        if acks:
            self.snapshots[subtask] = data
            counts = {state.descriptor.name: 1 for state in self.engine.states}
            message = make_ack(task, digests.checksum(data), len(data), 1, 0, name, 0.0, element_counts=counts)
            coordinator.ack(message, b"" if name else data)


@pytest.mark.parametrize("merging", MERGING)
def test_five_thousand_checkpoints_leave_a_bounded_number_of_files(tmp_path: Path, merging: str) -> None:
    load, most = Load(tmp_path, seed=7), 0
    store = LocalStore(load.engine.location)
    for run in range(10):
        load.start(merging, parallelism=1 + run % 3)
        for _ in range(500):
            load.run_batch()
            if load.batch % 50 == 0:
                most = max(most, len(store.list()))
        if run % 2:
            load.engine.coordinator.close()
    load.engine.coordinator.close()
    assert load.batch == 5000
    assert load.engine.leaked() == []
    # Ten checkpoints are retained: with a file each, and one per subtask of each if nothing is merged.
    limits = {"across": 10, "within": 10 + 2, "off": 10 * (1 + 3) + 2}
    assert most <= limits[merging]
    held = store.list()
    entries = QueryHistory(load.engine.read_log()).entries
    needed = {(segment.name, segment.offset): segment.length for entry in entries for segment in segments_in(entry)}
    assert sum(info.size_bytes for info in held) < 2.5 * sum(needed.values()) + 20_000


def test_the_mode_is_switched_in_every_order(tmp_path: Path) -> None:
    """Four runs with other modes and parallelisms: what is older is read, what is newer follows the new mode."""
    orders = [(a, b, c, d) for a in MERGING for b in MERGING for c in MERGING for d in MERGING if len({a, b, c, d}) > 2]
    for number, order in enumerate(orders):
        engine = OperatorEngine(tmp_path / str(number), retained_checkpoints=3)
        store = LocalStore(engine.location)
        elements: list[str] = []
        batch = 0
        for run, merging in enumerate(order):
            engine.file_merging = merging
            engine.start(1 + (run + number) % 3, batch)
            for _ in range(5):
                elements.append(f"{batch}")
                before = {info.name for info in store.list()}
                for subtask in range(engine.parallelism):
                    engine.run_subtask(batch, subtask, [["add", "items", f"{batch}"]] if subtask == 0 else [])
                made = {info.name for info in store.list()} - before
                uploads = [name for name in made if "/changes/" in name]
                is_first = batch % 5 == 0
                assert (0 < len(uploads) <= engine.parallelism) == (merging == "off")
                assert len(made) - len(uploads) == (merging != "across"), (order, batch)
                assert is_first or engine.leaked() == []
                batch += 1
            if number % 2:
                engine.coordinator.close()
        engine.start(2, batch, keep_local=False)
        found = [engine.run_subtask(batch, subtask, [["read"]])[1][0]["items"] for subtask in range(2)]
        assert sorted(found[0] + found[1], key=int) == elements, order
        assert engine.leaked() == []


def test_a_checkpoint_that_is_not_retained_any_more_is_named(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path, file_merging="within", retained_checkpoints=2)
    engine.start(1, 0)
    for batch in range(6):
        engine.run_subtask(batch, 0, [["add", "items", "x"]])
    with pytest.raises(StateMissingError, match="needs checkpoint 2, but the oldest that is retained is checkpoint 4"):
        engine.start(1, 3)
    engine.start(1, 5)


def test_a_snapshot_that_cannot_be_moved_stays_where_it_is(tmp_path: Path) -> None:
    class Unreadable(StoreWrapper):
        def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
            if is_failing and length != FRAME_HEADER_BYTES:
                raise StorageError("read failed: no.")
            return super().read(name, offset=offset, length=length)

    is_failing = False
    engine = OperatorEngine(tmp_path, max_file_bytes=2000, retained_checkpoints=2)
    engine.open_store = lambda location: Unreadable(LocalStore(location))
    engine.start(2, 0)
    engine.run_subtask(0, 0, [["add", "items", "kept"]])
    engine.run_subtask(0, 1, [])
    places = []
    for batch in range(1, 20):
        is_failing = batch < 12
        engine.run_subtask(batch, 0, [])
        engine.run_subtask(batch, 1, [["update", "items", f"{batch:050}"]])
        places.append(segments_in(checkpoints(engine.read_log())[-1])[0].name)
    assert len(set(places[:11])) == 1
    assert places[-1] != places[0], "moved once that was possible"
    is_failing = False
    engine.start(2, 20, keep_local=False)
    assert engine.run_subtask(20, 0, [["read"]])[1][0]["items"] == ["kept"]


def test_what_could_not_be_deleted_is_deleted_later(tmp_path: Path) -> None:
    load = Load(tmp_path, seed=1)
    failing = True

    class Undeletable(StoreWrapper):
        def delete(self, names: list[str]) -> None:
            if failing:
                raise StorageError("delete failed: no.")
            super().delete(names)

    load.engine.open_store = lambda location: Undeletable(LocalStore(location))
    load.start("off", 2)
    for _ in range(30):
        load.run_batch()
    assert len(load.engine.leaked()) > 20
    failing = False
    load.run_batch()
    load.run_batch()
    assert load.engine.leaked() == []


@pytest.mark.parametrize("spare_bytes", [-1, 0])
def test_a_file_is_filled_up_to_its_limit_and_not_beyond(tmp_path: Path, spare_bytes: int) -> None:
    store = LocalStore(tmp_path)
    claim_bytes = sum(map(len, encode_frame(make_claim("a")(1), [])))
    entry_bytes = sum(map(len, encode_frame(*make_checkpoint("a", 1, 0))))
    limit = claim_bytes + 3 * entry_bytes + spare_bytes
    log = NumberedLog(store, PREFIX, ManualClock(1000), appends=True, max_file_bytes=limit)
    log.claim(make_claim("a"))
    written = [log.append(*make_checkpoint("a", 1, batch)) for batch in range(9)]
    assert max(info.size_bytes for info in store.list()) <= limit
    assert [entry.number for entry in written[:4]] == ([1, 1, 1, 2] if spare_bytes == 0 else [1, 1, 2, 2])
    for batch, entry in enumerate(written):
        texts = [store.read(it.name, offset=it.offset, length=it.length) for it in segments_in(entry)]
        assert texts == make_checkpoint("a", 1, batch)[1]


# ---- What is still needed ----


@pytest.mark.parametrize("merging", MERGING)
def test_nothing_is_deleted_before_the_entry_that_makes_it_superfluous(tmp_path: Path, merging: str) -> None:
    """A process that dies at that moment leaves as many checkpoints as are to be retained."""

    class Watched(StoreWrapper):
        def delete(self, names: list[str]) -> None:
            kept = QueryHistory(load.engine.read_log()).entries[-3:]
            assert len(kept) == min(3, kept[-1].batch + 1)
            needed = {segment.name for entry in kept for segment in segments_in(entry)}
            needed.update(name for name in names if name.endswith(".log") and int(Path(name).stem) >= kept[0].number)
            assert needed.isdisjoint(names)
            deleted.extend(names)
            super().delete(names)

    deleted: list[str] = []
    load = Load(tmp_path, seed=3)
    load.engine.retained_checkpoints = 3
    load.engine.open_store = lambda location: Watched(LocalStore(location))
    for parallelism in (2, 3):
        load.start(merging, parallelism)
        for _ in range(60):
            load.run_batch()
    assert len(deleted) > 10


@pytest.mark.parametrize("merging", MERGING)
def test_a_late_attempt_finds_what_its_batch_started_from(tmp_path: Path, merging: str) -> None:
    """On another host, and with as few checkpoints retained as there may be."""
    engine = OperatorEngine(tmp_path, file_merging=merging, max_file_bytes=1, retained_checkpoints=2)
    engine.start(2, 0)
    for batch in range(8):
        for subtask in (0, 1, 0):
            engine.host += 1
            found = engine.run_subtask(batch, subtask, [["read"], ["add", "items", str(batch)]])
            assert found[1][0]["items"] == [str(before) for before in range(batch)]
    engine.coordinator.close()
    assert engine.leaked() == []
