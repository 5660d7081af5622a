"""The directory of a subtask's local files: ``.../statelog/<operator>/<parallelism>/<subtask>``."""

from __future__ import annotations

import shutil
from pathlib import Path


def subtask_directory(base: Path, operator: str, parallelism: int, subtask: int) -> Path:
    """The directory of a subtask on this host."""
    return base / "statelog" / operator / str(parallelism) / str(subtask)


def remove_other_parallelisms(directory: Path) -> None:
    """Remove the operator's directories of other parallelisms than this subtask's: the query has left those."""
    own = directory.parent
    for other in own.parent.glob("*"):
        if other != own:
            shutil.rmtree(other, ignore_errors=True)
