"""The numbered log where files are missing, late, foreign or not one's own: what a reader, a writer and a closer do.

What every log must do is in tests/contract, any order of operations in test_log_faults.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from statelog.errors import CorruptionError, ErrorKind, FencedError, StorageError
from statelog.log.entry import Fence, QueryCheckpoint, encode_frame
from statelog.log.numbered import NumberedLog
from statelog.storage import LocalStore, Store
from statelog.storage.store import ObjectInfo, StoreWrapper
from statelog.testing.faults import FaultPlan, FaultStore
from statelog.testing.query import ManualClock
from tests.contract.log_contract import PREFIX, checkpoints, make_checkpoint, make_claim
from tests.stores import WholeObjects


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


def make_log(
    store: Store, *, appends: bool = False, clock: ManualClock | None = None, min_age_s: float = 60
) -> NumberedLog:
    return NumberedLog(store, PREFIX, clock or ManualClock(1000), appends=appends, min_age_s=min_age_s)


def name_of(number: int) -> str:
    return f"{PREFIX}/{number:020}.log"


def append(log: NumberedLog, run: str, epoch: int, batch: int, log_start: int = 0) -> QueryCheckpoint:
    entry, payload = make_checkpoint(run, epoch, batch)
    return log.append(replace(entry, log_start=log_start), payload)


def batches(log: NumberedLog) -> list[int]:
    return [entry.batch for entry in checkpoints(log.read())]


def numbers(root: Path) -> list[int]:
    return [int(Path(info.name).stem) for info in LocalStore(root).list(f"{PREFIX}/")]


# ---- Before a claim, and at the end ----


def test_a_log_that_was_not_claimed_is_closed_and_left_alone(tmp_path: Path) -> None:
    make_log(LocalStore(tmp_path)).claim(make_claim("a"))
    log = make_log(LocalStore(tmp_path))
    assert (log.number, log.files_made) == (0, 0)
    log.close()
    assert numbers(tmp_path) == [1]


def test_closing_closes_the_store(tmp_path: Path) -> None:
    class Noted(StoreWrapper):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    store = Noted(LocalStore(tmp_path))
    make_log(store).close()
    assert store.is_closed


@pytest.mark.parametrize(
    "news",
    [{"follows": b"an id"}, {"renames": {"a-1": "b"}}, {"ended": ["a-1"]}, {"begins_at": 0}],
    ids=str,
)
def test_a_claim_with_news_stays_even_if_it_is_all_that_the_log_holds(tmp_path: Path, news: dict[str, Any]) -> None:
    log = make_log(LocalStore(tmp_path))
    log.claim(lambda epoch: replace(make_claim("a")(epoch), **news))
    log.close()
    assert numbers(tmp_path) == [1]
    [claim] = make_log(LocalStore(tmp_path)).claim(make_claim("b"))
    assert claim == replace(make_claim("a")(1), number=1, **news)


def test_a_claim_of_a_start_that_has_nothing_before_it_is_no_news(tmp_path: Path) -> None:
    log = make_log(LocalStore(tmp_path))
    log.claim(lambda epoch: replace(make_claim("a")(epoch), follows=b""))
    log.close()
    assert numbers(tmp_path) == []


def test_a_claim_goes_with_its_run_only_if_it_is_all_that_the_log_holds(tmp_path: Path) -> None:
    for name, others, left in (("alone", 0, []), ("fenced", 1, [1, 2])):
        logs = [make_log(LocalStore(tmp_path / name)) for _ in range(1 + others)]
        for log in logs:
            log.claim(make_claim("a"))
        logs[0].close()
        assert numbers(tmp_path / name) == left


def test_a_claim_stays_after_an_entry_whose_write_failed(tmp_path: Path) -> None:
    """The write may be late: then the log has the entry, and the claim that it belongs to."""
    log = make_log(FaultStore(LocalStore(tmp_path), FaultPlan.at("put_if_absent", call=2)))
    log.claim(make_claim("a"))
    with pytest.raises(StorageError):
        append(log, "a", 1, 0)
    log.close()
    assert numbers(tmp_path) == [1]


# ---- Claiming ----


def test_a_claim_that_finds_the_newest_file_gone_looks_again(tmp_path: Path) -> None:
    """The newest run has ended without a checkpoint, and has removed its claim."""
    make_log(LocalStore(tmp_path)).claim(make_claim("a"))
    gone = FaultPlan.at("read", action=lambda: LocalStore(tmp_path).delete([name_of(1)]))
    late = make_log(FaultStore(LocalStore(tmp_path), gone))
    assert late.claim(make_claim("b")) == []
    assert late.number == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_start_whose_claim_failed_does_not_take_the_log_from_a_newer_one(
    tmp_path: Path, when: Literal["before", "after"]
) -> None:
    """It was slow, or the store was; a tool may have rewound the query meanwhile."""
    make_log(LocalStore(tmp_path)).claim(make_claim("before"))
    older = make_log(FaultStore(LocalStore(tmp_path), FaultPlan.at("put_if_absent", call=1, when=when)))
    newer = make_log(LocalStore(tmp_path))
    with pytest.raises(StorageError):
        older.claim(make_claim("older"))
    newer.claim(make_claim("newer"))
    with pytest.raises(FencedError, match="another run has claimed the log since this run first tried to"):
        older.claim(make_claim("older"))
    append(newer, "newer", 2 if when == "before" else 3, 0)


@pytest.mark.parametrize(
    "make_store", [LocalStore, lambda root: WholeObjects(LocalStore(root))], ids=["files", "objects"]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_start_whose_claim_failed_claims_again(
    tmp_path: Path, when: Literal["before", "after"], make_store: Callable[[Path], Store]
) -> None:
    """A start reads the log before each claim."""
    make_log(make_store(tmp_path), appends=False).claim(make_claim("before"))
    log = make_log(FaultStore(make_store(tmp_path), FaultPlan.at("put_if_absent", call=1, when=when)), appends=False)
    log.read()
    with pytest.raises(StorageError):
        log.claim(make_claim("again"))
    log.read()
    log.claim(make_claim("again"))
    append(log, "again", 2 if when == "before" else 3, 0)


def test_a_claim_fails_if_the_store_does(tmp_path: Path) -> None:
    make_log(LocalStore(tmp_path)).claim(make_claim("a"))
    failing = make_log(FaultStore(LocalStore(tmp_path), FaultPlan.at("read")))
    with pytest.raises(StorageError, match="read"):
        failing.claim(make_claim("b"))
    assert numbers(tmp_path) == [1]


def test_a_newest_file_without_an_entry_is_damage(tmp_path: Path) -> None:
    """Nobody knows which epoch is the next."""
    LocalStore(tmp_path).put(name_of(3), b"")
    with pytest.raises(CorruptionError, match=r"3\.log: the file does not begin with a complete log entry"):
        make_log(LocalStore(tmp_path)).claim(make_claim("a"))
    assert numbers(tmp_path) == [3]


def test_other_files_in_the_folder_are_not_the_logs(tmp_path: Path) -> None:
    log = make_log(LocalStore(tmp_path))
    log.claim(make_claim("a"))
    written = append(log, "a", 1, 0)
    for name in ("notes.txt", "3.log", f"{3:020}.log.copy"):
        LocalStore(tmp_path).put(f"{PREFIX}/{name}", b"x")
    assert checkpoints(make_log(LocalStore(tmp_path)).read()) == [written]
    newer = make_log(LocalStore(tmp_path))
    newer.claim(make_claim("b"))
    assert newer.number == 3


def test_a_store_that_cannot_append_has_no_open_files(tmp_path: Path) -> None:
    class Refusing(WholeObjects):
        def append(self, name: str, parts: list[bytes | memoryview], *, at: int) -> None:
            raise AssertionError(name)

        def sync(self, name: str, *, start: int, end: int) -> None:
            raise AssertionError(name)

    for run, epoch in (("a", 1), ("b", 2)):
        log = make_log(Refusing(LocalStore(tmp_path)))
        log.claim(make_claim(run))
        append(log, run, epoch, epoch)
    assert batches(log) == [1, 2]


# ---- Writing ----


def test_a_driver_that_slept_looks_for_newer_files_everywhere(tmp_path: Path) -> None:
    """Its own file is there and the next number is free, because somebody has removed the claim that fences it."""
    clock, store = ManualClock(1000), LocalStore(tmp_path)
    older, newer = make_log(store, clock=clock), make_log(store)
    older.claim(make_claim("a"))
    append(older, "a", 1, 0)
    newer.claim(make_claim("b"))
    append(newer, "b", 2, 1)
    store.delete([name_of(3)])
    clock.advance(31)
    with pytest.raises(FencedError, match="another run's files are newer than its own"):
        append(older, "a", 1, 1)
    with pytest.raises(FencedError):
        append(older, "a", 1, 1)


def test_a_driver_that_slept_notices_that_the_whole_log_is_gone(tmp_path: Path) -> None:
    clock = ManualClock(1000)
    gone = FaultPlan.at("list", call=4, action=lambda: shutil.rmtree(tmp_path / PREFIX))
    log = make_log(FaultStore(LocalStore(tmp_path), gone), appends=True, clock=clock)
    log.claim(make_claim("a"))
    clock.advance(31)
    with pytest.raises(FencedError, match="newer than its own"):
        append(log, "a", 1, 0)


def test_a_driver_looks_at_the_whole_log_once_for_each_pause(tmp_path: Path) -> None:
    listed: list[str] = []

    class Noted(StoreWrapper):
        def list(self, prefix: str = "") -> list[ObjectInfo]:
            listed.append(prefix)
            return super().list(prefix)

    clock = ManualClock(1000)
    log = make_log(Noted(LocalStore(tmp_path)), appends=True, clock=clock)
    log.claim(make_claim("a"))
    listed.clear()
    for batch, pause_s in enumerate((29, 29, 31, 0, 29, 40)):
        clock.advance(pause_s)
        append(log, "a", 1, batch)
    assert len(listed) == 2


@pytest.mark.parametrize("content", [b"", b"x", bytes(100)])
def test_a_file_of_no_entry_that_takes_the_next_number_is_not_the_own(tmp_path: Path, content: bytes) -> None:
    log = make_log(FaultStore(LocalStore(tmp_path), FaultPlan.at("put_if_absent", call=2)))
    log.claim(make_claim("a"))
    with pytest.raises(StorageError):
        append(log, "a", 1, 0)
    LocalStore(tmp_path).put(name_of(2), content)
    with pytest.raises((FencedError, CorruptionError), match=r"entry 2 is another run's|2\.log: no log entry"):
        append(log, "a", 1, 0)


# ---- Reading while others remove and append ----


def test_a_reader_begins_again_when_a_file_goes_that_it_does_not_need_any_more(tmp_path: Path) -> None:
    log = make_log(LocalStore(tmp_path), min_age_s=0)
    log.claim(make_claim("a"))
    for batch in range(3):
        append(log, "a", 1, batch)

    def go_on() -> None:
        append(log, "a", 1, 3, log_start=4)
        LocalStore(tmp_path).delete([name_of(number) for number in (1, 2, 3)])

    reader = make_log(FaultStore(LocalStore(tmp_path), FaultPlan.at("read", call=2, action=go_on)))
    assert batches(reader) == [2, 3]


def test_a_reader_fails_if_the_store_does(tmp_path: Path) -> None:
    """Whether to try again is the store's decision."""
    make_log(LocalStore(tmp_path)).claim(make_claim("a"))
    for operation in ("read", "list"):
        with pytest.raises(StorageError, match=operation):
            make_log(FaultStore(LocalStore(tmp_path), FaultPlan.at(operation))).read()


