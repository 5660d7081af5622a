"""Local copies of runs: used when they fit, fetched again when they do not."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import stat
import weakref
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from statelog import CorruptionError, ErrorKind, Step, StorageError
from statelog.history.restore_plan import RestorePlan
from statelog.local.policy import MergePolicy
from statelog.local.restore import restore_runs
from statelog.local.runs import FileStamps, LocalRun, LocalRuns
from statelog.local.use import in_use
from statelog.log.references import Level, StoredRun
from statelog.runs import digests
from statelog.runs.key_groups import HashRange, hash_range
from statelog.runs.merge import Garbage
from statelog.runs.reader import Run
from statelog.runs.schema import Operation, StateDescriptor, TimeDomain
from statelog.runs.times import Moment
from statelog.runs.writer import StateChanges, encode_run
from statelog.storage import LocalStore
from statelog.testing.query import Crash
from tests.contract.table_contract import MAP, VALUE, encode_changes, make_run, write_run
from tests.local.local_runs_support import read
from tests.model.engine import Engine

EVERYTHING = hash_range(0, 1)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    engine = Engine(tmp_path, lambda key: hash(key) % 2**64, merge_fan_in=100)
    engine.start(1, 0)
    for batch in range(4):
        engine.run_commands(batch, 0, [((batch, None), ("set", batch)), ((0, "list"), ("append", str(batch)))])
    return engine


def local_folder(engine: Engine) -> Path:
    return engine.local / engine.identity / "1" / "0"


def expect_all(engine: Engine, batch: int) -> None:
    found = read(engine, batch, *((number, None) for number in range(4)), (0, "list"))
    assert [found[number, None][0] for number in range(4)] == [[0], [1], [2], [3]]
    assert found[0, "list"][1] == ["0", "1", "2", "3"]


def count_reads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    original = LocalStore.read

    def counted(store: LocalStore, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        names.append(name)
        return original(store, name, offset=offset, length=length)

    monkeypatch.setattr(LocalStore, "read", counted)
    return names


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    original = Run.verify

    def counted(run: Run) -> None:
        names.append(run.name)
        original(run)

    monkeypatch.setattr(Run, "verify", counted)
    return names


def test_next_batch_reads_nothing_from_the_store(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    names = count_reads(engine, monkeypatch)
    expect_all(engine, 4)
    assert names == []


def test_only_what_is_missing_is_fetched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = next(path for path in local_folder(engine).iterdir() if path.name.startswith("3-"))
    newest.unlink()
    names = count_reads(engine, monkeypatch)
    expect_all(engine, 4)
    assert len(names) == 1


def test_a_sweep_leaves_what_another_attempt_is_writing(tmp_path: Path) -> None:
    """A restore writes files of batches that are certain, and a merge replaces them; another start may be behind."""
    a, b, c, other = (bytes([number]) * 16 for number in range(1, 5))
    genesis, local = bytes(16), LocalRuns(tmp_path)
    path = [LocalRun(0, 0, genesis, a), LocalRun(1, 1, a, b), LocalRun(2, 2, b, c)]
    merged, dead = LocalRun(0, 1, genesis, b), LocalRun(1, 1, a, other)
    for local_run in (*path, merged, dead):
        write_run(local, local_run, encode_run([], compression=None, block_rows=1), "3-token")
    writing, merging = tmp_path / "1-attempt.tmp", tmp_path / "1-attempt.job"
    writing.write_bytes(b"half")
    merging.mkdir()
    local.sweep(path, certain=2)
    assert set(local.local_runs()) == {*path, merged}, "what shortens the path has just been merged"
    shorter = local.chain(genesis, c)
    assert shorter == [merged, path[2]]
    local.sweep(shorter, certain=3)
    assert set(local.local_runs()) == set(shorter)
    assert writing.exists()
    assert merging.exists()


@pytest.mark.parametrize("table", [{}, {"keeps_rocksdb": False}, {"keeps_rocksdb": True}])
def test_a_sweep_removes_the_folder_of_another_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: dict[str, bool]
) -> None:
    """And neither the job that continues from batch to batch nor its lock; another task may sweep at the same time."""
    local, local_run = LocalRuns(tmp_path), LocalRun(0, 2, bytes(16), b"1" * 16)
    write_run(local, local_run, encode_run([], compression=None, block_rows=1), "2-token")
    for name in ("job", "rocksdb"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "job.lock").touch()
    ahead = LocalRun(1, 3, b"2" * 16, b"3" * 16)
    write_run(local, ahead, encode_run([], compression=None, block_rows=1), "3-token")
    found = os.listdir(tmp_path)
    kept = {local_run.file_name, ahead.file_name, "job", "job.lock"} | (
        {"rocksdb"} if table.get("keeps_rocksdb") else set()
    )
    for _ in range(2):
        local.sweep([local_run], certain=2, **table)
        assert {entry.name for entry in os.scandir(tmp_path)} == kept
        monkeypatch.setattr(os, "listdir", lambda _: found)
    local.remove([local_run.file_name])
    local.remove([local_run.file_name])
    assert not (tmp_path / local_run.file_name).exists()


def test_a_sweep_before_the_first_batch(tmp_path: Path) -> None:
    (tmp_path / "unknown").touch()
    (tmp_path / "0-live.tmp").touch()
    LocalRuns(tmp_path).sweep([], certain=-1)
    assert os.listdir(tmp_path) == ["0-live.tmp"]
    LocalRuns(tmp_path / "none").sweep([], certain=-1)


def test_a_sweep_releases_what_is_mapped_of_removed_files(tmp_path: Path) -> None:
    """They take space as long as they are mapped."""
    local = LocalRuns(tmp_path)
    kept, left = LocalRun(0, 2, bytes(16), b"1" * 16), LocalRun(0, 1, bytes(16), b"2" * 16)
    for local_run in (kept, left):
        write_run(local, local_run, encode_run([], compression=None, block_rows=1), "2-token")
    runs = {local_run: weakref.ref(local.open(local_run)) for local_run in (kept, left)}
    local.sweep([kept], certain=2)
    assert [runs[kept]() is None, runs[left]() is None] == [False, True]


def test_an_attempt_that_restores_is_not_swept_by_one_that_is_ahead(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two attempts of a batch on a host: one has its state and sweeps while the other one writes what it fetched."""
    swept: list[Path] = []
    stamp = FileStamps.stamp

    def stamp_then_sweep(stamps: FileStamps, path: Path) -> None:
        stamp(stamps, path)
        if not swept:
            swept.append(path)
            LocalRuns(path.parent).sweep([], certain=3)

    shutil.rmtree(local_folder(engine))
    engine.new_workers()
    monkeypatch.setattr(FileStamps, "stamp", stamp_then_sweep)
    expect_all(engine, 4)
    assert swept[0].suffix == ".tmp"


