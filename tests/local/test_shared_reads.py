"""What several subtasks of a host need of an object store is read once."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
import xxhash

from statelog import CorruptionError, Options, Tuning
from statelog.history.restore_plan import SHARED_BYTES, ClippedSegment, Extent, RestorePlan
from statelog.local.restore import SHARED_FOLDER, SharedReads, remove_shared
from statelog.log.entry import FRAME_HEADER_BYTES
from statelog.log.references import Level, SegmentRef, StoredRun
from statelog.storage import LocalStore
from tests.model.engine import Command, Engine, Key, command_query, command_rows
from tests.query_runner import QueryRunner

KEYS = 40
BATCHES = 6
EXPECTED = {key: [BATCHES - 1] for key in range(KEYS)}


class ObjectLikeStore(LocalStore):
    """A directory without appends, as a bucket is; notes what tasks read of it."""

    reads: ClassVar[Counter[str]] = Counter()

    @property
    def can_append(self) -> bool:
        return False

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if length != FRAME_HEADER_BYTES:  # the driver's look at its own entry
            self.reads[name] += 1
        return super().read(name, offset=offset, length=length)


@pytest.fixture(autouse=True)
def fresh_counts() -> None:
    ObjectLikeStore.reads.clear()


def start(engine: Engine, parallelism: int, first_batch: int) -> None:
    """Start on a host without files; what the driver reads does not count."""
    engine.start(parallelism, first_batch, keep_local=False)
    ObjectLikeStore.reads.clear()


def run_all(engine: Engine, batch: int, command: Command) -> dict[int, object]:
    """Give all keys a command, and return what those that were to read have found."""
    found: dict[int, object] = {}
    for subtask, commands in enumerate(engine.parts([((key, None), command) for key in range(KEYS)])):
        found |= {key[0]: values[0] for key, values in engine.run_commands(batch, subtask, commands) if values}
    return found


def hash_of(key: Key) -> int:
    assert key[0] is not None
    return key[0] * (2**64 // KEYS)


def new_engine(directory: Path, inline_budget_bytes: int = 8 << 20) -> Engine:
    engine = Engine(
        directory,
        hash_of,
        file_merging="within",
        merge_fan_in=100,
        inline_budget_bytes=inline_budget_bytes,
        open_store=ObjectLikeStore,
    )
    engine.start(4, 0)
    for batch in range(BATCHES):
        run_all(engine, batch, ("set", batch))
    return engine


@pytest.mark.parametrize("parallelism", [4, 8, 3])
def test_each_object_is_read_once_for_all_subtasks(tmp_path: Path, parallelism: int) -> None:
    engine = new_engine(tmp_path)
    start(engine, parallelism, BATCHES)
    assert run_all(engine, BATCHES, ("read",)) == EXPECTED
    assert len(ObjectLikeStore.reads) == BATCHES, "one object per checkpoint"
    assert set(ObjectLikeStore.reads.values()) == {1}


def test_large_changesets_are_read_by_who_needs_them(tmp_path: Path) -> None:
    engine = new_engine(tmp_path, inline_budget_bytes=0)
    start(engine, 8, BATCHES)
    assert run_all(engine, BATCHES, ("read",)) == EXPECTED
    assert len(ObjectLikeStore.reads) == 4 * BATCHES
    assert set(ObjectLikeStore.reads.values()) == {1}, "two subtasks share each of them"


def test_files_are_removed_after_the_batch(tmp_path: Path) -> None:
    engine = new_engine(tmp_path)
    start(engine, 8, BATCHES)
    run_all(engine, BATCHES, ("read",))
    folder = engine.local / SHARED_FOLDER
    assert list(folder.iterdir())
    run_all(engine, BATCHES + 1, ("read",))
    assert list(folder.iterdir()) == []


def test_damage_is_reported_and_read_again_by_the_next_attempt(tmp_path: Path) -> None:
    engine = new_engine(tmp_path)
    objects = sorted((tmp_path / "location").rglob("*.log"))
    whole = objects[3].read_bytes()
    start(engine, 8, BATCHES)
    objects[3].write_bytes(whole[:-20] + bytes(20))
    with pytest.raises(CorruptionError, match=objects[3].name):
        run_all(engine, BATCHES, ("read",))
    objects[3].write_bytes(whole)
    assert run_all(engine, BATCHES, ("read",)) == EXPECTED


def test_a_damaged_file_is_read_again(tmp_path: Path) -> None:
    store, extent = prepared(tmp_path)
    shared = SharedReads(tmp_path / "shared", "run", 3, "one")
    assert shared.read(store, extent) == b"cde"
    for path in (tmp_path / "shared").iterdir():
        path.write_bytes(b"torn")
    assert shared.read(store, extent) == b"cde"
    assert store.reads == {"object": 2}


def test_a_read_lists_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart may share thousands of extents, each in a file of the same folder."""
    store, extent = prepared(tmp_path)
    monkeypatch.setattr(os, "scandir", None)
    monkeypatch.setattr(os, "listdir", None)
    assert SharedReads(tmp_path / "shared", "run", 3, "one").read(store, extent) == b"cde"


