"""Writes files in small steps, so that no write waits for memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

WRITE_BYTES: Final = 1 << 20
"""Size of a write. On a virtual machine, writes of 2 MB and more took ten times as long, probably because Linux then
allocates memory for its cache in units of 2 MB, which the host has to supply first."""


@contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Remove a file if the block, which writes it, fails or is interrupted: a full disk must not stay full."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file; nothing is synced. A file that could not be written is removed."""
    with removed_on_failure(path), path.open("wb") as file:
        for piece in cut(data):
            file.write(piece)


def cut(data: bytes | memoryview) -> Iterator[memoryview]:
    """Cut data into pieces of at most :data:`WRITE_BYTES`; none if it is empty."""
    view = memoryview(data).cast("B")
    return (view[start : start + WRITE_BYTES] for start in range(0, len(view), WRITE_BYTES))
