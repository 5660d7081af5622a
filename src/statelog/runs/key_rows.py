"""Finds the rows of one key in a run, however many blocks they fill; only blocks that can hold them are opened."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from statelog.runs.reader import RunBlock, RunSection
from statelog.runs.schema import Operation

_CLEAR: Final = int(Operation.CLEAR)
_SAMPLED_ROWS: Final = 64
"""If a block is searched often for a key, at most one in this many of its entries is kept in memory."""
_SAMPLED_BYTES: Final = 1 << 16
"""The most bytes of a block's entries that are kept, approximately."""
_OFTEN: Final = 32
"""From this many searches on, taking the samples pays off."""


class BinaryValues:
    """A column of binaries without nulls whose single values are read quickly."""

    def __init__(self, column: pa.Array) -> None:
        _, offsets, data = column.buffers()
        self._offsets = memoryview(offsets).cast("i")[column.offset : column.offset + len(column) + 1]
        self._data = memoryview(b"" if data is None else data)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def size_bytes(self, low: int, high: int) -> int:
        """Size of the values from `low` up to, not including, `high`."""
        return self._offsets[high] - self._offsets[low]

    def __getitem__(self, row: int) -> bytes:
        return self._data[self._offsets[row] : self._offsets[row + 1]].tobytes()


@dataclass(frozen=True)
class RowStretch:
    """Successive rows of a block."""

    block: RunBlock
    entries: BinaryValues
    """The entries of all rows of the block."""
    low: int
    """The first row; `high` is the row after the last."""
    high: int


class KeyRows:
    """The rows of one key in a section, in order of their entries."""

    def __init__(self, section: RunSection, key_hash: int, key: bytes) -> None:
        self._blocks = section.blocks_between(key_hash, key_hash)
        self._hash = key_hash
        self._key = key
        self._opened: dict[int, _RowsInBlock] = {}
        self._is_cleared: bool | None = None

    @property
    def may_exist(self) -> bool:
        """Whether any rows may exist; a key that may fill several blocks is not searched for."""
        blocks = self._blocks
        return len(blocks) > 1 or (len(blocks) == 1 and not (self._opened.get(0) or self._open(0)).is_empty)

    @property
    def is_cleared(self) -> bool:
        """Whether the run removes the key's older entries."""
        if self._is_cleared is None:
            found = self.find(b"")
            self._is_cleared = found is not None and found[0].operations[found[1]] == _CLEAR
        return self._is_cleared

    def find(self, entry: bytes) -> tuple[RunBlock, int] | None:
        """Block and row of one entry; None if the run does not name it."""
        blocks = self._blocks
        if len(blocks) > 1:
            # Their first rows are read by bisection, too: all but the first block begin with the hash.
            at = bisect_right(range(len(blocks)), (self._key, entry), 1, key=self._first_name) - 1
        elif blocks:
            at = 0
        else:
            return None
        row = (self._opened.get(at) or self._open(at)).find(entry)
        return None if row is None else (blocks[at], row)

    def stretches(self) -> Iterator[tuple[RunBlock, int, int]]:
        """All rows: block, first row and the row after the last. A block is opened only when it is reached."""
        blocks = self._blocks
        first = bisect_right(range(len(blocks)), (self._key, b""), 1, key=self._first_name) - 1 if blocks else 0
        for at in range(first, len(blocks)):
            rows = self._opened.get(at) or self._open(at)
            if not rows.is_empty:
                yield blocks[at], rows.low, rows.high
            if rows.high < blocks[at].rows:
                return

    def between(self, first: bytes, end: bytes, *, from_end: bool) -> Iterator[RowStretch]:
        """The rows whose entries are in a range, in order, or from the last block backwards."""
        blocks, key = self._blocks, self._key
        if not blocks:
            return
        low = bisect_right(range(len(blocks)), (key, first), 1, key=self._first_name) - 1
        high = bisect_left(range(len(blocks)), (key, end), max(low, 1), key=self._first_name)
        for at in reversed(range(low, high)) if from_end else range(low, high):
            rows = self._opened.get(at) or self._open(at)
            start = bisect_left(rows.entries, first, rows.low, rows.high)
            stop = bisect_left(rows.entries, end, start, rows.high)
            if start < stop:
                yield RowStretch(blocks[at], rows.entries, start, stop)

    def _first_name(self, at: int) -> tuple[bytes, bytes]:
        rows = self._opened.get(at) or self._open(at)
        return rows.key_at(0), rows.entries[0]

    def _open(self, at: int) -> _RowsInBlock:
        opened = self._opened[at] = _RowsInBlock(self._blocks[at], self._hash, self._key)
        return opened


class _RowsInBlock:
    """The rows of a key in one block, from `low` up to, not including, `high`."""

    __slots__ = ("_column", "_keys", "_samples", "_searches", "_step", "entries", "high", "low")

    def __init__(self, block: RunBlock, key_hash: int, key: bytes) -> None:
        self._keys, self._column = block.batch.column(1), block.batch.column(2)
        self.entries = BinaryValues(self._column)
        self._samples: list[bytes] | None = None
        self._step = 0
        self._searches = 0
        wanted = np.uint64(key_hash)
        low = int(block.hashes.searchsorted(wanted, "left"))
        high = int(block.hashes.searchsorted(wanted, "right"))
        if low < high and not self.key_at(low) == key == self.key_at(high - 1):  # several keys share the hash
            keys = BinaryValues(self._keys)
            low = bisect_left(keys, key, low, high)
            high = bisect_right(keys, key, low, high)
        self.low, self.high = low, high

    @property
    def is_empty(self) -> bool:
        return self.low == self.high

    def key_at(self, row: int) -> bytes:
        """The key of any row of the block."""
        key: bytes = self._keys[row].as_py()
        return key

    def find(self, entry: bytes) -> int | None:
        """The row of an entry; None if there is none."""
        low = self.low
        high = end = self.high
        if not entry:
            high = low  # no other sorts before it
        elif self._samples is not None:
            step = self._step
            high = low + bisect_left(self._samples, entry) * step
            if high > end:
                high = end
            if high - step > low:
                low = high - step
        else:
            self._searches += 1
            if self._searches == _OFTEN:
                self._step = max(_SAMPLED_ROWS, self.entries.size_bytes(low, high) // _SAMPLED_BYTES)
                self._samples = self._column.take(pa.array(np.arange(low, high, self._step))).to_pylist()
        row = bisect_left(self.entries, entry, low, high)
        return row if row < end and self.entries[row] == entry else None