def test_a_file_that_is_needed_and_stays_away_is_an_error(tmp_path: Path) -> None:
    class Gone(StoreWrapper):
        def size_bytes(self, name: str) -> int:
            raise StorageError(f"{name} is not there.", kind=ErrorKind.OBJECT_MISSING)

    make_log(LocalStore(tmp_path)).claim(make_claim("a"))
    with pytest.raises(StorageError, match="is not there"):
        make_log(Gone(LocalStore(tmp_path))).read()


def test_a_reader_sees_a_claim_that_is_being_made_before_its_fence_or_after(tmp_path: Path) -> None:
    """The older run appends, and the claim fences that, between the reader's look at the folder and its reads."""
    store = LocalStore(tmp_path)
    entries = [b"".join(encode_frame(*make_checkpoint("a", 1, batch))) for batch in range(2)]
    claims = [b"".join(encode_frame(make_claim(run)(epoch), [])) for run, epoch in (("a", 1), ("b", 2))]
    older = claims[0] + entries[0]
    fence = b"".join(encode_frame(Fence(2, {f"{1:020}.log": len(older + entries[1])}), []))
    store.put(name_of(1), older)
    store.put(name_of(2), claims[1])

    def go_on() -> None:
        store.append(name_of(1), [entries[1]], at=len(older))
        store.append(name_of(2), [fence], at=len(claims[1]))

    assert batches(make_log(store, appends=True)) == [0]
    reader = make_log(FaultStore(store, FaultPlan.at("list", when="after", action=go_on)), appends=True)
    assert batches(reader) == [0, 1]