def test_damaged_local_run_is_discarded_and_fetched(engine: Engine) -> None:
    for path in local_folder(engine).iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(bytes(data))
    expect_all(engine, 4)


def test_files_as_they_were_written_are_not_checked_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = count_checks(monkeypatch)
    expect_all(engine, 4)
    assert checked == []


@pytest.mark.parametrize("change", ["boot", "touch", "copy"])
def test_files_that_may_have_changed_are_checked_once(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    (tmp_path / "boot").write_text("an earlier one")
    before_the_boot = FileStamps(tmp_path / "boot")
    names = sorted(str(path) for path in local_folder(engine).iterdir())
    for name in names:
        if change == "touch":
            os.utime(name)
        elif change == "copy":
            shutil.copy(name, f"{name}.copy")
            os.replace(f"{name}.copy", name)
        elif change == "boot":
            before_the_boot.stamp(Path(name))
    checked = count_checks(monkeypatch)
    expect_all(engine, 4)
    assert sorted(checked) == names
    expect_all(engine, 5)
    assert sorted(checked) == names


def test_without_a_boot_id_files_are_always_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each process that opens them, but the one that has written them."""
    nameless = FileStamps(tmp_path / "none")
    local_runs = [LocalRun(batch, batch, bytes([batch]) * 16, bytes([batch + 1]) * 16) for batch in range(4)]
    checked = count_checks(monkeypatch)
    for process in range(3):
        local = LocalRuns(tmp_path / "runs", stamps=nameless)
        for local_run in local_runs:
            if not process:
                write_run(local, local_run, encode_run([], compression=None, block_rows=1), "4-token")
            local.open(local_run)
    assert len(checked) == 4 + 4


def test_a_block_that_has_changed_by_itself_is_found_when_it_is_read(engine: Engine) -> None:
    for path in local_folder(engine).iterdir():
        before = path.stat()
        data = bytearray(path.read_bytes())
        for start, _ in Run(pa.py_buffer(bytes(data)), path.name).byte_ranges(EVERYTHING):
            data[start] ^= 0xFF
        path.write_bytes(bytes(data))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in local_folder(engine).iterdir():
        with pytest.raises(CorruptionError, match="the next attempt fetches it again") as error:
            expect_all(engine, 4)
        assert error.value.kind == ErrorKind.CHECKSUM
    expect_all(engine, 4)


def test_a_damaged_run_is_not_kept_open(tmp_path: Path) -> None:
    local_run, local = LocalRun(0, 0, bytes(16), bytes(range(16))), LocalRuns(tmp_path)
    good = encode_changes(VALUE, [(1, b"k", b"", Operation.PUT, "v")])
    write_run(local, local_run, good, "token")
    path = tmp_path / local_run.file_name
    before = path.stat()
    damaged = bytearray(good)
    damaged[Run(pa.py_buffer(good), "good").byte_ranges(EVERYTHING)[0][0]] ^= 0xFF
    path.write_bytes(bytes(damaged))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    run = local.open(local_run)
    with pytest.raises(CorruptionError):
        run.verify()
    assert not path.exists()
    with pytest.raises(CorruptionError):
        run.verify()  # what another process has removed already
    write_run(LocalRuns(tmp_path), local_run, good, "of another process")
    local.open(local_run).verify()
    assert local.open(local_run) is local.open(local_run)


def test_truncated_local_run_is_discarded_and_fetched(engine: Engine) -> None:
    for path in local_folder(engine).iterdir():
        os.truncate(path, 20)
    expect_all(engine, 4)


def test_empty_local_run_is_discarded_and_fetched(engine: Engine) -> None:
    for path in local_folder(engine).iterdir():
        os.truncate(path, 0)
    expect_all(engine, 4)


def test_new_host_fetches_everything_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.start(1, 4, keep_local=False)
    names = count_reads(engine, monkeypatch)
    engine.run_commands(4, 0, [])
    segments = [name for name in names if name.endswith(".log")]
    assert len(segments) == 4, "each changeset is read once"
    assert len(list(local_folder(engine).glob("*.run"))) == 2, "they became one run, and this batch's own"
    expect_all(engine, 5)


def test_runs_of_another_parallelism_are_removed(engine: Engine) -> None:
    old = local_folder(engine).parent
    engine.start(2, 4)
    engine.run_commands(4, 0, [])
    assert not old.exists()


def test_the_runs_of_another_parallelism_are_removed(engine: Engine) -> None:
    old = local_folder(engine).parent
    engine.start(2, 4)
    engine.run_commands(4, 0, [])
    assert not old.exists()


def test_leftovers_are_swept(engine: Engine) -> None:
    folder = local_folder(engine)
    failed = LocalRun(2, 2, b"\1" * 16, b"\2" * 16)
    (folder / failed.file_name).write_bytes(b"of an attempt that failed")
    (folder / "2-attempt.tmp").write_bytes(b"of a worker that was killed")
    with in_use(folder, 9):
        (folder / "9-attempt.tmp").write_bytes(b"of an attempt that still runs")
        engine.run_commands(4, 0, [])
    left = {path.name for path in folder.iterdir()}
    assert failed.file_name not in left
    assert "2-attempt.tmp" not in left
    assert "9-attempt.tmp" in left


def test_damaged_store_is_named_and_nothing_is_written(engine: Engine) -> None:
    [log] = (engine.directory / "location").rglob("*.log")
    data = bytearray(log.read_bytes())
    data[-30] ^= 1
    log.write_bytes(bytes(data))
    engine.start(1, 4, keep_local=False)
    with pytest.raises(CorruptionError, match=r"log/0{19}1.log: the changeset of subtask 0 at offset \d+"):
        engine.run_commands(4, 0, [])
    assert list(local_folder(engine).glob("*.run")) == []


def test_missing_upload_is_named(tmp_path: Path) -> None:
    engine = Engine(tmp_path, lambda key: 0, inline_budget_bytes=0)
    engine.start(1, 0)
    engine.run_commands(0, 0, [((1, None), ("set", 1))])
    [upload] = (tmp_path / "location").rglob("*.run")
    upload.unlink()
    engine.start(1, 1, keep_local=False)
    with pytest.raises(CorruptionError, match="0-run-1-1-0.run") as caught:
        engine.run_commands(1, 0, [])
    assert caught.value.kind is ErrorKind.OBJECT_MISSING


def test_longest_edges_are_taken(tmp_path: Path) -> None:
    local = LocalRuns(tmp_path)
    a, b, c = b"a" * 16, b"b" * 16, b"c" * 16
    for local_run in (LocalRun(0, 0, a, b), LocalRun(1, 1, b, c), LocalRun(0, 1, a, c), LocalRun(1, 1, b"x" * 16, c)):
        (tmp_path / local_run.file_name).touch()
    assert local.chain(a, c) == [LocalRun(0, 1, a, c)]
    assert local.chain(b, c) == [LocalRun(1, 1, b, c)]
    assert local.chain(a, a) == []
    assert local.chain(c, a) is None
    assert sorted(local.digests(a)) == [a, b, c], "each once"


def test_a_path_that_is_not_there_is_soon_missed(tmp_path: Path) -> None:
    """Also among many files that lead to the wanted state in many ways."""
    local = LocalRuns(tmp_path)
    digests = [bytes([number]) * 16 for number in range(62)]
    for number in range(1, 60):
        for local_run in (
            LocalRun(number, number, digests[number], digests[number + 1]),
            LocalRun(number, number + 1, digests[number], digests[number + 2]),
        ):
            (tmp_path / local_run.file_name).touch()
    assert local.chain(digests[0], digests[60]) is None
    assert len(local.chain(digests[1], digests[61]) or ()) == 30


def test_many_segments_are_merged_in_groups(engine: Engine) -> None:
    engine.policy = MergePolicy(group_runs=2)
    engine.start(1, 4, keep_local=False)
    expect_all(engine, 4)
    assert list(local_folder(engine).glob("*.tmp")) == []


Changes = dict[int, str | None]


def run_with(changes: Changes) -> Run:
    """Values by hash; None removes one."""
    rows = [
        (key_hash, b"k", b"", Operation.DELETE if text is None else Operation.PUT, text)
        for key_hash, text in changes.items()
    ]
    return make_run(VALUE, rows)


@pytest.mark.parametrize(
    ("is_bottom", "expected"), [(True, {3: "d", 5: "f"}), (False, {1: None, 3: "d", 5: "f", 9: None})]
)
def test_a_merge_in_groups_keeps_removals_of_what_is_below_it(
    tmp_path: Path, is_bottom: bool, expected: Changes
) -> None:
    """Below a group there are the groups before it, and below all of them what the merge does not see."""
    in_pairs = MergePolicy(group_runs=2)
    local_run = LocalRun(0, 5, b"0" * 16, b"1" * 16)
    changes: list[Changes] = [{1: "a", 9: None}, {3: "b"}, {1: None}, {3: "d"}, {5: "f"}]
    writer = LocalRuns(tmp_path / "2" / "0", policy=in_pairs)
    writer.write_merged(local_run, map(run_with, changes), "5-token", is_bottom=is_bottom)
    local = LocalRuns(tmp_path / "2" / "0")
    rows = [row for block in local.open(local_run).sections[VALUE.name].blocks for row in block.load().to_pylist()]
    assert {row["hash"]: row["v0"] for row in rows} == expected


@pytest.mark.parametrize("bound", ["group_runs", "group_bytes"])
def test_a_merge_holds_a_few_runs_at_a_time(tmp_path: Path, bound: str) -> None:
    """As many as two groups have: one is merged when the next one is complete."""
    size = run_with({0: "a"}).size_bytes
    bounds: dict[str, Any] = {bound: 2 if bound == "group_runs" else 2 * size}
    made: list[weakref.ref[Run]] = []
    alive: list[int] = []

    def make(number: int) -> Run:
        alive.append(sum(run() is not None for run in made))
        run = run_with({number: "a"})
        made.append(weakref.ref(run))
        return run

    local_run = LocalRun(0, 9, b"0" * 16, b"1" * 16)
    local = LocalRuns(tmp_path, policy=MergePolicy(**bounds))
    local.write_merged(local_run, map(make, range(9)), "9-token", is_bottom=True)
    assert local.open(local_run).rows == 9
    assert alive == [0, 1, 2, 3, 2, 3, 2, 3, 2]


def test_merged_runs_become_one_edge_that_needs_no_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for another process."""
    checked = count_checks(monkeypatch)
    digests = [bytes([number]) * 16 for number in range(4)]
    local = LocalRuns(tmp_path / "2" / "0")
    local_runs = [LocalRun(number + 3, number + 3, digests[number], digests[number + 1]) for number in range(3)]
    for local_run in local_runs:
        write_run(
            local, local_run, encode_changes(VALUE, [(local_run.first, b"k", b"", Operation.PUT, "v")]), "6-token"
        )
    merged = local.merge(local_runs, digests[0], "6-token")
    assert merged == LocalRun(3, 5, digests[0], digests[3])
    assert LocalRuns(local.directory).local_runs() == [merged]
    assert LocalRuns(local.directory).open(merged).rows == 3
    assert checked == []
    assert stat.S_IMODE(local.directory.stat().st_mode) == 0o700


@pytest.mark.parametrize(("is_bottom", "rows"), [(True, 1), (False, 3)])
def test_a_merge_at_the_bottom_leaves_out_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_bottom: bool, rows: int
) -> None:
    """What was removed and what has expired; above the bottom both still hide what is older. The inputs go last."""
    state = dataclasses.replace(VALUE, expires_by=TimeDomain.EVENT)
    local, digests = LocalRuns(tmp_path), [bytes([number]) * 16 for number in range(1, 4)]
    written = [LocalRun(number, number, digests[number], digests[number + 1]) for number in range(2)]
    stays, removed = (1, b"k", b"", Operation.PUT, "stays"), (3, b"k", b"", Operation.DELETE, None)
    write_run(local, written[0], encode_changes(state, [stays, removed]), "2-token")
    ends = (2, b"k", b"", Operation.PUT, "ends")
    write_run(local, written[1], encode_changes(state, [ends], expiry_ms=1000), "2-token")
    genesis, garbage = digests[0] if is_bottom else bytes(16), Garbage(Moment(0, 5000), {})

    def die(local: LocalRuns, written: Path, local_run: LocalRun) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalRuns, "keep", die)
        with pytest.raises(KeyboardInterrupt):
            local.merge(written, genesis, "2-token", garbage=garbage)
    assert set(written) <= set(local.local_runs())
    assert local.open(local.merge(written, genesis, "2-token", garbage=garbage)).rows == rows


