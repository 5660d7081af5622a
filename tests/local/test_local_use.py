"""Local files of subtasks that run elsewhere by now."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from statelog.local.policy import MergePolicy
from statelog.local.runs import LocalRun, LocalRuns, LocalSnapshots
from statelog.local.use import (
    FORGOTTEN_S,
    SPARE_BATCHES,
    LocalCache,
    in_use,
    is_turn_to_remove,
    remove_forgotten,
    remove_other_parallelisms,
    remove_unused,
    subtask_directory,
)
from statelog.runs.digests import checksum
from statelog.runs.merge import Garbage
from statelog.runs.times import Moment
from statelog.runs.writer import encode_run
from statelog.tasks.attempt import WorkerMemory
from statelog.testing.query import ManualClock
from tests.contract.table_contract import write_run
from tests.model.engine import Engine
from tests.model.operator_engine import OperatorEngine

EDGE = LocalRun(0, 0, bytes(16), bytes(range(16)))


def use(directory: Path, batch: int) -> None:
    with in_use(directory, batch):
        directory.mkdir(exist_ok=True)
        (directory / "file").write_bytes(b"state")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_has_not_run_here_for_some_batches_is_removed(tmp_path: Path) -> None:
    for subtask in range(3):
        use(tmp_path / str(subtask), 7)
    (tmp_path / "shared").mkdir()
    use(tmp_path / "1", 8)
    use(tmp_path / "0", 11)
    remove_unused(tmp_path / "0", 11, spare_batches=3)
    assert names(tmp_path) == ["0", "0.used", "1", "1.used", "shared"]
    use(tmp_path / "2", 11)
    assert names(tmp_path / "2") == ["file"], "it may come back"
    remove_unused(tmp_path / "0", 12, spare_batches=3)
    assert names(tmp_path) == ["0", "0.used", "2", "2.used", "shared"]


def test_the_directories_of_another_parallelism_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another task may remove them at the same time."""
    own = tmp_path / "operator" / "2"
    for folder in (own.with_name("1"), own, own.with_name("3")):
        folder.mkdir(parents=True)
        for subtask in ("0", "1"):
            use(folder / subtask, 7)
    remove_other_parallelisms(own / "1")
    assert names(tmp_path / "operator") == ["2"]
    assert names(own) == ["0", "0.used", "1", "1.used"]
    glob = Path.glob
    gone = own.with_name("gone")
    monkeypatch.setattr(
        Path, "glob", lambda self, pattern: iter([gone, own]) if self == own.parent else glob(self, pattern)
    )
    remove_other_parallelisms(own / "1")
    assert names(tmp_path / "operator") == ["2"]


def test_several_tasks_may_remove_the_directories_of_another_parallelism(tmp_path: Path) -> None:
    for subtask in range(20):
        use(tmp_path / "3" / str(subtask), 7)
    use(tmp_path / "4" / "0", 8)
    with ThreadPoolExecutor(4) as pool:
        removals = [pool.submit(remove_other_parallelisms, tmp_path / "4" / str(subtask)) for subtask in range(4)]
    for removal in removals:
        removal.result()
    assert names(tmp_path / "4") == ["0", "0.used"]
    remove_other_parallelisms(tmp_path / "4" / "0")  # each may have left to another what that one had locked
    assert names(tmp_path) == ["4"]


def test_the_directory_of_a_running_task_of_another_parallelism_stays(tmp_path: Path) -> None:
    """A task of an older start, which a newer one with another parallelism has not stopped yet."""
    older, newer = tmp_path / "1" / "0", tmp_path / "2" / "0"
    for directory in (older, newer, newer.with_name("1")):
        use(directory, 7)
    with in_use(newer, 8):
        remove_other_parallelisms(older)
        assert names(newer) == ["file"]
        assert names(newer.parent) == ["0", "0.used"]
    remove_other_parallelisms(older)
    assert names(tmp_path) == ["1"]


