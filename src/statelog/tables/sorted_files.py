"""Sorted files, which RocksDB takes over as they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

_FILE_BYTES: Final = 64 << 20

_Row = tuple[bytes, bytes]


class SortedFiles:
    """Writes rows to sorted files, which RocksDB ingests without buffering, flushing and compacting their rows.

    A row that does not sort after all rows before it is left out. The folder is emptied first.
    """

    def __init__(self, folder: Path, new_writer: Callable[[], Any]) -> None:
        self._folder = folder
        self._new_writer = new_writer
        self._writer: Any = None
        self._paths: list[str] = []
        self._last = b""
        self.remove()
        folder.mkdir(parents=True)

    def add(self, rows: Iterable[_Row]) -> list[_Row]:
        """Add rows (non-empty key, value), and return those that were left out."""
        last = self._last
        left_out: list[_Row] = []
        for key, value in rows:
            if key <= last:
                left_out.append((key, value))
                continue
            if self._writer is None:
                self._begin()
            self._writer[key] = value
            last = key
        self._last = last
        if self._writer is not None and self._writer.file_size() >= _FILE_BYTES:
            self._finish()
        return left_out

    def _begin(self) -> None:
        self._paths.append(str(self._folder / f"{len(self._paths)}.sst"))
        self._writer = self._new_writer()
        self._writer.open(self._paths[-1])

    def _finish(self) -> None:
        self._writer.finish()
        self._writer = None

    def finish(self) -> list[str]:
        """End the last file, and return the paths of all."""
        if self._writer is not None:
            self._finish()
        return self._paths

    def remove(self) -> None:
        """Remove files that were not ingested."""
        shutil.rmtree(self._folder, ignore_errors=True)