def test_a_run_that_stands_for_more_batches_may_do_so_already(tmp_path: Path) -> None:
    """A job died after that, and is begun again."""
    local, before, after = (
        LocalRuns(tmp_path),
        LocalRun(0, 0, bytes(16), b"1" * 16),
        LocalRun(0, 1, bytes(16), b"2" * 16),
    )
    write_run(local, before, encode_changes(VALUE, [(1, b"k", b"", Operation.PUT, "v")]), "0-token")
    for _ in range(2):
        local.link(before, after)
        assert local.open(after).rows == 1


def test_who_dies_while_checking_a_file_leaves_it_unmarked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local_run = LocalRun(0, 0, bytes(16), bytes(range(16)))
    write_run(LocalRuns(tmp_path), local_run, encode_changes(VALUE, [(1, b"k", b"", Operation.PUT, "v")]), "0-token")
    os.utime(tmp_path / local_run.file_name)

    def die(run: Run) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "verify", die)
        with pytest.raises(KeyboardInterrupt):
            LocalRuns(tmp_path).open(local_run)
    checked = count_checks(monkeypatch)
    LocalRuns(tmp_path).open(local_run)
    assert len(checked) == 1


def two_states(first: int, texts: list[str]) -> Run:
    """A run with a value for each text, and a map with the first one."""
    changes = [(first + place, b"key", b"", Operation.PUT, text) for place, text in enumerate(texts)]
    values = make_run(VALUE, changes, block_rows=2)
    entries = make_run(MAP, [(first, b"key", b"entry", Operation.PUT, texts[0])])
    sections = [
        StateChanges(state, [block.load() for block in run.sections[state.name].blocks])
        for state, run in ((VALUE, values), (MAP, entries))
    ]
    return Run(pa.py_buffer(encode_run(sections, compression="lz4", block_rows=2)), "stored")


