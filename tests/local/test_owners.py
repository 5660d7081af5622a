"""What killed executors have left is removed, and nothing that a living one has or a task still uses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from statelog.local.owners import OWNERS_FOLDER, claim
from statelog.local.use import in_use, subtask_directory


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def executor(started: ExitStack) -> subprocess.Popen[bytes]:
    """A process that lives until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started.callback(process.wait)
    started.callback(process.kill)
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def leave(base: Path, subtask: int = 0) -> Path:
    """A subtask's directory with a file, as a task leaves it."""
    directory = subtask_directory(base, "query", "op", 2, subtask)
    with in_use(directory, 3):
        directory.mkdir()
        (directory / "0-3.run").write_bytes(b"a run")
    shared = base / "statelog" / "query" / "shared"
    shared.mkdir(exist_ok=True)
    (shared / "3-extent").write_bytes(b"bytes of several subtasks")
    return directory


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("blockmgr-1", "blockmgr-2"),  # a local master, YARN
        ("spark-1/executor-1/blockmgr-1", "spark-1/executor-1/blockmgr-2"),  # of one application
        ("spark-1/executor-1/blockmgr-1", "spark-2/executor-2/blockmgr-2"),  # of another standalone worker
    ],
)
def test_what_a_killed_executor_has_left_is_removed(
    tmp_path: Path, started: ExitStack, before: str, after: str
) -> None:
    first, second = executor(started), executor(started)
    old, new = tmp_path / before, tmp_path / after
    claim(old, first.pid)
    left = leave(old)
    claim(new, second.pid)
    assert left.exists(), "its executor lives"
    kill(first)
    claim(new, second.pid)
    assert not (old / "statelog").exists()
    assert old.exists(), "the rest is Spark's"
    assert len(list((new / "statelog" / OWNERS_FOLDER).iterdir())) == 1


def test_an_executor_lives_as_long_as_one_of_its_processes(tmp_path: Path, started: ExitStack) -> None:
    first, second = executor(started), executor(started)
    for process in (first, second):
        claim(tmp_path / "blockmgr-1", process.pid)
    left = leave(tmp_path / "blockmgr-1")
    kill(first)
    claim(tmp_path / "blockmgr-2", os.getpid())
    assert left.exists()
    kill(second)
    claim(tmp_path / "blockmgr-2", os.getpid())
    assert not left.exists()


def test_the_files_of_a_task_that_still_runs_stay(tmp_path: Path, started: ExitStack) -> None:
    """A worker may outlive its executor."""
    first = executor(started)
    claim(tmp_path / "blockmgr-1", first.pid)
    running, idle = leave(tmp_path / "blockmgr-1", 0), leave(tmp_path / "blockmgr-1", 1)
    with in_use(running, 4):
        kill(first)
        claim(tmp_path / "blockmgr-2", os.getpid())
        assert [path.name for path in running.iterdir()] == ["0-3.run"]
        assert not idle.exists()
        assert (tmp_path / "blockmgr-1/statelog/query/shared/3-extent").exists(), "it may read this, too"
    claim(tmp_path / "blockmgr-2", os.getpid())
    assert not (tmp_path / "blockmgr-1/statelog").exists()


@pytest.mark.parametrize(
    ("part", "value", "is_removed"),
    [
        (0, "another-host", False),
        (1, "another-boot", True),
        (2, "1", False),  # another container, whose processes are not seen here
        (3, "no-number", False),
        (4, "1", True),  # another process has its id
    ],
)
def test_only_what_is_known_to_be_left_is_removed(tmp_path: Path, part: int, value: str, is_removed: bool) -> None:
    claim(tmp_path / "blockmgr-1", os.getpid())
    left = leave(tmp_path / "blockmgr-1")
    [owner] = (tmp_path / "blockmgr-1/statelog" / OWNERS_FOLDER).iterdir()
    parts = owner.name.split(" ")
    owner.rename(owner.with_name(" ".join([*parts[:part], value, *parts[part + 1 :]])))
    claim(tmp_path / "blockmgr-2", os.getpid())
    assert left.exists() != is_removed


def test_a_folder_of_unknown_processes_stays(tmp_path: Path) -> None:
    left = leave(tmp_path / "blockmgr-1")
    claim(tmp_path / "blockmgr-2", os.getpid())
    assert left.exists()
    (tmp_path / "blockmgr-1/statelog" / OWNERS_FOLDER).mkdir()
    (tmp_path / "blockmgr-1/statelog" / OWNERS_FOLDER / "of another version").touch()
    claim(tmp_path / "blockmgr-2", os.getpid())
    assert left.exists()


WORKERS = """
import os
from statelog.local.owners import executor_process
if os.fork() == 0:
    print(executor_process(), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_worker_belongs_to_the_process_that_started_its_daemon() -> None:
    shell = f"'{sys.executable}' -c '{WORKERS}' & echo $$; wait"
    found = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=True).stdout.split()
    assert found[0] == found[1]


def test_a_worker_without_a_daemon_belongs_to_its_parent() -> None:
    shell = f"'{sys.executable}' -c 'from statelog.local.owners import *; print(executor_process())' & echo $$; wait"
    found = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=True).stdout.split()
    assert found[0] == found[1]


def test_a_disk_that_fails_is_left_to_who_writes_there(tmp_path: Path) -> None:
    (tmp_path / "blockmgr-1").mkdir()
    (tmp_path / "blockmgr-1" / "statelog").write_bytes(b"no directory")
    claim(tmp_path / "blockmgr-1", os.getpid())
    assert (tmp_path / "blockmgr-1" / "statelog").read_bytes() == b"no directory"
