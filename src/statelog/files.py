"""Writing files without waiting for memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["WRITE_BYTES", "cut", "write_file"]

WRITE_BYTES: Final = 1 << 20
"""Of larger writes Linux takes the memory for its cache in pieces of 2 MB, and a virtual machine may have to get each
of these from its host first: then they take ten times as long."""


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file; nothing is synced."""
    with path.open("wb") as file:
        for piece in cut(data):
            file.write(piece)


def cut(data: bytes | memoryview) -> Iterator[memoryview]:
    """Cut data into pieces of at most :data:`WRITE_BYTES`; none if it is empty."""
    view = memoryview(data).cast("B")
    return (view[start : start + WRITE_BYTES] for start in range(0, len(view), WRITE_BYTES))
