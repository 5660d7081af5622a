"""Knowing that a local file still is what was written or checked, without reading it.

A stamp is in the file's time of modification: its nanoseconds are a hash of the whole seconds, the size, and the id of
the operating system's boot. Whoever writes to the file sets another time, and after a boot no stamp holds: what the
system had not written to the disk before is lost then. Blocks that have changed by themselves are found by their
checksums when they are read.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SECOND_NS: Final = 10**9


def stamp(path: Path) -> None:
    """Mark a file whose content is right, where the file system lets times be set.

    Raises
    ------
    FileNotFoundError
        If it is gone.
    """
    boot = _boot()
    if boot is not None:
        status = path.stat()
        with suppress(PermissionError):
            os.utime(path, ns=(status.st_atime_ns, _stamped_ns(status, boot)))


def is_stamped(path: Path) -> bool:
    """Whether a file is as it was when it was marked, on this host and since its last boot.

    Raises
    ------
    FileNotFoundError
        If it is gone.
    """
    boot = _boot()
    status = path.stat()
    return boot is not None and status.st_mtime_ns == _stamped_ns(status, boot)


def _stamped_ns(status: os.stat_result, boot: str) -> int:
    second = status.st_mtime_ns // _SECOND_NS
    stamped = f"{boot} {second} {status.st_size}"
    return second * _SECOND_NS + xxhash.xxh3_64_intdigest(stamped.encode()) % _SECOND_NS


def _boot() -> str | None:
    """The id of the boot; None where the system has none, so that all files are checked whenever they are opened."""
    try:
        return _BOOT_ID.read_text()
    except FileNotFoundError:
        return None