def test_a_log_is_read_from_where_its_last_entry_says_on(tmp_path: Path) -> None:
    """A newer claim is not an entry; before the last one of its file others said that more is needed."""
    log = make_log(LocalStore(tmp_path))
    log.claim(make_claim("a"))
    for batch in range(4):
        append(log, "a", 1, batch, log_start=3 if batch < 3 else 4)
    make_log(LocalStore(tmp_path)).claim(make_claim("b"))
    LocalStore(tmp_path).delete([name_of(number) for number in (1, 3)])
    assert numbers(tmp_path) == [2, 4, 5, 6]
    assert batches(make_log(LocalStore(tmp_path))) == [2, 3]


def test_of_the_entries_of_a_file_the_last_one_says_what_is_needed(tmp_path: Path) -> None:
    frames = [encode_frame(make_claim("a")(1), [])]
    for batch, log_start in ((0, 1), (1, 2), (2, 3)):
        entry, payload = make_checkpoint("a", 1, batch)
        frames.append(encode_frame(replace(entry, log_start=log_start), payload))
    data = b"".join(part for frame in frames for part in frame)
    LocalStore(tmp_path).put(name_of(3), data)
    assert batches(make_log(LocalStore(tmp_path), appends=True)) == [0, 1, 2]


def test_entries_that_a_fence_covers_cannot_get_lost(tmp_path: Path) -> None:
    for run, epoch in (("a", 1), ("b", 2)):
        log = make_log(LocalStore(tmp_path), appends=True)
        log.claim(make_claim(run))
        append(log, run, epoch, epoch)
    path = tmp_path / name_of(1)
    whole = path.read_bytes()
    claim_bytes = sum(map(len, encode_frame(make_claim("a")(1), [])))
    path.write_bytes(whole[:claim_bytes])
    with pytest.raises(CorruptionError, match=f"valid entries up to offset {claim_bytes}, but had them up to"):
        make_log(LocalStore(tmp_path)).read()
    path.write_bytes(whole + b"what a fenced writer appended")
    assert batches(make_log(LocalStore(tmp_path))) == [1, 2]