def test_each_subtask_has_its_turn_to_remove() -> None:
    """About one per batch looks, so that the subtasks that are left find what has moved away."""
    for parallelism in (1, 3, 25):
        period = max(SPARE_BATCHES, parallelism)
        for subtask in range(parallelism):
            turns = [batch for batch in range(2 * period) if is_turn_to_remove(batch, subtask, parallelism)]
            assert len(turns) == 2
        for batch in range(period):
            assert sum(is_turn_to_remove(batch, subtask, parallelism) for subtask in range(parallelism)) <= 1


def test_what_marks_a_use_is_for_the_user_only(tmp_path: Path) -> None:
    use(tmp_path / "operator" / "2" / "0", 0)
    modes = [stat.S_IMODE((tmp_path / "operator" / "2" / name).stat().st_mode) for name in (".", "0.used")]
    assert modes == [0o700, 0o600]


def test_a_folder_that_is_removed_at_once_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of another parallelism removes all of this one's."""
    open_file = os.open
    removed: list[Path] = []

    def open_late(path: Path, *more: int) -> int:
        if not removed:
            path.parent.rmdir()
            removed.append(path.parent)
        return open_file(path, *more)

    monkeypatch.setattr(os, "open", open_late)
    with in_use(tmp_path / "2" / "0", 7):
        assert names(tmp_path / "2") == ["0.used"]


def test_a_mark_that_was_replaced_gives_no_right_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another task has removed the directory, and a third one works in a new one, before the lock is taken."""
    directory, unfinished = tmp_path / "0", tmp_path / "0" / "7-other.tmp"
    directory.mkdir()
    lock, others, replaced = fcntl.flock, ExitStack(), list[int]()

    def replaced_first(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and not replaced:
            replaced.append(descriptor)
            (tmp_path / "0.used").unlink()
            with monkeypatch.context() as undone:
                undone.setattr(fcntl, "flock", lock)
                others.enter_context(in_use(directory, 7))
            unfinished.touch()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replaced_first)
    with others, in_use(directory, 7):
        assert unfinished.exists()


def test_what_another_task_has_just_removed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path / "1", 0)
    open_file = os.open

    def open_late(path: Path, *more: int) -> int:
        path.unlink()
        return open_file(path, *more)

    monkeypatch.setattr(os, "open", open_late)
    remove_unused(tmp_path / "0", 100)
    assert names(tmp_path) == ["1"]


def test_a_subtask_that_died_before_it_named_its_batch_counts_from_now_on(tmp_path: Path) -> None:
    use(tmp_path / "1", 0)
    (tmp_path / "1.used").write_bytes(b"")
    for batch, is_there in ((100, True), (103, True), (104, False)):
        remove_unused(tmp_path / "0", batch, spare_batches=3)
        assert (tmp_path / "1").exists() == is_there


def test_what_could_not_be_removed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for a directory without its mark; a mark without a directory goes."""
    use(tmp_path / "1", 0)

    def fail(path: Path) -> None:
        raise OSError("the disk fails")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        remove_unused(tmp_path / "0", 100)
    assert names(tmp_path) == ["1", "1.used"]
    (tmp_path / "1" / "file").unlink()
    (tmp_path / "1").rmdir()
    remove_unused(tmp_path / "0", 101)
    assert names(tmp_path) == []


def test_what_runs_is_never_removed(tmp_path: Path) -> None:
    """A task that hangs for many batches, or one that has just come back."""
    use(tmp_path / "0", 100)
    with in_use(tmp_path / "1", 5):
        (tmp_path / "1").mkdir()
        remove_unused(tmp_path / "0", 100, spare_batches=3)
        assert (tmp_path / "1").exists()
    remove_unused(tmp_path / "0", 100, spare_batches=3)
    assert names(tmp_path) == ["0", "0.used"]


def test_a_task_that_waits_for_a_removal_begins_anew(tmp_path: Path) -> None:
    """What it holds must be the file that others look at."""
    use(tmp_path / "1", 0)
    has_begun, may_end = threading.Event(), threading.Event()

    def run() -> None:
        with in_use(tmp_path / "1", 50):
            has_begun.set()
            may_end.wait(10)

    files = os.listdir("/proc/self/fd")
    with (tmp_path / "1.used").open() as removing:
        fcntl.flock(removing, fcntl.LOCK_EX)
        task = threading.Thread(target=run)
        task.start()
        assert not has_begun.wait(0.2)
        (tmp_path / "1.used").unlink()
    assert has_begun.wait(10)
    try:
        assert (tmp_path / "1.used").read_text().split() == ["50"]
    finally:
        may_end.set()
        task.join()
    assert len(os.listdir("/proc/self/fd")) == len(files), "the removed file is not kept open"


