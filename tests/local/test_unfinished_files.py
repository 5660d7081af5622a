"""What is left of a file whose writer meets a full disk, is interrupted or is killed: nothing, on any disk."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from statelog import ErrorKind, StorageError
from statelog.files import write_file
from statelog.history.restore_plan import Extent
from statelog.local.restore import SharedReads, remove_shared
from statelog.local.runs import LocalRun, LocalRuns, LocalSnapshots
from statelog.local.use import in_use
from statelog.runs.key_groups import hash_range
from statelog.runs.reader import Run
from statelog.runs.schema import Operation
from statelog.storage import LocalStore
from tests.contract.table_contract import VALUE, make_run
from tests.model.engine import Engine
from tests.storage.full_disk import full_disk

LARGE = bytes(range(256)) * 100
EDGE = LocalRun(0, 0, bytes(16), bytes(range(16)))


def large_run() -> Run:
    return make_run(VALUE, [(number, b"%d" % number, b"", Operation.PUT, "x" * 50) for number in range(2000)])


def runs(interrupted: bool) -> Iterator[Run]:
    yield large_run()
    if interrupted:
        raise KeyboardInterrupt


def put(root: Path, interrupted: bool) -> None:
    LocalStore(root).put("folder/object", LARGE)


def put_if_absent(root: Path, interrupted: bool) -> None:
    LocalStore(root).put_if_absent("folder/object", LARGE)


def merge(root: Path, interrupted: bool) -> None:
    LocalRuns(root).write_merged(EDGE, runs(interrupted), "0-token", is_bottom=True)


def copy(root: Path, interrupted: bool) -> None:
    LocalRuns(root).write_disjoint(
        EDGE, runs(interrupted), 2000, "0-token", is_bottom=True, within=hash_range(0, 1), garbage=None
    )


def write_new(root: Path, interrupted: bool) -> None:
    def write(sink: object) -> None:
        sink.write(LARGE)  # type: ignore[attr-defined]  # typed as an object, and a file in fact
        if interrupted:
            raise KeyboardInterrupt

    LocalRuns(root).write_new(write, "0-token")


def snapshot(root: Path, interrupted: bool) -> None:
    LocalSnapshots(root).write(b"sum", LARGE, 0, "token")


def share(root: Path, interrupted: bool) -> None:
    source = LocalStore(root.parent / "source")
    SharedReads(root, "run", 0, "token").read(source, Extent("object", 0, len(LARGE)))


def plain(root: Path, interrupted: bool) -> None:
    write_file(root / "file", LARGE)


WRITERS = [put, put_if_absent, merge, copy, write_new, snapshot, share, plain]


def left(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize("write", WRITERS)
def test_a_write_to_a_full_disk_leaves_nothing(tmp_path: Path, write: Callable[[Path, bool], None]) -> None:
    LocalStore(tmp_path / "source").put("object", LARGE)
    root = tmp_path / "disk"
    root.mkdir()
    with full_disk(), pytest.raises((OSError, StorageError)):
        write(root, False)
    assert left(root) == []
    write(root, False)
    assert len(left(root)) == 1


@pytest.mark.parametrize("write", WRITERS)
def test_a_write_that_is_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bool], None]
) -> None:
    LocalStore(tmp_path / "source").put("object", LARGE)
    root = tmp_path / "disk"
    root.mkdir()

    def interrupt(*_: object) -> Iterator[memoryview]:
        yield memoryview(LARGE)[:100]
        raise KeyboardInterrupt

    monkeypatch.setattr("statelog.files.cut", interrupt)
    monkeypatch.setattr("statelog.storage.local.cut", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(root, True)
    assert left(root) == []


@pytest.mark.parametrize("write", [put, put_if_absent, merge, copy, snapshot, share])
def test_a_file_that_cannot_be_given_its_name_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bool], None]
) -> None:
    LocalStore(tmp_path / "source").put("object", LARGE)
    root = tmp_path / "disk"
    root.mkdir()

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "the disk fails")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        patched.setattr(os, "replace", refuse)
        patched.setattr(os, "link", refuse)
        with pytest.raises((OSError, StorageError), match="the disk fails"):
            write(root, False)
    assert left(root) == []
    write(root, False)
    assert len(left(root)) == 1


def test_an_append_to_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("log", b"head")
    with full_disk(), pytest.raises(StorageError):
        store.append("log", [LARGE], at=4)
    assert (tmp_path / "log").read_bytes() == b"head"
    store.append("log", [LARGE], at=4)
    assert (tmp_path / "log").read_bytes() == b"head" + LARGE


# ---- A subtask's batch ----


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    engine = Engine(tmp_path, lambda key: hash(key) % 2**64)
    engine.start(1, 0)
    for batch in range(3):
        engine.run_commands(batch, 0, [((number, None), ("append", "x" * 500)) for number in range(40)])
    return engine


def test_a_restore_that_meets_a_full_disk_can_be_repeated(engine: Engine) -> None:
    """Also in the next start, which finds the room that the state needs."""
    engine.start(1, 3, keep_local=False)
    for _ in range(3):
        with full_disk(), pytest.raises(StorageError) as caught:
            engine.run_commands(3, 0, [((0, None), ("read",))])
        assert caught.value.kind is ErrorKind.LOCAL_DISK
        assert f"Host {socket.gethostname()} cannot keep local files in {engine.local}" in str(caught.value)
        assert not list(engine.local.rglob("*.tmp"))
    engine.start(1, 3)
    [(_, found)] = engine.run_commands(3, 0, [((0, None), ("read",))])
    assert found[1] == ["x" * 500] * 3


KILLED = """
import os, sys
from pathlib import Path
from statelog.local.use import in_use
directory = Path(sys.argv[1])
with in_use(directory, 3):
    (directory / "3-token.tmp").write_bytes(b"half a run")
    (directory / "3-token.job").mkdir()
    (directory / "3-token.job" / "merge.part").write_bytes(b"half a merge")
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_start_removes_what_a_killed_process_has_begun_and_not_what_a_living_one_has(tmp_path: Path) -> None:
    directory = tmp_path / "0"
    directory.mkdir()
    (directory / "0-2-kept.run").write_bytes(b"a run")
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with in_use(directory, 3):
            assert sorted(os.listdir(directory)) == ["0-2-kept.run", "3-token.job", "3-token.tmp"]
        other.send_signal(signal.SIGKILL)
    with in_use(directory, 3):
        assert os.listdir(directory) == ["0-2-kept.run"]


def test_what_a_killed_process_has_begun_to_share_goes_with_its_batch(tmp_path: Path) -> None:
    source, extent = LocalStore(tmp_path / "source"), Extent("object", 0, len(LARGE))
    source.put("object", LARGE)
    shared = SharedReads(tmp_path / "shared", "run", 0, "second")
    assert shared.read(source, extent) == LARGE
    [name] = left(tmp_path / "shared")
    (tmp_path / "shared" / name).rename(tmp_path / "shared" / f"{name}.first.tmp")
    assert shared.read(source, extent) == LARGE
    remove_shared(tmp_path / "shared", certain=0)
    assert left(tmp_path / "shared") == []