def texts_of(run: Run, state: StateDescriptor) -> list[str]:
    return [text for block in run.sections[state.name].blocks for text in block.load().column("v0").to_pylist()]


def test_disjoint_runs_are_written_one_by_one(tmp_path: Path) -> None:
    rows = {0: ["a", "b", "c"], 10: ["d"], 20: ["e", "f", "g"]}
    alive: list[weakref.ref[Run]] = []

    def read(item: tuple[int, list[str]]) -> Run:
        assert all(run() is None for run in alive), "an earlier run is still in memory"
        run = two_states(*item)
        alive.append(weakref.ref(run))
        return run

    local_run = LocalRun(0, 4, b"0" * 16, b"1" * 16)
    within = HashRange(1, 21)
    garbage = Garbage(Moment(0, 0), {})
    LocalRuns(tmp_path).write_disjoint(
        local_run, map(read, rows.items()), 12, "t", is_bottom=True, within=within, garbage=garbage
    )
    assert len(alive) == 3
    run = LocalRuns(tmp_path).open(local_run)
    assert texts_of(run, VALUE) == ["b", "c", "d", "e", "f"]
    assert texts_of(run, MAP) == ["d", "e"]
    assert [path.name for path in tmp_path.iterdir()] == [local_run.file_name]


@pytest.mark.parametrize(("rows", "blocks"), [(70_000, 5), (1_000_000, 3), (100_000_000, 2)])
def test_blocks_are_larger_in_larger_runs(tmp_path: Path, rows: int, blocks: int) -> None:
    """The memory that a restore needs is that of a few blocks, and a search looks into all of them."""
    changes = [(place, b"key", b"", Operation.PUT, "text") for place in range(70_000)]
    part = make_run(VALUE, changes, block_rows=1000)
    local_run = LocalRun(0, 4, b"0" * 16, b"1" * 16)
    garbage = Garbage(Moment(0, 0), {})
    LocalRuns(tmp_path).write_disjoint(
        local_run, [part], rows, "t", is_bottom=True, within=HashRange(0, 70_000), garbage=garbage
    )
    run = LocalRuns(tmp_path).open(local_run)
    assert run.rows == 70_000
    assert len(run.sections[VALUE.name].blocks) == blocks