def test_discarding_leaves_what_others_write(tmp_path: Path) -> None:
    store, extent = prepared(tmp_path)
    shared = SharedReads(tmp_path / "shared", "run", 3, "one")
    shared.read(store, extent)
    (tmp_path / "shared" / "3-other.two.tmp").write_bytes(b"of another attempt")
    shared.discard()
    assert {path.suffix for path in (tmp_path / "shared").iterdir()} == {".tmp", ".lock"}
    assert shared.read(store, extent) == b"cde"
    assert store.reads == {"object": 2}


def test_two_attempts_may_discard_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, extent = prepared(tmp_path)
    shared = SharedReads(tmp_path / "shared", "run", 3, "one")
    shared.read(store, extent)
    found = list((tmp_path / "shared").iterdir())
    shared.discard()
    monkeypatch.setattr(Path, "glob", lambda *_: iter(found))
    shared.discard()
    assert shared.read(store, extent) == b"cde"


def test_a_directory_is_read_as_it_is(tmp_path: Path) -> None:
    """The operating system keeps what was read of it; a copy would cost time and space."""
    store, extent = LocalStore(tmp_path / "store"), Extent("object", 2, 3)
    store.put("object", b"abcdef")
    segment = SegmentRef(0, 1, bytes(16), 2, 3, 1, 1, "object")
    missing = RestorePlan(bytes(16), 0, [ClippedSegment(segment, 0, 9, True, extent)])
    readable = SharedReads(tmp_path / "shared", "run", 3, "one").of(store, missing)
    assert readable.read("object", offset=2, length=3) == b"cde"
    assert not (tmp_path / "shared").exists()


def test_whatever_is_read_is_what_the_object_holds(tmp_path: Path) -> None:
    """What lies in an extent comes from the host's file, and all else from the store."""
    store, extent = prepared(tmp_path)
    store.put("other", b"ghijkl")
    segment = SegmentRef(0, 1, bytes(16), 2, 3, 1, 1, "object")
    missing = RestorePlan(bytes(16), 0, [ClippedSegment(segment, 0, 9, True, extent)])
    shared = SharedReads(tmp_path / "shared", "run", 3, "one")
    readable = shared.of(store, missing)
    shared.read(store, extent)
    for name, content in (("object", b"abcdef"), ("other", b"ghijkl")):
        for offset in range(6):
            for length in range(1, 7 - offset):
                store.reads.clear()
                wanted = content[offset : offset + length]
                assert readable.read(name, offset=offset, length=length) == wanted
                buffer = bytearray(length)
                assert readable.read_into(memoryview(buffer), name, offset=offset) == length
                assert buffer == wanted
                is_shared = name == "object" and offset >= 2 and offset + length <= 5
                assert store.reads.total() == (0 if is_shared else 2)
    assert [readable.read(name, offset=3) for name in ("object", "other")] == [b"def", b"jkl"]
    assert readable.read("object") == b"abcdef"
    buffer = bytearray(3)
    assert readable.read_into(memoryview(buffer), "object") == 3
    assert buffer == b"abc"
    buffer = bytearray(b"untouched")
    assert readable.read_into(memoryview(buffer), "other", offset=4) == 2
    assert buffer == b"kltouched"


def test_two_tasks_may_remove_what_is_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, extent = prepared(tmp_path)
    remove_shared(tmp_path / "shared", certain=3)
    for batch in (3, 4):
        SharedReads(tmp_path / "shared", "run", batch, "one").read(store, extent)
    found = os.listdir(tmp_path / "shared")
    remove_shared(tmp_path / "shared", certain=3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda _: found)
        remove_shared(tmp_path / "shared", certain=3)
    assert {path.name[0] for path in (tmp_path / "shared").iterdir()} == {"4"}


