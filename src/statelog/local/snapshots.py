"""Local copies of an unkeyed subtask's snapshots, named by checksum and shared by the host's Python workers."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from statelog.files import removed_on_failure, write_file
from statelog.runs import digests


class LocalSnapshots:
    """The local snapshots of one subtask; the directory is made with the first file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, checksum: bytes) -> bytes | None:
        """The snapshot with a checksum; None if it is missing or damaged."""
        try:
            data = self._path(checksum).read_bytes()
        except FileNotFoundError:
            return None
        return data if digests.checksum(data) == checksum else None

    def write(self, checksum: bytes, data: bytes, batch: int, token: str) -> None:
        """Keep a snapshot of a batch; `token` is unique among the directory's writers."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self.directory / f"{batch}-{token}.tmp"
        write_file(temporary, data)
        with removed_on_failure(temporary):
            temporary.rename(self._path(checksum))

    def sweep(self, kept: Collection[bytes]) -> None:
        """Remove all snapshots but those of some checksums; unfinished files are left to `in_use`."""
        names = {self._path(checksum).name for checksum in kept}
        for name in os.listdir(self.directory) if self.directory.exists() else ():
            if name not in names and not name.endswith(".tmp"):
                (self.directory / name).unlink(missing_ok=True)

    def _path(self, checksum: bytes) -> Path:
        return self.directory / f"{checksum.hex()}.snapshot"
