"""Where the local files of a subtask are: ``.../statelog/<operator>/<parallelism>/<subtask>``."""

from __future__ import annotations

import shutil
from pathlib import Path


def subtask_directory(base: Path, operator: str, parallelism: int, subtask: int) -> Path:
    """The directory of a subtask on this host."""
    return base / "statelog" / operator / str(parallelism) / str(subtask)


def remove_other_parallelisms(directory: Path) -> None:
    """Remove what an operator has on this host with another parallelism than a subtask's: the query has left it."""
    own = directory.parent
    for other in own.parent.glob("*"):
        if other != own:
            shutil.rmtree(other, ignore_errors=True)
