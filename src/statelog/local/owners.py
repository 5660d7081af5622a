"""Removes the local files of executors that were killed, and so could not remove them.

Spark gives each executor a scratch directory of its own, and removes it at the executor's end, or at the application's.
What a killed executor leaves is of no use to its successor, which has another directory. So each executor's folder
names the processes that use it, and the workers of another executor on the host remove a folder whose processes have
all ended. Nothing is removed where this cannot be known: on another host, in another container, or without ``/proc``.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from statelog.local.use import remove_all

OWNERS_FOLDER: Final = ".owners"
_FOLDER: Final = "statelog"
_PROC: Final = Path("/proc")


def claim(base: Path, process_id: int) -> None:
    """Note that a process uses an executor's scratch directory `base`; first remove what killed executors left.

    `process_id` is the id of the executor, or of another process that lives as long. Disk errors are left to the task
    that writes state there.
    """
    with suppress(OSError):
        for folder in _others(base):
            if _is_left(folder):
                _remove(folder)
        owner = _owner(process_id)
        if owner is not None:
            owners = base / _FOLDER / OWNERS_FOLDER
            owners.mkdir(parents=True, exist_ok=True, mode=0o700)
            (owners / owner).touch(mode=0o600)


def executor_process() -> int:
    """The process that a Python worker works for: the one that started it, with or without a daemon of Python."""
    parent = os.getppid()
    with suppress(OSError):
        if os.path.samefile(_PROC / "self/exe", _PROC / str(parent) / "exe"):
            return int(_stat(parent)[1])
    return parent


def _stat(process_id: int) -> list[str]:
    """What ``/proc`` says about a process, from its state on."""
    return (_PROC / str(process_id) / "stat").read_text().rpartition(")")[2].split()


def _others(base: Path) -> Iterator[Path]:
    """The local files of other executors whose scratch directories are next to this one.

    A standalone worker has its own folder and, in between, one for each application.
    """
    own = base / _FOLDER
    patterns = [(base.parent, f"blockmgr-*/{_FOLDER}")]
    if base.parent.name.startswith("executor-") and base.parents[1].name.startswith("spark-"):
        patterns.append((base.parents[2], f"spark-*/executor-*/blockmgr-*/{_FOLDER}"))
    for root, pattern in patterns:
        yield from (folder for folder in root.glob(pattern) if folder != own)


def _is_left(folder: Path) -> bool:
    """Whether processes are known to have used a folder, and all of them have ended."""
    owners = [path.name for path in (folder / OWNERS_FOLDER).glob("*")]
    return bool(owners) and all(map(_has_ended, owners))


def _remove(folder: Path) -> None:
    """Remove a folder, except for directories of subtasks where a worker is still at work."""
    if remove_all(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _owner(process_id: int) -> str | None:
    """A unique name of a process: host, boot, container, process id and start time; None if one is unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        container = os.stat(_PROC / "self/ns/pid").st_ino
        started = _stat(process_id)[19]
    except OSError:
        return None
    return f"{socket.gethostname()} {boot} {container} {process_id} {started}"


def _has_ended(owner: str) -> bool:
    """Whether a process is known to have ended: its host has restarted, or its container has no such process."""
    own, parts = _owner(os.getpid()), owner.split(" ")
    if own is None or len(parts) != 5:
        return False
    host, boot, container, process_id, _ = parts
    here, this_boot, this_container, *_ = own.split(" ")
    if host != here or not process_id.isdecimal():
        return False
    if boot != this_boot:
        return True
    return container == this_container and _owner(int(process_id)) != owner
