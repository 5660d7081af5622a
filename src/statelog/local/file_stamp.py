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

_SECOND_NS: Final = 10**9


class FileStamps:
    """Stamps files; `boot_id` is the system's file with the id of its boot.

    Where the system has none, no file has a stamp, so all files are checked whenever they are opened.
    """

    def __init__(self, boot_id: Path) -> None:
        self._boot_id = boot_id

    def stamp(self, path: Path) -> None:
        """Mark a file whose content is right, where the file system lets times be set; raises FileNotFoundError."""
        boot = self._boot()
        if boot is not None:
            status = path.stat()
            with suppress(PermissionError):
                os.utime(path, ns=(status.st_atime_ns, _stamped_ns(status, boot)))

    def is_stamped(self, path: Path) -> bool:
        """Whether a file is unchanged since it was marked, since the last boot; raises FileNotFoundError."""
        boot = self._boot()
        status = path.stat()
        return boot is not None and status.st_mtime_ns == _stamped_ns(status, boot)

    def _boot(self) -> str | None:
        return self._boot_id.read_text() if self._boot_id.exists() else None


def _stamped_ns(status: os.stat_result, boot: str) -> int:
    second = status.st_mtime_ns // _SECOND_NS
    stamped = f"{boot} {second} {status.st_size}"
    return second * _SECOND_NS + xxhash.xxh3_64_intdigest(stamped.encode()) % _SECOND_NS


FILE_STAMPS: Final = FileStamps(Path("/proc/sys/kernel/random/boot_id"))
