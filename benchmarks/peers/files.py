"""The files of a side: lines with a key each, which all sides read, and the counts by key that it has written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.events import keys_of

Numbers = npt.NDArray[np.int64]

_CHUNK_BYTES: Final = 1 << 24
_NO_DIGITS: Final = bytes({*range(256)} - {*b"0123456789"})
_BLANKS: Final = bytes.maketrans(_NO_DIGITS, b" " * len(_NO_DIGITS))
_NEVER: Final = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Lines:
    """The input: files of so many rows, a key per line, which `benchmarks/events.py` makes of the row's number."""

    rows: int
    rows_per_file: int
    keys: int
    skew: str

    def write(self, folder: Path) -> None:
        """Write the files; their names and their times have the order of the rows."""
        folder.mkdir()
        for number, first in enumerate(self._firsts):
            lines = "\n".join(map(str, self._keys(first).tolist()))
            file = folder / f"{number:05}.txt"
            file.write_text(f"{lines}\n")
            os.utime(file, (number, number))

    def link(self, folder: Path, linked: Path) -> None:
        """Make a folder with the files of another one which has the files of these rows, and more."""
        linked.mkdir()
        for file in sorted(folder.iterdir())[: len(self._firsts)]:
            os.link(file, linked / file.name)

    def first(self, rows: int) -> Lines:
        """Those of the first files that together have so many rows."""
        files = -(-rows // self.rows_per_file)
        return dataclasses.replace(self, rows=min(files * self.rows_per_file, self.rows))

    def counts(self) -> Numbers:
        """How many rows each key has."""
        counts = np.zeros(self.keys, np.int64)
        for first in self._firsts:
            counts += np.bincount(self._keys(first), minlength=self.keys)
        return counts

    @property
    def _firsts(self) -> range:
        return range(0, self.rows, self.rows_per_file)

    def _keys(self, first: int) -> Numbers:
        index = np.arange(first, min(first + self.rows_per_file, self.rows))
        return keys_of(index.astype(np.uint64), self.keys, self.skew)


class Counts:
    """The counts by key that a side writes into a new folder, read as its files grow.

    A line begins with a key and its count; a side says how many numbers follow. All else in it, such as a comma, may
    be anything but digits. Files may be renamed.
    """

    def __init__(self, folder: Path, keys: int, numbers_per_line: int) -> None:
        folder.mkdir()
        self.folder = folder
        self._numbers_per_line = numbers_per_line
        self._done: dict[int, int] = {}
        """How many bytes of a file are read, by its inode."""
        self._first = np.full(keys, _NEVER)
        self.last = np.zeros(keys, np.int64)
        """The largest count of each key; 0 if it has none."""

    @property
    def first(self) -> Numbers:
        """The smallest count of each key; 0 if it has none."""
        return np.where(self.last > 0, self._first, 0)

    @property
    def rows(self) -> int:
        """How many rows of the input these counts cover."""
        return int(self.last.sum())

    def look(self) -> bool:
        """Read what is new, up to the last whole line of each file; whether there was something."""
        is_new = False
        for chunk in self._chunks():
            text = chunk.translate(_BLANKS)
            if text.isspace():  # a header
                continue
            numbers = np.fromstring(text, np.int64, sep=" ").reshape(-1, self._numbers_per_line)
            keys, counts = numbers[:, 0], numbers[:, 1]
            np.maximum.at(self.last, keys, counts)
            np.minimum.at(self._first, keys, counts)
            is_new |= len(keys) > 0
        return is_new

    def _chunks(self) -> Iterator[bytes]:
        for folder, _, names in os.walk(self.folder):
            # The checksums that Hadoop's file systems write
            for name in (each for each in names if not each.endswith(".crc")):
                with suppress(FileNotFoundError):  # it was renamed since it was listed
                    yield from self._new_in(Path(folder, name))

    def _new_in(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self._done.get(inode, 0))
            while chunk := file.read(_CHUNK_BYTES):
                end = chunk.rfind(b"\n") + 1
                if end == 0:
                    return
                self._done[inode] = self._done.get(inode, 0) + end
                file.seek(self._done[inode])
                yield chunk[:end]


def covered_rows(before: Counts, after: Counts) -> int:
    """How many rows of the input the counts of two lives cover together."""
    return int(np.maximum(before.last, after.last).sum())


@dataclass(frozen=True)
class Verdict:
    """How the counts of two lives, of which the second one continues the first one, differ from the right ones."""

    keys_after: int
    """How many keys have a count in the second life."""
    wrong: int
    """How many of these have another last count than they should."""
    missing: int
    """How many keys have no count in the second life, and another last count in the first one than they should."""
    restored_rows: int
    """How many rows the second life did not read again, by its first counts of the keys."""

    @classmethod
    def of(cls, right: Numbers, before: Counts, after: Counts) -> Verdict:
        """Compare the counts with the right ones."""
        is_after = after.last > 0
        return cls(
            keys_after=int(is_after.sum()),
            wrong=int((after.last != right)[is_after].sum()),
            missing=int((before.last != right)[~is_after].sum()),
            restored_rows=int(np.where(is_after, after.first - 1, right).sum()),
        )

    @property
    def is_exact(self) -> bool:
        """Whether no count is wrong or missing."""
        return self.wrong == self.missing == 0