@pytest.mark.parametrize("entries", [0, 1, 2])
def test_a_claim_makes_the_last_entry_of_the_run_before_durable(tmp_path: Path, entries: int) -> None:
    """Its writer may have been killed before it was; each earlier one was durable before the next was begun."""
    synced: list[tuple[str, int, int]] = []

    class Noted(StoreWrapper):
        def sync(self, name: str, *, start: int, end: int) -> None:
            synced.append((name, start, end))
            super().sync(name, start=start, end=end)

    log = make_log(LocalStore(tmp_path), appends=True)
    log.claim(make_claim("a"))
    ends = [0, (tmp_path / name_of(1)).stat().st_size]
    for batch in range(entries):
        append(log, "a", 1, batch)
        ends.append((tmp_path / name_of(1)).stat().st_size)
    make_log(Noted(LocalStore(tmp_path)), appends=True).claim(make_claim("b"))
    assert synced == [(name_of(1), 0, 0), (name_of(1), *ends[-2:])], "its name is durable before the claim is made"


# ---- Files that may go ----


def with_claims(root: Path, clock: ManualClock, open_store: Callable[[Path], Store] = LocalStore) -> NumberedLog:
    """A log whose files 1, 4 and 6 are of claims, and all others of entries; the newest run needs only its own."""
    for run, epoch, count in (("a", 1, 2), ("b", 2, 1), ("c", 3, 1)):
        log = make_log(open_store(root), clock=clock)
        log.claim(make_claim(run))
        for batch in range(count):
            append(log, run, epoch, 2 * epoch + batch)
    return log


def removable(log: NumberedLog, start: int) -> list[int]:
    return [int(Path(name).stem) for name in log.removable(start)]


def remove(log: NumberedLog, root: Path, *gone: int) -> None:
    LocalStore(root).delete([name_of(number) for number in gone])
    log.forget([name_of(number) for number in gone])