def test_a_restored_level_has_what_expired_after_it(tmp_path: Path) -> None:
    """The local run may serve a start that goes back; only one of the batch before may lack what is garbage now."""
    state = dataclasses.replace(VALUE, expires_by=TimeDomain.EVENT)
    data = encode_changes(state, [(1, b"k", b"", Operation.PUT, "text")], expiry_ms=1000)
    store = LocalStore(str(tmp_path / "store"))
    store.put("level.run", data)
    stored = StoredRun("level.run", 0, len(data), digests.checksum(data), 1, EVERYTHING.first, EVERYTHING.last)
    genesis, after, head = b"0" * 16, b"1" * 16, b"2" * 16
    level = Level(0, 3, genesis, after, EVERYTHING.first, EVERYTHING.last, [stored])

    def rows(last_batch: int, head: bytes) -> int:
        [(_, run), *_] = restore_runs(
            LocalRuns(tmp_path / str(last_batch)),
            genesis=genesis,
            head=head,
            last_batch=last_batch,
            within=EVERYTHING,
            garbage=Garbage(Moment(0, 5000), {}),
            fetch=lambda known: RestorePlan(after, 4, [], [level]),
            open_store=lambda: store,
            token="t",
        )
        return run.rows

    assert rows(9, head) == 1
    assert rows(3, after) == 0


