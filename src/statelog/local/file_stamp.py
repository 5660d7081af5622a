"""Tells without reading a local file whether it is unchanged since it was written or checked.

A stamp is in the file's time of modification: its nanoseconds are a hash of the whole seconds, the size, and the id of
the operating system's boot. A later write to the file sets another time. After a boot no stamp holds, because data that
the system had not yet written to the disk is lost. Blocks that change by themselves are found by their checksums when
they are read.
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
    """Mark a file whose content is right, where the file system lets times be set; raises FileNotFoundError."""
    boot = _boot()
    if boot is not None:
        status = path.stat()
        with suppress(PermissionError):
            os.utime(path, ns=(status.st_atime_ns, _stamped_ns(status, boot)))


def is_stamped(path: Path) -> bool:
    """Whether a file is unchanged since it was marked, on this host and since its last boot; or FileNotFoundError."""
    boot = _boot()
    status = path.stat()
    return boot is not None and status.st_mtime_ns == _stamped_ns(status, boot)


def _stamped_ns(status: os.stat_result, boot: str) -> int:
    second = status.st_mtime_ns // _SECOND_NS
    stamped = f"{boot} {second} {status.st_size}"
    return second * _SECOND_NS + xxhash.xxh3_64_intdigest(stamped.encode()) % _SECOND_NS


def _boot() -> str | None:
    """The id of the boot; None where the system has none. Then all files are checked whenever they are opened."""
    try:
        return _BOOT_ID.read_text()
    except FileNotFoundError:
        return None