def test_what_another_task_removed_is_not_removed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its subtask may have come back meanwhile."""
    use(tmp_path / "1", 0)
    lock = fcntl.flock
    running = ExitStack()

    def lock_late(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            monkeypatch.setattr(fcntl, "flock", lock)
            remove_unused(tmp_path / "0", 100)
            running.enter_context(in_use(tmp_path / "1", 100))
            (tmp_path / "1").mkdir()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with running:
        remove_unused(tmp_path / "0", 100)
        assert names(tmp_path) == ["1", "1.used"]


def test_after_going_back_batches_are_counted_anew(tmp_path: Path) -> None:
    use(tmp_path / "1", 1000)
    for batch, is_there in ((5, True), (8, True), (9, False)):
        use(tmp_path / "0", batch)
        remove_unused(tmp_path / "0", batch, spare_batches=3)
        assert (tmp_path / "1").exists() == is_there


def test_subtasks_that_come_and_go_at_once(tmp_path: Path) -> None:
    """What a task writes while it holds its directory is there until it lets go."""
    lost: list[int] = []

    def run(subtask: int) -> None:
        directory = tmp_path / str(subtask)
        for round_ in range(200):
            batch = 10 * round_ + subtask
            with in_use(directory, batch):
                directory.mkdir(exist_ok=True)
                (directory / "file").write_bytes(b"state")
                remove_unused(directory, batch, spare_batches=0)
                if not (directory / "file").exists():
                    lost.append(batch)

    threads = [threading.Thread(target=run, args=(subtask,)) for subtask in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []


def test_tasks_sweep_what_has_moved_away(tmp_path: Path) -> None:
    """Subtask 1 runs on another host from batch 1 on; its files here go, and nothing else."""
    engine = Engine(tmp_path, lambda key: 0 if key[0] == 0 else 2**64 - 1)
    engine.start(2, 0)
    here = engine.local_of(0) / engine.identity / "2"
    for batch in range(3 + 2 * SPARE_BATCHES):
        for subtask in range(2):
            engine.run_commands(batch, subtask, [((subtask, None), ("set", batch))])
        engine.place = lambda subtask: subtask
        assert batch > SPARE_BATCHES or (here / "1").exists()
    assert not (here / "1").exists()
    assert (here / "0").exists()
    engine.place = lambda subtask: 0
    [[_, [value, *_]]] = engine.run_commands(batch + 1, 1, [((1, None), ("read",))])
    assert value == [batch]


def test_tasks_without_keys_sweep_as_well(tmp_path: Path) -> None:
    engine = OperatorEngine(tmp_path)
    engine.start(2, 0)
    for batch in range(3 + 2 * SPARE_BATCHES):
        for subtask in range(2):
            engine.host = int(subtask == 1 and batch > 1)
            engine.run_subtask(batch, subtask, [["add", "items", "x"]])
    folders = [sorted(path.name for path in tmp_path.glob(f"host-{host}/**/?") if path.is_dir()) for host in (0, 1)]
    assert folders == [["0", "2"], ["1", "2"]]


def test_maps_of_subtasks_that_a_process_does_not_run_any_more_are_released(tmp_path: Path) -> None:
    """A removed file takes space as long as it is mapped."""
    released: list[Path] = []
    cache = LocalCache(spare_batches=3, released=released.append)
    first, second = (tmp_path / "operator" / "2" / str(subtask) for subtask in range(2))
    elsewhere = tmp_path / "other operator" / "2" / "0"
    local = cache.at(first, 5)
    write_run(local, EDGE, encode_run([], compression=None, block_rows=1), "5-token")
    mapped = weakref.ref(local.open(EDGE))
    del local
    cache.at(elsewhere, 0)
    for batch in range(5, 9):
        cache.at(second, batch)
    assert mapped() is not None
    assert cache.at(first, 8).open(EDGE) is mapped()
    cache.at(second, 12)
    assert mapped() is None
    assert released == [first]
    assert isinstance(cache.at(first, 12), LocalRuns)


def test_maps_of_other_operators_are_released_after_an_hour(tmp_path: Path) -> None:
    released: list[Path] = []
    clock = ManualClock()
    cache = LocalCache(released=released.append, clock=clock)
    over, slow, busy = (tmp_path / query / "operator" / "1" / "0" for query in ("over", "slow", "busy"))
    cache.at(over, 5)
    cache.at(slow, 5)
    for batch in range(4):
        clock.advance(1000)
        cache.at(busy, 100 + batch)
        if batch == 2:
            cache.at(slow, 6)
    assert released == [over]


def test_the_files_of_queries_that_have_not_run_here_for_a_week_are_removed(tmp_path: Path) -> None:
    def place(query: str, subtask: int = 0) -> Path:
        return subtask_directory(tmp_path, query, "operator", 1, subtask)

    def age(directory: Path, seconds: float) -> None:
        used = directory.with_name(f"{directory.name}.used")
        os.utime(used, (used.stat().st_atime, used.stat().st_mtime - seconds))

    for directory in (place("own"), place("over"), place("busy"), place("recent"), place("half"), place("half", 1)):
        use(directory, 5)
        if directory != place("own"):
            age(directory, FORGOTTEN_S - 60 if "recent" in str(directory) else FORGOTTEN_S + 60)
    use(place("half", 1), 6)
    with in_use(place("busy"), 6):
        age(place("busy"), FORGOTTEN_S + 60)
        remove_forgotten(place("own"))
    assert names(tmp_path / "statelog") == ["busy", "half", "own", "recent"]
    assert names(place("half").parent) == ["1", "1.used"]
    for query in ("busy", "own", "recent"):
        assert names(place(query)) == ["file"]


def test_a_worker_forgets_the_tables_of_subtasks_that_have_moved_away(tmp_path: Path) -> None:
    policy = MergePolicy(slice_rows=7)
    memory, garbage = WorkerMemory(policy), Garbage(Moment(0, 0), {})
    first, second = (tmp_path / "operator" / "2" / str(subtask) for subtask in range(2))
    local = memory.local.at(first, 0)
    assert local.policy is policy
    table = memory.tables.at(local, [], EDGE.before, garbage)
    memory.local.at(second, SPARE_BATCHES)
    assert memory.tables.at(local, [], EDGE.before, garbage) is table
    memory.local.at(second, 1 + SPARE_BATCHES)
    assert memory.tables.at(local, [], EDGE.before, garbage) is not table


def test_snapshots_that_other_attempts_write_are_left_alone(tmp_path: Path) -> None:
    local = LocalSnapshots(tmp_path)
    local.write(checksum(b"state"), b"state", 3, "token")
    local.write(checksum(b"other"), b"other", 2, "token")
    (tmp_path / "2-live.tmp").write_bytes(b"half")
    local.sweep([checksum(b"state")])
    assert names(tmp_path) == sorted(["2-live.tmp", f"{checksum(b'state').hex()}.snapshot"])


def test_a_snapshot_is_here_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    local = LocalSnapshots(tmp_path / "2" / "0")
    local.sweep([])
    assert local.read(checksum(b"state")) is None
    for batch in (3, 4):
        local.write(checksum(b"state"), b"state", batch, "token")
    assert local.read(checksum(b"state")) == b"state"
    assert stat.S_IMODE(local.directory.stat().st_mode) == 0o700
    [path] = local.directory.iterdir()
    path.write_bytes(b"other")
    assert local.read(checksum(b"state")) is None


def test_two_attempts_may_sweep_snapshots_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalSnapshots(tmp_path)
    for data in (b"a", b"b"):
        local.write(checksum(data), data, 3, "token")
    found = os.listdir(tmp_path)
    local.sweep([checksum(b"b")])
    monkeypatch.setattr(os, "listdir", lambda _: found)
    local.sweep([checksum(b"b")])
    assert local.read(checksum(b"b")) == b"b"
