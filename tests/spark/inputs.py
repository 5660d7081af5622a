"""Input of streaming queries: files that Spark reads in the order in which they were added."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["add_file", "add_json"]

_FIRST_FILE_S = 1_000_000_000


def add_file(folder: Path, write: Callable[[Path], object]) -> None:
    """Add a file, whole at once; its time is its number, because Spark takes files of one millisecond in any order."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.iterdir()))
    hidden = folder.parent / f"{folder.name}-{number:04}.new"
    write(hidden)
    os.utime(hidden, (_FIRST_FILE_S + number, _FIRST_FILE_S + number))
    hidden.rename(folder / f"{number:04}.json")


def add_json(folder: Path, batches: Iterable[Sequence[Mapping[str, Any]]]) -> None:
    """Add a file of rows per batch."""
    for rows in batches:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        add_file(folder, partial(Path.write_text, data=text))
