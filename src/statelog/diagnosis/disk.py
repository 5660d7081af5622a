"""Checks the folder of a host's local copies of state."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from statelog.diagnosis.finding import Place
from statelog.diagnosis.limited import Findings

_LOWEST_BYTES: Final = 1 << 30
_GB: Final = 1e9
_REMEDY: Final = (
    "Tasks keep copies of their state there: give the host a larger local disk, or name a folder on another one with"
    " Options(local_directory=...)."
)


def check_disk(base: Path, place: Place, free_bytes: Callable[[Path], int] | None = None) -> Findings:
    """Whether the folder can be written to, and has room. `base` is made by the first task if it is missing."""
    folder = base / "statelog"
    try:
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder, prefix=".statelog-doctor-") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield place.error(
            "local-disk",
            f"{base}: a file in {folder} cannot be written: {error.strerror or error}.",
            "Make it writable for the user of the Python workers and free space on it, or name another folder with"
            " Options(local_directory=...).",
        )
        return
    free = (free_bytes or _free_bytes)(folder)
    told = f"{base} is writable and has {free / _GB:.1f} GB of free space."
    yield place.ok("local-disk", told) if free >= _LOWEST_BYTES else place.warning("local-disk", told, _REMEDY)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
