"""Where a subtask's local files are, which subtasks still run on this host, and how the files of others are removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from statelog.clock import Clock, SystemClock
from statelog.errors import ErrorKind, StorageError
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.local.runs import JOB_FOLDER, LocalRuns

_FOLDER: Final = "statelog"


def subtask_directory(base: Path, query_id: str, identity: str, parallelism: int, subtask: int) -> Path:
    """The directory of a subtask on this host; `identity` is its operator's."""
    return base / _FOLDER / query_id / identity / str(parallelism) / str(subtask)


SPARE_BATCHES: Final = 10
"""Number of batches that a subtask may run elsewhere before its files are removed."""
FORGOTTEN_S: Final = 7 * 24 * 3600.0
"""How long no subtask of an operator may run on this host before its files are removed."""
_IDLE_S: Final = 3600.0
_SUFFIX: Final = ".used"
_BATCH_BYTES: Final = 20


def disk_error(directory: Path, reason: object) -> StorageError:
    """The error for local files that cannot be written, read or found; it names the host, which Spark's may not do."""
    return StorageError(
        f"Host {socket.gethostname()} cannot keep local files in {directory}: {reason}.",
        kind=ErrorKind.LOCAL_DISK,
        hint="Free space on that disk, replace it, or choose another one with Options(local_directory=...) or"
        " SPARK_LOCAL_DIRS. Check whether another program removes files there. No state is lost: local files are copies"
        " of what the store has.",
    )


@contextmanager
def in_use(directory: Path, batch: int) -> Iterator[None]:
    """Hold a subtask's directory while a batch runs in it; first remove what killed processes left unfinished there."""
    used = _hold(directory)
    try:
        os.pwrite(used, f"{batch:{_BATCH_BYTES}}".encode(), 0)
        yield
    finally:
        os.close(used)


def _used_file(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}{_SUFFIX}")


def _hold(directory: Path) -> int:
    path = _used_file(directory)
    while True:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            used = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # another process removed the folder just now
        with suppress(BlockingIOError):
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(used).st_nlink:  # otherwise others may hold a new file
                _remove_unfinished(directory)  # no other process is at work there
        fcntl.flock(used, fcntl.LOCK_SH)
        if os.fstat(used).st_nlink:
            return used
        os.close(used)


def _remove_unfinished(directory: Path) -> None:
    """Remove the unfinished files of processes that were killed: the disk may be full of them."""
    for path in (*directory.glob("*.tmp"), *directory.glob(f"{JOB_FOLDER}/*.tmp")):
        with suppress(OSError):
            path.unlink()
    for path in directory.glob(f"*.{JOB_FOLDER}"):
        shutil.rmtree(path, ignore_errors=True)


def is_turn_to_remove(batch: int, subtask: int, parallelism: int) -> bool:
    """Whether a task looks for unused directories after a batch: at most one of the operator's tasks does, in turn."""
    period = max(SPARE_BATCHES, parallelism)
    return batch % period == subtask % period


def remove_unused(directory: Path, batch: int, spare_batches: int = SPARE_BATCHES) -> None:
    """Remove the directories of subtasks that have not run on this host for more than `spare_batches`.

    `directory` belongs to a subtask that has run `batch` here; the others are next to it.
    """
    for used_file in directory.parent.glob(f"*{_SUFFIX}"):
        _remove_if(used_file, lambda used: _is_unused(used, batch, spare_batches))


def remove_forgotten(directory: Path) -> None:
    """Remove the directories of all queries in which no task has run for a week; `directory` has just been used."""
    folder = directory.parents[3]
    if folder.name != _FOLDER:
        return
    with suppress(FileNotFoundError):
        since_s = _used_file(directory).stat().st_mtime - FORGOTTEN_S
        for used_file in folder.glob(f"*/*/*/*{_SUFFIX}"):
            if used_file.stat().st_mtime >= since_s:
                continue  # nearly all: they are not opened and locked
            _remove_if(used_file, lambda used: os.fstat(used).st_mtime < since_s)
            with suppress(OSError):  # other subtasks have files there
                for parent in used_file.parents[:3]:
                    parent.rmdir()


def remove_other_parallelisms(directory: Path) -> None:
    """Remove the operator's directories for other parallelisms than this subtask's, except where a task is running.

    A task of an older start may call this while tasks of a newer one run with another parallelism.
    """
    own = directory.parent
    for other in own.parent.glob("*"):
        if other != own:
            with suppress(OSError):  # a task is running there, or another one also removes it
                for used_file in other.glob(f"*{_SUFFIX}"):
                    _remove_if(used_file, lambda used: True)
                other.rmdir()


def remove_all(folder: Path) -> bool:
    """Remove the directories of all subtasks below a folder, except where a task is running; whether none is left."""
    for used_file in folder.glob(f"*/*/*/*{_SUFFIX}"):
        _remove_if(used_file, lambda used: True)
    return not any(folder.glob(f"*/*/*/*{_SUFFIX}"))


def _is_unused(used: int, batch: int, spare_batches: int) -> bool:
    text = os.pread(used, _BATCH_BYTES, 0)
    last = int(text) if text.strip().isdigit() else None
    if last is None or last > batch:
        # The task died before it named its batch, or the query has since gone back: count from now on.
        os.pwrite(used, f"{batch:{_BATCH_BYTES}}".encode(), 0)
        return False
    return last < batch - spare_batches


def _remove_if(used_file: Path, is_unused: Callable[[int], bool]) -> None:
    """Remove the directory whose use a file marks, and the file, if no task is running there and the file says so."""
    try:
        used = os.open(used_file, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Without a name, another task has removed it in the meantime; the subtask may run again, with a new file.
        if os.fstat(used).st_nlink and is_unused(used):
            if used_file.with_suffix("").exists():
                shutil.rmtree(used_file.with_suffix(""))
            used_file.unlink()
    except OSError:
        pass  # a task runs there, or the disk fails; the next task tries again
    finally:
        os.close(used)


class LocalCache:
    """The local runs that a process has opened, of the subtasks that it has run recently.

    After more than `spare_batches` without a subtask, its maps are released: their files may be removed already, and
    take up space as long as they are mapped. So are those of other operators after an hour: their queries may be over.
    `released` is then called with the subtask's directory.
    """

    def __init__(
        self,
        spare_batches: int = SPARE_BATCHES,
        released: Callable[[Path], None] = lambda _: None,
        policy: MergePolicy = MERGE_POLICY,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._policy = policy
        self._spare_batches = spare_batches
        self._released = released
        self._runs: dict[Path, LocalRuns] = {}
        self._used: dict[Path, tuple[int, float]] = {}
        """The last batch of each subtask, and when it was."""

    def at(self, directory: Path, batch: int) -> LocalRuns:
        """The local runs of a subtask's directory; those opened before stay open."""
        operator, now_s = directory.parent.parent, self._clock.monotonic_s()
        for other, (last, used_s) in list(self._used.items()):
            is_own = other.parent.parent == operator
            is_unused = abs(batch - last) > self._spare_batches if is_own else now_s - used_s > _IDLE_S
            if is_unused and other != directory:
                del self._runs[other], self._used[other]
                self._released(other)
        self._used[directory] = batch, now_s
        return self._runs.setdefault(directory, LocalRuns(directory, policy=self._policy))