def test_files_of_claims_stay_for_older_writers_and_go_one_after_another(tmp_path: Path) -> None:
    clock = ManualClock(1000)
    log = with_claims(tmp_path, clock)
    assert removable(log, 7) == [2, 3, 5]
    assert removable(log, 5) == [2, 3]
    clock.advance(59)
    assert removable(log, 7) == [2, 3, 5]
    clock.advance(1)
    assert removable(log, 7) == [1, 2, 3, 5], "before the claim in file 4 the one before it must be gone"
    remove(log, tmp_path, 1, 2, 3)
    assert removable(log, 7) == [4, 5]
    remove(log, tmp_path, 4, 5)
    assert removable(log, 7) == [6]


def test_a_claim_stays_while_it_is_not_known_that_the_file_before_is_gone(tmp_path: Path) -> None:
    class Failing(StoreWrapper):
        def size_bytes(self, name: str) -> int:
            if is_failing:
                raise StorageError(f"{name}: no answer.")
            return super().size_bytes(name)

    is_failing = False
    clock = ManualClock(1000)
    log = with_claims(tmp_path, clock, lambda root: Failing(LocalStore(root)))
    clock.advance(60)
    store = LocalStore(tmp_path)
    late = store.read(name_of(3))
    remove(log, tmp_path, 1, 2, 3)
    is_failing = True
    assert removable(log, 7) == [5]
    is_failing = False
    store.put(name_of(3), late)
    assert removable(log, 7) == [5], "it is there again: a delete that failed after all, or a late write"
    store.delete([name_of(3)])
    assert removable(log, 7) == [4, 5]


def test_the_store_is_not_asked_for_files_that_are_known_to_be_there(tmp_path: Path) -> None:
    """Every commit looks for what may go, and a request takes time."""
    asked: set[str] = set()

    class Noted(StoreWrapper):
        def size_bytes(self, name: str) -> int:
            asked.add(name)
            return super().size_bytes(name)

    clock = ManualClock(1000)
    log = with_claims(tmp_path, clock, lambda root: Noted(LocalStore(root)))
    clock.advance(60)
    asked.clear()
    assert removable(log, 7) == [1, 2, 3, 5]
    assert asked.isdisjoint(map(name_of, range(1, 7)))


@pytest.mark.parametrize("appends", [False, True])
def test_a_number_is_free_again_after_a_newer_run_removed_the_entry_in_doubt(tmp_path: Path, appends: bool) -> None:
    """The answer to a write was lost; a newer run counted the entry, and did not need it any more soon after."""
    store = FaultStore(LocalStore(tmp_path), FaultPlan.at("put_if_absent", call=2, when="after"))
    log = NumberedLog(store, PREFIX, ManualClock(1000), appends=appends, max_file_bytes=1)
    log.claim(make_claim("a"))
    with pytest.raises(StorageError):
        append(log, "a", 1, 0)
    newer = make_log(LocalStore(tmp_path))
    newer.claim(make_claim("b"))
    append(newer, "b", 2, 1)
    LocalStore(tmp_path).delete([name_of(2)])
    with pytest.raises(FencedError, match="newer than its own"):
        append(log, "a", 1, 0)


def test_entries_of_an_object_store_are_read_many_at_once(tmp_path: Path) -> None:
    """A restart waits for some round trips, and not for one per entry."""
    at_once = 8
    entries = at_once * 3
    meeting = threading.Barrier(at_once, timeout=30)

    class Meeting(WholeObjects):
        def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
            if name != name_of(entries + 1):
                meeting.wait()
            return super().read(name, offset=offset, length=length)

    log = make_log(WholeObjects(LocalStore(tmp_path)))
    log.claim(make_claim("a"))
    for batch in range(entries):
        append(log, "a", 1, batch)
    log = NumberedLog(Meeting(LocalStore(tmp_path)), PREFIX, ManualClock(), appends=False, reads_at_once=at_once)
    assert batches(log) == list(range(entries))


def test_an_entry_that_goes_while_many_are_read_is_looked_for_again(tmp_path: Path) -> None:
    log = make_log(WholeObjects(LocalStore(tmp_path)))
    log.claim(make_claim("a"))
    for batch in range(40):
        append(log, "a", 1, batch)
    listed = 0

    class Cut(WholeObjects):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            nonlocal listed
            listed += 1
            found = [*super().list(prefix)]
            if listed == 1:
                append(log, "a", 1, 40, log_start=20)
                LocalStore(tmp_path).delete([name_of(number) for number in range(1, 20)])
            return iter(found)

    assert batches(make_log(Cut(LocalStore(tmp_path)))) == list(range(18, 41))
    assert listed == 2