def test_shared_files_are_for_the_user_only(tmp_path: Path) -> None:
    store, extent = prepared(tmp_path)
    folder = tmp_path / "operator" / "2" / "shared"
    SharedReads(folder, "run", 3, "one").read(store, extent)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_readers_wait_for_the_first(tmp_path: Path) -> None:
    store, extent = prepared(tmp_path)
    is_reading = threading.Event()
    original = store.read

    def slow(name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        is_reading.set()
        time.sleep(0.1)
        return original(name, offset=offset, length=length)

    store.read = slow  # type: ignore[method-assign]  # only for the test
    found: list[bytes] = []

    def read(number: int) -> None:
        found.append(SharedReads(tmp_path / "shared", "run", 3, str(number)).read(store, extent))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    threads[0].start()
    assert is_reading.wait(10)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"cde"] * 4
    assert store.reads == {"object": 1}


def test_another_run_and_another_batch_read_for_themselves(tmp_path: Path) -> None:
    store, extent = prepared(tmp_path)
    for run, batch in (("one", 3), ("two", 3), ("two", 4)):
        SharedReads(tmp_path / "shared", run, batch, "token").read(store, extent)
    assert store.reads == {"object": 3}
    remove_shared(tmp_path / "shared", certain=3)
    assert {path.name.partition("-")[0] for path in (tmp_path / "shared").iterdir()} == {"4"}


def config_of(name: str, length: int, first: int, last: int) -> StoredRun:
    return StoredRun(name, 7, length, bytes(16), 1, first, last)


def test_worth_sharing_is_what_is_small_and_holds_keys_of_several_subtasks() -> None:
    """Of a large run each reads the blocks that it needs, and its own runs nobody else reads."""
    runs = [
        config_of("own", 10, 10, 19),
        config_of("left", 10, 9, 12),
        config_of("right", SHARED_BYTES, 19, 20),
        config_of("large", SHARED_BYTES + 1, 0, 99),
    ]
    level = Level(0, 1, bytes(16), bytes(16), 10, 19, runs)
    extent = Extent("log", 0, 100)
    segments = [
        ClippedSegment(SegmentRef(0, 1, bytes(16), offset, 5, 1, 1, "log"), first, last, True, extent)
        for offset, first, last in ((0, 10, 12), (0, 14, 19), (5, 10, 19))
    ]
    alone = ClippedSegment(SegmentRef(0, 1, bytes(16), 0, 8, 1, 1, "alone"), 10, 19, False)
    missing = RestorePlan(bytes(16), 2, [*segments, alone], [level])
    assert missing.extents == {extent, Extent("left", 7, 10), Extent("right", 7, SHARED_BYTES)}
    assert missing.length == 20 + 2 * SHARED_BYTES + 1 + 5 + 5 + 8, "each counts once"


def prepared(directory: Path) -> tuple[ObjectLikeStore, Extent]:
    store = ObjectLikeStore(directory / "store")
    store.put("object", b"abcdef")
    return store, Extent("object", 2, 3)


def test_an_entry_is_read_once_for_all_operators_of_a_query(tmp_path: Path) -> None:
    uids = ("a", "b", "c")
    options = Options(file_merging="within", tuning=Tuning(orphan_min_age_s=0))
    queries = {uid: command_query(uid, lambda key: xxhash.xxh64_intdigest(repr(key).encode()), options) for uid in uids}
    runner = QueryRunner(tmp_path, options, open_store=ObjectLikeStore)
    operators = [query.operator for query in queries.values()]

    def run(batch: int, command: Command) -> None:
        for uid, query in queries.items():
            runner.run_operator(uid, batch, command_rows(query, [((key, None), command) for key in range(KEYS)]))

    runner.start(operators, 2, 0)
    for batch in range(BATCHES):
        run(batch, ("set", batch))
    runner.start(operators, 4, BATCHES, keep_local=False)
    ObjectLikeStore.reads.clear()
    run(BATCHES, ("read",))
    assert len(ObjectLikeStore.reads) == BATCHES
    assert set(ObjectLikeStore.reads.values()) == {1}, "twelve subtasks share each entry"
    runner.stop()