def test_restore_gives_up_with_a_clear_error(tmp_path: Path) -> None:
    local = LocalRuns(tmp_path / "gone")

    def fetch(known: list[bytes]) -> RestorePlan:
        raise CorruptionError("some/file: damaged.")

    with pytest.raises(CorruptionError, match="some/file"):
        restore_runs(
            local,
            genesis=b"0" * 16,
            head=b"1" * 16,
            last_batch=0,
            within=EVERYTHING,
            garbage=Garbage(Moment(0, 0), {}),
            fetch=fetch,
            open_store=lambda: LocalStore(str(tmp_path)),
            token="t",
        )


def test_what_another_attempt_of_the_batch_wrote_stays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is not certain, so that attempt may be the one that counts."""
    engine.run_commands(4, 0, [((0, None), ("set", 10))])
    engine.crash_point.arm(Step.ACKING, None)
    with pytest.raises(Crash):
        engine.run_commands(4, 0, [((0, None), ("set", 10)), ((1, None), ("set", 11))])
    names = count_reads(engine, monkeypatch)
    found = read(engine, 5, (0, None), (1, None))
    assert [found[0, None][0], found[1, None][0]] == [[10], [1]]
    assert names == []


def test_a_run_that_was_written_just_now_is_open_whatever_another_attempt_does_to_its_name(tmp_path: Path) -> None:
    """An attempt of the same batch that fails removes the file with its changes, which has the same name."""
    local, edge = LocalRuns(tmp_path), LocalRun(0, 0, bytes(16), bytes(range(16)))
    write_run(local, edge, encode_changes(VALUE, [(1, b"1", b"", Operation.PUT, "x")]), "0-token")
    (tmp_path / edge.file_name).unlink()
    assert local.open(edge).sections.keys() == {"value"}


def test_local_runs_that_never_open_are_an_error_of_the_host(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(local: LocalRuns, local_run: LocalRun) -> Run:
        raise FileNotFoundError(local_run.file_name)

    engine.new_workers()
    monkeypatch.setattr(LocalRuns, "open", lose)
    with pytest.raises(StorageError, match=f"Host {re.escape(socket.gethostname())} .*missing in .*attempts") as caught:
        engine.run_commands(4, 0, [((0, None), ("read",))])
    assert caught.value.kind is ErrorKind.LOCAL_DISK
